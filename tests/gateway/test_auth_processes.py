"""Gateway processes on one store of keys."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
from click.testing import CliRunner

from gateway.cli import main as pagefleet
from gateway.identity.secret import new_key
from gateway.identity.store import KEYS_FILE
from tests.gateway.auth_checks import EFFECTIVE, bearer, written
from tests.gateway.rig import CHAT, Rig, target, until


@contextlib.contextmanager
def processes(rig: Rig, count: int, auth: str = "{mode: keys}") -> Iterator[Callable[[], list[str]]]:
    """Gateways as processes of their own in the rig's folder, where they log; gives their addresses."""
    config = rig.folder / "fleet.yaml"
    config.write_text(f"gateway: {{port: 0, auth: {auth}}}\nmodels: [{{name: m, source: o/n}}]\n")
    command = [sys.executable, "-m", "gateway", "--config", str(config), "--state-dir", str(rig.folder)]
    children = []
    for number in range(count):
        with (rig.folder / f"gateway{number}.log").open("wb") as log:
            children.append(subprocess.Popen(command, stderr=log))

    def urls() -> list[str]:
        ports = re.findall(rb"serves on \('127.0.0.1', (\d+)\)", written(rig.folder, "*.log"))
        return [f"http://127.0.0.1:{port.decode()}" for port in ports]

    try:
        yield urls
    finally:
        for child in children:
            child.terminate()
        for child in children:
            assert child.wait(60) == 0


@contextlib.asynccontextmanager
async def clients_of(
    rig: Rig, count: int, auth: str = "{mode: keys}"
) -> AsyncIterator[list[httpx.AsyncClient]]:
    """One client for each of so many gateway processes."""
    with processes(rig, count, auth) as urls:
        await until(lambda: len(urls()) == count, 60)
        async with contextlib.AsyncExitStack() as stack:
            # They say their address just before they listen.
            transport = httpx.AsyncHTTPTransport(retries=5)
            await stack.enter_async_context(transport)
            clients = [httpx.AsyncClient(base_url=url, transport=transport, timeout=60) for url in urls()]
            for client in clients:
                assert (await client.get("/health")).status_code == 200
            yield clients


def keys(folder: Path, *arguments: str) -> str:
    """What ``pagefleet keys`` prints."""
    result = CliRunner().invoke(pagefleet, ["keys", *arguments, "--state-dir", str(folder)])
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


async def agree(clients: list[httpx.AsyncClient], key: str, status: int) -> None:
    """All gateways give this status within half a second."""
    changed = time.monotonic()
    while True:
        began = time.monotonic()
        answers = [(await client.get("/v1/models", headers=bearer(key))).status_code for client in clients]
        if set(answers) == {status}:
            return
        assert began - changed < EFFECTIVE, answers


async def test_two_processes_on_one_store(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.route(target(worker := await rig.worker()))
    async with clients_of(rig, 2) as clients:
        await agree(clients, new_key()[1], 401)  # there is no store yet
        key = keys(tmp_path, "create", "--user", "alice", "--model", "m")
        await agree(clients, key, 200)
        successor = keys(tmp_path, "rotate", key, "--grace", "1h")
        await agree(clients, successor, 200)
        await agree(clients, key, 200)
        keys(tmp_path, "revoke", key)
        await agree(clients, key, 401)
        for client in clients:
            assert (
                await client.post(CHAT, json={"model": "m"}, headers=bearer(successor))
            ).status_code == 200
    await worker.stop()
    logs = written(tmp_path, "*.log").decode()
    assert logs.count("auth: keys") == 2
    assert "Traceback" not in logs
    for text in (key, successor):
        assert text.rpartition("_")[2] not in logs


async def test_without_keys_the_log_says_so(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.route(target(worker := await rig.worker()))
    async with clients_of(rig, 1, "{mode: none}") as (client,):
        assert (await client.post(CHAT, json={"model": "m"})).status_code == 200
        assert (await client.post(CHAT, json={"model": "m"}, headers=bearer("sk-1"))).status_code == 200
    await worker.stop()
    assert "auth: none; whoever reaches this gateway may use it" in (tmp_path / "gateway0.log").read_text()


def test_keys_that_cannot_be_read_end_the_process(tmp_path: Path) -> None:
    """With code 1, after which the supervisor tries again: serving nobody in silence would be worse."""
    (tmp_path / KEYS_FILE).write_text("no keys in here" * 1000)
    config = tmp_path / "fleet.yaml"
    config.write_text("gateway: {port: 0, auth: {mode: keys}}\nmodels: [{name: m, source: o/n}]\n")
    command = [sys.executable, "-m", "gateway", "--config", str(config), "--state-dir", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"the keys in {tmp_path / KEYS_FILE} can't be used" in ended.stderr
    assert "Traceback" not in ended.stderr
