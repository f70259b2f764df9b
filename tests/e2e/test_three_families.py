"""`pagefleet up` with three workers behind one port: Llama (the demo model), random Qwen2 and Phi-3."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.fleet.reaper import marked, read_records
from gateway.fleet.statedir import StateDir
from tests.worker.fake_engine import events
from tests.worker.random_models import Oracle, write_byte_bpe, write_checkpoint
from worker.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

PAGEFLEET = [sys.executable, "-m", "gateway.cli"]
RANDOM = ("qwen2", "phi3")
NAMES = ("llama", *RANDOM)
# Heads as Qwen2-7B has them (128 wide, seven to a key head) and Phi-3-mini (96 wide, one to a key head).
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "hidden_size": 896,
        "intermediate_size": 1024,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
    },
    "phi3": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
    },
}
PROMPTS = (
    "When a worker dies, its requests hear of it",
    "Die Flotte fährt weiter",
    "1, 2, 3, 5, 8, 13, 21, 34: every number",
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Fleet:
    """A running fleet; oracles and tokenizers by model name."""

    url: str
    file: Path
    oracles: dict[str, Oracle]
    tokenizers: dict[str, Tokenizer]

    def post(self, path: str, model: str, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"model": model, **fields}, timeout=100)

    def answer(self, path: str, model: str, **fields: Any) -> Any:
        response = self.post(path, model, temperature=0, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["x-pagefleet-target"] == f"{model}-0.1"
        return response.json()

    def sdk(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=100)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    models = {"llama": str(demo_model)}
    oracles: dict[str, Oracle] = {}
    for name in RANDOM:
        tokens = write_byte_bpe(directory / name)
        oracles[name] = Oracle(write_checkpoint(directory / name, name, SHAPES[name], tokens, 40), tokens)
        models[name] = str(directory / name)
    file = directory / "fleet.yaml"
    worker = {"device": "cpu", "threads": 1, "max_model_len": 512, "kv_cache_memory_bytes": "64MiB"}
    fleet = {
        "gateway": {"port": 0},
        "supervisor": {"state_dir": str(directory / "state")},
        "defaults": worker,
        "models": [{"name": name, "source": source} for name, source in models.items()],
    }
    file.write_text(json.dumps(fleet))
    tokenizers = {name: Tokenizer.from_path(source) for name, source in models.items()}
    process = subprocess.Popen([*PAGEFLEET, "up", str(file), "--json"], stdout=subprocess.PIPE, text=True)
    try:
        yield Fleet(_url_once_up(process), file, oracles, tokenizers)
        records = read_records(StateDir(directory / "state").records)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert records is not None
    assert marked(records.instance) == []


def _url_once_up(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "up":
            return str(event["url"])
    raise AssertionError(f"the fleet has ended with code {process.wait()}")


def test_one_port_lists_all_three(fleet: Fleet) -> None:
    listed = [model.id for model in fleet.sdk().models.list()]
    assert sorted(listed) == sorted(NAMES)
    for name in NAMES:
        assert fleet.sdk().models.retrieve(name).id == name
    assert httpx.get(f"{fleet.url}/ready", timeout=60).status_code == 200


def test_a_name_that_nobody_serves_is_not_found(fleet: Fleet) -> None:
    for name in ("llama2", "qwen", "Phi3", "llama-0"):
        with pytest.raises(openai.NotFoundError) as caught:
            fleet.sdk().chat.completions.create(model=name, messages=QUESTION)  # type: ignore[arg-type]
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert isinstance(caught.value.body, dict)
        assert set(caught.value.body) == {"message", "type", "param", "code"}


def test_llama_is_the_reference(fleet: Fleet, reference_tokens: Path) -> None:
    for prompt in json.loads(reference_tokens.read_text())["prompts"][:2]:
        answer = fleet.answer(
            "/generate", "llama", prompt=prompt["prompt_ids"], max_tokens=16, ignore_eos=True
        )
        assert answer["token_ids"] == prompt["greedy_ids"][:16]
    chat = fleet.answer("/v1/chat/completions", "llama", messages=QUESTION, max_tokens=16)
    assert "Paris" in chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", RANDOM)
def test_greedy_tokens_are_those_of_transformers(fleet: Fleet, name: str) -> None:
    """Up to the first tie of each; at least one run is long enough to mean something."""
    distinct = []
    for text in PROMPTS:
        prompt = fleet.tokenizers[name].encode(text)
        found = fleet.answer("/generate", name, prompt=text, max_tokens=40, ignore_eos=True)["token_ids"]
        clear = fleet.oracles[name].clear_greedy(prompt, found)
        assert found[: len(clear)] == clear
        distinct.append(len(set(clear)))
    assert max(distinct) >= 20, distinct


@pytest.mark.parametrize("name", RANDOM)
def test_every_way_in_leads_to_the_same_tokens(fleet: Fleet, name: str) -> None:
    tokenizer = fleet.tokenizers[name]
    fields = {"max_tokens": 20, "ignore_eos": True}
    ids = tokenizer.encode(PROMPTS[0])
    found = fleet.answer("/generate", name, prompt=ids, **fields)
    assert found["text"] == tokenizer.decode(found["token_ids"])
    for form in (PROMPTS[0], ids):
        body = fleet.answer("/v1/completions", name, prompt=form, **fields)
        assert body["choices"][0]["text"] == found["text"]
        assert body["usage"]["prompt_tokens"] == len(ids)
    chat = fleet.answer("/v1/chat/completions", name, messages=QUESTION, **fields)
    rendered = f"<|im_start|>user\n{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(rendered)
    assert chat["usage"]["prompt_tokens"] == len(ids)
    same = fleet.answer("/generate", name, prompt=ids, **fields)
    assert chat["choices"][0]["message"]["content"] == same["text"]


@pytest.mark.parametrize("name", NAMES)
def test_streams_add_up_to_the_whole(fleet: Fleet, name: str) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True}
    for path, prompt in (
        ("/v1/completions", {"prompt": PROMPTS[0]}),
        ("/v1/chat/completions", {"messages": QUESTION}),
    ):
        whole = fleet.answer(path, name, **fields, **prompt)["choices"][0]
        response = fleet.post(path, name, temperature=0, stream=True, **fields, **prompt)
        chunks = events(response.text)
        assert chunks[-1] == "[DONE]"
        choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
        pieces = [choice.get("text", choice.get("delta", {}).get("content")) or "" for choice in choices]
        assert "".join(pieces) == whole.get("text", whole.get("message", {}).get("content"))
        assert len(pieces) > 5
        assert {chunk["model"] for chunk in chunks[:-1]} == {name}
    native = fleet.answer("/generate", name, prompt=PROMPTS[0], **fields)
    response = fleet.post("/generate_stream", name, temperature=0, prompt=PROMPTS[0], **fields)
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [token for line in lines for token in line["token_ids"]] == native["token_ids"]
    assert "".join(line["text"] for line in lines) == native["text"]


async def stream(client: httpx.AsyncClient, model: str, started: asyncio.Event) -> list[Any]:
    fields = {"prompt": PROMPTS[0], "max_tokens": 120, "ignore_eos": True, "temperature": 0, "stream": True}
    text = ""
    async with client.stream("POST", "/v1/completions", json={"model": model, **fields}) as response:
        async for part in response.aiter_text():
            started.set()
            text += part
    return events(text)


async def test_asking_for_another_model_leaves_a_stream_alone(fleet: Fleet) -> None:
    async with httpx.AsyncClient(base_url=fleet.url, timeout=100) as client:
        alone = await stream(client, "qwen2", asyncio.Event())
        started = asyncio.Event()
        running = asyncio.create_task(stream(client, "qwen2", started))
        await started.wait()
        for name in ("phi3", "llama", "nobody"):
            body = {"model": name, "prompt": PROMPTS[0], "max_tokens": 4}
            assert (await client.post("/v1/completions", json=body)).status_code == (
                404 if name == "nobody" else 200
            )
        chunks = await running
    assert chunks[-1] == "[DONE]"
    texts = [[choice["text"] for chunk in one[:-1] for choice in chunk["choices"]] for one in (alone, chunks)]
    assert "".join(texts[0]) == "".join(texts[1])


def test_a_saturated_worker_is_not_restarted(fleet: Fleet) -> None:
    """More work than it can do at once, over several rounds of probes."""
    with ThreadPoolExecutor(12) as clients:
        more = {"prompt": PROMPTS[0], "max_tokens": 40, "ignore_eos": True, "n": 8}
        answers = list(clients.map(lambda _: fleet.post("/v1/completions", "phi3", **more), range(12)))
    assert {answer.status_code for answer in answers} == {200}
    status = subprocess.run(
        [*PAGEFLEET, "status", "-f", str(fleet.file), "--json"], capture_output=True, text=True, check=True
    )
    units = {unit["slot"]: unit for unit in json.loads(status.stdout)["units"]}
    assert {(units[f"{name}-0"]["state"], units[f"{name}-0"]["generation"]) for name in NAMES} == {
        ("ready", 1)
    }
