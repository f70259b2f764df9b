"""allowed_token_ids, bad_words and other fields of sampling as a client sends them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.fake_engine import IM_END, MODEL, VOCAB_SIZE, FakeEngine, in_process, make_state
from worker.server.state import ServerState

PATHS = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/generate", {"prompt": "a"}),
]


async def post(state: ServerState, path: str, **fields: Any) -> Any:
    async with in_process(state) as client:
        return await client.post(path, json={"model": MODEL, **fields})


@pytest.mark.parametrize(("path", "prompt"), PATHS, ids=[path for path, _ in PATHS])
async def test_the_engine_gets_them_as_tokens(path: str, prompt: dict[str, Any]) -> None:
    engine = FakeEngine()
    fields = {
        "allowed_token_ids": [5, 9],
        "bad_words": ["ab", "  c", "ab"],
        "spaces_between_special_tokens": False,
    }
    answer = await post(make_state(engine), path, **prompt, **fields)
    assert answer.status_code == 200, answer.text
    params = engine.submitted[0].params
    assert params.allowed_token_ids == (5, 9)
    assert params.bad_words == ()
    assert params.bad_words_token_ids == ((*b"ab",), (*b" ab",), (*b"c",), (*b" c",))
    for absent in ({}, {"allowed_token_ids": None, "bad_words": []}):
        await post(make_state(engine), path, **prompt, **absent)
        params = engine.submitted[-1].params
        assert (params.allowed_token_ids, params.bad_words_token_ids) == (None, ())


@pytest.mark.parametrize(("path", "prompt"), PATHS, ids=[path for path, _ in PATHS])
@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", "is empty"),
        (
            {"allowed_token_ids": [1, VOCAB_SIZE]},
            "allowed_token_ids",
            f"the vocabulary ends at {VOCAB_SIZE - 1}",
        ),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "whole numbers from 0"),
        ({"allowed_token_ids": [0] * 16_385}, "allowed_token_ids", "at most 16384 ids, not 16385"),
        ({"allowed_token_ids": ["5"]}, "allowed_token_ids", "wrong type"),
        (
            {"allowed_token_ids": [65], "bad_words": ["A"]},
            "allowed_token_ids",
            "no token that bad_words lets",
        ),
        ({"allowed_token_ids": [IM_END], "min_tokens": 1}, "allowed_token_ids", "min_tokens (1) keeps"),
        (
            {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2},
            "allowed_token_ids",
            "(2) keeps",
        ),
        ({"bad_words": [""]}, "bad_words", "1 to 256 characters"),
        ({"bad_words": ["  "]}, "bad_words", "more than spaces"),
        ({"bad_words": ["x" * 257]}, "bad_words", "1 to 256 characters"),
        ({"bad_words": ["x"] * 257}, "bad_words", "at most 256 strings, not 257"),
        ({"bad_words": ["x" * 256] * 33}, "bad_words", "at most 8192 characters all together"),
        ({"bad_words": "x"}, "bad_words", "wrong type"),
        ({"use_beam_search": True}, "use_beam_search", "n gives several answers"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds", "texts or token ids"),
        ({"logits_processors": ["x"]}, "logits_processors", "can't bring code"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_can_not_be_is_refused(
    path: str, prompt: dict[str, Any], fields: dict[str, Any], param: str, text: str
) -> None:
    answer = await post(make_state(), path, **prompt, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].startswith(param)
    assert text in error["message"]


async def test_an_end_may_be_all_that_is_allowed() -> None:
    for fields in ({}, {"min_tokens": 1, "ignore_eos": True}):
        path, prompt = PATHS[0]
        answer = await post(make_state(), path, **prompt, allowed_token_ids=[IM_END], **fields)
        assert answer.status_code == 200, answer.text
