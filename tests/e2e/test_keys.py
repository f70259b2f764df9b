"""API keys as an operator meets them: `pagefleet up` with mode keys, `pagefleet keys`, a real worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from gateway.cli import main as pagefleet
from tests.worker.random_models import write_byte_bpe, write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGEFLEET = [sys.executable, "-m", "gateway.cli"]
EFFECTIVE = 0.5  # seconds within which a change must hold
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}


class Fleet:
    """A running `pagefleet up` with one small model, and what it printed until it was up. `gateway`: of the
    fleet file, beside the port."""

    def __init__(self, directory: Path, **gateway: Any) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.file = directory / "fleet.yaml"
        write_checkpoint(directory / "model", "qwen2", SHAPE, write_byte_bpe(directory / "model"))
        worker = {"device": "cpu", "threads": 1, "max_model_len": 256, "kv_cache_memory_bytes": "16MiB"}
        fleet = {
            "gateway": {"port": 0, "auth": {"mode": "keys"}, **gateway},
            "supervisor": {"state_dir": "state"},  # relative: all processes must mean the same directory
            "models": [{"name": "tiny", "aliases": ["nick"], "source": "model", "worker": worker}],
        }
        self.file.write_text(json.dumps(fleet))
        self.process = subprocess.Popen(
            [*PAGEFLEET, "up", str(self.file)],
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if "Ctrl-C stops it" in line:
                break
        assert "pagefleet is up at " in self.output, self.output
        self.url = self.output.partition("pagefleet is up at ")[2].split()[0]

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PAGEFLEET, *arguments, "--file", str(self.file)],
            cwd=self.directory,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def tell(self, *arguments: str) -> str:
        """What a command says that only touches the fleet's files; run in this process, which is quick."""
        result = CliRunner().invoke(pagefleet, [*arguments, "--state-dir", str(self.state)])
        assert result.exit_code == 0, result.output
        return result.stdout

    def key(self, *arguments: str) -> str:
        return self.tell("keys", "create", "--user", "alice", *arguments).strip()

    def ask(self, key: str, model: str = "tiny") -> Any:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=100) as client:
            return client.completions.create(
                model=model, prompt="hi", max_tokens=3, extra_body={"ignore_eos": True}
            )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(tmp_path_factory.mktemp("keys"))
    yield running
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
        running.process.communicate(timeout=60)


def test_a_key_from_its_making_to_its_end(fleet: Fleet) -> None:
    assert "authentication: API keys" in fleet.output
    with pytest.raises(openai.AuthenticationError, match="not valid"):
        fleet.ask("none")
    key = fleet.key("--model", "tiny")
    answer = fleet.ask(key)
    assert answer.usage.completion_tokens == 3
    assert fleet.ask(key, "nick").model == "tiny"
    revoked = fleet.run("keys", "revoke", key)
    assert revoked.returncode == 0, revoked.stderr
    time.sleep(EFFECTIVE)
    with pytest.raises(openai.AuthenticationError, match="was revoked"):
        fleet.ask(key)


def test_a_key_for_another_model(fleet: Fleet) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny' does not exist"):
        fleet.ask(fleet.key("--model", "nick"))


def test_chat_with_a_key(fleet: Fleet) -> None:
    question = ("chat", "tiny", "-p", "hi", "--max-tokens", "3")
    refused = fleet.run(*question)
    assert refused.returncode == 1
    assert "An API key is needed" in refused.stderr
    assert "--api-key" in refused.stderr
    answered = fleet.run(*question, PAGEFLEET_API_KEY=fleet.key())
    assert answered.returncode == 0, answered.stderr


def test_a_restarted_gateway_asks_as_well(fleet: Fleet) -> None:
    def gateway() -> Any:
        units = json.loads(fleet.run("status", "--json").stdout)["units"]
        return next(unit for unit in units if unit["slot"] == "gateway")

    key = fleet.key()
    first = gateway()
    os.kill(first["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 100
    while (now := gateway())["state"] != "ready" or now["generation"] == first["generation"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert fleet.ask(key).usage.completion_tokens == 3
    with pytest.raises(openai.AuthenticationError):
        fleet.ask("none")


def test_no_key_is_written_anywhere(fleet: Fleet) -> None:
    key = fleet.key()
    fleet.ask(key)
    with pytest.raises(openai.AuthenticationError):
        fleet.ask(key[:-1] + "_")
    fleet.process.send_signal(signal.SIGINT)
    rest, _ = fleet.process.communicate(timeout=60)
    assert fleet.process.returncode == 0
    files = [path for path in fleet.state.rglob("*") if path.is_file()]
    assert {"gateway.log", "tiny-0.log", "keys.db"} <= {path.name for path in files}
    everything = b"".join(path.read_bytes() for path in files) + (fleet.output + rest).encode()
    assert b"auth: keys; 0 known" in everything
    assert key.rpartition("_")[2][:12].encode() not in everything
