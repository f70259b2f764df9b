"""Questions to a process over HTTP: who are you, how far is your start, are you making progress."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import httpx
import msgspec

from gateway.board import Peer

log = logging.getLogger(__name__)

PROBE_TIMEOUT = 10.0  # seconds; a busy server answers late, a stuck one not at all


class Progress(msgspec.Struct, frozen=True):
    """How far a start is: `done` of `total` within `phase`, in whatever unit the phase counts.

    `failure`: why it can't go on; the process ends by itself after it.
    """

    phase: str = ""
    done: float = 0
    total: float = 0
    ready: bool = False
    failure: str | None = None


class Health(msgspec.Struct, frozen=True):
    """What a process that makes progress says about itself. `draining`: it takes no new requests."""

    draining: bool = False


class WrongProcess(Exception):
    """Something else than the process that was started answers at its address."""


class Probe(Protocol):
    """What a unit wants to know; answers, never raises httpx errors."""

    async def progress(self) -> Progress | None:
        """How far the start is; None while nothing answers. WrongProcess when somebody else does."""

    async def health(self) -> Health | None:
        """None unless the process is alive and making progress."""

    async def take_over(self) -> None:
        """Tells a process that an earlier supervisor has started what may have changed since."""

    async def close(self) -> None: ...


class _Readiness(msgspec.Struct, frozen=True):
    """A worker's answer to /ready."""

    status: str = ""
    phase: str = ""
    done: float = 0
    total: float = 0
    message: str | None = None


class _Identity(msgspec.Struct, frozen=True):
    slot: str
    generation: int


class WorkerProbe:
    """Asks a worker on its Unix socket, after making sure that it is the one that was started. `names`: those
    that requests may use."""

    def __init__(self, uds: Path, slot: str, generation: int, names: Sequence[str]) -> None:
        transport = httpx.AsyncHTTPTransport(uds=str(uds), verify=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=PROBE_TIMEOUT)
        self._expected = _Identity(slot, generation)
        self._identified = False
        self._names = names

    async def progress(self) -> Progress | None:
        try:
            if not self._identified:
                await self._identify()
            response = await self._client.get("/ready")
            answer = msgspec.json.decode(response.content, type=_Readiness)
            if response.status_code == 200 or answer.status == "draining":  # it has loaded in any case
                return Progress(phase="ready", ready=True)
            if answer.status == "failed":
                return Progress(failure=answer.message or "the engine has ended")
            return Progress(phase=answer.phase, done=answer.done, total=answer.total)
        except (httpx.HTTPError, msgspec.MsgspecError):
            return None

    async def health(self) -> Health | None:
        return await _health(self._client)

    async def take_over(self) -> None:
        try:
            answer = await self._client.post("/admin/names", json={"names": self._names})
            answer.raise_for_status()
        except httpx.HTTPError as error:
            log.warning("%s.%d keeps its names: %s", self._expected.slot, self._expected.generation, error)

    async def close(self) -> None:
        await self._client.aclose()

    async def _identify(self) -> None:
        response = await self._client.get("/internal/whoami")
        identity = msgspec.json.decode(response.content, type=_Identity)
        if identity != self._expected:
            raise WrongProcess(
                f"{identity.slot}.{identity.generation} answers on the socket of "
                f"{self._expected.slot}.{self._expected.generation}"
            )
        self._identified = True


class GatewayProbe:
    """Looks at the board of a gateway process, which its event loop signs several times a second.

    Not over HTTP: on a port that several processes share, any of them would answer, and one that has no
    connection to spare isn't dead.
    """

    def __init__(self, board: Path, generation: int) -> None:
        self._peer = Peer(board)
        self._generation = generation

    async def progress(self) -> Progress | None:
        if await self.health():
            return Progress(phase="ready", ready=True)
        return None

    async def health(self) -> Health | None:
        reading = self._peer.read()
        if reading is None or reading.generation != self._generation or not reading.alive:
            return None
        return Health(draining=reading.leaving)

    async def take_over(self) -> None:
        """It follows the fleet file."""

    async def close(self) -> None:
        pass


async def _health(client: httpx.AsyncClient) -> Health | None:
    try:
        response = await client.get("/health")
        return msgspec.json.decode(response.content, type=Health) if response.status_code == 200 else None
    except (httpx.HTTPError, msgspec.MsgspecError):
        return None
