from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.routes import native
from gateway.routes import openai as openai_routes
from tests.gateway.rig import CHAT, Rig, error_of, http_post, one_worker, target, until

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PROXIED = (*openai_routes.PROXIED, *native.PROXIED)


async def test_every_route_reaches_the_worker_untouched(tmp_path: Path) -> None:
    odd = b' { "model" :"m",\n "fake":{"do":"echo"}, "unknown": [1e5, null, "\\u00e9 \xc3\xa9"], "n": 1.0 } '
    async with one_worker(tmp_path) as rig:
        for path in PROXIED:
            response = await rig.client.post(path, content=odd, headers={"content-type": "application/json"})
            assert response.content == odd
            seen = rig.workers[0].requests[-1]
            assert (seen.path, seen.body) == (path, odd)
            assert response.headers["x-pagefleet-model"] == "m"
            assert response.headers["x-pagefleet-target"] == "s.1"


async def test_only_allowed_headers_travel(tmp_path: Path) -> None:
    sent = {
        "authorization": "Bearer secret", "cookie": "a=b", "proxy-authorization": "x", "x-api-key": "k",
        "x-user-id": "anna", "x-forwarded-for": "1.2.3.4", "user-agent": "test", "te": "trailers",
        "x-pagefleet-priority": "high",
        "connection": "keep-alive, x-hop", "x-hop": "1",
        "accept": "text/event-stream", "content-type": "application/json; charset=utf-8",
        "x-request-id": "req-1", "traceparent": TRACEPARENT, "tracestate": "a=1", "accept-encoding": "gzip",
    }  # fmt: skip
    async with one_worker(tmp_path) as rig:
        response = await rig.post(headers=sent)
        assert rig.workers[0].requests[0].headers == {
            "host": "worker",
            "accept": "text/event-stream",
            "content-type": "application/json; charset=utf-8",
            "content-length": str(len(rig.workers[0].requests[0].body)),
            "x-request-id": "req-1",
            "traceparent": TRACEPARENT,
            "tracestate": "a=1",
            "x-pagefleet-priority": "normal",
        }
        assert set(response.headers) == {
            "date",
            "content-type",
            "content-length",
            "x-request-id",
            "x-pagefleet-model",
            "x-pagefleet-target",
        }


async def test_request_ids(tmp_path: Path) -> None:
    """One that is an id is kept, any other replaced by a new one; the worker and the client get the same."""
    kept = ["req-1", "a" * 128, "0af7651916cd43dd8448eb211c80319c", "a/b:c.d_e@f=+"]
    replaced = ["", "a" * 129, "a b", "<script>", "a\tb", "\u00e9"]
    async with one_worker(tmp_path) as rig:
        given = [*kept, None, None, *replaced]
        answered = []
        for value in given:
            headers = {} if value is None else {"x-request-id": value.encode("latin-1")}
            answered += (await rig.post(headers=headers)).headers.get_list("x-request-id")
        assert [seen.headers["x-request-id"] for seen in rig.workers[0].requests] == answered
        assert answered[: len(kept)] == kept
        assert len(set(answered)) == len(given)
        assert not set(answered) & set(replaced)


MODEL_NAMES: list[tuple[dict[str, Any], str, int]] = [
    ({"model": "m"}, "", 200),
    ({"model": "nick"}, "", 200),
    ({"model_name": "m"}, "", 200),
    ({"model": "m", "model_name": "nope"}, "", 200),
    ({"model": None, "model_name": "m"}, "", 200),
    ({"model": "", "model_name": ""}, "?model=m", 200),
    ({}, "?model=nick", 200),
    ({}, "?other=1&model=%6D", 200),
    ({"model": "m"}, "?model=nope", 200),
    ({"model": "nope"}, "?model=m", 404),
    ({"model": "M"}, "", 404),
    ({"model": "m "}, "", 404),
    ({"model": "x" * 5000}, "", 404),
    ({}, "?model=", 400),
    ({}, "", 400),
]


