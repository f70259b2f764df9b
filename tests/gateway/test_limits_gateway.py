"""Limits at a running gateway: what is refused, what clients are told, and what a request costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import accounting
from gateway.limits.bounds import Bounds
from gateway.limits.live import LOOK_EVERY
from gateway.limits.overrides import FILE, OverridesFile
from gateway.limits.rules import MINUTE
from gateway.settings import LimitSettings
from tests.gateway.rig import CHAT, Rig, error_of, http_post, one_worker, target, until
from tests.worker.fake_engine import MODEL, FakeEngine, make_state, serving

LONG = [65] * 400
SLOW = {"qps": 0.01, "burst": 3}  # nothing comes back within a test
RESET = re.compile(r"\d+ms|[\d.]+s|(\d+h)?\d+m\d+s")


def limited(**bounds: Any) -> dict[str, Any]:
    return {"limits": {"default": bounds}}


def user(name: str) -> dict[str, str]:
    return {"x-user-id": name}


# --- requests


async def test_over_the_limit_is_429_and_says_when(tmp_path: Path) -> None:
    async with one_worker(tmp_path, **limited(qps=0.05, burst=2)) as rig:
        passed = [await rig.post() for _ in range(2)]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in passed] == ["1", "0"]
        refused = await rig.post()
        assert refused.status_code == 429
        error = error_of(refused)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "the user's limit of 0.05 requests a second (burst 2)" in error["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert 0 < int(refused.headers["retry-after-ms"]) <= 20_000
        assert refused.headers["x-request-id"]
        for answer in (*passed, refused):
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert RESET.fullmatch(answer.headers["x-ratelimit-reset-requests"])
        assert len(rig.workers[0].requests) == 2
        metrics = (await rig.client.get("/metrics")).text
        assert 'pagefleet_gateway_rate_limited_total{scope="user"} 1.0' in metrics
        assert 'status="429"' in metrics
        assert "pagefleet_gateway_limits_degraded 0.0" in metrics


async def test_the_wait_that_is_named_is_true(tmp_path: Path) -> None:
    async with one_worker(tmp_path, **limited(qps=1, burst=1)) as rig:
        await rig.post()
        refused = await rig.post()
        await asyncio.sleep(int(refused.headers["retry-after-ms"]) / 1000)
        assert (await rig.post()).status_code == 200


async def test_every_user_has_a_bucket_and_the_model_has_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path, **limited(**SLOW))
    rig.model_limits = {"m": LimitSettings(qps=0.01, burst=5)}
    rig.route(target(await rig.worker()))
    async with rig.running():
        statuses = [(await rig.post(headers=user("ann"))).status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        # What ann was refused left the model's limit alone; an alias is the same model.
        answers = [await rig.post({"model": "nick"}, headers=user("bob")) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert "the model's limit" in error_of(answers[2])["message"]
        assert answers[1].headers["x-ratelimit-limit-requests"] == "5"  # the one with the least left


async def test_what_asks_no_worker_is_not_limited(tmp_path: Path) -> None:
    async with one_worker(tmp_path, **limited(qps=0.01, burst=1)) as rig:
        for path in ("/v1/models", "/health", "/metrics", "/version") * 3:
            answer = await rig.client.get(path)
            assert answer.status_code == 200
            assert "x-ratelimit-limit-requests" not in answer.headers
        assert (await rig.post({"model": "nobody's"})).status_code == 404
        assert (await rig.post({"no": "model"})).status_code == 400
        assert (await rig.post()).status_code == 200
        assert (await rig.post()).status_code == 429


async def test_without_limits_nothing_is_said(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        answer = await rig.post()
        assert not [name for name in answer.headers if "ratelimit" in name]
        assert "x-pagefleet-usage" not in rig.workers[0].requests[0].headers


async def test_what_no_worker_worked_on_is_given_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path, **limited(qps=0.01, burst=1, concurrency=1, tokens_per_minute=300))
    worker = await rig.worker()
    rig.route(target("unix:/nowhere"))
    async with rig.running():
        for _ in range(3):
            assert (await rig.post()).status_code == 503
        worker.draining = True
        rig.route(target(worker, generation=2))
        await until(lambda: rig.app.router.table.epoch == 2)
        assert (await rig.post()).status_code == 503
        worker.draining = False
        assert (await rig.post()).status_code == 200
        assert (await rig.post()).status_code == 429


async def test_slots_come_back_with_the_answer_and_with_the_client(tmp_path: Path) -> None:
    async with one_worker(tmp_path, **limited(concurrency=2)) as rig:
        waiting = [asyncio.create_task(rig.ask(stream=True, do="sse", gate_at=1)) for _ in range(2)]
        await until(lambda: len(rig.workers[0].requests) == 2)
        refused = await rig.post()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "2 requests at a time" in error_of(refused)["message"]
        assert (await rig.post(headers=user("other"))).status_code == 200
        waiting[0].cancel()
        await until(lambda: rig.inflight() == 1)
        assert (await rig.post()).status_code == 200
        rig.workers[0].gate.set()
        await waiting[1]
        assert [(await rig.post()).status_code for _ in range(3)] == [200] * 3
        # An answer that fails gives its slot back too.
        for do in ("eof", "garbage", "short"):
            with contextlib.suppress(httpx.RemoteProtocolError):
                await rig.ask(do=do)
        assert (await rig.post()).status_code == 200


async def test_a_thousand_at_once_let_exactly_the_burst_pass(tmp_path: Path) -> None:
    async with one_worker(tmp_path, **limited(**SLOW)) as rig:
        answers = await asyncio.gather(*(rig.post() for _ in range(300)))
        statuses = [answer.status_code for answer in answers]
        assert statuses.count(200) == 3
        assert statuses.count(429) == 297
        assert len(rig.workers[0].requests) == 3


async def test_limits_set_while_running_hold_at_once(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as rig:
        assert (await rig.post(headers=user("ann"))).status_code == 200
        OverridesFile(tmp_path / FILE).put("user:ann", Bounds(qps=0.01, burst=1))
        await asyncio.sleep(LOOK_EVERY)
        assert (await rig.post(headers=user("ann"))).status_code == 200
        assert (await rig.post(headers=user("ann"))).status_code == 429
        assert (await rig.post(headers=user("bob"))).status_code == 200


# --- tokens: a real worker server, and an engine that says what it is told


class Tokens:
    """A gateway with a limit of tokens in front of a real worker server."""

    def __init__(self, rig: Rig, engine: FakeEngine) -> None:
        self.rig = rig
        self.engine = engine

    def used(self, name: str = "ann") -> int:
        """Tokens charged to a user now, as far as they haven't drained."""
        limiter: Any = self.rig.app.admission._limiter
        stored = limiter._rates.get(f"{{u:{name}}}:user:{name}:tokens")
        if stored is None:
            return 0
        backlog = max(0, stored[0] - limiter._clock())
        return round(backlog * TOKENS / MINUTE)

    async def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        body = {"model": "m", "prompt": "Hi there", **fields}
        return await self.rig.client.post(path, json=body, headers=user("ann"))


