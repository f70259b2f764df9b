"""The demo model is swapped for itself while users are on it, and for something that answers wrong."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner

from gateway.cli import main as pagefleet

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

PAGEFLEET = [sys.executable, "-m", "gateway.cli"]
PROMPT = [{"role": "user", "content": "What is the capital of France?"}]
USERS = 2
FLEET = """
gateway: {{port: 0}}
supervisor: {{state_dir: {state}}}
defaults: {{device: cpu, dtype: float32, threads: 1, max_model_len: 1024, kv_cache_memory_bytes: 64MiB}}
models:
  - name: smollm2
    source: {model}
    golden: [{{prompt: "What is the capital of France?", expect: "/Paris|London/"}}]
    judge: {{min_requests: 5, max_ttft_ratio: 10, max_tpot_ratio: 10}}
"""


class Fleet:
    def __init__(self, folder: Path, model: Path) -> None:
        self.file = folder / "fleet.yaml"
        self.file.write_text(FLEET.format(state=folder / "state", model=model))
        self.model = model
        up = self.command("up", str(self.file), "--detach")
        assert up.returncode == 0, up.stdout + up.stderr
        self.url = self.status()["url"]

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PAGEFLEET, *arguments], capture_output=True, text=True, timeout=500, check=False
        )

    def status(self) -> dict[str, Any]:
        shown = CliRunner().invoke(pagefleet, ["status", "-f", str(self.file), "--json"])
        answer: dict[str, Any] = json.loads(shown.stdout)
        return answer

    def worker(self) -> dict[str, Any]:
        (unit,) = [unit for unit in self.status()["units"] if unit["role"] == "worker"]
        found: dict[str, Any] = unit
        return found

    def swap(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.command("swap", *arguments, "-f", str(self.file))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Fleet]:
    running = Fleet(tmp_path_factory.mktemp("fleet"), demo_model)
    yield running
    assert running.command("down", "-f", str(running.file)).returncode == 0


async def user(fleet: Fleet, name: str, stop: asyncio.Event, served: list[str]) -> None:
    """Asks again and again, every other time for a stream; fails with the first answer that isn't whole."""
    number = 0
    async with httpx.AsyncClient(base_url=fleet.url, timeout=300, trust_env=False) as client:
        while not stop.is_set():
            number += 1
            body = {"model": "smollm2", "messages": PROMPT, "user": name, "temperature": 0, "max_tokens": 8}
            if number % 2:
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert "Paris" in answer.json()["choices"][0]["message"]["content"]
            else:
                answer = await client.post("/v1/chat/completions", json={**body, "stream": True})
                assert answer.text.rstrip().endswith("data: [DONE]"), answer.text[-300:]
                assert '"error"' not in answer.text
            served.append(answer.headers["x-pagefleet-target"])
            await asyncio.sleep(0.5)  # the version that comes needs the processor more


async def test_users_of_a_model_that_is_swapped_notice_nothing(fleet: Fleet) -> None:
    before = fleet.worker()
    assert before["slot"] == "smollm2-0"
    stop = asyncio.Event()
    served: list[str] = []
    users = [asyncio.create_task(user(fleet, f"user-{n}", stop, served)) for n in range(USERS)]
    steps = ("--steps", "25%,100%", "--hold", "1s")
    done = await asyncio.to_thread(fleet.swap, "start", "smollm2", "--to", str(fleet.model), *steps)
    moved = len(served)
    while len(served) < moved + USERS and not any(task.done() for task in users):
        await asyncio.sleep(0.1)
    stop.set()
    await asyncio.gather(*users)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smollm2: completed" in done.stdout.splitlines()[-1]
    assert served[0] == "smollm2-0.1"
    assert set(served[moved:]) == {"smollm2-alt-0.1"}
    assert not psutil.pid_exists(before["pid"])
    after = fleet.worker()
    assert (after["slot"], after["state"]) == ("smollm2-alt-0", "ready")


def test_a_version_that_answers_wrong_changes_nothing(fleet: Fleet) -> None:
    before = fleet.worker()
    # Positions that turn a thousand times as fast are another model.
    words = ("start", "smollm2", "--to", str(fleet.model), "--set", "rope_theta=3")
    bad = fleet.swap(*words)
    assert bad.returncode == 4, bad.stdout + bad.stderr
    assert "a golden prompt failed" in bad.stdout
    assert fleet.worker()["pid"] == before["pid"]
    answer = httpx.post(
        f"{fleet.url}/v1/chat/completions",
        json={"model": "smollm2", "messages": PROMPT, "temperature": 0, "max_tokens": 8},
        timeout=120,
        trust_env=False,
    )
    target = f"{before['slot']}.{before['generation']}"
    assert (answer.status_code, answer.headers["x-pagefleet-target"]) == (200, target)
