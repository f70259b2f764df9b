"""A running fleet is brought to another fleet file: real gateways, fake models, users who notice nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner, Result

from gateway.cli import main as pagefleet
from gateway.cli import reconfigure
from gateway.config import load_fleet
from gateway.fleet.changes import Job
from gateway.fleet.leaving import Leaving
from gateway.fleet.ledger import Ledger
from gateway.fleet.observer import Observer
from gateway.fleet.reconcile import reconcile
from gateway.fleet.rollout import Options
from gateway.fleet.steps import Applying
from gateway.fleet.versions import entry_of, file_version
from gateway.settings import ModelEntry
from tests.gateway.swapping import TIMING, Swapping, swapping, users

# A busy machine makes times that a judge with the usual limits would doubt.
JUDGE = "{min_requests: 5, max_ttft_ratio: 20, max_tpot_ratio: 20}"
M = f"{{name: m, aliases: [nick], source: fake/ok, judge: {JUDGE}"


@pytest.fixture(autouse=True)
def ledgers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Problems of the ledgers that commands ask for, one after another; none when there are no more."""
    problems: list[tuple[str, ...]] = []

    def make_ledger(*_: object) -> Ledger:
        return Ledger(workers=(), places=(), problems=problems.pop(0) if problems else ())

    monkeypatch.setattr(reconfigure, "make_ledger", make_ledger)
    return problems


def write(folder: Path, *models: str, gateway: str = "") -> Path:
    """A fleet file of these models; each ends as YAML wants it."""
    path = folder / "fleet.yaml"
    lines = [
        f"gateway: {{port: 0{gateway and ', ' + gateway}}}",
        f"supervisor: {{state_dir: {folder / 'state'}}}",
        "models:",
        *(f"  - {model}" for model in models),
    ]
    path.write_text("\n".join(lines))
    return path


async def run(*arguments: str | Path) -> Result:
    """A command of `pagefleet`, beside the fleet in this process."""
    return await asyncio.to_thread(CliRunner().invoke, pagefleet, list(map(str, arguments)))


async def apply(path: Path) -> Result:
    return await run("config", "apply", path)


def processes(fleet: Swapping) -> dict[str, tuple[int | None, int]]:
    """(process id, generation) of each slot."""
    return {unit.slot: (unit.pid, unit.generation) for unit in fleet.supervisor.statuses}


async def ask(fleet: Swapping, model: str) -> tuple[int, str]:
    """(status, slot that answered) of one request."""
    async with httpx.AsyncClient(
        base_url=fleet.supervisor.url, trust_env=False, verify=False, timeout=60
    ) as client:
        answer = await client.post("/v1/completions", json={"model": model, "prompt": "x"})
    return answer.status_code, answer.headers.get("x-pagefleet-target", "none").rpartition(".")[0]


async def models(fleet: Swapping) -> set[str]:
    async with httpx.AsyncClient(
        base_url=fleet.supervisor.url, trust_env=False, verify=False, timeout=60
    ) as client:
        return {card["id"] for card in (await client.get("/v1/models")).json()["data"]}


async def test_models_come_go_and_multiply_while_users_notice_nothing(tmp_path: Path) -> None:
    path = write(
        tmp_path, M + "}", "{name: gone, source: fake/ok}", "{name: two, source: fake/ok, replicas: 2}"
    )
    async with swapping(path) as fleet:
        before = processes(fleet)
        async with users(fleet.supervisor.url, 2) as load:
            begun = asyncio.Event()
            streams = asyncio.create_task(long_stream(fleet, "gone", 60, begun))
            await begun.wait()
            write(
                tmp_path,
                M + ", replicas: 2}",
                "{name: two, source: fake/ok, replicas: 1}",
                "{name: come/in, aliases: [new], source: fake/late-1}",
            )
            result = await apply(path)
            assert result.exit_code == 0, result.output
            assert (await streams).count("data: {") == 60  # of the model that went, whole
        assert load.failures == []
        assert sum(load.served.values()) > 20
        after = processes(fleet)
        for slot in ("gateway", "m-0", "two-0"):
            assert after[slot] == before[slot]  # the same processes
        assert set(after) == {"gateway", "m-0", "m-1", "two-0", "come-in-0"}
        assert await models(fleet) == {"m", "nick", "two", "come/in", "new"}
        assert (await ask(fleet, "new")) == (200, "come-in-0")
        assert (await ask(fleet, "gone"))[0] == 404
        gone = before["gone-0"][0]
        assert gone is not None
        assert not psutil.pid_exists(gone)
        again = await apply(path)
        assert (again.exit_code, "nothing to change" in again.output) == (0, True)
        assert processes(fleet) == after


