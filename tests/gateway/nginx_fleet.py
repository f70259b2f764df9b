"""Fleets behind nginx, and what both tests of its ways ask of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import yaml

from gateway.config import FleetFile, load_fleet
from gateway.fleet.state import Target

SECRET = "marmalade-7319"


def fleet_file(folder: Path, *names: str, **gateway: Any) -> Path:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    content = {
        "gateway": {"port": 8123, "usage": False, **gateway},
        "supervisor": {"state_dir": str(folder / "state")},
        "models": [{"name": name, "source": "./model"} for name in names or ("m",)],
    }
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def fleet_of(folder: Path, *names: str, **gateway: Any) -> FleetFile:
    return load_fleet(fleet_file(folder, *names, **gateway))


def targets(*weights: int, state: Any = "ready") -> tuple[Target, ...]:
    return tuple(
        Target(slot=f"s-{i}", generation=1, address=f"unix:/run/s {i}.sock", weight_bp=weight, state=state)
        for i, weight in enumerate(weights)
    )


async def raw_get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    try:
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
