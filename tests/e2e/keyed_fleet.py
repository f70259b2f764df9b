"""`pagefleet up` with API keys and one small model, for tests of what an operator and users meet."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
from click.testing import CliRunner, Result

from gateway.cli import main as pagefleet
from tests.worker.random_models import write_byte_bpe, write_checkpoint

PAGEFLEET = [sys.executable, "-m", "gateway.cli"]
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
        worker = {"device": "cpu", "threads": 1, "max_model_len": 8192, "kv_cache_memory_bytes": "16MiB"}
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

    def run(self, *arguments: str, **environment: str) -> Result:
        """A command, in this process: the imports of another one take a second."""
        with contextlib.chdir(self.directory):
            return CliRunner().invoke(pagefleet, [*arguments, "--file", str(self.file)], env=environment)

    def tell(self, *arguments: str) -> str:
        """What a command says that only touches the fleet's files."""
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
