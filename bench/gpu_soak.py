"""Ten thousand requests through a pool far too small for them, a tenth of them aborted: what is lost?

    python -m bench.gpu_soak --out bench/results/gpu_soak.json

A small model with random weights; shapes of bench/workload.py's `mixed`, answers a quarter as long; greedy,
sampled, with penalties and with log-probabilities in turn. A request is aborted after a random number of
steps wherever it is then: waiting, in its prompt, decoding, or with a step in flight. In the end every
request must have ended once, the finished ones with all their tokens, and every page must be free.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import machine, workload
from worker import LLM, SamplingParams
from worker.engine.loop import Engine
from worker.ipc.messages import EngineRequest

MODEL = f"random:{Path(__file__).parent / 'models' / 'small.json'}"
VOCABULARY = 32_000
PAGES = 1_500
IN_ENGINE = 600  # at a time, running and waiting
ABORT_EVERY = 10
LONGEST_LIFE = 300  # steps until an abort, at most
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.0},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0},
    {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1},
]


@dataclass
class Soak:
    """What is under way, and what became of the rest."""

    engine: Engine
    due: dict[int, list[str]] = field(default_factory=dict)  # step: requests to abort after it
    left: dict[str, int] = field(default_factory=dict)  # tokens that a request still has to give
    ends: Counter[str] = field(default_factory=Counter)
    step: int = 0

    def submit(self, request: workload.Request, life: int) -> None:
        tokens = max(1, request.max_tokens // 4)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, **KINDS[request.id % len(KINDS)])
        name = str(request.id)
        refused = self.engine.add(EngineRequest(name, request.prompt, params, request.id))
        assert refused is None, refused
        self.left[name] = tokens
        if request.id % ABORT_EVERY == 0:
            self.due.setdefault(self.step + life, []).append(name)

    def advance(self) -> None:
        for output in self.engine.step():
            self.left[output.request_id] -= len(output.token_ids)
            if output.finish_reason is not None:
                missing = self.left.pop(output.request_id)
                assert missing == 0, f"{output.request_id}: {output.finish_reason}, {missing} tokens missing"
                self.ends[output.finish_reason] += 1
        for name in self.due.pop(self.step, []):
            if self.left.pop(name, None) is not None:  # else it had ended already
                self.engine.abort(name)
                self.ends["abort"] += 1
        self.step += 1


def run(engine: Engine, requests: list[workload.Request]) -> dict[str, Any]:
    waiting, lives = deque(requests), workload.splitmix64("soak-lives")
    soak = Soak(engine)
    memory = torch.cuda.memory_allocated()
    started = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and len(soak.left) < IN_ENGINE:
            soak.submit(waiting.popleft(), next(lives) % LONGEST_LIFE)
        soak.advance()
    engine.drain()
    stats = engine.stats()
    return {
        "requests": len(requests), "ended": dict(soak.ends), "unaccounted": len(soak.left),
        "integrity": engine.check_integrity(), "pages": stats.pages_total, "pages_used": stats.pages_used,
        "preemptions": stats.preemptions, "steps": stats.steps, "generation_tokens": stats.generation_tokens,
        "seconds": time.perf_counter() - started,
        "memory_growth_bytes": torch.cuda.memory_allocated() - memory,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    requests = workload.mixed(arguments.requests, vocabulary=VOCABULARY)
    with LLM(MODEL, num_gpu_blocks_override=PAGES, max_num_seqs=256) as llm:
        result = {"machine": machine.describe(), **run(llm._engine, requests)}
    print(json.dumps(result, indent=1), flush=True)
    assert result["integrity"] == ""
    assert (result["unaccounted"], result["pages_used"]) == (0, 0)
    machine.save(result, arguments.out)


if __name__ == "__main__":
    main()
