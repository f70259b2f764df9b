// What a program with OpenAI's client for Node does with a gateway: node --test smoke.mjs
// BASE_URL: the gateway with /v1. MODEL says whatever follows "SAY:" in a message.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const model = process.env.MODEL;
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "unused", maxRetries: 0, timeout: 60_000 });
const say = (text) => [{ role: "user", content: `SAY:${text}` }];
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>';

test("a whole answer, with usage", async () => {
  const answer = await client.chat.completions.create({ model, messages: say("Grüße, 👍🏽!") });
  assert.equal(answer.choices[0].message.content, "Grüße, 👍🏽!");
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  assert.ok(answer._request_id);
});

test("a stream, with usage at its end", async () => {
  const stream = await client.chat.completions.create({
    model, messages: say("One two three 👩‍👩‍👧"), stream: true, stream_options: { include_usage: true },
  });
  let text = "";
  let usage = null;
  let chunks = 0;
  for await (const chunk of stream) {
    chunks += 1;
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, "One two three 👩‍👩‍👧");
  assert.ok(chunks > 3);
  assert.ok(usage.completion_tokens > 0);
});

test("the client's own stream helper", async () => {
  const runner = client.chat.completions.stream({ model, messages: say("Piece by piece.") });
  let text = "";
  runner.on("content", (delta) => { text += delta; });
  const final = await runner.finalChatCompletion();
  assert.equal(text, "Piece by piece.");
  assert.equal(final.choices[0].message.content, text);
});

test("a tool call, and the answer to its result", async () => {
  const answer = await client.chat.completions.create({ model, messages: say(call), tools: [weather] });
  const [made] = answer.choices[0].message.tool_calls;
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
  assert.deepEqual(JSON.parse(made.function.arguments), { city: "Köln" });
  const next = await client.chat.completions.create({
    model,
    tools: [weather],
    messages: [
      ...say(call),
      answer.choices[0].message,
      { role: "tool", tool_call_id: made.id, content: "22 degrees" },
      ...say("It is warm."),
    ],
  });
  assert.equal(next.choices[0].message.content, "It is warm.");
});

test("a tool call as a stream", async () => {
  const runner = client.chat.completions.stream({ model, messages: say(call), tools: [weather] });
  const final = await runner.finalChatCompletion();
  assert.equal(final.choices[0].message.tool_calls[0].function.name, "get_weather");
});

test("an answer in a form", async () => {
  const schema = { type: "object", properties: { n: { type: "integer" } }, required: ["n"], additionalProperties: false };
  const answer = await client.chat.completions.create({
    model, messages: say('{"n": 5}'),
    response_format: { type: "json_schema", json_schema: { name: "number", strict: true, schema } },
  });
  assert.deepEqual(JSON.parse(answer.choices[0].message.content), { n: 5 });
});

test("responses", async () => {
  const response = await client.responses.create({ model, input: "SAY:Hello." });
  assert.equal(response.status, "completed");
  assert.equal(response.output_text, "Hello.");
});

test("the list of models", async () => {
  const names = [];
  for await (const one of client.models.list()) names.push(one.id);
  assert.deepEqual(names, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("errors have their classes, codes and fields", async () => {
  await assert.rejects(
    client.chat.completions.create({ model, messages: say("x"), temperature: 9 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature" && error.status === 400,
  );
  await assert.rejects(
    client.chat.completions.create({ model: "nobody", messages: say("x") }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
  );
});

test("leaving a stream", async () => {
  const stream = await client.chat.completions.create({ model, messages: say("long ".repeat(400)), stream: true });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
});
