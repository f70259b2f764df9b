"""tests/gateway/fake_model.py with gates: while a file of that name is in $FAKE_GATES, it doesn't go on.

`ready`: it loads; `warm`, `golden`: it doesn't answer such prompts; `busy`: it says that it has a request;
`end`: it doesn't end when told to. Behaviour `hungry`: it takes half a GiB, `meal` is the gate of that.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gateway import fake_model

GATES = Path(os.environ["FAKE_GATES"])


def closed(gate: str) -> bool:
    return (GATES / gate).exists()


async def passed(gate: str) -> None:
    while closed(gate):
        await asyncio.sleep(0.02)


class GatedModel(fake_model.Model):
    was_ready = False

    @property
    def ready(self) -> bool:
        self.was_ready |= not closed("ready")
        return self.was_ready

    def admin(self, path: str) -> fake_model.Answer:
        status, body = super().admin(path)
        return status, {**body, "inflight": body.get("inflight", 0) + closed("busy")}


async def answer(
    model: fake_model.Model, path: str, body: dict[str, Any], writer: asyncio.StreamWriter
) -> None:
    if path == "/generate":
        await passed("golden" if "logprobs" in body else "warm")
    await _answer(model, path, body, writer)


_answer, fake_model.answer = fake_model.answer, answer


async def eat() -> None:
    await passed("meal")
    eaten = []
    for _ in range(64):
        eaten.append(b"x" * (8 << 20))
        await asyncio.sleep(0.01)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("--uds")
    parser.add_argument("--slot")
    parser.add_argument("--generation", type=int)
    model = GatedModel(parser.parse_args())
    stop = asyncio.Event()
    eating = asyncio.create_task(eat()) if "hungry" in model.behaviour else None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await asyncio.start_unix_server(lambda r, w: fake_model.handle(model, r, w), model.options.uds)
    await stop.wait()
    await passed("end")
    if eating is not None:
        eating.cancel()


if __name__ == "__main__":
    asyncio.run(main())
