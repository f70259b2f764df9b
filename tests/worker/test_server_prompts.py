"""What is said of prompts: echo, prompt_logprobs, token ids, truncation; against a scripted engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.worker.fake_engine import (
    IM_END,
    IM_START,
    MODEL,
    FakeEngine,
    events,
    in_process,
    make_state,
    say,
    strict_json,
)
from tests.worker.text_models import byte_level, sentencepiece
from worker.server import completion_body, fitting
from worker.server.echo import echo
from worker.server.state import ServerState

CHAT = [{"role": "user", "content": "Hi"}]
CHAT_TOKENS = [IM_START, *b"user\nHi", IM_END, *b"\n", IM_START, *b"assistant\n"]


async def post(state: ServerState, path: str = "/v1/completions", status: int = 200, **fields: Any) -> Any:
    async with in_process(state) as client:
        answer = await client.post(path, json={"model": MODEL, **fields})
    assert answer.status_code == status, answer.text
    return strict_json(answer.content)


async def stream(state: ServerState, path: str = "/v1/completions", **fields: Any) -> list[Any]:
    async with in_process(state) as client:
        answer = await client.post(path, json={"model": MODEL, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    found = events(answer.text)
    assert found.pop() == "[DONE]"
    return found


async def refused(path: str = "/v1/completions", **fields: Any) -> tuple[str, str]:
    error = (await post(make_state(), path, 400, **fields))["error"]
    return error["param"], error["message"]


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The choice that the chunks of a stream make."""
    text, columns = "", {}
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        text += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            columns.setdefault(name, []).extend(values)
    return {"text": text, "logprobs": columns or None}


async def test_echo_is_the_prompt_and_then_the_answer() -> None:
    state = make_state(FakeEngine(say("bye")))
    for prompt, text in (("Hé ", "Hé bye"), ([*b"ab"], "abbye"), ([IM_START, *b"a"], "abye")):
        body = await post(state, prompt=prompt, echo=True)
        assert body["choices"][0]["text"] == text
        assert body["choices"][0]["logprobs"] is None
        assert joined(await stream(state, prompt=prompt, echo=True))["text"] == text
    body = await post(state, prompt=["a", "b"], echo=True, n=2)
    assert [choice["text"] for choice in body["choices"]] == ["abye", "abye", "bbye", "bbye"]


async def test_echoed_logprobs_are_openais() -> None:
    """One entry for every token of prompt and answer, the one that ended it too; null for the very first."""
    state = make_state(FakeEngine(say("éy")))
    body = await post(state, prompt="hé!", echo=True, logprobs=2)
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "hé!éy"
    assert logprobs["tokens"] == ["h", "\ufffd", "\ufffd", "!", "\ufffd", "\ufffd", "y", "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 3, 4, 5]
    assert logprobs["token_logprobs"] == [None, *[-0.25] * 3, *[-0.5] * 4]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"!": -0.25, '"': -2.0}
    assert logprobs["top_logprobs"][6] == {"y": -0.5, "z": -1.0}
    assert joined(await stream(state, prompt="hé!", echo=True, logprobs=2)) == {
        "text": "hé!éy",
        "logprobs": logprobs,
    }


