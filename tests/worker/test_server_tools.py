"""Tool calls in POST /v1/chat/completions, against an engine that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest

from tests.worker import chat_templates
from tests.worker.chat_templates import text_side
from tests.worker.fake_engine import IM_END, MODEL, FakeEngine, byte_tokenizer, make_state, say, serving
from tests.worker.talking import (
    ASK,
    CALL,
    COLOGNE,
    NOW,
    NOW_CALL,
    PARAMETERS,
    ROOMY,
    TOOLS,
    WEATHER,
    chat,
    engine_of,
    joined,
    plain_calls,
    post,
    prompt_of,
    stream,
    worker,
)
from worker.grammar import checker
from worker.grammar.compiling import compile_matcher
from worker.server.schemas import MAX_TOOLS, MAX_TOOLS_SIZE
from worker.server.state import ServerState
from worker.text.calls import CALL_FORMATS
from worker.text.template import ChatTemplate


async def test_a_call_is_given_as_one() -> None:
    state = worker(CALL)
    body = await chat(state, tools=TOOLS)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"].pop("tool_calls")
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]) == ("function", {"name": "get_weather", "arguments": COLOGNE})
    assert choice["message"] == {
        "role": "assistant", "content": None, "refusal": None, "reasoning_content": None, "reasoning": None,
    }  # fmt: skip
    tool = json.dumps(WEATHER, ensure_ascii=False)
    assert f"<tools>\n{tool}\n" in prompt_of(state)


@pytest.mark.parametrize("per_step", [1, 3, 17, 1000])
@pytest.mark.parametrize(
    ("answer", "content", "calls", "reason"),
    [
        (CALL, "", [("get_weather", COLOGNE)], "tool_calls"),
        (
            f"Let me look.\n{CALL}\n{NOW_CALL}",
            "Let me look.",
            [("get_weather", COLOGNE), ("now", "{}")],
            "tool_calls",
        ),
        ("Just <b>text</b>.\n", "Just <b>text</b>.\n", [], "stop"),
        ('<tool_call>{"name": broken}</tool_call>', '<tool_call>{"name": broken}</tool_call>', [], "stop"),
    ],
)  # fmt: skip
async def test_streams_joined_are_whole_answers(
    per_step: int, answer: str, content: str, calls: list[tuple[str, str]], reason: str
) -> None:
    chunks = await stream(worker(answer, per_step=per_step), tools=TOOLS)
    message, streamed_reason = joined(chunks)
    assert (message["content"], plain_calls(message), streamed_reason) == (content, calls, reason)
    (choice,) = (await chat(worker(answer, per_step=per_step), tools=TOOLS))["choices"]
    assert (choice["message"]["content"] or "") == content
    assert (plain_calls(choice["message"]), choice["finish_reason"]) == (calls, reason)


async def test_arguments_come_as_they_are_written() -> None:
    long = json.dumps({"city": "x" * 50})
    chunks = await stream(
        worker(f'<tool_call>{{"name": "get_weather", "arguments": {long}}}</tool_call>'), tools=TOOLS
    )
    fragments = [
        call["function"]["arguments"]
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    assert "".join(fragments) == long
    assert len(fragments) > 50


async def test_a_call_that_max_tokens_cuts() -> None:
    cut = CALL.index("Köln")
    body = await chat(worker(CALL), tools=TOOLS, max_tokens=len(CALL[:cut].encode()))
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert plain_calls(choice["message"]) == [("get_weather", '{"city": "')]


async def test_a_beginning_of_a_call_that_max_tokens_cuts_is_content() -> None:
    body = await chat(worker(CALL), tools=TOOLS, max_tokens=20)
    (choice,) = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL[:20], "length")
    assert "tool_calls" not in choice["message"]


async def test_a_stop_string_within_a_call() -> None:
    message, reason = joined(await stream(worker(CALL), tools=TOOLS, stop=["öl"]))
    assert (plain_calls(message), reason) == ([("get_weather", '{"city": "K')], "stop")


async def test_at_most_one_call_without_parallel_calls() -> None:
    answer = f"{CALL}\n{NOW_CALL}"
    for body in (await chat(worker(answer), tools=TOOLS, parallel_tool_calls=False))["choices"]:
        assert plain_calls(body["message"]) == [("get_weather", COLOGNE)]
        assert body["finish_reason"] == "tool_calls"
    message, reason = joined(await stream(worker(answer), tools=TOOLS, parallel_tool_calls=False))
    assert (plain_calls(message), reason) == ([("get_weather", COLOGNE)], "tool_calls")


async def test_several_answers_are_read_apart() -> None:
    state = worker("", per_step=4)
    answers = iter([f"A{CALL}", "<think>hm</think>B", NOW_CALL])
    engine_of(state).script = lambda request: [*next(answers).encode(), IM_END]
    chunks = await stream(state, tools=TOOLS, n=3)
    first, second, third = (joined(chunks, index) for index in range(3))
    assert (first[0]["content"], plain_calls(first[0]), first[1]) == (
        "A",
        [("get_weather", COLOGNE)],
        "tool_calls",
    )
    assert (second[0]["content"], second[0]["reasoning"], second[1]) == ("B", "hm", "stop")
    assert (plain_calls(third[0]), third[1]) == ([("now", "{}")], "tool_calls")


CODED = "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("sign", "answer"),
    [
        ("{# <function=example> #}", CODED),
        ("{# [TOOL_CALLS] #}", f"[TOOL_CALLS]get_weather[ARGS]{COLOGNE}"),
        ("{# [func_name1(params_name1=params_value1)] #}", '[get_weather(city="Köln")]'),
    ],
)
@pytest.mark.parametrize("per_step", [1, 5])
async def test_other_families_write_calls_otherwise(sign: str, answer: str, per_step: int) -> None:
    template = sign + chat_templates.QWEN25.replace("<tool_call>", "<call>")
    (choice,) = (await chat(worker(answer, template), tools=TOOLS))["choices"]
    assert (plain_calls(choice["message"]), choice["finish_reason"]) == (
        [("get_weather", COLOGNE)],
        "tool_calls",
    )
    message, reason = joined(await stream(worker(answer, template, per_step=per_step), tools=TOOLS))
    assert (message["content"], plain_calls(message), reason) == (
        "",
        [("get_weather", COLOGNE)],
        "tool_calls",
    )


@pytest.mark.parametrize("tool_choice", ["none", None])
async def test_without_tools_marks_are_text(tool_choice: str | None) -> None:
    fields: dict[str, Any] = {} if tool_choice is None else {"tools": TOOLS, "tool_choice": "none"}
    state = worker(CALL, chat_templates.QWEN25)
    (choice,) = (await chat(state, **fields))["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert "# Tools" not in prompt_of(state)


async def test_calls_and_results_of_earlier_turns_reach_the_template() -> None:
    state = worker("20 degrees.")
    history = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "I should look.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": COLOGNE},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "20"}]},
        {"role": "assistant", "content": "20", "tool_calls": []},
    ]
    await chat(state, messages=history, tools=TOOLS)
    prompt = prompt_of(state)
    assert "<think>\nI should look.\n</think>" in prompt
    assert f'<tool_call>\n{{"name": "get_weather", "arguments": {COLOGNE}}}\n</tool_call><|im_end|>' in prompt
    assert "<tool_response>\n20\n</tool_response>" in prompt


async def test_llamas_calls() -> None:
    answer = f'{{"name": "get_weather", "parameters": {COLOGNE}}}'
    state = worker(answer, chat_templates.LLAMA)
    (choice,) = (await chat(state, tools=TOOLS))["choices"]
    assert plain_calls(choice["message"]) == [("get_weather", COLOGNE)]
    (choice,) = (await chat(worker('{"name": "Bob", "parameters": {}}', chat_templates.LLAMA), tools=TOOLS))[
        "choices"
    ]
    assert choice["message"]["content"] == '{"name": "Bob", "parameters": {}}'


async def test_phis_tools_are_in_the_system_message() -> None:
    answer = f'<|tool_call|>[{{"name": "get_weather", "arguments": {COLOGNE}}}]<|/tool_call|>'
    for messages in (ASK, [{"role": "system", "content": "Be brief."}, *ASK]):
        state = worker(answer, chat_templates.PHI)
        (choice,) = (await chat(state, messages=messages, tools=TOOLS))["choices"]
        assert plain_calls(choice["message"]) == [("get_weather", COLOGNE)]
        said = "Be brief." if len(messages) == 2 else ""
        functions = json.dumps([WEATHER["function"], NOW["function"]], ensure_ascii=False)
        assert prompt_of(state).startswith(f"<|system|>{said}<|tool|>{functions}<|/tool|><|end|><|user|>")


@pytest.mark.parametrize(
    ("tool_choice", "answer", "calls"),
    [
        (
            "required",
            f'[{{"name": "get_weather", "parameters": {COLOGNE}}}, {{"name": "now", "parameters": {{}}}}]',
            [("get_weather", COLOGNE), ("now", "{}")],
        ),
        ({"type": "function", "function": {"name": "get_weather"}}, COLOGNE, [("get_weather", COLOGNE)]),
    ],
)
async def test_forced_calls(tool_choice: Any, answer: str, calls: list[tuple[str, str]]) -> None:
    state = worker(answer)
    ended = "tool_calls" if tool_choice == "required" else "stop"  # as OpenAI and vLLM have it
    (choice,) = (await chat(state, tools=TOOLS, tool_choice=tool_choice))["choices"]
    assert (plain_calls(choice["message"]), choice["finish_reason"]) == (calls, ended)
    message, reason = joined(await stream(worker(answer, per_step=2), tools=TOOLS, tool_choice=tool_choice))
    assert (message["content"], plain_calls(message), reason) == ("", calls, ended)
    form = engine_of(state).submitted[0].params.structured_outputs
    assert form is not None
    assert isinstance(form.json, str)
    schema = json.loads(form.json)
    if tool_choice == "required":
        names = [kind["properties"]["name"]["const"] for kind in schema["items"]["anyOf"]]
        assert names == ["get_weather", "now"]
        first = schema["items"]["anyOf"][0]["properties"]
        assert first["parameters"] == {"$ref": f"#/$defs/{first['name']['const']}"}
        assert schema["$defs"][first["name"]["const"]] == PARAMETERS
    else:
        assert schema == PARAMETERS


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


async def test_only_allowed_tools_are_shown_and_may_be_called() -> None:
    state = worker(NOW_CALL)
    (choice,) = (await chat(state, tools=TOOLS, tool_choice=allowed("now")))["choices"]
    assert (plain_calls(choice["message"]), choice["finish_reason"]) == ([("now", "{}")], "tool_calls")
    assert "get_weather" not in prompt_of(state)
    assert '"now"' in prompt_of(state)
    assert engine_of(state).submitted[0].params.structured_outputs is None
    state = worker('[{"name": "now", "parameters": {}}]')
    (choice,) = (await chat(state, tools=TOOLS, tool_choice=allowed("now", mode="required")))["choices"]
    assert (plain_calls(choice["message"]), choice["finish_reason"]) == ([("now", "{}")], "tool_calls")
    form = engine_of(state).submitted[0].params.structured_outputs
    assert form is not None
    assert isinstance(form.json, str)
    assert json.loads(form.json)["items"]["properties"]["name"] == {"const": "now"}


async def test_parameters_refer_to_themselves_among_others_too() -> None:
    """Under the same names two functions may mean different things."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {**parameters, "type": "object"}}}
        for name, parameters in (
            ("a", {"properties": {"size": {"$ref": "#/$defs/Size"}}, "$defs": {"Size": {"enum": ["s"]}}}),
            ("b", {"properties": {"size": {"$ref": "#/$defs/Size"}}, "$defs": {"Size": {"enum": [5]}}}),
            ("c", {"properties": {"x": {"type": "integer"}, "y": {"$ref": "#/properties/x"}}}),
            ("d", {"properties": {"$ref": {"type": "integer"}, "next": {"$ref": "#"}}}),
            ("e", {"properties": {"at": {"const": {"$ref": "#/x"}}}}),
        )
    ]
    state = worker("[]")
    await chat(state, tools=tools, tool_choice="required", parallel_tool_calls=False)
    form = engine_of(state).submitted[0].params.structured_outputs
    assert form is not None
    assert isinstance(form.json, str)
    schema = json.loads(form.json)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    matcher = compile_matcher(checker.byte_tokenizer(), form)
    for name, arguments, fits in (
        ("a", {"size": "s"}, True), ("a", {"size": 5}, False), ("b", {"size": 5}, True),
        ("c", {"x": 1, "y": 2}, True), ("c", {"y": "2"}, False),
        ("d", {"$ref": 1, "next": {"next": {}}}, True), ("d", {"next": [{"name": "a"}]}, False),
        ("e", {"at": {"$ref": "#/x"}}, True),
    ):  # fmt: skip
        answer = json.dumps([{"name": name, "parameters": arguments}]).encode()
        taken = matcher.deep_copy().try_consume_tokens(list(answer))
        assert (taken == len(answer)) is fits, (name, arguments)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(name="get weather")]}, "tools[0].function.name"),
        ({"tools": [tool(name="x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": "f"}, "tools"),
        ({"tools": [tool(name=f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [tool(description="x" * MAX_TOOLS_SIZE)]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("other")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed()}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("now", mode="always")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": [5]}}, "tool_choice"),
        ({"tool_choice": allowed("now")}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
async def test_what_is_wrong_with_tools_is_named(fields: dict[str, Any], param: str) -> None:
    answer = await post(worker(CALL), **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


async def test_tools_need_a_template_that_shows_them_and_a_format_that_is_known() -> None:
    state = make_state(FakeEngine(say(CALL)))
    answer = await post(state, tools=TOOLS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "--chat-template" in answer.json()["error"]["message"]
    state = worker(CALL, "{{ tools }}{{ messages }}")
    answer = await post(state, tools=TOOLS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "--tool-call-parser" in answer.json()["error"]["message"]
    state = worker('{"city": "Rome"}', "{{ tools }}{{ messages }}")
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = await chat(state, tools=TOOLS, tool_choice=choice)
    assert plain_calls(body["choices"][0]["message"]) == [("get_weather", '{"city": "Rome"}')]


async def test_the_sdk_puts_streams_together() -> None:
    state = worker(f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}\n{NOW_CALL}")
    async with serving(state) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        call: Any = client.chat.completions
        async with call.stream(model=MODEL, messages=ASK, tools=TOOLS) as answering:
            kinds = [event.type async for event in _aiter(answering)]
            answer = await answering.get_final_completion()
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather", "now"]
    assert [call.function.arguments for call in choice.message.tool_calls] == [COLOGNE, "{}"]
    assert kinds.count("tool_calls.function.arguments.done") == 2


async def _aiter(stream: Any) -> AsyncIterator[Any]:
    async for event in stream:
        yield event


async def test_marks_that_are_special_tokens_are_seen_and_not_shown() -> None:
    tokenizer = byte_tokenizer(("<|python_tag|>", "<|other|>"))
    tag, other = tokenizer.token_id("<|python_tag|>"), tokenizer.token_id("<|other|>")
    assert tag is not None
    assert other is not None
    call = f'{{"name": "get_weather", "parameters": {COLOGNE}}}'.encode()
    said = [*b"Hm.", other, tag, *call, IM_END]
    info = msgspec.structs.replace(ROOMY, vocab_size=tokenizer.vocab_size)

    def state() -> ServerState:
        made = make_state(FakeEngine(lambda request: said, info=info))
        made.text = text_side(chat_templates.LLAMA, tokenizer)
        return made

    message = (await chat(state(), tools=TOOLS))["choices"][0]["message"]
    assert (message["content"], plain_calls(message)) == ("Hm.", [("get_weather", COLOGNE)])
    message = (await chat(state()))["choices"][0]["message"]
    assert message["content"] == f"Hm.{call.decode()}"


async def test_models_can_be_told_of_tools_where_the_template_has_no_place() -> None:
    state = make_state(FakeEngine(say(f"Hm.\n{NOW_CALL}"), info=ROOMY))
    assert state.text
    state.text.calls = CALL_FORMATS["hermes"]
    history = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": COLOGNE}},
                {"id": "2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "20"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "noon"}]},
    ]
    message = (await chat(state, messages=history, tools=TOOLS))["choices"][0]["message"]
    assert (message["content"], plain_calls(message)) == ("Hm.", [("now", "{}")])
    system, user, assistant, results, _ = prompt_of(state).split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(WEATHER)}\n{json.dumps(NOW)}\n</tools>" in system
    assert user == "<|im_start|>user\nWeather in Köln?"
    assert assistant == f"<|im_start|>assistant\nLet me look.\n{CALL}\n{NOW_CALL}"
    assert results == (
        "<|im_start|>user\n<tool_response>\n20\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
    await chat(state, messages=ASK)
    tokenizer = state.text.tokenizer
    assert tokenizer
    plain = tokenizer.decode(engine_of(state).submitted[1].prompt_token_ids, skip_special_tokens=False)
    assert plain.startswith("<|im_start|>user\n")


async def test_a_template_of_its_own_for_chats_with_tools() -> None:
    state = worker(CALL, "{{ messages[-1].content }}{{ '(plain)' }}")
    assert state.text
    state.text.tool_template = ChatTemplate(chat_templates.QWEN25)
    state.text.calls = CALL_FORMATS["hermes"]
    (choice,) = (await chat(state, tools=TOOLS))["choices"]
    assert plain_calls(choice["message"]) == [("get_weather", COLOGNE)]
    assert "# Tools" in prompt_of(state)
    await chat(state)
    assert engine_of(state).submitted[1].prompt_token_ids[-7:] == list(b"(plain)")
