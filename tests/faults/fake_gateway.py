"""A gateway without HTTP, for the supervisor: it shows on its board what gates (files) let it.

`frozen`: the routes and the fleet file that it has stay in use; `inflight`: it has a request on each target.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import zlib
from pathlib import Path

from gateway.board import CONFIG, INFLIGHT, ROUTE_EPOCH, Board
from gateway.fleet.state import read_routes


def digest(file: Path) -> float:
    try:
        return zlib.crc32(file.read_bytes())
    except OSError:
        return -1.0


async def show(board: Board, routes: Path, file: Path, gates: Path) -> None:
    epoch, config = board.numbers((ROUTE_EPOCH,)), board.numbers((CONFIG,))
    while True:
        document = read_routes(routes)
        if not (gates / "frozen").exists():
            epoch[0] = document.epoch
            config[0] = digest(file)
        busy = float((gates / "inflight").exists())
        for model, found in document.models.items():
            for target in found.targets:
                board.numbers((INFLIGHT, model, target.id))[0] = busy
        board.beat()
        await asyncio.sleep(0.05)


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--board", "--routes", "--config"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--generation", type=int)
    options = parser.parse_args()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    board = Board(options.board, options.generation)
    gates = Path(os.environ["FAKE_GATES"])
    showing = asyncio.create_task(show(board, options.routes, options.config, gates))
    await asyncio.wait({showing, asyncio.ensure_future(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
    board.close()


if __name__ == "__main__":
    asyncio.run(main())