TOKENS = 100  # a minute: less than two of them drain within a second


@asynccontextmanager
async def tokens(folder: Path, engine: FakeEngine, **bounds: Any) -> AsyncIterator[Tokens]:
    state = make_state(engine, served_model_name=[MODEL, "m"], slot="s", generation=1)
    rig = Rig(folder, **limited(tokens_per_minute=TOKENS, **bounds))
    async with serving(state) as url:
        rig.route(target(url))
        async with rig.running():
            yield Tokens(rig, engine)


def close_to(expected: int) -> Any:
    """What was charged drains at less than two tokens a second."""
    return pytest.approx(expected - 4, abs=5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_tokens_are_settled_with_what_was_used(tmp_path: Path, stream: bool, n: int) -> None:
    """Without include_usage; reserved were 2 + 40 a choice."""
    async with tokens(tmp_path, FakeEngine(lambda request: [65] * 400)) as fleet:
        answer = await fleet.post(max_tokens=30, stream=stream, n=n, stop=["A" * 12])
        assert answer.status_code == 200
        assert "x-pagefleet-usage" not in answer.headers
        assert answer.headers["x-ratelimit-limit-tokens"] == "100"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= TOKENS - 30 * n
        assert "x-ratelimit-limit-requests" not in answer.headers
        await until(lambda: fleet.used() <= 8 + 12 * n)
        assert fleet.used() == close_to(8 + 12 * n)  # "Hi there" is 8 tokens here


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/generate_stream", CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_abandoned_request_is_charged_what_was_generated(
    tmp_path: Path, path: str, stream: bool
) -> None:
    engine = FakeEngine(lambda request: list(LONG), step_seconds=0.02)
    async with tokens(tmp_path, engine) as fleet:
        fields = {"max_tokens": 90, "stream": stream}
        if path == CHAT:
            fields |= {"prompt": None, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60}
        asking = asyncio.create_task(fleet.post(path, **fields))
        await until(lambda: engine.generated > 5)
        assert fleet.used() >= 60
        asking.cancel()
        await until(lambda: not engine.in_flight)
        prompt = len(engine.submitted[0].prompt_token_ids)
        await until(lambda: fleet.used() <= prompt + engine.generated)
        assert fleet.used() == close_to(prompt + engine.generated)
        assert engine.generated < 50