async def long_stream(fleet: Swapping, model: str, chunks: int, begun: asyncio.Event) -> str:
    """The whole answer; twenty chunks a second."""
    body = {"model": model, "stream": True, "fake": {"chunks": chunks, "delay": 0.05}}
    async with httpx.AsyncClient(
        base_url=fleet.supervisor.url, trust_env=False, verify=False, timeout=60
    ) as client:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            begun.set()
            return (await response.aread()).decode()


async def test_names_limits_and_time_limits_are_taken_over_without_a_restart(tmp_path: Path) -> None:
    path = write(tmp_path, M + "}")
    async with swapping(path) as fleet:
        before = processes(fleet)
        limits = "aliases: [other], limits: {qps: 0.001, burst: 2}"
        write(tmp_path, "{name: m, source: fake/ok, " + limits + "}", gateway="timeouts: {total: 5m}")
        shown = await run("config", "diff", path)
        assert 'aliases: ["nick"] -> ["other"] (while everything runs)' in shown.output
        assert await models(fleet) == {"m", "nick"}  # nothing was changed yet
        dry = await run("config", "apply", "--dry-run", "--json", path)
        plan = json.loads(dry.stdout)
        assert {change["key"] for change in plan["fleet"]} == {"gateway.timeouts.total"}
        result = await apply(path)
        assert result.exit_code == 0, result.output
        assert processes(fleet) == before
        assert await models(fleet) == {"m", "other"}
        assert [(await ask(fleet, "other"))[0] for _ in range(3)] == [200, 200, 429]
        assert (await ask(fleet, "nick"))[0] == 404
        assert json.loads(fleet.state.config.read_bytes())["gateway"]["timeouts"]["total"] == 300


async def test_what_fails_undoes_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, M + "}")
    async with swapping(path) as fleet:
        write(tmp_path, M + "}", "{name: good, source: fake/ok}", "{name: bad, source: fake/crash}")
        result = await apply(path)
        assert result.exit_code == 7
        assert re.search(
            r"bad comes: failed: bad-0: exited with code 1: there is no such model", result.output
        )
        assert await ask(fleet, "good") == (200, "good-0")
        assert (await ask(fleet, "bad"))[0] == 503
        again = await apply(path)
        assert (again.exit_code, "bad starts again: failed: bad-0" in again.output) == (7, True)
        write(tmp_path, M + "}", "{name: good, source: fake/ok}")
        assert (await apply(path)).exit_code == 0
        assert fleet.slots() == {"m-0": "ready", "good-0": "ready"}


async def test_what_cannot_be_done_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, M + "}")
    async with swapping(path) as fleet:
        before = processes(fleet)
        snapshot = fleet.state.config.read_bytes()
        write(tmp_path, M + "}", "{name: new, source: fake/ok}", gateway="max_body: 1MiB")
        result = await apply(path)
        assert (result.exit_code, "gateway.max_body can't change while the fleet runs" in result.output) == (
            2,
            True,
        )
        assert (await run("config", "apply", "--dry-run", path)).exit_code == 2
        write(tmp_path, M + "}", "{name: new}")
        result = await apply(path)
        assert (result.exit_code, "nothing was changed" in result.output) == (2, True)
        write(tmp_path, "{name: m, source: fake/ok}", "{name: " + "n" * 60 + ", source: fake/ok}")
        rollout = await fleet.start("o/late-30")
        result = await apply(path)
        assert (result.exit_code, f"rollout {rollout.id} of m isn't over" in result.output) == (6, True)
        where = ("--state-dir", fleet.state.root)
        shown = await run("status", *where)
        assert re.search(rf"m: rollout {rollout.id} is \w+, 0% of the users on late-30", shown.output)
        page = json.loads((await run("top", "--json", "-n", "0.2", *where)).stdout)
        assert [one["id"] for one in page["rollouts"]] == [rollout.id]
        assert fleet.state.config.read_bytes() == snapshot
        assert {slot: pair for slot, pair in processes(fleet).items() if slot in before} == before
        missing = await run("config", "apply", "--state-dir", tmp_path / "nowhere", path)
        assert (missing.exit_code, "no fleet is up" in missing.output) == (1, True)


