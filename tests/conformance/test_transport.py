"""Around the answer: headers, raw and streamed responses, time limits, retries, methods, kinds of bodies."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.conformance.conftest import MODEL, Served, free_port, wait_until_idle

pytestmark = pytest.mark.model

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours."}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 1, "temperature": 0}
PATH = "/v1/chat/completions"


# --- headers


def test_who_served_it_is_in_the_headers(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT)
    assert raw.headers["x-pagefleet-model"] == MODEL
    assert raw.headers["x-pagefleet-target"] == "standalone.0"
    assert raw.headers["content-type"] == "application/json"
    assert int(raw.headers["content-length"]) == len(raw.content)


def test_what_gateway_and_worker_tell_each_other_stays_between_them(client: OpenAI) -> None:
    mine = {"x-pagefleet-usage": "steal", "x-pagefleet-priority": "high"}
    raw = client.chat.completions.with_raw_response.create(**CHAT, extra_headers=mine)
    assert "x-pagefleet-usage" not in raw.headers


@pytest.mark.parametrize("name", ["abc-123", "a" * 128, "A.b:c/d+e=f@g_h"])
def test_the_client_s_request_id_comes_back(client: OpenAI, name: str) -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT, extra_headers={"x-request-id": name})
    assert raw.headers["x-request-id"] == name
    assert raw.request_id == name


@pytest.mark.parametrize("name", ["a" * 129, "with space", "quote\"'", "semi;colon"])
def test_an_id_that_could_harm_is_replaced(client: OpenAI, name: str) -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT, extra_headers={"x-request-id": name})
    assert raw.headers["x-request-id"] not in ("", name)


def test_two_ids_are_made(client: OpenAI) -> None:
    create = client.chat.completions.with_raw_response.create
    assert create(**CHAT).request_id != create(**CHAT).request_id


def test_other_headers_and_queries_of_the_sdk_do_no_harm(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        **CHAT,
        extra_headers={"openai-organization": "o", "openai-project": "p", "idempotency-key": "i"},
        extra_query={"api-version": "2024-01-01", "model": "ignored"},
    )
    assert answer.choices[0].finish_reason


# --- raw, streamed, asynchronous


def test_raw_response_parses_into_the_same_model(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT)
    parsed: Any = raw.parse()
    assert parsed.choices[0].message.content == json.loads(raw.text)["choices"][0]["message"]["content"]


def test_whole_answer_read_as_a_stream_of_bytes(client: OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(**CHAT) as response:
        data = b"".join(response.iter_bytes())
    assert json.loads(data)["object"] == "chat.completion"


def test_raw_lines_of_a_stream_are_events(client: OpenAI) -> None:
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt="One, two,", max_tokens=2, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


async def test_asynchronous_raw_response(async_client: AsyncOpenAI) -> None:
    raw = await async_client.completions.with_raw_response.create(model=MODEL, prompt="One,", max_tokens=1)
    assert raw.status_code == 200
    assert raw.parse().choices[0].text


async def test_twenty_at_once_on_one_client(async_client: AsyncOpenAI) -> None:
    async def one(number: int) -> Any:
        return await async_client.completions.create(
            model=MODEL, prompt=[number + 100], max_tokens=2, temperature=0, extra_body={"ignore_eos": True}
        )

    answers = await asyncio.gather(*map(one, range(20)))
    assert len({answer.id for answer in answers}) == 20
    assert {answer.usage.completion_tokens for answer in answers} == {2}


def test_a_connection_serves_request_after_request(url: str) -> None:
    with httpx.Client(base_url=url, limits=httpx.Limits(max_connections=1), timeout=100) as client:
        ports = set()
        for _ in range(5):
            response = client.post(PATH, json=CHAT)
            ports.add(response.extensions["network_stream"].get_extra_info("client_addr")[1])
        assert len(ports) == 1


# --- time and failure, as the SDK sees them


def test_timeout_of_the_client_is_the_sdk_s_exception(url: str, worker: Served) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=0.2) as client:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**{**CHAT, "max_tokens": 400}, extra_body={"ignore_eos": True})
    wait_until_idle(worker)


def test_timeout_between_chunks_stops_the_worker(client: OpenAI, worker: Served) -> None:
    chunks = client.chat.completions.create(
        **{**CHAT, "max_tokens": 400}, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(chunks))
    chunks.close()
    wait_until_idle(worker)


def test_nobody_there_is_a_connection_error() -> None:
    with OpenAI(base_url=f"http://127.0.0.1:{free_port()}/v1", api_key="unused", max_retries=0) as client:
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


class Flaky:
    """A proxy that answers the first request with a 503 and passes on what follows."""

    def __init__(self, url: str) -> None:
        self.seen = 0
        self._backend = url
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.seen += 1
            with connection:
                if self.seen == 1:
                    connection.recv(65536)
                    connection.sendall(
                        b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 0\r\ncontent-length: 2\r\n"
                        b"connection: close\r\n\r\n{}"
                    )
                else:
                    self._pass_on(connection)

    def _pass_on(self, connection: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(
            next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))[15:]
        )
        while len(body) < length:
            body += connection.recv(65536)
        answer = httpx.post(f"{self._backend}{PATH}", content=body, timeout=100)
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(answer.content), answer.content)
        )

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def flaky(url: str) -> Iterator[Flaky]:
    proxy = Flaky(url)
    yield proxy
    proxy.close()


def test_the_sdk_tries_a_503_again(flaky: Flaky) -> None:
    with OpenAI(base_url=f"{flaky.url}/v1", api_key="unused", max_retries=1, timeout=100) as client:
        assert client.chat.completions.create(**CHAT).choices
    assert flaky.seen == 2


# --- methods and paths


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/version", "/openapi.json"])
def test_head_is_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(get.content))


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_other_methods_are_405_with_allow(http: httpx.Client, path: str, method: str) -> None:
    response = http.request(method, path)
    assert response.status_code == 405
    assert "POST" in response.headers["allow"]
    assert response.json()["error"]["code"] == "method_not_allowed"


def test_options_says_what_there_is(http: httpx.Client) -> None:
    response = http.options(PATH)
    assert response.status_code == 200
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1/models", "/v1/chat", "/V1/models", "/v1/files"]
)
def test_nearly_a_path_is_404(http: httpx.Client, path: str) -> None:
    response = http.post(path, json=CHAT)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "route_not_found"


# --- bodies


def test_a_body_in_chunks(http: httpx.Client) -> None:
    body = json.dumps(CHAT).encode()
    pieces = (body[start : start + 7] for start in range(0, len(body), 7))
    response = http.post(PATH, content=pieces, headers={"content-type": "application/json"})
    assert response.status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/json; charset=utf-8", "", "nonsense"])
def test_the_content_type_of_a_body_does_not_matter(http: httpx.Client, kind: str) -> None:
    response = http.post(PATH, content=json.dumps(CHAT), headers={"content-type": kind})
    assert response.status_code == 200


def test_a_byte_order_mark_is_no_json(http: httpx.Client) -> None:
    response = http.post(f"{PATH}?model={MODEL}", content=b"\xef\xbb\xbf" + json.dumps(CHAT).encode())
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


def test_a_compressed_body_is_415(http: httpx.Client) -> None:
    body = gzip.compress(json.dumps(CHAT).encode())
    response = http.post(PATH, content=body, headers={"content-encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_content_encoding")


def test_no_body_at_all_is_411(http: httpx.Client, url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 411 ")


def test_headers_without_end_are_431(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 70_000 + b"\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")


def test_duplicate_keys_the_last_counts(http: httpx.Client) -> None:
    once = '"model": "nobody", "max_tokens": 9, "ignore_eos": true, "prompt": "x"'
    body = f'{{{once}, "max_tokens": 2, "model": "{MODEL}"}}'
    response = http.post("/v1/completions", content=body)
    assert response.json()["usage"]["completion_tokens"] == 2


def test_a_megabyte_of_prompt_is_refused_at_once(http: httpx.Client) -> None:
    started = time.monotonic()
    response = http.post("/v1/completions", json={"model": MODEL, "prompt": "word " * 200_000})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("depth", [100, 5000])
def test_nesting_is_no_trouble(http: httpx.Client, depth: int) -> None:
    body = json.dumps(CHAT)[:-1] + ', "deep": ' + "[" * depth + "]" * depth + "}"
    response = http.post(PATH, content=body)
    assert response.status_code == (200 if depth == 100 else 400)


def test_numbers_beyond_64_bits_are_wrong_values(http: httpx.Client) -> None:
    response = http.post(PATH, content=json.dumps(CHAT)[:-1] + ', "seed": 1' + "0" * 400 + "}")
    assert response.status_code == 400
