"""Golden prompts against a worker whose model says what the test wants."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from gateway.fleet.driver.peer import Peer
from gateway.fleet.driver.proof import Unproven, run_golden
from gateway.settings import Golden
from tests.worker.fake_engine import MODEL
from tests.worker.talking import worker
from worker.server.lifecycle import HttpServer, uvicorn_config

THINKS = "<think>\nTwo and two make four, or so it"


@pytest.mark.parametrize(
    ("said", "expect", "good"),
    [
        (THINKS, "make four", True),  # all its tokens went into the reasoning
        (f"{THINKS} seems.\n</think>\n\nIt is 4.", "/is 4/", True),
        ("It is 4.", "is 4", True),
        (THINKS, "five", False),
        ("", None, False),
    ],
)
async def test_golden_prompts_hear_what_a_model_thinks_and_says(
    tmp_path: Path, said: str, expect: str | None, good: bool
) -> None:
    state = worker(said)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / "worker.sock"))
    server = HttpServer(uvicorn_config(state))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    peer = Peer(tmp_path / "worker.sock", "bytes-0", 0, MODEL)
    try:
        if good:
            await run_golden(peer, [Golden(prompt="2 + 2?", expect=expect)])
        else:
            with pytest.raises(Unproven, match=r"2 \+ 2\?|nothing"):
                await run_golden(peer, [Golden(prompt="2 + 2?", expect=expect)])
    finally:
        await peer.close()
        server.should_exit = True
        await serving