async def test_gateways_are_replaced_one_after_another(tmp_path: Path) -> None:
    path = write(tmp_path, M + "}", gateway="processes: 2")
    async with swapping(path) as fleet:
        before = processes(fleet)
        async with users(fleet.supervisor.url, 2) as load:
            write(tmp_path, M + "}", gateway="processes: 2, queue: {size: 5}")
            result = await apply(path)
            assert result.exit_code == 0, result.output
        assert load.failures == []
        after = processes(fleet)
        assert after["m-0"] == before["m-0"]
        for slot in ("gateway0", "gateway1"):
            assert after[slot][1] == before[slot][1] + 1
        assert all(unit.restarts == 0 for unit in fleet.supervisor.statuses)


async def test_settings_that_a_gateway_cannot_start_with_are_taken_back(tmp_path: Path) -> None:
    path = write(tmp_path, M + "}")
    async with swapping(path) as fleet:
        keys = fleet.state.root / "keys.db"
        keys.mkdir()  # no store of keys
        write(tmp_path, M + ", limits: {qps: 50}}", gateway="auth: {mode: keys}")
        result = await apply(path)
        assert result.exit_code == 7
        assert "the gateways' settings were taken back" in result.output
        assert (await ask(fleet, "m"))[0] == 200
        shown = json.loads((await run("config", "diff", "--json", path)).stdout)
        assert [change["key"] for change in shown["fleet"]] == ["gateway.auth.mode"]
        assert [model["action"] for model in shown["models"]] == ["unchanged"]


async def test_another_source_comes_by_a_rollout(tmp_path: Path) -> None:
    quick = ("--steps", "50%,100%", "--hold", "0s")
    path = write(tmp_path, M + "}", "{name: other, source: fake/ok}")
    async with swapping(path) as fleet:
        before = processes(fleet)
        async with users(fleet.supervisor.url, 2) as load:
            write(
                tmp_path,
                M.replace("fake/ok", "new/ok") + ", worker: {seed: 3}}",
                "{name: other, source: fake/ok}",
            )
            result = await run("config", "apply", *quick, path)
            assert result.exit_code == 0, result.output
        assert load.failures == []
        assert set(fleet.slots()) == {"m-alt-0", "other-0"}
        assert processes(fleet)["other-0"] == before["other-0"]
        assert "nothing to change" in (await run("config", "diff", path)).output
        assert fleet.rollouts.models.changed_versions() == {}
        write(
            tmp_path, M.replace("fake/ok", "new/errs") + "}", "{name: other, source: fake/ok, aliases: [o]}"
        )
        result = await run("config", "apply", *quick, path)
        assert result.exit_code == 4, result.output
        assert "m is swapped: failed: rolled_back" in result.output
        assert (await ask(fleet, "o")) == (200, "other-0")  # the rest is done
        assert (await ask(fleet, "m")) == (200, "m-alt-0")
        shown = json.loads((await run("config", "diff", "--json", path)).stdout)
        assert {change["key"] for model in shown["models"] for change in model["changes"]} == {
            "models[].source",
            "models[].worker.seed",
        }


async def test_what_outlasts_the_limit_is_ended_with_an_error(tmp_path: Path) -> None:
    async with swapping(write(tmp_path, M + "}", "{name: gone, source: fake/ok}")) as fleet:
        begun = asyncio.Event()
        stream = asyncio.create_task(long_stream(fleet, "gone", 10_000, begun))
        await begun.wait()
        observer = Observer({"gateway": fleet.state.board("gateway")})
        said: list[str] = []
        leaving = Leaving(fleet.supervisor._workers, observer, TIMING, limit=1.0)
        assert await leaving.model("gone", said.append) == 1
        assert "request_aborted" in await stream
        assert "1 in flight, 0 waiting" in said
        assert (await ask(fleet, "gone"))[0] == 503  # known by the file, which nobody has changed
        assert fleet.slots() == {"m-0": "ready"}


async def test_up_again_applies_what_takes_nothing_away(tmp_path: Path) -> None:
    path = write(tmp_path, M + "}")
    async with swapping(path) as fleet:
        before = processes(fleet)
        assert (await run("up", path)).exit_code == 0
        write(tmp_path, M + "}", "{name: more, source: fake/ok}")
        result = await run("up", "--detach", path)
        assert result.exit_code == 0, result.output
        assert (await ask(fleet, "more")) == (200, "more-0")
        write(tmp_path, "{name: more, source: fake/ok}")
        result = await run("up", path)
        assert (result.exit_code, "with m, which" in result.output) == (6, True)
        assert set(processes(fleet).items()) > set(before.items())


