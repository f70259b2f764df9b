"""Every wrong request: its status, the field it names, its code, and always the one shape of an error."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.worker.fake_engine import INFO, MODEL, VOCAB_SIZE, FakeEngine, in_process, make_state, strict_json
from worker.ipc.messages import EngineRequest
from worker.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOP, MAX_STOP_TOKEN_IDS, SamplingParams
from worker.server.app import create_app
from worker.server.schemas import MAX_PROMPTS
from worker.server.text_model import TextModel

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]
DEEP = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def check_shape(body: Any) -> dict[str, Any]:
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": MAX_N + 1}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 10**30}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": 100_000}, "min_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * (MAX_STOP + 1)}, "stop"),
    ({"stop": ["x" * 5000]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"logit_bias": {" 5": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "a"}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(MAX_LOGIT_BIAS + 1)}}, "logit_bias"),
    ({"cache_salt": "s" * 1000}, "cache_salt"),
    ({"priority": 10**20}, "priority"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": "text"}, "response_format"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1.5}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"guided_json": "{"}, "guided_json"),
    ({"structural_tag": {}}, "structural_tag"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"best_of": 2}, "best_of"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "two words"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
]

CHAT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
        "messages[0].content[1].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": MAX_LOGPROBS + 1}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"echo": "yes"}, "echo"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": 1}},
        "stream_options.continuous_usage_stats",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": [[] for _ in range(40_000)]}}, "chat_template_kwargs"),
]

TEXT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
    ({"prompt": ["a"] * MAX_PROMPTS, "n": 2}, "n"),
    ({"logprobs": MAX_LOGPROBS + 1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"echo": True, "logprobs": MAX_LOGPROBS + 1}, "logprobs"),
    ({"echo": True, "max_tokens": 0, "n": 2}, "n"),
    ({"suffix": "end"}, "suffix"),
]

BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    TEXT: {"prompt": "Hi"},
    "/generate": {"prompt": "Hi"},
}

CASES = [
    *((path, fields, param) for path in (CHAT, TEXT) for fields, param in SAMPLING),
    *((CHAT, fields, param) for fields, param in CHAT_ONLY),
    *((TEXT, fields, param) for fields, param in TEXT_ONLY),
    ("/generate", {"n": 2}, "n"),
    ("/generate", {"prompt": ["a"]}, "prompt[0]"),
    ("/generate", {"temperature": 9}, "temperature"),
]


@pytest.mark.parametrize(("path", "fields", "param"), CASES)
async def test_bad_field_is_a_400_that_names_it(path: str, fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    async with in_process(make_state(engine)) as client:
        answer = await client.post(path, json={"model": MODEL, **BASE[path], **fields})
    assert answer.status_code == 400, answer.text
    error = check_shape(strict_json(answer.content))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert engine.submitted == []


@pytest.mark.parametrize("path", [CHAT, TEXT, "/generate", "/generate_stream", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff",
        b'{"a":NaN}',
        b'{"a":"\xff"}',
        b'{"prompt":"\\ud800"}',
        DEEP,
    ],
    ids=lambda body: repr(body[:12]),
)
async def test_what_is_not_a_json_object_is_a_400(path: str, body: bytes) -> None:
    async with in_process(make_state()) as client:
        answer = await client.post(path, content=body)
    assert answer.status_code == 400
    check_shape(strict_json(answer.content))


async def test_missing_required_field_is_named() -> None:
    async with in_process(make_state()) as client:
        for path, param in (
            (CHAT, "messages"),
            (TEXT, "prompt"),
            ("/generate", "prompt"),
            ("/detokenize", "tokens"),
        ):
            answer = await client.post(path, json={"model": MODEL})
            assert answer.status_code == 400
            assert check_shape(answer.json())["param"] == param


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
        ("GET", "/", 404),
        ("POST", "/v1/images/generations", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/admin/drain", 405),
    ],
)
async def test_unknown_paths_and_methods(method: str, path: str, status: int) -> None:
    async with in_process(make_state()) as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    check_shape(answer.json())
    if status == 405:
        assert answer.headers["allow"]
        assert answer.json()["error"]["code"] == "method_not_allowed"
    else:
        assert answer.json()["error"]["code"] in ("route_not_found", "model_not_found")


async def test_model_name_comes_from_body_or_query_and_must_be_served() -> None:
    async with in_process(make_state(served_model_name=("a", "b/c"))) as client:
        body = {"prompt": "Hi", "max_tokens": 1}
        for path in (TEXT, "/generate", "/tokenize"):
            for fields, query in (({"model": "a"}, ""), ({"model_name": "b/c"}, ""), ({}, "?model=b/c")):
                assert (await client.post(path + query, json={**body, **fields})).status_code == 200
            missing = await client.post(path, json=body)
            error = missing.json()["error"]
            assert (missing.status_code, error["param"], error["code"]) == (400, "model", "model_missing")
            unknown = await client.post(path, json={**body, "model": "x"})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"prompt": "x" * 512}, ("512",)),
        ({"prompt": "x" * 500, "max_tokens": 13}, ("512", "513", "500", "13")),
        ({"prompt": "x" * 10_000_000}, ("512",)),
        ({"prompt": [1] * 600}, ("512", "600")),
        ({"prompt": [1] * 512}, ("512", "512, which leaves none for an answer")),
    ],
)
async def test_longer_than_the_context_says_the_numbers(
    fields: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    async with in_process(make_state()) as client:
        answer = await client.post(TEXT, json={"model": MODEL, **fields})
    assert answer.status_code == 400
    error = check_shape(answer.json())
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert all(number in error["message"] for number in numbers), error["message"]


async def test_what_fits_the_context_but_never_the_pool_is_refused() -> None:
    small = msgspec.structs.replace(INFO, num_pages=5)  # 4 pages of 16 tokens
    engine = FakeEngine(info=small)
    async with in_process(make_state(engine)) as client:
        for fields in ({"prompt": "x" * 64}, {"prompt": "x" * 60, "max_tokens": 5}):
            answer = await client.post(TEXT, json={"model": MODEL, **fields})
            error = check_shape(answer.json())
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert "64" in error["message"]
            assert "kv-cache-memory-bytes" in error["message"]
        fits = await client.post(TEXT, json={"model": MODEL, "prompt": "x" * 60})
        assert fits.status_code == 200
    assert engine.submitted[0].params.max_tokens == 4


async def test_full_queue_is_a_503_to_retry() -> None:
    engine = FakeEngine(paused=True, info=msgspec.structs.replace(INFO, max_num_seqs=2))
    state = make_state(engine, max_waiting=1)
    async with in_process(state) as client:
        for number in range(3):
            engine.submit(EngineRequest(f"other-{number}", [1], SamplingParams(), seed=0))
        answer = await client.post(TEXT, json={"model": MODEL, "prompt": "Hi"})
        engine.paused = False
    assert answer.status_code == 503
    assert check_shape(answer.json())["code"] == "queue_full"
    assert answer.headers["x-pagefleet-refused"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    assert len(engine.submitted) == 3


@pytest.mark.parametrize("announced", [True, False])
async def test_body_over_the_limit_is_a_413(announced: bool) -> None:
    body = b'{"prompt":"' + b"x" * 2000 + b'"}'

    async def in_chunks() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async with in_process(make_state(max_body=1024)) as client:
        answer = await client.post(TEXT, content=body if announced else in_chunks())
    assert answer.status_code == 413
    error = check_shape(answer.json())
    assert "limit of 1024 bytes" in error["message"]
    assert "--max-body" in error["message"]
    assert error["code"] == "request_too_large"
    async with in_process(make_state(max_body=len(body), max_model_len=512)) as client:
        answer = await client.post(TEXT, content=body if announced else in_chunks())
    assert check_shape(answer.json())["code"] == "model_missing"


async def test_body_that_stops_coming_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.server.exchange.BODY_IDLE_SECONDS", 0.05)

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.sleep(10)

    scope = {"type": "http", "method": "POST", "path": TEXT, "query_string": b"", "headers": []}
    await create_app(make_state())(scope, receive, send)
    assert sent[0]["status"] == 408
    assert check_shape(strict_json(sent[1]["body"]))["code"] == "request_timeout"


async def test_a_defect_of_the_server_is_a_500_without_the_prompt_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(request: Any) -> list[int]:
        raise RuntimeError(request.cache_salt)

    async with in_process(make_state(FakeEngine(broken))) as client:
        answer = await client.post(TEXT, json={"model": MODEL, "prompt": "Hi", "cache_salt": "se" + "cret"})
    assert answer.status_code == 500
    assert check_shape(answer.json())["type"] == "server_error"
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text + answer.text


async def test_without_a_tokenizer_token_ids_still_work() -> None:
    state = make_state(FakeEngine(lambda request: [1, 2, 3]))
    state.text = TextModel(None)
    async with in_process(state) as client:
        body = {"model": MODEL, "max_tokens": 3, "logprobs": 1}
        good = await client.post("/generate", json={**body, "prompt": [5, 6]})
        assert (good.status_code, good.json()["token_ids"], good.json()["text"]) == (200, [1, 2, 3], "")
        assert (await client.post(TEXT, json={**body, "prompt": [5, 6]})).status_code == 200
        for path, fields, param in (
            (TEXT, {"prompt": "Hi"}, "prompt"),
            (TEXT, {"prompt": [1], "stop": "x"}, "stop"),
            (CHAT, {"messages": HELLO, "logprobs": None}, "messages"),
            ("/tokenize", {"prompt": "Hi"}, "prompt"),
            ("/detokenize", {"tokens": [1]}, "tokens"),
        ):
            answer = await client.post(path, json={**body, **fields})
            assert (answer.status_code, check_shape(answer.json())["param"]) == (400, param), path


async def test_arguments_of_a_tool_call_nested_too_deeply_are_a_400() -> None:
    state = make_state()
    call = {"id": "c", "type": "function", "function": {"name": "x", "arguments": "[" * 5000}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    async with in_process(state) as client:
        for path in (CHAT, "/tokenize"):
            response = await client.post(path, json={"model": MODEL, "messages": messages})
            assert response.status_code == 400, path
            assert check_shape(response.json())["param"] == "messages"


async def test_a_text_too_long_to_tokenize_is_a_400() -> None:
    async with in_process(make_state()) as client:
        response = await client.post("/tokenize", json={"model": MODEL, "prompt": "a" * 4_000_001})
        assert response.status_code == 400
        assert check_shape(response.json())["param"] == "prompt"


@pytest.mark.parametrize("text", [r"\ud83d", r"\ud83d and more text", r"\ude00 x", r"a \ud83d\ud83d, b"])
async def test_text_that_was_cut_within_a_character_is_told(text: str) -> None:
    """JavaScript's slice does that to emoji, and JSON.stringify writes half of the pair."""
    body = f'{{"model": "{MODEL}", "prompt": "{text}"}}'
    async with in_process(make_state()) as client:
        response = await client.post(TEXT, content=body)
        cut_off = await client.post(TEXT, content=body.replace(text, r"\ud83d\ude00")[:-1])
    assert response.status_code == cut_off.status_code == 400
    error = check_shape(response.json())
    assert error["code"] == "invalid_json"
    assert "send whole characters" in error["message"]
    assert "truncated" in check_shape(cut_off.json())["message"]
