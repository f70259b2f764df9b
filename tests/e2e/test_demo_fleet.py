"""`pagefleet up` as a whole: the demo model and a small random one, real processes, and what befalls them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from gateway.cli import main as pagefleet
from gateway.fleet.reaper import marked, read_records
from gateway.fleet.statedir import StateDir
from tests.worker.random_models import SMALL, write_byte_bpe, write_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

PAGEFLEET = [sys.executable, "-m", "gateway.cli"]
START = 240.0  # seconds; both models load at once, perhaps on one busy core
PROMPT = [{"role": "user", "content": "What is the capital of France?"}]

FLEET = """
gateway: {{port: 0}}
supervisor: {{state_dir: {state}, drain_timeout: 20s}}
defaults: {{device: cpu, dtype: float32, threads: 1, max_model_len: 1024, kv_cache_memory_bytes: 128MiB}}
models:
  - {{name: first, aliases: [one], source: {model}}}
  - {{name: second, source: {second}}}
"""


class Fleet:
    """A running `pagefleet up`."""

    def __init__(self, directory: Path, model: Path) -> None:
        small = directory / "small"
        write_checkpoint(small, "llama", SMALL, write_byte_bpe(small))
        self.file = directory / "fleet.yaml"
        self.state = StateDir(directory / "state")
        self.file.write_text(FLEET.format(state=self.state.root, model=model, second=small))
        self.process = subprocess.Popen(
            [*PAGEFLEET, "up", str(self.file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.output = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if "Ctrl-C stops it" in line:
                break
        assert "pagefleet is up" in self.output, self.output
        records = read_records(self.state.records)
        assert records is not None
        self.instance = records.instance
        self.url = str(self.status()["url"])

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PAGEFLEET, *arguments], capture_output=True, text=True, timeout=120, check=False
        )

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.tell("status", "--json").stdout)
        return answer

    def tell(self, *arguments: str) -> Result:
        """A command, in this process: the imports of another one take a second."""
        return CliRunner().invoke(pagefleet, [*arguments, "--file", str(self.file)])

    def unit(self, slot: str) -> dict[str, Any]:
        unit: dict[str, Any] = next(unit for unit in self.status()["units"] if unit["slot"] == slot)
        return unit

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Fleet]:
    running = Fleet(tmp_path_factory.mktemp("fleet"), demo_model)
    yield running
    running.end()


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": PROMPT, "temperature": 0, "max_tokens": 16, **more}


def test_both_models_answer_under_all_their_names(fleet: Fleet) -> None:
    for name, slot in (("first", "first-0"), ("one", "first-0"), ("second", "second-0")):
        answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body(name), timeout=120)
        assert answer.status_code == 200, answer.text
        assert ("Paris" in answer.json()["choices"][0]["message"]["content"]) == (slot == "first-0")
        assert answer.headers["x-pagefleet-target"] == f"{slot}.1"
    listed = {model["id"] for model in httpx.get(f"{fleet.url}/v1/models", timeout=60).json()["data"]}
    assert {"first", "second"} <= listed
    assert httpx.get(f"{fleet.url}/ready", timeout=60).status_code == 200


def test_the_printed_command_works_when_pasted(fleet: Fleet) -> None:
    (line,) = [line for line in fleet.output.splitlines() if line.strip().startswith("curl ")]
    answer = subprocess.run(line + " -sS", shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert "Paris" in json.loads(answer.stdout)["choices"][0]["message"]["content"]
    assert "authentication: none" in fleet.output


def test_chat_status_and_logs(fleet: Fleet) -> None:
    place = ("-f", str(fleet.file))
    answer = fleet.command("chat", "first", "-p", PROMPT[0]["content"], "--temperature", "0", *place)
    assert (answer.returncode, "Paris" in answer.stdout) == (0, True), answer.stderr
    unknown = fleet.tell("chat", "third", "-p", "hello")
    assert unknown.exit_code == 1
    assert "'third' does not exist" in unknown.stderr
    status = fleet.command("status", *place)
    assert status.returncode == 0
    assert status.stdout.count(" ready ") == 3
    logs = fleet.tell("logs", "first")
    assert logs.exit_code == 0
    assert "capital" not in logs.stdout  # prompts are not logged


def test_up_again_changes_nothing_and_another_fleet_on_its_port_is_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    pids = {unit["slot"]: unit["pid"] for unit in fleet.status()["units"]}
    second = fleet.command("up", str(fleet.file))
    assert (second.returncode, "nothing to change" in second.stdout + second.stderr) == (0, True)
    assert {unit["slot"]: unit["pid"] for unit in fleet.status()["units"]} == pids
    port = fleet.url.rpartition(":")[2]
    other = tmp_path / "other.yaml"
    other.write_text(fleet.file.read_text().replace("port: 0", f"port: {port}").replace("/state", "/other"))
    taken = fleet.command("up", str(other))
    assert taken.returncode == 2
    assert f"gateway.port {port}" in taken.stderr
    holders = (fleet.process.pid, fleet.unit("gateway")["pid"])  # they share the socket
    assert any(f"in use by process {pid}" in taken.stderr for pid in holders)


async def stream(client: httpx.AsyncClient, model: str, started: asyncio.Event) -> list[str]:
    """The data of all events of a long answer."""
    events: list[str] = []
    request = body(model, max_tokens=600 if model == "first" else 900, ignore_eos=True, stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=request) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if len(events) > 4:
                    started.set()
    return events


async def test_a_killed_worker_costs_only_its_own_requests(fleet: Fleet) -> None:
    victim = fleet.unit("first-0")["pid"]
    async with httpx.AsyncClient(base_url=fleet.url, timeout=120) as client:
        started = [asyncio.Event() for _ in range(3)]
        streams = [
            asyncio.create_task(stream(client, model, event))
            for model, event in zip(("first", "first", "second"), started)
        ]
        async with asyncio.timeout(120):
            for event in started:
                await event.wait()
        os.kill(victim, signal.SIGKILL)
        first, also_first, second = await asyncio.gather(*streams)
        for broken in (first, also_first):
            error = json.loads(broken[-1])["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert "[DONE]" not in broken
        assert second[-1] == "[DONE]"
        assert len(second) > 50

        # Refused with a time to come back, or already served by the next generation.
        answer = await client.post("/v1/chat/completions", json=body("first"))
        if answer.status_code != 200:
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        async with asyncio.timeout(START):
            while answer.status_code != 200:
                await asyncio.sleep(0.5)
                answer = await client.post("/v1/chat/completions", json=body("first"))
        assert answer.headers["x-pagefleet-target"] == "first-0.2"
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert fleet.unit("second-0")["generation"] == 1


def test_terminated_it_ends_well_and_leaves_nothing(fleet: Fleet) -> None:
    assert len(marked(fleet.instance)) >= 5  # gateway, two workers, two engines
    fleet.process.terminate()
    fleet.process.communicate(timeout=60)
    assert fleet.process.returncode == 0
    assert marked(fleet.instance) == []
    assert fleet.tell("status").exit_code == 1
    assert fleet.tell("down").exit_code == 0


def test_killed_while_models_load_it_leaves_nothing(tmp_path: Path, demo_model: Path) -> None:
    file = tmp_path / "fleet.yaml"
    state = StateDir(tmp_path / "state")
    file.write_text(FLEET.format(state=state.root, model=demo_model, second=demo_model))
    process = subprocess.Popen([*PAGEFLEET, "up", str(file)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    loading = set()
    for line in process.stdout:
        if ": weights" in line:
            loading.add(line.split()[1])
        if len(loading) == 2:  # both engines run
            break
    records = read_records(state.records)
    assert records is not None
    assert len(marked(records.instance)) >= 5
    process.kill()
    deadline = time.monotonic() + 60
    process.communicate()
    while left := marked(records.instance):
        assert time.monotonic() < deadline, [entry.cmdline() for entry in left]
        time.sleep(0.1)


def test_a_source_that_is_not_there_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    none = "/none/model.gguf"
    file.write_text(FLEET.format(state=tmp_path / "state", model=none, second=none))
    result = subprocess.run(
        [*PAGEFLEET, "up", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert f"{file}:6: models[0].source: /none/model.gguf isn't there" in result.stderr
    assert f"{file}:7: models[1].source" in result.stderr
    assert not (tmp_path / "state").exists()
