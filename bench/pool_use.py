"""How well the KV pool is used: the scheduler alone, on the mixed workload, no model.

    python -m bench.pool_use --out bench/results/pool_use.json

Waste: slots of held pages that hold no token, as a share of those held. Use: pages held, as a share of the
pool, in the steps in which a request waits for pages: places in the batch and tokens of the step's budget are
left. Which tokens are sampled doesn't matter to the books, so none are computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from bench import machine, workload
from worker.engine.blocks import PagePool
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.ipc.messages import EngineRequest
from worker.params import SamplingParams
from worker.request import Request, Step

PAGE_SIZE = 16
MAX_MODEL_LEN = 8192
POOLS = {  # name: (pages, sequences, tokens a step)
    "1 GiB of SmolLM2-135M's pages": (1456, 256, 2048),
    "16 GiB of Qwen2-7B's pages": (18724, 256, 8192),
    "a tiny pool": (364, 64, 512),
}


def run(requests: int, pages: int, max_num_seqs: int, budget: int) -> dict[str, Any]:
    pool = PagePool(pages, PAGE_SIZE)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs, budget), pool)
    for r in workload.mixed(requests):
        params = SamplingParams(max_tokens=r.max_tokens, ignore_eos=True)
        message = EngineRequest(str(r.id), r.prompt, params, 0)
        scheduler.add(Request(message, max_model_len=MAX_MODEL_LEN, eos_token_ids=frozenset(), number=r.id))
    waste, use, steps = [], [], 0
    while scheduler.waiting or scheduler.running:
        steps += 1
        step = scheduler.schedule(float(steps))
        if scheduler.waiting and len(scheduler.running) < max_num_seqs and step.num_tokens < budget:
            use.append(pool.num_used / pool.capacity)
        taken, filled = scheduler.slots()
        waste.append((taken - filled) / max(1, taken))
        _collect(scheduler, step, token=steps % 1000)
    scheduler.check()
    return {
        "pages": pages,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "requests": requests,
        "steps": steps,
        "preemptions": scheduler.preemptions,
        "waste_mean": statistics.mean(waste),
        "steps_waiting_for_pages": len(use),
        "use_while_waiting_median": statistics.median(use) if use else None,
        "use_while_waiting_p5": sorted(use)[len(use) // 20] if use else None,
    }


def _collect(scheduler: Scheduler, step: Step, token: int) -> None:
    for row in step.rows:
        scheduler.collected(row.request)
        if row.sample:
            scheduler.update(row.request, token)
        else:
            scheduler.prefilled(row.request)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine.describe(), "pools": {}}
    for name, (pages, max_num_seqs, budget) in POOLS.items():
        result["pools"][name] = run(arguments.requests, pages, max_num_seqs, budget)
        print(name, json.dumps(result["pools"][name]), flush=True)
    machine.save(result, arguments.out)


if __name__ == "__main__":
    main()
