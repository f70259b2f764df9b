"""The supervisor's parts that need no fleet: slots, command lines, back-off, logs, reaper."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.options import WorkerOptions
from gateway.config import load_fleet
from gateway.fleet import logs
from gateway.fleet.commands import Commands, is_as_good, option_flags, slots_for, slots_of, slugs_of
from gateway.fleet.listen import base_url, bind
from gateway.fleet.reaper import MARK, Record, Records, boot_id, marked, reap, start_ticks, write_records
from gateway.fleet.restart import RestartPolicy
from worker.config import read_config


def test_slots_never_collide(tmp_path: Path) -> None:
    names = ["a/b", "a-b", "a:b", "n" * 100, "n" * 99, "m", "m-alt", "x-alt", "x"]
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "models: [" + ", ".join(f"{{name: '{n}', source: o/n, replicas: 2}}" for n in names) + "]"
    )
    fleet = load_fleet(path)
    slugs = slugs_of(fleet.models)
    slots = [slot.name for slot in slots_of(fleet)]
    assert slots[:3] == ["a-b-0", "a-b-1", slots[2]]
    assert slugs["x-alt"] == "x-alt"
    slots += [slot.name for entry in fleet.models for slot in slots_for(entry, slugs[entry.name], "b")]
    known = dict(list(slugs.items())[:1])
    others = slugs_of(reversed(fleet.models), known)
    assert known.items() <= others.items()
    assert len(set(others.values())) == len(slugs)
    assert len(set(slots)) == 36
    assert all(len(slot) < 60 and "/" not in slot and ":" not in slot for slot in slots)


OPTIONS = [
    {},
    {"device": "cpu", "gpus": [0, 1], "dtype": "float32", "max_num_seqs": 3, "rope_theta": 10000.5},
    {"gpu_memory": "20GiB", "enable_prefix_caching": False, "enforce_eager": True, "block_size": 32},
    {"kv_cache_memory_bytes": 123456789, "seed": 2**63 - 1, "gpu_memory_utilization": 0.123456789},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_worker_reads_its_command_line_as_the_file_said(
    options: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "gateway: {max_body: 100MiB}\nsupervisor: {drain_timeout: 7500ms, stall_timeout: 5m}\n"
        f"models: [{{name: m, aliases: [x], source: o/n, worker: {options}}}]".replace("'", "")
    )
    fleet = load_fleet(path)
    (slot,) = slots_of(fleet)
    argv = Commands(4242, fleet).worker(slot, 3, Path("/run/m.sock"))
    assert argv[:4] == [sys.executable, "-P", "-m", "worker"]
    config = read_config(argv[4:])
    assert {name: getattr(config, name) for name in WorkerOptions.model_fields} == dict(slot.entry.worker)
    assert (config.model, config.served_model_name, config.uds) == ("o/n", ("m", "x"), "/run/m.sock")
    assert (config.slot, config.generation, config.parent_pid) == ("m-0", 3, 4242)
    assert (config.shutdown_timeout, config.stall_limit, config.max_body) == (7.5, 300, 100 << 20)


def test_workers_on_the_cpu_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(*workers: str, replicas: int = 1) -> list[int | None]:
        path = tmp_path / "fleet.yaml"
        models = (
            f"{{name: m{i}, source: o/n, replicas: {replicas}, worker: {worker}}}"
            for i, worker in enumerate(workers)
        )
        path.write_text(f"models: [{', '.join(models)}]")
        fleet = load_fleet(path)
        commands = Commands(1, fleet)
        argvs = [commands.worker(slot, 1, Path("/run/m.sock")) for slot in slots_of(fleet)]
        return [read_config(argv[4:]).threads for argv in argvs]

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert threads("{}") == [None]
    assert threads("{}", "{device: cpu}") == [4, 4]
    assert threads("{}", "{threads: 7}", "{device: cuda}", "{}") == [4, 7, None, 4]
    assert threads("{}", replicas=3) == [2, 2, 2]
    assert threads("{}", replicas=20) == [1] * 20


def test_a_process_may_stay_whose_names_and_share_of_the_cores_were_others(tmp_path: Path) -> None:
    def worker(first: str, more: str = "") -> list[str]:
        path = tmp_path / "fleet.yaml"
        path.write_text(f"models: [{{name: m, source: o/n{first}}}{more}]")
        fleet = load_fleet(path)
        return Commands(None, fleet).worker(slots_of(fleet)[0], 1, Path("/run/m.sock"))

    before = worker("")
    assert is_as_good(before, worker(", aliases: [nick]"))
    assert is_as_good(before, worker("", ", {name: n, source: o/n}, {name: o, source: o/n}"))
    for other in (", worker: {threads: 2}", ", worker: {max_num_seqs: 4}"):
        assert not is_as_good(before, worker(other))
    assert not is_as_good(worker(", worker: {threads: 1}"), worker(", worker: {threads: 2}"))


def test_defaults_make_no_flags() -> None:
    assert option_flags(WorkerOptions.model_validate({})) == []


def test_back_off_doubles_up_to_its_longest_and_ends_at_five_within_ten_minutes() -> None:
    policy = RestartPolicy(crashes=100)
    delays = [policy.after_crash(now=float(n), lived=0) or 0 for n in range(10)]
    for delay, expected in zip(delays, [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]):
        assert expected * 0.8 <= delay <= expected * 1.2

    policy = RestartPolicy()
    assert [policy.after_crash(n, 0) is None for n in (0, 1, 2, 3, 4)] == [False, False, False, False, True]
    policy = RestartPolicy()
    assert [policy.after_crash(n, 0) is None for n in (0, 200, 400, 599, 601)] == [False] * 5
    assert policy.after_crash(700, 0) is None or policy.after_crash(701, 0) is None


def test_back_off_starts_over_after_a_long_life() -> None:
    policy = RestartPolicy()
    for now in (0, 1, 2):
        policy.after_crash(now, 0)
    delay = policy.after_crash(10_000, lived=9_998)
    assert delay is not None
    assert delay <= 1.2


def test_rotation_keeps_the_newest_and_the_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "w.log"
    descriptor = logs.open_log(path)
    try:
        for round_ in range(4):
            os.write(descriptor, f"round {round_}\n".encode() * 20)
            assert logs.rotate(path, limit=100, keep=2)
        os.write(descriptor, b"last\n")
        assert not logs.rotate(path, limit=100, keep=2)
    finally:
        os.close(descriptor)
    assert path.read_text() == "last\n"
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["w.log", "w.log.1", "w.log.2"]
    assert "round 3" in (tmp_path / "w.log.1").read_text()
    assert "round 2" in (tmp_path / "w.log.2").read_text()


def test_tail(tmp_path: Path) -> None:
    path = tmp_path / "w.log"
    assert logs.tail(path, 5) == []
    path.write_bytes(b"one\ntwo\nthree \xff\n")
    assert logs.tail(path, 2) == ["two", "three \ufffd"]
    assert logs.tail(path, 5, start=4) == ["two", "three \ufffd"]
    assert logs.tail(path, 5, start=999) == ["one", "two", "three \ufffd"]  # it was rotated since
    assert logs.tail(path, 0) == []


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", None)]
)
def test_address_for_clients(host: str, shown: str | None) -> None:
    with bind(host, 0) as listener:
        port = listener.getsockname()[1]
        assert base_url(listener) in (
            [f"http://{shown}:{port}"] if shown else [f"http://127.0.0.1:{port}", f"http://[::1]:{port}"]
        )


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def records(path: Path, instance: str, *processes: Record, boot: str | None = None) -> Path:
    write_records(
        path, Records(instance=instance, boot_id=boot or boot_id(), supervisor=1, processes=processes)
    )
    return path


def test_the_reaper_ends_what_carries_the_mark_in_any_session(tmp_path: Path) -> None:
    instance = uuid.uuid4().hex
    environment = {**os.environ, MARK: f"{instance}/a-0.1"}
    victim = subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)
    path = records(tmp_path / "processes.json", instance)
    assert [process.pid for process in marked(instance)] == [victim.pid]
    assert marked(instance[:-1]) == []
    assert reap(path) == 1
    assert victim.wait(timeout=60) == -9
    assert not path.exists()


def test_the_reaper_knows_a_process_without_mark_by_its_start(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    record = Record(pid=sleeper.pid, started=start_ticks(sleeper.pid) or 0, mark="x/a-0.1")
    assert reap(records(tmp_path / "processes.json", uuid.uuid4().hex, record)) == 1
    assert sleeper.wait(timeout=60) == -9


def test_the_reaper_spares_a_recycled_process_id(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    instance = uuid.uuid4().hex
    started = start_ticks(sleeper.pid) or 0
    record = Record(pid=sleeper.pid, started=started - 1, mark="x/a-0.1")
    assert reap(records(tmp_path / "processes.json", instance, record)) == 0
    same = Record(pid=sleeper.pid, started=started, mark="x/a-0.1")
    assert reap(records(tmp_path / "processes.json", instance, same, boot="another-boot")) == 0
    assert sleeper.poll() is None


def test_the_reaper_bears_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "processes.json"
    path.write_text("{")
    assert reap(path) == 0
    assert not path.exists()
