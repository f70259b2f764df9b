"""Errors: the SDK's exception class, the field at fault, and one shape of body everywhere."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.conformance.conftest import MAX_MODEL_LEN, MODEL

pytestmark = pytest.mark.model

USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 2}


def check_body(body: Any) -> None:
    """Exactly the four fields, of the types that clients expect."""
    assert set(body) == {"message", "type", "param", "code"}
    assert isinstance(body["message"], str)
    assert body["message"]
    assert isinstance(body["type"], str)
    assert isinstance(body["param"], str | None)
    assert isinstance(body["code"], str | None)


BAD_CHATS = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 100_000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stop": [str(i) for i in range(17)]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": "x" * 5000}, "stop"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"hello": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [USER, {"content": "hi"}]}, "messages[1].role"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 3}, "min_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), BAD_CHATS)
def test_bad_parameter_is_named(client: OpenAI, change: dict[str, Any], param: str) -> None:
    known = {key: value for key, value in {**CHAT, **change}.items() if key not in NOT_OF_THE_SDK}
    extra = {key: value for key, value in change.items() if key in NOT_OF_THE_SDK}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**known, extra_body=extra)
    error = caught.value
    assert error.status_code == 400
    assert param in (error.param or "").replace("messages[...]", "messages") or error.param == param
    assert error.type == "invalid_request_error"
    assert param.split("[")[0] in error.message
    check_body(error.body)


NOT_OF_THE_SDK = ("min_p", "top_k", "repetition_penalty", "min_tokens")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["ok", ""]}, "prompt"),
        ({"prompt": [1, "two"]}, "prompt"),
        ({"prompt": [10**7]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 129}, "n"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_bad_completion_is_named(client: OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**COMPLETION, **change})
    assert caught.value.param == param
    check_body(caught.value.body)


def test_images_are_refused_where_they_are(client: OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages)
    assert (caught.value.param or "").startswith("messages[0].content[1]")


@pytest.mark.parametrize("streamed", [False, True])
def test_unknown_model(client: OpenAI, streamed: bool) -> None:
    for create, request in (
        (client.chat.completions.create, CHAT),
        (client.completions.create, COMPLETION),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            create(**{**request, "model": "nobody/knows"}, stream=streamed)  # type: ignore[operator]
        assert caught.value.code == "model_not_found"
        assert caught.value.param == "model"
        assert "nobody/knows" in caught.value.message
        check_body(caught.value.body)


@pytest.mark.parametrize("too_much", ["prompt", "answer"])
def test_context_length(client: OpenAI, too_much: str) -> None:
    content = "word " * MAX_MODEL_LEN if too_much == "prompt" else "hi"
    limit = 2 if too_much == "prompt" else MAX_MODEL_LEN
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=limit
        )
    assert caught.value.code == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in caught.value.message
    check_body(caught.value.body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'{"model": "\xff"}', b"\x00", b"[" * 100_000])
def test_body_that_is_no_json_object(http: httpx.Client, path: str, body: bytes) -> None:
    response = http.post(f"{path}?model={MODEL}", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    check_body(response.json()["error"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_missing_model(http: httpx.Client, path: str) -> None:
    response = http.post(path, json={"messages": [USER], "prompt": "hi"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
    check_body(response.json()["error"])


def test_model_may_come_by_other_names(http: httpx.Client) -> None:
    body = {"messages": [USER], "max_tokens": 1}
    path = "/v1/chat/completions"
    assert http.post(f"{path}?model={MODEL}", json=body).status_code == 200
    assert http.post(path, json={**body, "model_name": MODEL}).status_code == 200
    # The body's model wins over the query's.
    assert http.post(f"{path}?model={MODEL}", json={**body, "model": "nobody"}).status_code == 404


def test_missing_messages(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={"model": MODEL})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("path", ["/v1/nothing", "/", "/v2/chat/completions"])
def test_unknown_path(http: httpx.Client, path: str) -> None:
    response = http.post(path, json=CHAT)
    assert response.status_code == 404
    check_body(response.json()["error"])


def test_wrong_method(http: httpx.Client) -> None:
    response = http.get("/v1/chat/completions")
    assert response.status_code == 405
    assert "POST" in response.headers["allow"]
    check_body(response.json()["error"])


def test_sdk_raises_not_found_for_unknown_paths(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.images.generate(prompt="a cat")


def test_errors_carry_the_request_id(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **{**CHAT, "temperature": 5}, extra_headers={"x-request-id": "conf-err"}
        )
    assert caught.value.request_id == "conf-err"


def test_server_goes_on_after_all_of_this(client: OpenAI) -> None:
    assert client.chat.completions.create(**CHAT).choices[0].finish_reason in ("length", "stop")
