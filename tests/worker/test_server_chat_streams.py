"""Answers piece by piece: the shape of chunks, characters, stop strings, usage, several answers."""

from __future__ import annotations

import pytest

from tests.worker.chatting import chat, stream, text_of
from tests.worker.fake_engine import IM_END, FakeEngine, make_state, say


async def test_usage_so_far_is_in_every_chunk_where_it_is_asked_for() -> None:
    answered = say("Hello, world!")
    each = {"continuous_usage_stats": True}
    for options in (each, {**each, "include_usage": True}):
        chunks = await stream(make_state(FakeEngine(answered)), n=2, stream_options=options)
        assert chunks.pop() == "[DONE]"
        last = chunks.pop()
        assert last["choices"] == []
        counts: dict[int, list[int]] = {0: [], 1: []}
        for chunk in chunks:
            usage = chunk["usage"]
            counts[chunk["choices"][0]["index"]].append(usage["completion_tokens"])
            assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        for own in counts.values():
            assert own == sorted(own)
            assert len(set(own)) > 5
        assert sum(own[-1] for own in counts.values()) == last["usage"]["completion_tokens"]
    none = await stream(make_state(), stream_options={**each, "include_usage": False})
    assert all("usage" not in chunk for chunk in none[:-1])


async def test_stream_has_the_shape_that_clients_expect() -> None:
    chunks = await stream(make_state(), stream_options={"include_usage": True})
    assert chunks[-1] == "[DONE]"
    first, last, usage = chunks[0], chunks[-3], chunks[-2]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 14
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    assert text_of(chunks) == "Hello, world!"
    for key in ("id", "created", "model", "system_fingerprint", "object"):
        assert len({chunk[key] for chunk in chunks[:-1]}) == 1, key


async def test_stream_without_options_says_nothing_of_usage() -> None:
    chunks = await stream(make_state())
    assert all("usage" not in chunk for chunk in chunks[:-1])


async def test_characters_are_never_broken_over_chunks() -> None:
    text = "naïve 日本 🙂"
    chunks = await stream(make_state(FakeEngine(say(text))))
    assert text_of(chunks) == text
    assert "\ufffd" not in "".join(str(chunk) for chunk in chunks)


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_over_token_boundaries(per_step: int, include: bool) -> None:
    engine = FakeEngine(say("one </en two </end> three"), per_step=per_step)
    fields = {"stop": ["</end>"], "include_stop_str_in_output": include}
    whole = await chat(make_state(engine), **fields)
    chunks = await stream(make_state(FakeEngine(engine.script, per_step=per_step)), **fields)
    expected = "one </en two " + ("</end>" if include else "")
    assert whole["choices"][0]["message"]["content"] == expected
    assert text_of(chunks) == expected
    assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["stop_reason"]) == ("stop", "</end>")
    # What the engine made after the stop string is nobody's: it isn't counted, and it is stopped.
    assert whole["usage"]["completion_tokens"] == len("one </en two </end>")
    assert engine.in_flight == 0


async def test_stop_token_is_reported_and_not_shown() -> None:
    body = await chat(make_state(FakeEngine(say("abc.def"))), stop_token_ids=[ord(".")])
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "abc"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord("."))


async def test_max_tokens_ends_with_length() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = await chat(make_state(), **{name: 5})
        (choice,) = body["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "length")


async def test_n_answers_stream_by_index() -> None:
    engine = FakeEngine(lambda request: [*f"seed {request.seed}".encode(), IM_END])
    chunks = await stream(make_state(engine), n=3)
    for index, request in enumerate(engine.submitted):
        assert text_of(chunks, index) == f"seed {request.seed}"
        mine = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in mine].count("stop") == 1


async def test_logprob_bytes_joined_are_the_text() -> None:
    text = "naïve 日本 🙂!"
    whole = await chat(make_state(FakeEngine(say(text))), logprobs=True, top_logprobs=2)
    chunks = await stream(make_state(FakeEngine(say(text), per_step=2)), logprobs=True, top_logprobs=2)
    content = whole["choices"][0]["logprobs"]["content"]
    streamed = [
        token
        for chunk in chunks[:-1]
        for choice in chunk["choices"]
        if choice["logprobs"]
        for token in choice["logprobs"]["content"]
    ]
    assert content == streamed
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == text
    assert all(len(token["top_logprobs"]) == 2 for token in content)
