"""POST /v1/chat/completions against a scripted engine: whole answers, and what parameters do."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.worker.chatting import HELLO, chat, stream
from tests.worker.fake_engine import IM_END, MODEL, FakeEngine, in_process, make_state, say, serving
from worker.params import MAX_STOP_TOKEN_IDS


async def test_a_request_names_its_answer() -> None:
    for _ in range(2):  # names may repeat
        engine = FakeEngine()
        body = await chat(make_state(engine), request_id="mine-1", n=2)
        assert body["id"] == "chatcmpl-mine-1"
        assert len({request.request_id for request in engine.submitted}) == 2
        assert not any("mine-1" in request.request_id for request in engine.submitted)
    chunks = await stream(make_state(), request_id="chatcmpl-2")
    assert {chunk["id"] for chunk in chunks[:-1]} == {"chatcmpl-2"}


async def test_whole_answer() -> None:
    engine = FakeEngine()
    body = await chat(make_state(engine))
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["id"].startswith("chatcmpl-")
    prompt = len("user\nHi") + len("\n") + len("assistant\n") + 3  # three marks of ChatML
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 14,
        "total_tokens": prompt + 14,
        "prompt_tokens_details": {"cached_tokens": prompt // 16 * 16},
    }


async def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    engine = FakeEngine()
    body = await chat(make_state(engine))
    assert engine.submitted[0].params.max_tokens == 512 - body["usage"]["prompt_tokens"]


async def test_n_answers_have_seeds_of_their_own_that_repeat() -> None:
    seeds = []
    for _ in range(2):
        engine = FakeEngine(lambda request: [*f"seed {request.seed}".encode(), IM_END])
        body = await chat(make_state(engine), n=3, seed=7)
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert texts == [f"seed {request.seed}" for request in engine.submitted]
        seeds.append([request.seed for request in engine.submitted])
        assert body["usage"]["prompt_tokens"] == len(engine.submitted[0].prompt_token_ids)
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert seeds[0][0] == 7


async def test_logprobs_stop_where_the_text_stops() -> None:
    state = make_state(FakeEngine(say("keep STOP lost"), per_step=5))
    body = await chat(state, logprobs=True, stop="STOP")
    (choice,) = body["choices"]
    tokens = [token["token"] for token in choice["logprobs"]["content"]]
    assert "".join(tokens) == choice["message"]["content"] == "keep "


NULLS = [
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "max_tokens"),
    *("max_completion_tokens", "min_tokens", "ignore_eos", "logprobs", "top_logprobs", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stream", "stream_options", "user"),
    *("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "response_format"),
    *("metadata", "store", "service_tier", "reasoning_effort", "cache_salt", "priority"),
]


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(NULLS),
        {"logprobs": False, "top_logprobs": 0},
        {"stop": [], "logit_bias": {}, "tools": [], "tool_choice": "auto"},
        {"response_format": {"type": "text"}, "modalities": ["text"], "service_tier": "auto"},
    ],
    ids=["nulls", "no logprobs", "nothing in them", "what is so anyhow"],
)
async def test_what_clients_send_without_meaning_anything_is_accepted(fields: dict[str, Any]) -> None:
    (choice,) = (await chat(make_state(), **fields))["choices"]
    assert (choice["message"]["content"], choice["logprobs"]) == ("Hello, world!", None)


async def test_impossible_tokens_have_finite_logprobs() -> None:
    body = await chat(make_state(FakeEngine(logprob=float("-inf"))), logprobs=True, top_logprobs=1)
    content = body["choices"][0]["logprobs"]["content"]
    assert {token["logprob"] for token in content} == {-9999.0}
    assert content[0]["top_logprobs"][0]["logprob"] == -9999.0


async def test_special_tokens_are_shown_when_asked_for() -> None:
    state = make_state(FakeEngine(lambda request: [256, *b"x", 256]))
    assert (await chat(state))["choices"][0]["message"]["content"] == "x"
    shown = await chat(state, skip_special_tokens=False)
    assert shown["choices"][0]["message"]["content"] == "<|im_start|>x<|im_start|>"


async def test_every_parameter_reaches_the_engine() -> None:
    engine = FakeEngine()
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "min_tokens": 1,
        "stop_token_ids": [9], "ignore_eos": True, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "logit_bias": {"5": -3}, "cache_salt": "s", "priority": -2,
    }  # fmt: skip
    await chat(make_state(engine), **fields)
    (request,) = engine.submitted
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (request.seed, params.min_tokens, params.stop_token_ids) == (3, 1, (9,))
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (params.logit_bias, params.ignore_eos) == ({5: -3.0}, True)
    assert (request.cache_salt, request.priority) == ("s", -2)


async def test_the_tokenizers_end_tokens_end_answers_too() -> None:
    engine = FakeEngine()
    most = list(range(MAX_STOP_TOKEN_IDS))
    answers = [await chat(make_state(engine), **more) for more in ({}, {"ignore_eos": True})]
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["stop", "length"]
    await chat(make_state(engine), stop_token_ids=most)  # they take no room from the request's own
    assert [request.end_token_ids for request in engine.submitted] == [(IM_END,)] * 3
    assert [request.params.stop_token_ids for request in engine.submitted] == [(), (), tuple(most)]


async def test_request_ids_and_headers() -> None:
    engine = FakeEngine()
    async with in_process(make_state(engine)) as client:
        body = {"model": MODEL, "messages": HELLO}
        for _ in range(2):  # the same id twice at once is no clash
            answer = await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
            assert answer.headers["x-request-id"] == "mine"
            assert answer.headers["x-pagefleet-model"] == MODEL
        minted = await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "no\tgood"})
        assert minted.headers["x-request-id"] not in ("", "no\tgood")
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
        assert streamed.headers["x-accel-buffering"] == "no"
        assert streamed.headers["content-type"].startswith("text/event-stream")
    assert all("mine" not in request.request_id for request in engine.submitted)
    assert len({request.request_id for request in engine.submitted}) == 4


async def test_the_openai_client_understands_it() -> None:
    state = make_state()
    async with serving(state) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=1
        )
        assert whole.choices[0].message.content == "Hello, world!"
        assert whole.choices[0].logprobs
        assert whole.choices[0].logprobs.content
        pieces = []
        usage = None
        async for chunk in await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        ):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        assert "".join(pieces) == "Hello, world!"
        assert usage
        assert usage.completion_tokens == 14
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hi"}])
        assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], temperature=9
            )
        assert refused.value.param == "temperature"


@pytest.mark.parametrize(
    ("headers", "client", "wanted", "given"),
    [
        ({}, "127.0.0.1", -9, (1, -9)),
        ({"x-pagefleet-priority": "high"}, "127.0.0.1", 0, (0, 0)),
        ({"x-pagefleet-priority": "low"}, "127.0.0.1", 5, (2, 5)),
        # A request of one class can't pass for one of another.
        ({"x-pagefleet-priority": "low"}, "127.0.0.1", -1_000_000, (2, -2)),
        # From elsewhere, and unknown: nobody said anything.
        ({"x-pagefleet-priority": "high"}, "192.0.2.1", -3, (1, -3)),
        ({"x-pagefleet-priority": "highest"}, "127.0.0.1", 0, (1, 0)),
        ({"x-pagefleet-priority": ""}, "127.0.0.1", 0, (1, 0)),
    ],
)
async def test_the_class_comes_from_a_gateway_on_this_machine_only(
    headers: dict[str, str], client: str, wanted: int, given: tuple[int, int]
) -> None:
    engine = FakeEngine()
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "priority": wanted,
        "max_tokens": 1,
    }
    async with in_process(make_state(engine), (client, 1)) as http:
        answer = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    (request,) = engine.submitted
    assert (request.service_class, request.priority) == given
