"""Waits until a card's memory is back: the driver frees it some time after the process is gone."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Collection

LONGEST = 10.0  # seconds
STEP = 0.25


async def until_free(gpus: Collection[int]) -> None:
    """Until the memory in use on these cards no longer falls; at once without any."""
    if not gpus:
        return
    used = await asyncio.to_thread(_used, gpus)
    for _ in range(round(LONGEST / STEP)):
        await asyncio.sleep(STEP)
        now = await asyncio.to_thread(_used, gpus)
        if now is None or used is None or now >= used:
            return
        used = now


def _used(gpus: Collection[int]) -> int | None:
    """MiB in use on these cards together, as nvidia-smi says; None when it doesn't."""
    query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    argv = ["nvidia-smi", "-i", ",".join(map(str, sorted(gpus))), *query]
    try:
        out = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout
        return sum(int(line) for line in out.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
