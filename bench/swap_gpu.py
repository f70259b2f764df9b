"""What a swap on a shared card costs users, with and without NVIDIA's Multi-Process Service (MPS).

    python -m bench.swap_gpu --out bench/results/swap_gpu_mps_h200.json
    python -m bench.swap_gpu --cpu --rounds 1        # a trial without a card: tiny models, no MPS

Two models share the card, which is busy half of the time: what is full has no room for a third worker. Users
stream from both at a steady pace, and one of the models is swapped for itself: its new version loads beside
the two, then takes over. A round is as long a time without a swap as the last swap took, and then a swap.
Told for each way, for users of the swapped model and of the other one: first tokens without a swap, while the
new version loads and is proven, and while both versions serve; failures; and how long each phase took. A way
that can't be had (no MPS here) is named with the reason. On a card both ways take five minutes together; what
isn't measured by `--limit` seconds is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench import machine
from bench.swap_under_load import Seen, Traffic, percentile, phases, users_of
from gateway.cli.common import ask_supervisor
from gateway.cli.swap_client import Swaps
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.rollout import Options, Rollout
from gateway.fleet.statedir import StateDir

ROOT = Path(__file__).resolve().parents[1]
SWAPPED, OTHER = "swapped", "other"
AIM = 1.2
MPS = "nvidia-cuda-mps-control"
WAYS = ("without_mps", "with_mps")
READY_WITHIN = 150.0  # seconds; two starts on one card come one after the other
LEAST_QUIET = 10.0
PROMPT = 64  # tokens

Span = tuple[float, float]  # time.monotonic's


class CannotBeHad(Exception):
    """Why this way isn't measured here."""


@dataclass
class Round:
    """`quiet`: without a swap; `loading`: until the new version is proven; `sharing`: from then on."""

    quiet: Span
    loading: Span
    sharing: Span
    rollout: Rollout


@contextlib.contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """Its daemon, with a directory of its own; the environment of processes that are to use it."""
    program = shutil.which(MPS)
    if program is None:
        raise CannotBeHad(f"{MPS} isn't installed")
    pipes = folder / "mps"
    pipes.mkdir()
    ours = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
    environment = {**os.environ, **ours}
    words = pipes / "start.log"  # not through a pipe: the daemon would hold it open
    with words.open("wb") as log:
        code = subprocess.run(
            [program, "-d"], env=environment, stdout=log, stderr=log, check=False
        ).returncode
    if code != 0:
        raise CannotBeHad(f"{MPS} -d ended with code {code}: {words.read_text().strip()[-300:]}")
    try:
        yield ours
    finally:
        subprocess.run([program], input=b"quit\n", env=environment, timeout=60, check=False)


@contextlib.contextmanager
def fleet(folder: Path, args: argparse.Namespace, environment: Mapping[str, str]) -> Iterator[StateDir]:
    """Both models, ready; CannotBeHad with the last words of what isn't."""
    source = f"random:{Path(args.config).absolute()}"
    worker = {"device": "cpu", "threads": 1, "kv_cache_memory_bytes": "64MiB", "max_model_len": 512}
    if not args.cpu:
        worker = {"device": "cuda", "gpu_memory": args.gpu_memory, "max_model_len": 4096}
    judge = {"max_ttft_ratio": 50, "max_tpot_ratio": 50}  # what is measured here is not to end it
    state = StateDir(folder / "state")
    content = {
        "gateway": {"port": 0, "usage": False},
        "supervisor": {"state_dir": str(state.root)},
        "models": [
            {"name": name, "source": source, "worker": worker, "judge": judge} for name in (SWAPPED, OTHER)
        ],
    }
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(content))
    argv = [sys.executable, "-m", "gateway.cli", "up", "--json", str(file)]
    with open(folder / "up.log", "wb") as log:
        process = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **environment}, stdout=log, stderr=log)
        try:
            _until_ready(state, process, folder / "up.log")
            yield state
        finally:
            process.terminate()
            process.wait(timeout=90)


