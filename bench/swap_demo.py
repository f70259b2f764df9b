"""How long a swap of the demo model takes, from the command to the end of the old worker.

    python -m bench.swap_demo --out bench/results/swap_demo.json

The fleet is configs/demo.yaml, in a state directory and on a port of its own. The model is swapped for itself
by `pagefleet swap start`, first without any other traffic (the judge's probes decide), then while 200 users
each ask every two and a half minutes. Told: seconds of the command, of each phase, of the old
worker's end, and what users noticed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench import machine
from bench.swap_under_load import Traffic, phases, users_of
from gateway.cli.common import ask_supervisor
from gateway.cli.swap_client import Swaps
from gateway.fleet.admin import FleetStatus
from gateway.fleet.statedir import StateDir

ROOT = Path(__file__).resolve().parents[1]
PAGEFLEET = (sys.executable, "-m", "gateway.cli")
MODEL = "smollm2"
STEPS, HOLD = "5%,50%,100%", "5s"
AIM = 60.0  # seconds
USERS, TOKENS, THINK = 200, 16, 150.0
SETTLE = 15.0  # seconds of traffic before the command


@contextmanager
def demo_fleet(folder: Path) -> Iterator[tuple[StateDir, str]]:
    """The fleet, and the source of its models."""
    content = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    content["gateway"]["port"] = 0
    content["supervisor"]["state_dir"] = str(folder / "state")
    for model in content["models"]:
        model["source"] = str((ROOT / "configs" / model["source"]).resolve())
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(content))
    subprocess.run([*PAGEFLEET, "up", "--detach", str(file)], check=True, stdout=subprocess.DEVNULL)
    try:
        yield StateDir(folder / "state"), content["models"][0]["source"]
    finally:
        subprocess.run([*PAGEFLEET, "down", "--file", str(file)], check=True, stdout=subprocess.DEVNULL)


def swap(state: StateDir, source: str) -> dict[str, Any]:
    """One, as an operator does it."""
    (old,) = [unit.pid for unit in _status(state).units if unit.model == MODEL]
    argv = [*PAGEFLEET, "swap", "start", MODEL, "--to", source, "--steps", STEPS, "--hold", HOLD]
    began = time.monotonic()
    code = subprocess.run([*argv, "--state-dir", str(state.root)], stdout=subprocess.DEVNULL).returncode
    took = time.monotonic() - began
    rollout = Swaps(state).status(MODEL).rollout
    return {
        "seconds": round(took, 1),
        "met": code == 0 and took < AIM and not psutil.pid_exists(old or 0),
        "exit_code": code,
        "old_worker_is_gone": not psutil.pid_exists(old or 0),
        "seconds_in_phases": phases(rollout),
        "seconds_on_steps": _on_steps(rollout.log),
        "judged_by": {step: verdict.measures[1].canary_samples for step, verdict in rollout.verdicts.items()},
        "reason": rollout.reason,
    }


def _on_steps(log: Any) -> list[float]:
    """From one step's weights to the next one's, or to the end of the last."""
    at = [entry.at for entry in log if entry.phase == "shifting" or entry.phase == "clearing"]
    return [round(after - before, 1) for before, after in itertools.pairwise(at)]


def _status(state: StateDir) -> FleetStatus:
    status = ask_supervisor(state, "GET", "/status")
    assert status is not None, f"no fleet is up in {state.root}"
    return status


async def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pf-demo-") as folder:
        with demo_fleet(Path(folder)) as (state, source):
            alone = await asyncio.to_thread(swap, state, source)
            traffic = Traffic(MODEL, USERS, TOKENS, THINK)
            async with users_of(_status(state).url, traffic) as seen:
                await asyncio.sleep(SETTLE)
                loaded = await asyncio.to_thread(swap, state, source)
            return {"without_traffic": alone, "with_users": {**loaded, **seen.shown()}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    host = machine.host()
    result = {
        "machine": host,
        "steps": STEPS,
        "hold": HOLD,
        "users": {"count": USERS, "tokens": TOKENS, "seconds_between_requests": THINK},
        "aim_seconds": AIM,
        **asyncio.run(measure()),
    }
    machine.publish(result, arguments.out)


if __name__ == "__main__":
    main()