async def test_scoring_without_an_answer() -> None:
    """`max_tokens: 0` with echo, as programs that score texts send it."""
    for width in (0, 1):
        engine = FakeEngine()
        body = await post(make_state(engine), prompt=["ab", "xyz"], echo=True, max_tokens=0, logprobs=width)
        assert [choice["text"] for choice in body["choices"]] == ["ab", "xyz"]
        assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
        assert body["choices"][1]["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
        assert body["choices"][1]["logprobs"]["top_logprobs"] == [None, {"y": -0.25}, {"z": -0.25}]
        assert body["usage"] | {"prompt_tokens_details": None} == {
            "prompt_tokens": 5,
            "completion_tokens": 0,
            "total_tokens": 5,
            "prompt_tokens_details": None,
        }
        assert [request.params.max_tokens for request in engine.submitted] == [0, 0]
    body = await post(make_state(), prompt="ab", echo=True, max_tokens=0)
    assert (body["choices"][0]["text"], body["choices"][0]["logprobs"]) == ("ab", None)
    full = await post(make_state(), prompt="x" * 512, echo=True, max_tokens=0, logprobs=1)
    assert len(full["choices"][0]["logprobs"]["tokens"]) == 512
    chunks = await stream(make_state(), prompt="ab", echo=True, max_tokens=0, logprobs=1)
    assert joined(chunks)["logprobs"]["token_logprobs"] == [None, -0.25]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("/generate", {"prompt": "a", "max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
        ("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
    ids=str,
)
async def test_no_answer_at_all_only_with_an_echo(path: str, fields: dict[str, Any], param: str) -> None:
    found, message = await refused(path, **fields)
    assert found == param
    assert f"{param} must be at least 1, not 0" in message


async def test_prompt_logprobs_are_vllms() -> None:
    entry = {"logprob": -0.25, "rank": 1}
    other = {"logprob": -2.0, "rank": 2, "decoded_token": "c"}
    want = [None, {"98": {**entry, "decoded_token": "b"}, "99": other}]
    body = await post(make_state(), prompt=["ab", "xyz"], prompt_logprobs=2, n=2)
    found = [choice["prompt_logprobs"] for choice in body["choices"]]
    assert found[0] == found[1] == want
    assert found[2] == found[3]
    assert [list(tokens) for tokens in found[2][1:]] == [["121", "122"], ["122", "123"]]
    assert body["choices"][0]["logprobs"] is None
    body = await post(make_state(), prompt="ab", prompt_logprobs=0)
    assert body["choices"][0]["prompt_logprobs"] == [None, {"98": {**entry, "decoded_token": "b"}}]
    body = await post(make_state(), "/v1/chat/completions", messages=CHAT, prompt_logprobs=1)
    tokens = [list(tokens) for tokens in body["prompt_logprobs"][1:]]
    assert tokens == [[str(token)] for token in CHAT_TOKENS[1:]]
    body = await post(make_state(), "/generate", prompt="ab", prompt_logprobs=1)
    top = [{"token_id": 98, "logprob": -0.25}]
    assert body["prompt_logprobs"] == [None, {"token_id": 98, "logprob": -0.25, "rank": 1, "top": top}]


async def test_only_the_first_answer_computes_them() -> None:
    for streamed, want in ((False, [1, None, None]), (True, [1, 1, 1])):
        engine = FakeEngine()
        fields = {"prompt": "ab", "n": 3, "logprobs": 1, "echo": True}
        if streamed:
            chunks = await stream(make_state(engine), **fields)
            found = [joined(chunks, i)["logprobs"]["token_logprobs"][:2] for i in range(3)]
        else:
            body = await post(make_state(engine), **fields)
            found = [choice["logprobs"]["token_logprobs"][:2] for choice in body["choices"]]
        assert found == [[None, -0.25]] * 3
        assert [request.params.prompt_logprobs for request in engine.submitted] == want


async def test_refusals_say_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await refused(prompt="a", prompt_logprobs=21) == (
        "prompt_logprobs", "prompt_logprobs must be a whole number from 0 to 20, not 21",
    )  # fmt: skip
    assert (await refused(prompt="a", prompt_logprobs=-1, echo=True, logprobs=3))[0] == "prompt_logprobs"
    assert (await refused(prompt="a", prompt_logprobs=1, stream=True))[1].startswith(
        "prompt_logprobs can't be"
    )
    monkeypatch.setattr(fitting, "MAX_PROMPT_TOKENS", 30)
    param, message = await refused(prompt=["a" * 8] * 2, n=2)
    assert param == "prompt"
    assert "32 tokens together; at most 30" in message
    monkeypatch.undo()
    monkeypatch.setattr(fitting, "MAX_ECHOED", 30)
    assert await refused(prompt=["a" * 8] * 2, echo=True, n=2) == (
        "echo", "echo would repeat 32 tokens; at most 30 are repeated in one answer",
    )  # fmt: skip
    monkeypatch.setattr(fitting, "MAX_MASKED", 30)
    param, message = await refused(prompt=["a"] * 4, allowed_token_ids=list(range(9)))
    assert param == "allowed_token_ids"
    assert message.endswith("at most 7")
    monkeypatch.setattr(fitting, "MAX_PROMPT_ALTERNATIVES", 30)
    param, message = await refused(prompt=["abc"] * 4, prompt_logprobs=2)
    assert param == "prompt_logprobs"
    assert "36 numbers; at most 30" in message


@pytest.mark.parametrize("streamed", [False, True])
async def test_long_prompts_are_written_on_a_thread(monkeypatch: pytest.MonkeyPatch, streamed: bool) -> None:
    monkeypatch.setattr(completion_body, "_LONG", 8)
    threads = []

    def remember(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return echo(*arguments)

    monkeypatch.setattr(completion_body, "echo", remember)
    fields = {"prompt": ["abcdef", "ghi"], "echo": True, "logprobs": 0}
    if streamed:
        chunks = await stream(make_state(FakeEngine(say("!"))), **fields)
        found = [joined(chunks, i) for i in range(2)]
    else:
        found = (await post(make_state(FakeEngine(say("!"))), **fields))["choices"]
    assert [choice["text"] for choice in found] == ["abcdef!", "ghi!"]
    assert [len(choice["logprobs"]["tokens"]) for choice in found] == [8, 5]
    assert threads
    assert threading.main_thread() not in threads


async def test_truncated_prompts() -> None:
    engine = FakeEngine()
    state = make_state(engine)
    long = "".join(chr(97 + i % 26) for i in range(600))  # over the context of 512
    for fields, kept in (
        ({"truncate_prompt_tokens": 3}, 3),
        ({"truncate_prompt_tokens": -1}, 496),
        ({"truncate_prompt_tokens": -1, "max_tokens": 500}, 12),
        ({"truncate_prompt_tokens": -1, "max_tokens": 0, "logprobs": 0}, 512),
    ):
        body = await post(state, **{"prompt": long, "echo": True, "max_tokens": 16, **fields})
        assert engine.submitted[-1].prompt_token_ids == [*long.encode()[-kept:]]
        assert body["choices"][0]["text"].startswith(long[-kept:])
        assert body["usage"]["prompt_tokens"] == kept
    await post(state, "/v1/chat/completions", messages=CHAT, truncate_prompt_tokens=4)
    assert engine.submitted[-1].prompt_token_ids == CHAT_TOKENS[-4:]
    for wanted in (0, -2, 513):
        param, message = await refused(prompt="a", truncate_prompt_tokens=wanted)
        assert param == "truncate_prompt_tokens"
        assert "truncate_prompt_tokens must be" in message


async def test_token_ids_beside_the_text() -> None:
    state = make_state(FakeEngine(say("hé")))
    want = [*"hé".encode(), IM_END]
    body = await post(state, prompt=["ab", "c"], return_token_ids=True)
    assert [choice["token_ids"] for choice in body["choices"]] == [want, want]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[97, 98], [99]]
    chunks = [chunk["choices"][0] for chunk in await stream(state, prompt="ab", return_token_ids=True)]
    assert [token for choice in chunks for token in choice["token_ids"]] == want
    assert [choice.get("prompt_token_ids") for choice in chunks] == [[97, 98], *[None] * (len(chunks) - 1)]
    body = await post(state, "/v1/chat/completions", messages=CHAT, return_token_ids=True)
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == (CHAT_TOKENS, want)
    chunks = await stream(state, "/v1/chat/completions", messages=CHAT, return_token_ids=True)
    assert [t for chunk in chunks for t in chunk["choices"][0].get("token_ids", ())] == want
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [CHAT_TOKENS, *[None] * (len(chunks) - 1)]


async def test_tokens_named_by_their_ids() -> None:
    state = make_state(FakeEngine(say("h")))
    body = await post(state, prompt="ab", echo=True, logprobs=1, return_tokens_as_token_ids=True)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in (97, 98, 104, IM_END)]
    assert logprobs["top_logprobs"][1] == {"token_id:98": -0.25}
    fields = {"messages": CHAT, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    body = await post(state, "/v1/chat/completions", **fields)
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:104", [104])
    assert entry["top_logprobs"][0]["token"] == "token_id:104"


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_places_in_an_echo(make: Any) -> None:
    """Every token's bytes begin where its offset says, whichever way the prompt came."""
    tokenizer = make()
    mark = min(tokenizer.special_ids)
    for text in ("hello world", "hé中 hello", "h"):
        plain = tokenizer.encode(text, add_special_tokens=False)
        for given, tokens in (
            (text, plain),
            (text, [mark, *plain]),
            (None, plain),
            (None, [mark, *plain, mark]),
        ):
            found, offsets = echo(given, tokens, tokenizer, skip_special_tokens=True)
            assert found == text
            assert len(offsets) == len(tokens)
            assert offsets == sorted(offsets)
            for token, start in zip(tokens, offsets):
                shown = tokenizer.visible_bytes(token).decode("utf-8", "ignore")
                assert text[start:].startswith((shown, shown.removeprefix(" ")))
    assert echo(None, [1, 2], None, skip_special_tokens=True) == ("", [0, 0])
