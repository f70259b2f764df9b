"""Serving on a CPU: N concurrent streams through the worker's HTTP server, beside transformers' batched
generate.

    python -m bench.cpu_serving --out bench/results/cpu_serving.json

SmolLM2-135M-Instruct in float32, 2 threads, greedy, 64 new tokens a stream, the same prompts for both; three
interleaved rounds, medians. Tokens per second are all streams' tokens over the time from the first request to
the last token (for transformers: the whole `generate` call: sdpa attention, KV cache, left padding).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench import machine

MODEL = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TOPICS = [
    "the sea", "bread", "rivers", "a clock", "snow", "the moon", "trees", "iron",
    "a violin", "tea", "horses", "maps", "glass", "rain", "paper", "bridges",
]  # fmt: skip
BARS = {1: 1.8, 16: 2.0}
NEW = 64


def prompt(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Write one long paragraph about {TOPICS[i]}."}]


@contextmanager
def worker(threads: int) -> Iterator[str]:
    """A worker process, ready; the path of its Unix socket."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/worker.sock"
        command = [
            sys.executable,
            "-m",
            "worker",
            "--model",
            str(MODEL),
            "--served-model-name",
            "m",
            "--uds",
            path,
        ]
        process = subprocess.Popen(
            [
                *command,
                "--device",
                "cpu",
                "--threads",
                str(threads),
                "--disable-log-stats",
                "--parent-pid",
                str(os.getpid()),
            ]
        )
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://worker") as probe:
                for _ in range(600):
                    time.sleep(0.1)
                    try:
                        if probe.get("/ready").status_code == 200:
                            break
                    except httpx.TransportError:
                        continue
                else:
                    raise RuntimeError("the worker isn't ready after 60 s")
            yield path
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


async def stream(path: str, i: int) -> dict[str, float]:
    """One streamed chat: seconds to the first and to the last token, and the number of tokens.

    A plain reader of lines: a client library would take a share of the two cores that the worker computes on.
    """
    body = json.dumps({
        "model": "m", "messages": prompt(i), "max_tokens": NEW, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    })  # fmt: skip
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: worker\r\nContent-Length: {len(body)}\r\n"
    started = time.perf_counter()
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n{body}".encode())
    first, usage = 0.0, b""
    assert b" 200 " in await reader.readline()
    while line := await reader.readline():
        if not first and b'"content":"' in line and b'"content":""' not in line:
            first = time.perf_counter() - started
        if b'"completion_tokens":' in line:
            usage = line
    writer.close()
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == NEW
    return {"first": first, "total": time.perf_counter() - started}


async def ours(path: str, streams: int) -> dict[str, float]:
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path)) as client:
        await client.post("http://worker/admin/reset_prefix_cache")
    started = time.perf_counter()
    results = await asyncio.gather(*(stream(path, i) for i in range(streams)))
    elapsed = time.perf_counter() - started
    return {
        "tokens_per_second": streams * NEW / elapsed,
        "p50_seconds": statistics.median(r["total"] for r in results),
        "first_token_p50_seconds": statistics.median(r["first"] for r in results),
    }


class Transformers:
    """transformers' own generate on the same checkpoint."""

    def __init__(self, threads: int) -> None:
        import torch
        from transformers import AutoTokenizer

        torch.set_num_threads(threads)
        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)
        self.tokenizer.padding_side = "left"
        self.model = self._load()

    def _load(self) -> Any:
        """LlamaForCausalLM with the checkpoint's weights, read by our loader (theirs needs accelerate)."""
        from transformers import LlamaConfig, LlamaForCausalLM

        from worker.weights.loader import load_model
        from worker.weights.source import resolve_source

        source = resolve_source(str(MODEL))
        shape = source.config
        ours = load_model(source, dtype=self.torch.float32, device="cpu", max_model_len=1024)
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            vocab_size=shape.vocab_size,
            rms_norm_eps=shape.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
            max_position_embeddings=shape.max_position_embeddings,
            tie_word_embeddings=True,
            eos_token_id=list(shape.eos_token_ids),
            attn_implementation="sdpa",
        )
        model = LlamaForCausalLM(config).eval()
        named = {name: tensor.clone() for name, tensor in ours.named_parameters.items()}
        state = {"model.embed_tokens.weight": named["embedding.weight"]}
        state["model.norm.weight"] = named["final_norm.weight"]
        heads = [n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        for i in range(shape.num_layers):
            layer, theirs = f"layers.{i}", f"model.layers.{i}"
            qkv = named[f"{layer}.qkv.weight"].split(heads)
            state |= {f"{theirs}.self_attn.{x}_proj.weight": part for x, part in zip("qkv", qkv)}
            gate, up = named[f"{layer}.gate_up.weight"].chunk(2)
            state |= {f"{theirs}.mlp.gate_proj.weight": gate, f"{theirs}.mlp.up_proj.weight": up}
            state[f"{theirs}.self_attn.o_proj.weight"] = named[f"{layer}.output.weight"]
            state[f"{theirs}.mlp.down_proj.weight"] = named[f"{layer}.down.weight"]
            state[f"{theirs}.input_layernorm.weight"] = named[f"{layer}.input_norm.weight"]
            state[f"{theirs}.post_attention_layernorm.weight"] = named[f"{layer}.mlp_norm.weight"]
        missing = model.load_state_dict(state, strict=False)
        assert not missing.unexpected_keys
        assert missing.missing_keys in ([], ["lm_head.weight"])
        return model

    def run(self, streams: int) -> float:
        """Tokens per second over the whole call."""
        texts = [
            self.tokenizer.apply_chat_template(prompt(i), add_generation_prompt=True, tokenize=False)
            for i in range(streams)
        ]
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        started = time.perf_counter()
        with self.torch.inference_mode():
            output = self.model.generate(**inputs, min_new_tokens=NEW, max_new_tokens=NEW, do_sample=False)
        elapsed = time.perf_counter() - started
        assert output.shape[1] == inputs["input_ids"].shape[1] + NEW
        return streams * NEW / elapsed


def throughput(threads: int, rounds: int) -> list[dict[str, Any]]:
    peer = Transformers(threads)
    rows = []
    with worker(threads) as path, asyncio.Runner() as runner:
        runner.run(ours(path, 2))
        peer.run(1)
        for streams in (1, 8, 16):
            mine, theirs = [], []
            for _ in range(rounds):
                mine.append(runner.run(ours(path, streams)))
                theirs.append(peer.run(streams))
            row: dict[str, Any] = {"streams": streams}
            row |= {key: statistics.median(m[key] for m in mine) for key in mine[0]}
            row["transformers_tokens_per_second"] = statistics.median(theirs)
            row["ratio"] = row["tokens_per_second"] / row["transformers_tokens_per_second"]
            row["bar"] = BARS.get(streams)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "machine": machine.describe(),
        "gemm_gflop_s": machine.cpu_gemm_gflops(arguments.threads),
    }
    print(json.dumps(result), flush=True)
    result["streams"] = throughput(arguments.threads, arguments.rounds)
    machine.save(result, arguments.out)


if __name__ == "__main__":
    main()
