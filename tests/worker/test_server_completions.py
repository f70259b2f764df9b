"""POST /v1/completions, /generate, /generate_stream, /tokenize and /detokenize against a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.fake_engine import (
    IM_END,
    MODEL,
    FakeEngine,
    events,
    in_process,
    make_state,
    say,
    strict_json,
)
from worker.server.state import ServerState


async def post(state: ServerState, path: str, **fields: Any) -> Any:
    async with in_process(state) as client:
        answer = await client.post(path, json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    return strict_json(answer.content)


async def stream(state: ServerState, **fields: Any) -> list[Any]:
    async with in_process(state) as client:
        answer = await client.post("/v1/completions", json={"model": MODEL, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def echo(prefix: str = "") -> FakeEngine:
    """Answers with its own prompt."""
    return FakeEngine(lambda request: [*prefix.encode(), *request.prompt_token_ids, IM_END])


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abc"]),
        (["abc", "de"], ["abc", "de"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
async def test_every_form_of_prompt(prompt: Any, texts: list[str]) -> None:
    body = await post(make_state(echo()), "/v1/completions", prompt=prompt)
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    assert body["object"] == "text_completion"
    assert body["usage"]["prompt_tokens"] == sum(map(len, texts))
    chunks = await stream(make_state(echo()), prompt=prompt)
    for index, text in enumerate(texts):
        mine = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine][-1] == "stop"


async def test_prompts_times_n_answers_in_order() -> None:
    body = await post(make_state(echo()), "/v1/completions", prompt=["a", "b"], n=2, best_of=2)
    assert [choice["text"] for choice in body["choices"]] == ["a", "a", "b", "b"]
    assert body["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 2,
        "completion_tokens": 8,
        "total_tokens": 10,
        "prompt_tokens_details": None,
    }


async def test_sixteen_tokens_unless_asked_for_more_or_less_is_left() -> None:
    engine = FakeEngine(lambda request: [65] * 600)
    state = make_state(engine)
    for fields, length in (
        ({"prompt": "x"}, 16),
        ({"prompt": "x", "max_tokens": 20}, 20),
        ({"prompt": "x" * 505}, 7),
    ):
        body = await post(state, "/v1/completions", **fields)
        assert body["choices"][0]["text"] == "A" * length
        assert body["choices"][0]["finish_reason"] == "length"


async def test_prefix_hits_are_counted_once_a_prompt() -> None:
    body = await post(make_state(echo()), "/v1/completions", prompt="x" * 40, n=3)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


async def test_logprobs_have_offsets_and_the_token_taken() -> None:
    text = "héy!"
    whole = await post(make_state(FakeEngine(say(text))), "/v1/completions", prompt="x", logprobs=0)
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "\ufffd", "\ufffd", "y", "!"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert [len(top) for top in logprobs["top_logprobs"]] == [1] * 5
    two = await post(make_state(FakeEngine(say(text))), "/v1/completions", prompt="x", logprobs=2)
    assert two["choices"][0]["logprobs"]["top_logprobs"][0] == {"h": -0.5, "i": -1.0}
    chunks = await stream(make_state(FakeEngine(say(text))), prompt="x", logprobs=0)
    streamed: list[int] = []
    for chunk in chunks[:-1]:
        streamed += chunk["choices"][0]["logprobs"]["text_offset"]
    assert streamed == logprobs["text_offset"]


async def test_stream_usage() -> None:
    chunks = await stream(make_state(echo()), prompt="abc", stream_options={"include_usage": True})
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["total_tokens"] == 7
    assert all(chunk["usage"] is None for chunk in chunks[:-2])


async def test_min_tokens_keeps_stop_strings_from_ending_the_answer() -> None:
    state = make_state(FakeEngine(say("a.b.c.d")))
    body = await post(state, "/v1/completions", prompt="x", stop=".", min_tokens=3)
    assert body["choices"][0]["text"] == "a.b"


async def test_generate_gives_text_tokens_and_usage() -> None:
    body = await post(make_state(), "/generate", prompt="Hi", logprobs=1)
    assert body["text"] == "Hello, world!"
    assert body["token_ids"] == [*b"Hello, world!", IM_END]
    assert (body["finish_reason"], body["stop_reason"], body["model"]) == ("stop", None, MODEL)
    assert body["usage"]["completion_tokens"] == 14
    assert body["logprobs"][0] == {
        "token_id": ord("H"),
        "logprob": -0.5,
        "rank": 1,
        "top": [{"token_id": ord("H"), "logprob": -0.5}],
    }
    assert (await post(make_state(), "/generate", prompt="Hi"))["logprobs"] is None


@pytest.mark.parametrize(("path", "fields"), [("/generate_stream", {}), ("/generate", {"stream": True})])
async def test_generate_stream_is_one_object_a_step(path: str, fields: dict[str, Any]) -> None:
    async with in_process(make_state(FakeEngine(say("häy"), step_seconds=0.005))) as client:
        answer = await client.post(path, json={"model": MODEL, "prompt": "Hi", **fields})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [strict_json(line) for line in answer.text.splitlines()]
    assert "".join(line["text"] for line in lines) == "häy"
    assert [token for line in lines for token in line["token_ids"]] == [*"häy".encode(), IM_END]
    assert [line["finish_reason"] for line in lines] == [None] * (len(lines) - 1) + ["stop"]
    assert lines[-1]["usage"]["completion_tokens"] == 5
    assert len({line["id"] for line in lines}) == 1


async def test_tokenize_and_detokenize_are_inverse() -> None:
    state = make_state()
    text = "naïve 日本"
    tokens = await post(state, "/tokenize", prompt=text, return_token_strs=True)
    assert tokens["tokens"] == list(text.encode())
    assert tokens["count"] == len(text.encode())
    assert tokens["max_model_len"] == 512
    assert tokens["token_strs"][0] == "n"
    assert await post(state, "/detokenize", tokens=tokens["tokens"]) == {"prompt": text}
    assert (await post(state, "/tokenize", prompt=""))["tokens"] == []


async def test_tokenize_a_chat_is_what_chat_sends() -> None:
    engine = FakeEngine()
    state = make_state(engine)
    messages = [{"role": "user", "content": "Hi"}]
    tokens = await post(state, "/tokenize", messages=messages)
    await post(state, "/v1/chat/completions", messages=messages)
    assert tokens["tokens"] == engine.submitted[0].prompt_token_ids
    without = await post(state, "/tokenize", messages=messages, add_generation_prompt=False)
    assert without["count"] < tokens["count"]


async def test_detokenize_shows_special_tokens_unless_told_not_to() -> None:
    state = make_state()
    assert (await post(state, "/detokenize", tokens=[97, IM_END]))["prompt"] == "a<|im_end|>"
    hidden = await post(state, "/detokenize", tokens=[97, IM_END], skip_special_tokens=True)
    assert hidden["prompt"] == "a"


@pytest.mark.parametrize(
    ("method", "path", "short", "long"),
    [
        ("encode", "/tokenize", {"prompt": "x"}, {"prompt": "x" * 100_000}),
        ("decode", "/detokenize", {"tokens": [97]}, {"tokens": [97] * 100_000}),
        (
            "token_text",
            "/tokenize",
            {"prompt": "x", "return_token_strs": True},
            {"prompt": "x" * 3000, "return_token_strs": True},
        ),
    ],
)
async def test_what_takes_long_is_done_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, short: dict[str, Any], long: dict[str, Any]
) -> None:
    import threading

    threads = set()
    state = make_state()
    assert state.text
    assert state.text.tokenizer
    tokenizer = state.text.tokenizer
    done = getattr(type(tokenizer), method)

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread())
        return done(self, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), method, watched)
    await post(state, path, **short)
    assert threads == {threading.main_thread()}
    threads.clear()
    await post(state, path, **long)
    assert threads
    assert threading.main_thread() not in threads


async def test_more_token_ids_than_any_context_are_refused() -> None:
    async with in_process(make_state()) as client:
        answer = await client.post("/detokenize", json={"model": MODEL, "tokens": [97] * 1_000_001})
        assert answer.status_code == 400
        assert "at most 1000000 are read" in answer.json()["error"]["message"]