def _until_ready(state: StateDir, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while True:
        status = ask_supervisor(state, "GET", "/status")
        units = status.units if status is not None else ()
        if units and all(unit.state == "ready" for unit in units):
            return
        failed = [f"{unit.slot}: {unit.error}" for unit in units if unit.error]
        if process.poll() is not None or failed or time.monotonic() > deadline:
            raise CannotBeHad("; ".join(failed) or f"not ready: {log.read_text()[-500:]}")
        time.sleep(0.2)


def swap(state: StateDir, args: argparse.Namespace) -> tuple[Span, Span, Rollout]:
    """One, to its end: while the new version loads, the rest, and how it went."""
    steps = tuple(float(step.rstrip("%")) for step in args.steps.split(","))
    swaps, began = Swaps(state), time.monotonic()
    found = swaps.start(SWAPPED, StartRequest(set={}, options=Options(steps=steps, hold=args.hold)))
    while found.exit_code is None:
        found = swaps.next(SWAPPED, found.rollout.revision, 10)
    ended, rollout = time.monotonic(), found.rollout
    offset = time.time() - time.monotonic()  # the log has Unix times
    shared = next((entry.at - offset for entry in rollout.log if entry.phase == "shifting"), ended)
    return (began, shared), (shared, ended), rollout


async def measure(state: StateDir, args: argparse.Namespace, until: float) -> dict[str, Any]:
    """One way. `until`: time.monotonic's, when no other round begins."""
    status = ask_supervisor(state, "GET", "/status")
    assert status is not None
    rounds: list[Round] = []
    pace = {
        "users": args.users, "tokens": args.tokens, "think": args.think, "stream_of": 1,
        "prompt_ids": PROMPT,
    }  # fmt: skip
    async with (
        users_of(status.url, Traffic(SWAPPED, **pace)) as swapped,
        users_of(status.url, Traffic(OTHER, **pace)) as other,
    ):
        *_, first = await asyncio.to_thread(swap, state, args)  # for warming up
        took = (first.ended or 0) - first.started
        while len(rounds) < args.rounds and (not rounds or time.monotonic() + 2 * took < until):
            began = time.monotonic()
            await asyncio.sleep(max(LEAST_QUIET, took))
            quiet = (began, time.monotonic())
            loading, sharing, rollout = await asyncio.to_thread(swap, state, args)
            rounds.append(Round(quiet, loading, sharing, rollout))
            took = sharing[1] - loading[0]
            print(f"round {len(rounds)}: {rollout.phase} after {took:.1f} s", file=sys.stderr, flush=True)
    return {
        "swaps": [{"outcome": one.rollout.phase, "seconds": phases(one.rollout)} for one in rounds],
        "users_of_the_other_model": compared(other, rounds),
        "users_of_the_swapped_model": compared(swapped, rounds),
    }


def compared(seen: Seen, rounds: Sequence[Round]) -> dict[str, Any]:
    """First tokens in seconds, and the 99th percentile during swaps by that without."""

    def within(spans: Sequence[Span]) -> list[float]:
        return [took for at, took in seen.firsts if any(start <= at < end for start, end in spans)]

    quiet = within([one.quiet for one in rounds])
    parts = {
        "without_a_swap": quiet,
        "while_it_loads": within([one.loading for one in rounds]),
        "while_both_serve": within([one.sharing for one in rounds]),
    }
    during = [*parts["while_it_loads"], *parts["while_both_serve"]]
    ratio = (percentile(during, 0.99) or 0) / (percentile(quiet, 0.99) or 1)
    return {
        **seen.shown(),
        "first_token_s": {
            name: {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99), "streams": len(times)}
            for name, times in parts.items()
        },
        "p99_ratio": round(ratio, 3),
        "met": 0 < ratio <= AIM,
    }


def card() -> str | None:
    """As nvidia-smi names it: this process is to leave the card alone."""
    argv = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def one_way(way: str, args: argparse.Namespace, until: float) -> dict[str, Any]:
    """Measured, or why it can't be."""
    with tempfile.TemporaryDirectory(prefix="pagefleet-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        try:
            environment = stack.enter_context(mps(folder)) if way == "with_mps" else {}
            state = stack.enter_context(fleet(folder, args, environment))
            return asyncio.run(measure(state, args, until))
        except CannotBeHad as error:
            return {"not_measured": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(ROOT / "bench/models/qwen2-7b.json"))
    parser.add_argument("--gpu-memory", default="36GiB", help="Of each worker; three share the card.")
    parser.add_argument("--cpu", action="store_true", help="Tiny models, without a card.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--users", type=int, default=24, help="Of each model.")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--think", type=float, default=2.0, help="Mean seconds between a user's requests.")
    parser.add_argument("--steps", default="50%,100%")
    parser.add_argument("--hold", type=float, default=3.0, help="Seconds on each step.")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--limit", type=float, default=330.0, help="Seconds of the whole.")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.cpu:
        args.config, args.users = str(ROOT / "bench/models/small.json"), min(args.users, 4)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # who is cut off leaves nothing behind
    began, host = time.monotonic(), {**machine.host(), "gpu": card()}
    result: dict[str, Any] = {"machine": host, "users_per_model": args.users, "aim_p99_ratio": AIM}
    for turn, way in enumerate(args.ways, 1):
        result[way] = one_way(way, args, began + args.limit * turn / len(args.ways))
        result["seconds"] = round(time.monotonic() - began, 1)
        machine.publish(result, args.out)  # also what there is when the rest is cut off


if __name__ == "__main__":
    main()
