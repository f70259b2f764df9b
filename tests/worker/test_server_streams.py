"""Streams that don't go to plan: clients that leave or don't read, engines that die, workers that stop."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import openai
import pytest

from tests.worker.fake_engine import (
    MODEL,
    FakeEngine,
    events,
    eventually,
    make_state,
    serving,
    strict_json,
)
from worker.ipc.messages import RequestOutput
from worker.server.state import ServerState

LONG = [65] * 400
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "n": 3}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 400}),
    ("/v1/completions", {"prompt": ["Hi", "Ho"], "max_tokens": 400, "stream": True}),
    ("/generate", {"prompt": "Hi", "max_tokens": 400}),
    ("/generate_stream", {"prompt": "Hi", "max_tokens": 400}),
]


RESPONSES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/responses", {"input": "Hi", "stream": True}),
]


def slow_engine(**fields: Any) -> FakeEngine:
    return FakeEngine(lambda request: list(LONG), step_seconds=0.02, **fields)


async def hang_up(url: str, path: str, fields: dict[str, Any], leave: Any) -> None:
    """Send a request on a raw socket, await `leave`, close the socket."""
    host = httpx.URL(url)
    reader, writer = await asyncio.open_connection(host.host, host.port)
    body = json.dumps({"model": MODEL, **fields}).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    await leave(reader)
    writer.close()


@pytest.mark.parametrize(("path", "fields"), [*ROUTES, *RESPONSES])
@pytest.mark.parametrize("first_token", [False, True])
async def test_a_client_that_leaves_ends_its_work(
    path: str, fields: dict[str, Any], first_token: bool
) -> None:
    engine = slow_engine(paused=not first_token)
    state = make_state(engine)
    async with serving(state) as url:

        async def leave(reader: asyncio.StreamReader) -> None:
            await eventually(lambda: engine.submitted)
            if first_token:
                await eventually(lambda: engine.generated > 3)

        await hang_up(url, path, fields, leave)
        await eventually(lambda: engine.in_flight == 0)
        assert len(engine.aborted) == len(engine.submitted)
        assert engine.generated < len(LONG)
        await eventually(lambda: state.gate.inside == 0)
        assert not state.generations


async def test_five_hundred_disconnects_leave_nothing() -> None:
    engine = slow_engine()
    state = make_state(engine)
    async with serving(state) as url:

        async def leave(reader: asyncio.StreamReader) -> None:
            await reader.readline()

        for _ in range(10):
            fields = {"prompt": "Hi", "stream": True, "max_tokens": 400}
            await asyncio.gather(*(hang_up(url, "/v1/completions", fields, leave) for _ in range(50)))
        await eventually(lambda: engine.in_flight == 0 and state.gate.inside == 0)
        assert len(engine.submitted) == 500
        assert not state.generations
        counted = state.metrics.finished["abort"]._value.get()
        assert counted == 500


async def test_leaving_while_the_body_is_on_its_way_starts_nothing() -> None:
    state = make_state()
    async with serving(state) as url:
        host = httpx.URL(url)
        _, writer = await asyncio.open_connection(host.host, host.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        async with httpx.AsyncClient(timeout=60) as client:
            assert (await client.get(f"{url}/health")).status_code == 200
    assert isinstance(state.engine, FakeEngine)
    assert state.engine.submitted == []


async def test_a_client_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stops writing when the socket is full, and doesn't wait for ever."""
    monkeypatch.setattr("worker.server.exchange.SEND_STALL_SECONDS", 0.5)
    engine = FakeEngine(lambda request: [65] * 400, per_step=1)
    state = make_state(engine)
    async with serving(state) as url:
        host = httpx.URL(url)
        with socket.create_connection((host.host, host.port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = json.dumps(
                # Every token brings alternatives: megabytes in all, more than sockets hold.
                {"model": MODEL, "prompt": ["Hi"] * 400, "max_tokens": 400, "stream": True, "logprobs": 20}
            ).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            await asyncio.to_thread(sock.sendall, head.encode() + body)
            await eventually(lambda: engine.submitted)
            await eventually(lambda: state.gate.inside == 0)
            assert not state.generations
            await eventually(lambda: engine.in_flight == 0)


async def post_lines(url: str, path: str, fields: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(url + path, json={"model": MODEL, **fields})


@pytest.mark.parametrize(("path", "fields"), ROUTES)
@pytest.mark.parametrize("first_token", [False, True])
async def test_death_of_the_engine_is_told_on_every_route(
    path: str, fields: dict[str, Any], first_token: bool
) -> None:
    engine = slow_engine(paused=not first_token)
    state = make_state(engine)
    async with serving(state) as url:
        asking = asyncio.create_task(post_lines(url, path, fields))
        await eventually(lambda: engine.submitted)
        if first_token:
            await eventually(lambda: engine.generated > 3)
        engine.die()
        answer = await asking
        streamed = fields.get("stream") or path == "/generate_stream"
        assert answer.status_code == (200 if streamed else 500)
        if path == "/generate_stream":
            last = strict_json(answer.text.splitlines()[-1])
        elif streamed:
            last = events(answer.text)[-1]
            assert "[DONE]" not in answer.text
        else:
            last = strict_json(answer.content)
        assert last["error"]["code"] == "engine_dead"
        assert set(last["error"]) == {"message", "type", "param", "code"}
        # And from now on: nothing is let in, and health says so.
        assert (await post_lines(url, path, fields)).status_code == 500
        async with httpx.AsyncClient(timeout=60) as client:
            assert (await client.get(f"{url}/health")).status_code == 500


async def test_the_openai_client_raises_when_the_engine_dies_in_a_stream() -> None:
    engine = slow_engine()
    async with (
        serving(make_state(engine)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        chunks = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        await anext(chunks)
        engine.die()
        with pytest.raises(openai.APIError, match="engine"):
            [chunk async for chunk in chunks]


async def test_an_error_of_one_request_ends_that_request() -> None:
    engine = slow_engine(paused=True)
    async with serving(make_state(engine)) as url:
        asking = asyncio.create_task(post_lines(url, "/v1/completions", {"prompt": "Hi", "n": 2}))
        await eventually(lambda: len(engine.submitted) == 2)
        first = engine.submitted[0].request_id
        stream = engine._running.pop(first)[1]
        stream.put(RequestOutput(first, [], finish_reason="error", error="not finite"))
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "not finite")
        assert engine.in_flight == 0, "the other answer of the request goes too"


async def open_stream(client: httpx.AsyncClient, url: str) -> Any:
    request = client.build_request(
        "POST",
        f"{url}/v1/completions",
        json={"model": MODEL, "prompt": "Hi", "max_tokens": 400, "stream": True},
    )
    return await client.send(request, stream=True)


async def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    engine = FakeEngine(lambda request: [65] * 40, step_seconds=0.02)
    state = make_state(engine)
    async with serving(state) as url, httpx.AsyncClient(timeout=60) as client:
        running = await open_stream(client, url)
        drained = await client.post(f"{url}/admin/drain")
        assert drained.json() == {"draining": True, "inflight": 1}
        for path, fields in (*ROUTES, ("/tokenize", {"prompt": "Hi"})):
            refused = await client.post(url + path, json={"model": MODEL, **fields})
            assert (refused.status_code, refused.headers["x-pagefleet-refused"]) == (503, "draining")
            assert refused.headers["retry-after"]
        assert (await client.get(f"{url}/ready")).json()["status"] == "draining"
        assert (await client.get(f"{url}/health")).status_code == 200
        text = (await running.aread()).decode()
        assert events(text)[-1] == "[DONE]"
        await eventually(lambda: state.gate.inside == 0)
        assert (await client.post(f"{url}/admin/drain")).json()["inflight"] == 0
        await client.post(f"{url}/admin/undrain")
        assert (await client.get(f"{url}/ready")).status_code == 200
        again = await client.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "Hi"})
        assert again.status_code == 200


async def test_abort_by_id_takes_the_whole_id_only() -> None:
    engine = FakeEngine(lambda request: list(LONG), paused=True)
    state = make_state(engine)
    async with serving(state) as url, httpx.AsyncClient(timeout=60) as client:

        def ask(name: str) -> asyncio.Task[httpx.Response]:
            body = {"model": MODEL, "prompt": "Hi", "max_tokens": 400}
            headers = {"x-request-id": name}
            return asyncio.create_task(client.post(f"{url}/v1/completions", json=body, headers=headers))

        asking = {name: ask(name) for name in ("a", "ab", "ba")}
        await eventually(lambda: len(engine.submitted) == 3)
        misspelt = await client.post(f"{url}/admin/abort", json={"request_id": ["a"]})
        assert (misspelt.status_code, "request_id" in misspelt.text) == (400, True)
        assert (await client.post(f"{url}/admin/abort", json={"request_ids": ["a"]})).json() == {"aborted": 1}
        answer = await asking.pop("a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_aborted")
        engine.paused = False
        for answer in await asyncio.gather(*asking.values()):
            assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "A" * 400)


async def test_one_of_two_of_the_same_name_leaves() -> None:
    """A name is the client's to choose; the engine knows each request by one of its own."""
    engine = FakeEngine(lambda request: list(LONG), paused=True)
    state = make_state(engine)
    async with serving(state) as url, httpx.AsyncClient(timeout=60) as client:
        fields = {"prompt": "Hi", "max_tokens": 400, "request_id": "mine"}

        both = asyncio.Event()

        async def leave(reader: asyncio.StreamReader) -> None:
            await both.wait()

        leaving = asyncio.create_task(hang_up(url, "/v1/completions", fields, leave))
        await eventually(lambda: len(engine.submitted) == 1)
        body = {"model": MODEL, **fields}
        staying = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
        await eventually(lambda: len(engine.submitted) == 2)
        both.set()
        await leaving
        await eventually(lambda: engine.in_flight == 1)
        engine.paused = False
        answer = await staying
    assert answer.json()["choices"][0]["text"] == "A" * 400
    assert engine.aborted == [engine.submitted[0].request_id]
    assert engine.submitted[0].request_id != engine.submitted[1].request_id


async def test_abort_without_ids_takes_everything() -> None:
    engine = FakeEngine(lambda request: list(LONG), paused=True)
    async with serving(make_state(engine)) as url:
        asking = [asyncio.create_task(post_lines(url, path, fields)) for path, fields in ROUTES]
        await eventually(lambda: len(engine.submitted) == 9)
        async with httpx.AsyncClient(timeout=60) as client:
            assert (await client.post(f"{url}/admin/abort")).json() == {"aborted": len(ROUTES)}
        answers = await asyncio.gather(*asking)
        assert [answer.status_code for answer in answers] == [503, 200, 503, 200, 503, 200]
        assert all("request_aborted" in answer.text for answer in answers)
        assert all("[DONE]" not in answer.text for answer in answers)
        assert engine.in_flight == 0


async def test_many_streams_at_once_keep_their_tokens_apart() -> None:
    engine = FakeEngine(lambda request: [*f"<{request.request_id}>".encode()], step_seconds=0.001)
    state: ServerState = make_state(engine)
    async with serving(state) as url, httpx.AsyncClient(timeout=60) as client:
        fields = {"model": MODEL, "prompt": "Hi", "max_tokens": 200, "stream": True}
        answers = await asyncio.gather(
            *(client.post(f"{url}/v1/completions", json=fields) for _ in range(40))
        )
    for answer in answers:
        chunks = events(answer.text)
        assert chunks[-1] == "[DONE]"
        text = "".join(choice["text"] for chunk in chunks[:-1] for choice in chunk["choices"])
        assert text == f"<{chunks[0]['id'].removeprefix('cmpl-')}-0>"
