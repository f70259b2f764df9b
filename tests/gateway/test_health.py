"""What a gateway makes of workers that fail, hang, lie, flap and die; real sockets and processes."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.gateway.fake_worker import FakeWorker
from tests.gateway.rig import Rig, error_of, one_worker, target, until

QUICK = {"probe_interval": "50ms", "probe_timeout": "1s", "fail_timeout": "400ms"}


@asynccontextmanager
async def replicas(folder: Path, count: int = 2, **settings: Any) -> AsyncIterator[Rig]:
    """A gateway that looks often, before workers `a`, `b` and so on of model `m`."""
    rig = Rig(folder, **{"health": QUICK, **settings})
    workers = [await rig.worker(name) for name in "abcdefgh"[:count]]
    rig.route(*(target(worker, slot=worker.name) for worker in workers))
    async with rig.running():
        yield rig


def up(rig: Rig, slot: str) -> float:
    page = rig.app.metrics.render().decode()
    lines = [line for line in page.splitlines() if line.startswith("pagefleet_gateway_target_up{")]
    (line,) = [line for line in lines if f'target="{slot}.1"' in line]
    return float(line.rsplit(" ", 1)[1])


async def served(rig: Rig, count: int, **fake: Any) -> list[str]:
    """Who served each of `count` requests, one after the other."""
    answers = [await rig.ask(**(fake or {"do": "json"})) for _ in range(count)]
    assert {answer.status_code for answer in answers} == {200}
    return [answer.json()["served_by"] for answer in answers]


# --- what workers answer


async def test_errors_of_a_worker_eject_it_and_a_trial_brings_it_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    async with replicas(tmp_path, health={**QUICK, "fail_timeout": "60s"}) as rig:
        bad = rig.workers[0]
        bad.fault = {"do": "status", "status": 500}
        statuses = [(await rig.post()).status_code for _ in range(30)]
        assert statuses.count(500) == 3  # max_fails
        assert up(rig, "a") == 0
        bad.fault = None
        assert up(rig, "a") == 0
        assert set(await served(rig, 10)) == {"b"}
        rig.app.router.table.backends["m", "a.1"].health._retry_at -= 60  # type: ignore[operator]
        assert set(await served(rig, 10)) == {"a", "b"}
        assert up(rig, "a") == 1
    told = [record.message for record in caplog.records if "target a.1" in record.message]
    assert len(told) == 2
    assert ("failed 3 times" in told[0], "answers again" in told[1]) == (True, True)


@pytest.mark.parametrize("do", ["reset", "eof"])
async def test_connections_lost_before_an_answer_are_never_seen_by_clients(tmp_path: Path, do: str) -> None:
    async with replicas(tmp_path, health={**QUICK, "fail_timeout": "60s"}) as rig:
        rig.workers[0].fault = {"do": do}
        assert set(await served(rig, 20)) == {"b"}
        assert len(rig.workers[0].requests) == 3
        assert up(rig, "a") == 0
        assert rig.inflight() == 0


async def test_a_request_is_tried_on_two_workers_at_most_if_the_first_had_it(tmp_path: Path) -> None:
    """One that fells workers must not fell all of them."""
    async with replicas(tmp_path, 4) as rig:
        response = await rig.ask(do="reset")
        assert (response.status_code, error_of(response)["code"]) == (502, "worker_failed")
        assert sum(len(worker.requests) for worker in rig.workers) == 2


async def test_nothing_is_repeated_after_the_first_byte(tmp_path: Path) -> None:
    async with replicas(tmp_path) as rig:
        response = await rig.ask(do="sse", chunks=60, die_at=40, stream=True)
        assert response.status_code == 200
        assert b"stream_interrupted" in response.content
        assert b"[DONE]" not in response.content
        assert sum(len(worker.requests) for worker in rig.workers) == 1


@pytest.mark.parametrize(
    "plan",
    [
        {"do": "status", "status": 400},
        {"do": "status", "status": 429},
        {"do": "refuse", "why": "queue_full"},
        {"do": "refuse", "why": "draining"},
        {"do": "json", "wait": 0.3},
    ],
)
async def test_what_says_nothing_against_a_worker(tmp_path: Path, plan: dict[str, Any]) -> None:
    async with replicas(tmp_path) as rig:
        rig.workers[0].fault = plan
        await asyncio.gather(*(rig.post() for _ in range(20)))
        assert (up(rig, "a"), up(rig, "b")) == (1, 1)


async def test_clients_that_leave_say_nothing_against_a_worker(tmp_path: Path) -> None:
    async with replicas(tmp_path) as rig:
        for stream in (True, False) * 5:
            task = asyncio.create_task(rig.ask(do="hang", stream=stream))
            await until(lambda: rig.workers[0].busy + rig.workers[1].busy == 1)
            task.cancel()
            await rig.idle()
        assert (up(rig, "a"), up(rig, "b")) == (1, 1)


async def test_the_only_worker_is_never_ejected(tmp_path: Path) -> None:
    async with one_worker(tmp_path, health=QUICK) as rig:
        rig.workers[0].fault = {"do": "status", "status": 500}
        statuses = {(await rig.post()).status_code for _ in range(10)}
        assert statuses == {500}
        rig.workers[0].fault = None
        assert (await rig.post()).status_code == 200
        assert up(rig, "s") == 1


async def test_a_full_worker_is_passed_over(tmp_path: Path) -> None:
    async with replicas(tmp_path) as rig:
        rig.workers[0].full = True
        assert set(await served(rig, 10)) == {"b"}
        rig.workers[1].full = True
        response = await rig.post()
        assert (response.status_code, error_of(response)["code"]) == (503, "overloaded")
        assert int(response.headers["retry-after"]) >= 1


# --- what workers say


async def test_a_worker_without_progress_gets_nothing_until_it_moves(tmp_path: Path) -> None:
    async with replicas(tmp_path) as rig:
        rig.workers[0].health = 503
        await until(lambda: up(rig, "a") == 0)
        assert set(await served(rig, 10)) == {"b"}
        rig.workers[0].health = 200
        await until(lambda: up(rig, "a") == 1)
        assert set(await served(rig, 10)) == {"a", "b"}


async def test_a_worker_that_hangs_gets_nothing_after_a_few_late_answers(tmp_path: Path) -> None:
    async with replicas(tmp_path) as rig:
        await until(lambda: all(worker.probes > 2 for worker in rig.workers))
        hanging = rig.workers[0]
        before_each: list[float] = []

        def hears(url: bytes) -> None:
            before_each.append(up(rig, "a"))

        hanging.page = hears  # type: ignore[assignment]
        await until(lambda: up(rig, "a") == 0)
        assert before_each[:3] == [1, 1, 1]  # busy, perhaps: one late answer is no reason
        assert set(await served(rig, 10)) == {"b"}


async def test_a_worker_that_lies_about_who_it_is_gets_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with replicas(tmp_path) as rig:
        liar = rig.workers[0]
        await served(rig, 4)
        liar.identity = ("a", 7)
        await until(lambda: up(rig, "a") == 0)
        before = len(liar.requests)
        assert set(await served(rig, 20)) == {"b"}
        assert len(liar.requests) == before
        assert "a.7 answers at its address" in caplog.text
        await rig.workers[1].stop()
        response = await rig.post()  # not even as the last one
        assert response.status_code == 503
        assert len(liar.requests) == before


@pytest.mark.parametrize("identity", [None, ("s", 2), ("t", 1)])
async def test_a_liar_gets_not_one_request_from_the_start(
    tmp_path: Path, identity: tuple[str, int] | None
) -> None:
    rig = Rig(tmp_path, health=QUICK)
    worker = await rig.worker()
    rig.route(target(worker))
    worker.identity = identity
    async with rig.running():
        responses = await asyncio.gather(*(rig.post() for _ in range(10)))
        assert {response.status_code for response in responses} == {503}
        assert error_of(responses[0])["code"] == "model_unavailable"
        assert (await rig.client.get("/ready")).status_code == 503
        assert worker.requests == []
        worker.identity = ("s", 1)
        await until(lambda: up(rig, "s") == 1)
        assert (await rig.post()).status_code == 200


async def test_a_flapping_replica_costs_no_request(tmp_path: Path) -> None:
    async with replicas(tmp_path, 3) as rig:
        flapping = rig.workers[0]
        faults = [{"do": "reset"}, None, {"do": "eof"}, None, {"do": "refuse", "why": "draining"}, None]
        answers: list[int] = []
        stop = False

        async def hammer() -> None:
            while not stop:
                answers.append((await rig.ask(do="json", wait=0.002)).status_code)

        hammers = [asyncio.create_task(hammer()) for _ in range(8)]
        for fault in faults * 2:
            flapping.fault = fault
            flapping.health = 200 if fault is None else 503
            answered, probed = len(answers) + 20, flapping.probes + 3
            await until(lambda a=answered, p=probed: len(answers) >= a and flapping.probes >= p)  # type: ignore[misc]
        stop = True
        await asyncio.gather(*hammers)
        assert set(answers) == {200}


async def test_many_slow_streams_to_one_worker(tmp_path: Path) -> None:
    """No pool of connections and no limit of its own is in the way of 300 streams."""
    async with one_worker(tmp_path, health=QUICK) as rig:
        streams = [
            asyncio.create_task(rig.ask(do="sse", chunks=20, gate_at=2, stream=True)) for _ in range(300)
        ]
        await until(lambda: rig.inflight() == 300)
        assert (await rig.post()).status_code == 200  # the 301st doesn't wait for them
        rig.workers[0].gate.set()
        responses = await asyncio.gather(*streams)
        assert all(response.content.endswith(b"data: [DONE]\n\n") for response in responses)
        assert up(rig, "s") == 1
        await rig.idle()


# --- workers that are processes


@asynccontextmanager
async def worker_process(folder: Path, slot: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = ["-m", "tests.gateway.fake_worker", "--uds", f"{folder}/{slot}.sock", "--slot", slot]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_killed_under_load_costs_no_request_its_answer(tmp_path: Path, stream: bool) -> None:
    rig = Rig(tmp_path, health=QUICK)
    async with worker_process(tmp_path, "a") as first, worker_process(tmp_path, "b") as second:
        rig.route(*(target(f"unix:{tmp_path}/{slot}.sock", slot=slot) for slot in "ab"))
        async with rig.running():
            answers: list[Any] = []
            stop = False

            async def hammer() -> None:
                while not stop:
                    answers.append(await rig.ask(do="sse" if stream else "json", wait=0.02, stream=stream))

            hammers = [asyncio.create_task(hammer()) for _ in range(16)]
            await until(lambda: len(answers) > 60)
            assert {answer.headers["x-pagefleet-target"] for answer in answers} == {"a.1", "b.1"}
            first.kill()
            count = len(answers)
            await until(lambda: len(answers) > count + 200)
            stop = True
            await asyncio.gather(*hammers)
            assert {answer.status_code for answer in answers} == {200}
            broken = [answer for answer in answers if stream and b"[DONE]" not in answer.content]
            assert all(b"stream_interrupted" in answer.content for answer in broken)
            assert {answer.headers["x-pagefleet-target"] for answer in answers[-50:]} == {"b.1"}
            assert up(rig, "a") == 0
            assert rig.inflight() == 0
            assert second.returncode is None


async def test_a_stopped_process_is_passed_over_and_comes_back(tmp_path: Path) -> None:
    """SIGSTOP: it is alive, its socket takes connections, and nothing answers."""
    rig = Rig(tmp_path, health=QUICK)
    async with worker_process(tmp_path, "a") as first, worker_process(tmp_path, "b"):
        rig.route(*(target(f"unix:{tmp_path}/{slot}.sock", slot=slot) for slot in "ab"))
        async with rig.running():
            await until(lambda: up(rig, "a") == up(rig, "b") == 1)
            first.send_signal(signal.SIGSTOP)
            await until(lambda: up(rig, "a") == 0)
            assert {(await rig.post()).headers["x-pagefleet-target"] for _ in range(10)} == {"b.1"}
            first.send_signal(signal.SIGCONT)
            await until(lambda: up(rig, "a") == 1)
            await until(lambda: rig.inflight() == 0)
            assert {(await rig.post()).headers["x-pagefleet-target"] for _ in range(10)} == {"a.1", "b.1"}


async def test_a_fake_worker_can_be_told_what_to_do(tmp_path: Path) -> None:
    """The fault-injecting worker itself, as a process."""
    rig = Rig(tmp_path, health=QUICK)
    async with worker_process(tmp_path, "a"):
        rig.route(target(f"unix:{tmp_path}/a.sock", slot="a"))
        async with rig.running():
            assert (await rig.post()).json() == {"served_by": "a"}
            reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/a.sock")
            body = b'{"do": "status", "status": 418}'
            writer.write(
                b"POST /fault HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            assert b"200" in await reader.readline()
            writer.close()
            assert (await rig.post()).status_code == 418


def test_fake_worker_pages() -> None:
    worker = FakeWorker(identity=("s", 1))
    assert worker.page(b"/internal/whoami") is not None
    worker.configure({"silent": True})
    assert worker.page(b"/health") is None
