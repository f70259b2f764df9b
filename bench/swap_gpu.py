"""What a swap on a shared card costs users, and which part of it costs what; with and without NVIDIA's
Multi-Process Service (MPS).

    python -m bench.swap_gpu --out bench/results/swap_gpu_mps_h200.json
    python -m bench.swap_gpu --ways with_mps --kinds as_it_is --limit 200     # the aim alone
    python -m bench.swap_gpu --cpu --rounds 1 --ways without_mps        # a trial without a card: tiny models

Two models share the card, which is busy half of the time: what is full has no room for a third worker. Users
stream from both at a steady pace, and one of the models is swapped for itself: its new version loads beside
the two, then takes over. A round is a time without a swap, and then a swap, of these kinds in turn:

- `without_probes`: the judge sends none, and this script promotes from step to step. On the first step the
  new version has next to no users: what it costs to be there. On the second, each has half of them: what it
  costs that two engines do the work of one.
- `with_probes`: the same, with the judge's probes all the time: what is more than before, is theirs.
- `as_it_is`: what an operator starts; the aim is about that.

Told for each way, for users of the swapped model and of the other one: first tokens without a swap, in each
phase of the load, while the new version is proven, on each step of each kind, and while the old one leaves;
failures; and how long each phase took. A way that can't be had (no MPS here) is named with the reason. What
isn't measured by `--limit` seconds is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import statistics
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
from gateway.cli.swap_client import SwapRefused, Swaps
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.driver.routes import RolloutStatus
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
WITHOUT_PROBES, WITH_PROBES, AS_IT_IS = KINDS = ("without_probes", "with_probes", "as_it_is")
APART = "0.01%,50%,100%"  # next to nobody, half, all
HELD = 600.0  # seconds: nothing goes on by itself
LOOK = 0.2  # seconds between two looks at a rollout

Span = tuple[float, float]  # time.monotonic's


class CannotBeHad(Exception):
    """Why this way isn't measured here."""


@dataclass
class Round:
    """`quiet`: without a swap; `parts`: what of the swap went on when, in order."""

    kind: str
    quiet: Span
    parts: list[tuple[str, Span]]
    rollout: Rollout

    def spans(self, *beginnings: str) -> list[Span]:
        return [span for name, span in self.parts if name.startswith(beginnings)]


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


def swap(state: StateDir, args: argparse.Namespace, kind: str) -> tuple[list[tuple[str, Span]], Rollout]:
    """One of that kind, to its end: what went on when, and how it went."""
    as_it_is = kind == AS_IT_IS
    steps = args.steps if as_it_is else APART
    options = Options(
        steps=tuple(float(step.rstrip("%")) for step in steps.split(",")),
        hold=args.hold if as_it_is else HELD,
        probes=kind != WITHOUT_PROBES,
    )
    swaps, parts = Swaps(state), _Parts(kind)
    found = swaps.start(SWAPPED, StartRequest(options=options))
    while found.exit_code is None:
        parts.see(found)
        if not as_it_is and found.rollout.phase == "judging" and parts.lasts >= args.hold:
            with contextlib.suppress(SwapRefused):  # it has gone on by itself
                found = swaps.command(SWAPPED, "promote")
        found = swaps.next(SWAPPED, found.rollout.revision, LOOK)
    parts.end()
    return parts.seen, found.rollout


class _Parts:
    """Of one swap, as its rollout tells it look by look."""

    def __init__(self, kind: str) -> None:
        self.seen: list[tuple[str, Span]] = []
        self._kind = kind
        self._name = ""
        self._since = time.monotonic()

    @property
    def lasts(self) -> float:
        """Seconds since the present one began."""
        return time.monotonic() - self._since

    def see(self, found: RolloutStatus) -> None:
        name = self._name_of(found)
        if name != self._name:
            self.end()
            self._name, self._since = name, time.monotonic()

    def end(self) -> None:
        if self._name:
            self.seen.append((self._name, (self._since, time.monotonic())))

    def _name_of(self, found: RolloutStatus) -> str:
        rollout = found.rollout
        match rollout.phase:
            case "starting":
                phases_now = [unit.phase or unit.state for unit in found.starting]
                return f"loading: {phases_now[0] if phases_now else 'starting'}"
            case "checking" | "warming" | "proving" | "proven":
                return "proof"
            case "shifting" | "judging":
                return f"serving: {rollout.step_name}, {self._kind}"
        return "leaving"


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
        *_, first = await asyncio.to_thread(swap, state, args, AS_IT_IS)  # for warming up
        took = (first.ended or 0) - first.started
        for kind in tuple(args.kinds) * args.rounds:
            # As many streams on both sides: the 99th percentile of fewer is further out.
            pause = max(LEAST_QUIET, took / len(args.kinds))
            if rounds and time.monotonic() + pause + took > until:
                break
            began = time.monotonic()
            await asyncio.sleep(pause)
            quiet = (began, time.monotonic())
            parts, rollout = await asyncio.to_thread(swap, state, args, kind)
            rounds.append(Round(kind, quiet, parts, rollout))
            took = time.monotonic() - quiet[1]
            said = f"round {len(rounds)}, {kind}: {rollout.phase} after {took:.1f} s"
            print(said, file=sys.stderr, flush=True)
    return {
        "swaps": [
            {"kind": one.kind, "outcome": one.rollout.phase, "seconds": phases(one.rollout)} for one in rounds
        ],
        "users_of_the_other_model": compared(other, rounds),
        "users_of_the_swapped_model": compared(swapped, rounds),
    }


def compared(seen: Seen, rounds: Sequence[Round]) -> dict[str, Any]:
    """First tokens in seconds by part, and the 99th percentile during swaps as they are by that without."""

    def within(spans: Sequence[Span]) -> list[float]:
        return [took for at, took in seen.firsts if any(start <= at < end for start, end in spans)]

    quiet = within([one.quiet for one in rounds])
    usual = [one for one in rounds if one.kind == AS_IT_IS]
    parts = {
        "without_a_swap": quiet,
        "while_it_loads": within([span for one in usual for span in one.spans("loading", "proof")]),
        "while_both_serve": within([span for one in usual for span in one.spans("serving", "leaving")]),
    }
    names = dict.fromkeys(name for one in rounds for name, _ in one.parts)
    apart = {name: within([span for one in rounds for span in one.spans(name)]) for name in names}
    during = [*parts["while_it_loads"], *parts["while_both_serve"]]
    ratio = (percentile(during, 0.99) or 0) / (percentile(quiet, 0.99) or 1)
    return {
        **seen.shown(),
        "first_token_s": {name: _summed_up(times, quiet) for name, times in parts.items()},
        "taken_apart_s": {name: _summed_up(times, quiet) for name, times in apart.items()},
        "p99_ratio": round(ratio, 3),
        "met": 0 < ratio <= AIM,
    }


def _summed_up(times: list[float], quiet: list[float]) -> dict[str, Any]:
    """`more`: of the mean, than without a swap; it tells costs apart where streams are too few for a p99."""
    known = times and quiet
    more = statistics.mean(times) - statistics.mean(quiet) if known else None
    return {
        "p50": percentile(times, 0.5),
        "p99": percentile(times, 0.99),
        "more": round(more, 4) if more is not None else None,
        "streams": len(times),
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
    parser.add_argument("--rounds", type=int, default=4, help="Of each kind, as far as the time goes.")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="Of rounds.")
    parser.add_argument("--users", type=int, default=24, help="Of each model.")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--think", type=float, default=2.0, help="Mean seconds between a user's requests.")
    parser.add_argument("--steps", default="5%,100%")
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