async def test_memory_is_asked_before_anything_is_done(
    tmp_path: Path, ledgers: list[tuple[str, ...]]
) -> None:
    path = write(tmp_path, M + "}", "{name: old, source: fake/ok}")
    async with swapping(path) as fleet:
        before = processes(fleet)
        write(tmp_path, M + "}", "{name: new, source: fake/ok}")
        ledgers += [("gpu0: too much",), ("gpu0: too much",)]  # with what goes, and without
        result = await apply(path)
        assert (result.exit_code, "doesn't fit: gpu0: too much" in result.output) == (5, True)
        assert processes(fleet) == before
        ledgers += [("gpu0: too much",), ()]
        result = await apply(path)
        assert result.exit_code == 0, result.output
        assert result.output.index("old goes: done") < result.output.index("new comes")
        states = [unit.state for unit in fleet.history if unit.slot in ("old-0", "new-0")]
        assert states.index("stopped") < len(states) - 1 - states[::-1].index("starting")


def test_sizes_of_a_version_are_not_rounded() -> None:
    entry = ModelEntry.model_validate(
        {"name": "m", "source": "o/n", "worker": {"gpu_memory": "1500MiB", "gpus": [0]}}
    )
    assert entry_of(entry, file_version(entry)) == entry
    assert file_version(entry).worker == {"gpu_memory": 1500 << 20, "gpus": [0]}


async def test_what_stops_the_first_step_stops_the_others(tmp_path: Path) -> None:
    before = load_fleet(write(tmp_path, M + "}"))
    wanted = load_fleet(write(tmp_path, M + ", limits: {qps: 7}}", "{name: more, source: fake/ok}"))
    done: list[Any] = []

    def full(entries: list[ModelEntry]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    models = SimpleNamespace(write_down=full, runs=lambda name: before.models[0], variant=lambda name: "")
    site: Any = SimpleNamespace(
        workers=SimpleNamespace(slots=lambda *_: []),
        rollouts=SimpleNamespace(models=models, bring_up=lambda *model: done.append(model)),
        observer=None,
        timing=lambda: TIMING,
        adopt=done.append,
    )
    applying = Applying(plan=reconcile(before, wanted, {"m": before.models[0]}), steps=[], started=0.0)
    job = Job(site, before, wanted, {"m": "m", "more": "more"}, Options(), applying)
    job.prepare(removed_first=False)
    assert (await job.run(), done) == (before, [])
    assert [step.state for step in applying.steps] == ["failed", "waiting"]
    assert "can't be written: No space left on device" in applying.steps[0].detail


@pytest.mark.parametrize("cause", ["no room for the file", "a worker that takes no names"])
async def test_a_first_step_that_fails_leaves_all_models_as_they_were(tmp_path: Path, cause: str) -> None:
    has_room = cause != "no room for the file"
    other = f"{{name: other, source: fake/{'nameless' if has_room else 'ok'}, aliases: [of-it]}}"
    path = write(tmp_path, M + "}", other)
    async with swapping(path) as fleet:
        snapshot, routes = fleet.state.config.read_bytes(), fleet.routes
        in_the_way = fleet.state.config.with_name("fleet.json.tmp")
        if not has_room:
            in_the_way.mkdir()
        changed = M.replace("nick", "also").replace("min_requests: 5", "min_requests: 7")
        golden = "golden: [{prompt: 'What is 2+2?', expect: never}]"
        write(tmp_path, f"{changed}, {golden}}}", other.replace("of-it", "its"))
        result = await apply(path)
        assert result.exit_code == 7, result.output
        assert re.search("takes? the names" if has_room else "can't be written", result.output), result.output
        assert (fleet.state.config.read_bytes(), fleet.routes) == (snapshot, routes)
        assert (await ask(fleet, "nick"))[0] == 200
        await fleet.start("new/ok")
        assert (await fleet.over()).phase == "completed", "proven and judged as before"
        if not has_room:
            in_the_way.rmdir()
            assert (await apply(path)).exit_code == 0
            await fleet.start("new/ok")
            rollout = await fleet.over()
            assert (rollout.phase, "golden prompt" in rollout.reason) == ("rolled_back", True)
