"""A gateway whose disk is really full: a small file system of its own, in a namespace of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx

from gateway.usage.store import USAGE_FILE, UsageStore
from tests.conftest import unavailable
from tests.gateway.rig import CHAT, Rig, target, until

MOUNT = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
SEPARATE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNT]


def may_mount(folder: Path) -> bool:
    try:
        return subprocess.run([*SEPARATE, folder, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


async def test_a_full_disk_fails_no_request_and_loses_nothing(tmp_path: Path) -> None:
    """Audit and usage are both on it, and it is full before they are made."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not may_mount(disk):
        unavailable("this user may mount nothing")
    rig = Rig(tmp_path)
    worker = await rig.worker()
    rig.route(target(worker))
    (tmp_path / "model.json").write_text("{}")
    config = tmp_path / "fleet.json"
    fleet = {
        "gateway": {"audit": {"file": str(disk / "audit.jsonl")}},
        "models": [{"name": "m", "source": f"random:{tmp_path}/model.json"}],
    }
    config.write_text(json.dumps(fleet))
    listener = socket.create_server(("127.0.0.1", 0))
    gateway = [sys.executable, "-m", "gateway", "--config", config, "--state-dir", disk / "state"]
    gateway += ["--routes", rig.path, "--fd", str(listener.fileno())]
    fill = 'dd if=/dev/zero of="$0/filler" bs=64k 2>/dev/null; exec "$@"'
    command = [*SEPARATE, disk, "sh", "-c", fill, disk, *gateway]
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen(command, pass_fds=[listener.fileno()], stderr=log)  # noqa: ASYNC220
    inside = Path(f"/proc/{child.pid}/root{disk}")
    try:
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as client:
            for _ in range(50):
                answer = await client.post(CHAT, json={"model": "m", "user": "ann"})
                assert answer.status_code == 200
            await until(lambda: "requests go on" in (tmp_path / "log").read_text())
            assert (await client.post(CHAT, json={"model": "m", "user": "ann"})).status_code == 200
            os.unlink(inside / "filler")
            await until(lambda: audited(inside) == 51)
            await until(lambda: used(inside, tmp_path / "copy") == 51)
            page = (await client.get("/metrics")).text
        assert 'pagefleet_gateway_records_lost_total{kind="audit"} 0.0' in page
        assert 'pagefleet_gateway_records_lost_total{kind="usage"} 0.0' in page
    finally:
        child.terminate()
        await asyncio.to_thread(child.wait)
        listener.close()
        await worker.stop()


def audited(disk: Path) -> int:
    path = disk / "audit.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def used(disk: Path, copy: Path) -> int:
    """Read from a copy: SQLite follows no links into another process's root."""
    copy.mkdir(exist_ok=True)
    for path in (disk / "state").glob(USAGE_FILE + "*"):
        (copy / path.name).write_bytes(path.read_bytes())
    if not (copy / USAGE_FILE).exists():
        return 0
    store = UsageStore(copy / USAGE_FILE)
    try:
        return sum(total.requests for total in store.totals(()))
    finally:
        store.close()