async def test_where_the_model_name_comes_from(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        for body, query, status in MODEL_NAMES:
            response = await rig.post(body, path=CHAT + query)
            assert (body, query, response.status_code) == (body, query, status)
            if status != 200:
                error = error_of(response)
                assert error["param"] == "model"
                assert error["code"] == ("model_not_found" if status == 404 else "model_missing")
                assert len(error["message"]) < 400
        assert len(rig.workers[0].requests) == sum(status == 200 for *_, status in MODEL_NAMES)


async def test_query_parameters_stay_here(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        await rig.post(path=CHAT + "?api_key=secret&model=m")
        assert rig.workers[0].requests[0].path == CHAT


async def test_model_named_in_the_query_alone_reaches_the_worker(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        await rig.post({}, path=CHAT + "?api_key=secret&model=nick")
        assert rig.workers[0].requests[0].path == CHAT + "?model=nick"


BAD_BODIES = [
    (b"", "invalid_json", None),
    (b"  \n", "invalid_json", None),
    (b"[]", "invalid_json", None),
    (b'"m"', "invalid_json", None),
    (b"{", "invalid_json", None),
    (b'{"model":"m",}', "invalid_json", None),
    (b'{"model":"m"} x', "invalid_json", None),
    (b"model=m", "invalid_json", None),
    (b'{"model":"\xff\xfe"}', "invalid_json", None),
    (b'{"x":' + b"[" * 200_000, "invalid_json", None),
    (b'{"model":7}', "invalid_type", "model"),
    (b'{"model":["m"]}', "invalid_type", "model"),
    (b'{"model_name":{}}', "invalid_type", "model_name"),
]


async def test_bodies_that_are_refused(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        for content, code, param in BAD_BODIES:
            response = await rig.client.post(CHAT, content=content)
            error = error_of(response)
            assert (content[:30], response.status_code, error["code"]) == (content[:30], 400, code)
            assert error["param"] == param
            assert response.headers["x-request-id"]
        assert not rig.workers[0].requests


async def test_the_body_limit_holds_to_the_byte_and_is_named(tmp_path: Path) -> None:
    async with one_worker(tmp_path, max_body=2048) as rig:

        def sized(size: int) -> bytes:
            return b'{"model":"m"}'.ljust(size)

        async def in_chunks(content: bytes) -> Any:
            for start in range(0, len(content), 500):
                yield content[start : start + 500]

        assert (await rig.client.post(CHAT, content=sized(2048))).status_code == 200
        assert (await rig.client.post(CHAT, content=in_chunks(sized(2048)))).status_code == 200
        for content in (sized(2049), in_chunks(sized(2049))):
            response = await rig.client.post(CHAT, content=content)
            assert response.status_code == 413
            assert "2048 bytes" in error_of(response)["message"]
            assert "gateway.max_body" in error_of(response)["message"]
        assert len(rig.workers[0].requests) == 2
        assert rig.workers[0].requests[1].headers["content-length"] == "2048"
        assert "transfer-encoding" not in rig.workers[0].requests[1].headers


async def test_a_client_that_is_still_sending_sees_the_413(tmp_path: Path) -> None:
    async with one_worker(tmp_path, max_body=1024) as rig:
        huge = b"x" * (4 * 1024**2)
        response = await rig.raw(http_post(huge))
        assert response.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in response
        assert json.loads(response.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "request_too_large"


async def test_a_client_that_waits_for_100_continue_needs_not_send(tmp_path: Path) -> None:
    async with one_worker(tmp_path, max_body=1024) as rig:
        head = b"POST /generate HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 999999\r\n\r\n"
        assert (await rig.raw(head)).startswith(b"HTTP/1.1 413 ")


async def test_compressed_bodies_are_refused(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        response = await rig.client.post(CHAT, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert response.status_code == 415
        assert "'gzip'" in error_of(response)["message"]
        assert (await rig.post(headers={"content-encoding": "identity"})).status_code == 200


async def test_a_big_body_goes_through(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        body = {"model": "m", "fake": {"do": "echo"}, "pad": "y" * (20 * 1024**2)}
        response = await rig.post(body)
        assert response.json() == body


async def test_a_big_answer_goes_through(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        response = await rig.ask(do="big", size=10_000_001)
        assert response.content == (bytes(range(256)) * 40_000)[:10_000_001]


async def test_the_workers_own_errors_pass_through(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        statuses = [400, 404, 422, 429, 500, 503]
        for status in statuses:
            response = await rig.ask(do="status", status=status)
            assert response.status_code == status
            assert response.json() == {"error": {"message": "no", "type": "t", "param": "p", "code": "c"}}
            assert response.headers["retry-after"] == "7"
        assert len(rig.workers[0].requests) == len(statuses)


async def test_odd_but_whole_answers(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        for do in ("split", "extra", "no_keep_alive") * 3:
            response = await rig.ask(do=do)
            assert response.status_code == 200
            assert "evil" not in response.text


async def test_users_stick_by_header_then_body_then_address(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    workers = [await rig.worker(name) for name in "ab"]
    split = {"rollout_id": "r", "salt": "s"}
    rig.route(
        *(target(worker, slot=worker.name, weight_bp=5000, variant=worker.name) for worker in workers),
        **split,
    )
    async with rig.running():

        async def served_by(headers: dict[str, str], **body: Any) -> str:
            return str((await rig.post({"model": "m", **body}, headers=headers)).json()["served_by"])

        by_header = {user: await served_by({"x-user-id": user}) for user in map(str, range(12))}
        assert set(by_header.values()) == {"a", "b"}
        for user, worker in by_header.items():
            assert await served_by({"x-user-id": user}) == worker
            assert await served_by({}, user=user) == worker
            assert await served_by({"x-user-id": user}, user="somebody else") == worker
        assert len({await served_by({}) for _ in range(5)}) == 1
        assert await served_by({}, user=17) == await served_by({})


async def test_a_model_that_starts_is_503_until_its_worker_is_ready(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.running():
        response = await rig.post()
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert error_of(response)["code"] == "model_starting"
        assert "'m' is starting" in error_of(response)["message"]
        rig.route(target(await rig.worker()))
        await until(lambda: rig.app.router.table.epoch == 1)
        assert (await rig.post()).status_code == 200


async def test_openai_sdk_maps_the_errors(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        sdk = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{rig.port}/v1", api_key="secret", max_retries=0)
        async with sdk:
            with pytest.raises(openai.NotFoundError) as missing:
                await sdk.chat.completions.create(model="nope", messages=[])
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.InternalServerError) as starting:
                await sdk.chat.completions.create(model="idle", messages=[])
            assert starting.value.status_code == 503
            assert [model.id async for model in sdk.models.list()] == ["m", "nick", "idle"]
            assert (await sdk.models.retrieve("nick")).id == "nick"