async def test_what_the_worker_refuses_costs_no_tokens(tmp_path: Path) -> None:
    async with tokens(tmp_path, FakeEngine()) as fleet:
        assert (await fleet.post(temperature=77)).status_code == 400
        assert (await fleet.post("/tokenize")).status_code == 200
        assert (await fleet.post("/v1/completions", prompt="")).status_code == 400
        assert fleet.used() == 0


async def test_more_than_the_limit_ever_allows_is_said_so(tmp_path: Path) -> None:
    async with tokens(tmp_path, FakeEngine()) as fleet:
        refused = await fleet.post(max_tokens=101)
        assert refused.status_code == 429
        assert error_of(refused)["message"].endswith(
            "this size never passes. Its prompt counts as about 2 tokens, its max_tokens as 101: shorten the "
            "prompt or lower max_tokens."
        )
        silent = await fleet.post("/v1/chat/completions", messages=[])
        assert silent.status_code == 429
        assert (
            "and without max_tokens 256 are reserved for the answer: shorten the prompt or set max_tokens."
            in error_of(silent)["message"]
        )
        assert "retry-after" not in refused.headers
        assert refused.headers["x-should-retry"] == "false"
        assert (await fleet.post(max_tokens=80)).status_code == 200


async def test_a_worker_that_cant_say_leaves_the_reservation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died with the request, or is another engine that knows nothing of usage."""
    monkeypatch.setattr(accounting, "ANSWER_SECONDS", 0.3)
    async with one_worker(tmp_path, **limited(tokens_per_minute=TOKENS)) as rig:
        fleet = Tokens(rig, FakeEngine())
        body = {"model": "m", "prompt": "Hi there", "max_tokens": 50, "stream": True}
        answer = await rig.post({**body, "fake": {"do": "sse", "die_at": 3}}, headers=user("ann"))
        assert "error" in answer.text
        assert rig.workers[0].requests[0].headers["x-pagefleet-usage"]
        await rig.workers[0].stop()
        await until(lambda: rig.app.usage.unknown == 1)
        assert fleet.used() == close_to(52)


async def test_a_worker_that_keeps_no_usage_is_asked_once(tmp_path: Path) -> None:
    async with one_worker(tmp_path, **limited(tokens_per_minute=TOKENS)) as rig:
        asked = 0
        fetch = rig.app.usage._fetch

        async def counting(address: str, batch: Any) -> Any:
            nonlocal asked
            asked += 1
            return await fetch(address, batch)

        rig.app.usage._fetch = counting  # type: ignore[method-assign]
        body = {"model": "m", "max_tokens": 5, "stream": True, "fake": {"do": "sse"}}
        assert (await rig.post(body)).status_code == 200
        await until(lambda: rig.app.usage.unknown == 1)
        assert asked == 1


async def test_asking_doesnt_hold_up_the_client(tmp_path: Path) -> None:
    """The answer is complete before its worker is asked, and hundreds are asked about in a few questions."""
    engine = FakeEngine(lambda request: [65] * 5)
    async with tokens(tmp_path, engine) as fleet:
        asked: list[str] = []
        fetch = fleet.rig.app.usage._fetch

        async def counting(address: str, batch: Any) -> Any:
            asked.append(address)
            return await fetch(address, batch)

        fleet.rig.app.usage._fetch = counting  # type: ignore[method-assign]
        body = {"model": "m", "prompt": "Hi", "max_tokens": 5, "stream": True}
        posts = (
            fleet.rig.client.post("/v1/completions", json=body, headers=user(f"u{number % 8}"))
            for number in range(60)
        )
        answers = await asyncio.gather(*posts)
        assert {answer.text for answer in answers if answer.status_code != 200} == set()
        await until(lambda: not fleet.rig.app.usage._waiting)
        assert fleet.rig.app.usage.unknown == 0
        assert 0 < len(asked) < 60
        assert not fleet.rig.app.usage._asking


async def test_a_client_cant_choose_under_which_name_its_usage_is_kept(tmp_path: Path) -> None:
    async with one_worker(tmp_path, **limited(tokens_per_minute=TOKENS)) as rig:
        body = json.dumps({"model": "m", "max_tokens": 5}).encode()
        for _ in range(2):
            await rig.raw(http_post(body, b"x-pagefleet-usage: mine\r\nconnection: close\r\n"))
        names = [request.headers["x-pagefleet-usage"] for request in rig.workers[0].requests]
        assert "mine" not in names
        assert len(set(names)) == 2
