"""Embeddings through a whole fleet, beside a model that answers; and cached prompts that are forgotten."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from click.testing import CliRunner
from transformers import PreTrainedModel

from gateway.cli import main as pagefleet
from tests.worker.random_models import SMALL, write_byte_bpe, write_checkpoint
from worker.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TEXTS = ["A fleet is several ships.", "Die Flotte fährt weiter, ¿verdad? " * 6, "x"]
WORKER = {"device": "cpu", "threads": 1, "max_model_len": 256, "kv_cache_memory_bytes": "16MiB"}


@dataclass
class Fleet:
    url: str
    state: Path
    model: PreTrainedModel
    tokenizer: Tokenizer

    def tell(self, *arguments: str) -> str:
        result = CliRunner().invoke(pagefleet, [*arguments, "--state-dir", str(self.state)])
        assert result.exit_code == 0, result.output
        return result.stdout


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("embeddings")
    model = write_checkpoint(folder / "model", "llama", SMALL, write_byte_bpe(folder / "model"))
    (folder / "embedder").mkdir()
    for file in (folder / "model").iterdir():
        (folder / "embedder" / file.name).symlink_to(file)
    (folder / "embedder" / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    (folder / "embedder" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    models = [
        {"name": "tiny", "source": "model", "worker": WORKER},
        {"name": "vectors", "aliases": ["v"], "source": "embedder", "worker": WORKER},
    ]
    written = {"gateway": {"port": 0}, "supervisor": {"state_dir": "state"}, "models": models}
    (folder / "fleet.yaml").write_text(json.dumps(written))
    with subprocess.Popen(
        [sys.executable, "-m", "gateway.cli", "up", "fleet.yaml"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if "Ctrl-C stops it" in line:
                break
        assert "pagefleet is up at " in output, output
        url = output.partition("pagefleet is up at ")[2].split()[0]
        yield Fleet(url, folder / "state", model, Tokenizer.from_path(folder / "model"))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=100) as client:
        yield client


@torch.no_grad()
def expected(fleet: Fleet, text: str) -> np.ndarray:
    states = fleet.model.model(torch.tensor([fleet.tokenizer.encode(text)])).last_hidden_state[0]
    mean = states.mean(0)
    return np.asarray(mean / mean.norm())


def test_the_sdk_gets_the_vectors_of_transformers(fleet: Fleet, client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="v", input=TEXTS)
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, text in zip(answer.data, TEXTS):
        vector = expected(fleet, text)
        assert item.embedding == pytest.approx(vector, abs=1e-4 * float(np.abs(vector).max()))
    assert answer.model == "vectors"
    assert answer.usage.prompt_tokens == sum(len(fleet.tokenizer.encode(text)) for text in TEXTS)
    as_numbers = client.embeddings.create(model="v", input=TEXTS[0], encoding_format="float")
    assert as_numbers.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-6)


def test_each_model_does_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--runner pooling") as caught:
        client.embeddings.create(model="tiny", input="x")
    assert caught.value.code == "wrong_runner"
    with pytest.raises(openai.BadRequestError, match="--runner generate") as caught:
        client.completions.create(model="vectors", prompt="x")
    assert caught.value.code == "wrong_runner"
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="vectors", input=["x", ""])
    assert caught.value.param == "input[1]"


def test_what_it_used_is_written_down(fleet: Fleet, client: openai.OpenAI) -> None:
    client.embeddings.create(model="vectors", input=[[5, 6, 7], [8, 9]], user="counted")
    deadline = time.monotonic() + 60
    while not (fleet.state / "usage.db").exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    while not (rows := json.loads(fleet.tell("usage", "--user", "counted", "--json"))):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    (row,) = rows
    assert (row["model"], row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (
        "vectors",
        1,
        5,
        0,
    )


def test_cached_prompts_are_forgotten_on_command(fleet: Fleet, client: openai.OpenAI) -> None:
    def cached() -> int | None:
        answer = client.completions.create(model="tiny", prompt=list(range(2, 50)), max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached() == 0
    assert cached() == 32
    assert fleet.tell("cache", "reset", "tiny") == "tiny-0.1: reset\n"
    assert cached() == 0
    assert json.loads(fleet.tell("cache", "reset", "v", "--json")) == {
        "vectors-0.1": {"reset": True, "error": None}
    }
    unknown = CliRunner().invoke(pagefleet, ["cache", "reset", "nobody", "--state-dir", str(fleet.state)])
    assert unknown.exit_code == 2
    assert "it has tiny, vectors" in unknown.output
