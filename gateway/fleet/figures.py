"""What a fleet is doing, in numbers, for who watches it: read from where its processes show them.

Gateways have theirs on boards, workers at `/metrics` of their sockets, the kernel and the driver know the
memory; no gateway is asked, nor the supervisor. Counters only grow; rates are made of two looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import httpx
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from gateway.board import INFLIGHT, QUEUE_WAITING, Peer, Reading
from gateway.fleet.admin import FleetStatus
from gateway.fleet.state import FULL_WEIGHT, RoutesFile, read_routes
from gateway.fleet.statedir import StateDir
from gateway.fleet.unit import UnitState, UnitStatus

_ASK_SECONDS = 2.0
_DRIVER = Path("/dev/nvidiactl")
_REQUESTS = "pagefleet_gateway_requests_total"
_TTFT, _KV = "pagefleet_time_to_first_token_seconds_bucket", "pagefleet_kv_cache_usage_ratio"


class WorkerLook(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's own page. `ttft`: upper bound in seconds → requests whose first token came within it."""

    kv_usage: float = 0.0
    ttft: dict[float, float] = {}


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of a process and all that it started, in bytes; `gpu` None: the driver doesn't say. `started`: Unix
    time."""

    resident: int
    gpu: int | None
    started: float


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one moment (`at`: monotonic). By target: requests ended, those with errors, in flight; by
    model: requests queued; by gateway slot: requests ended, connections."""

    at: float
    routes: RoutesFile = RoutesFile()
    requests: dict[str, float] = {}
    errors: dict[str, float] = {}
    inflight: dict[str, int] = {}
    queued: dict[str, int] = {}
    served: dict[str, float] = {}
    connections: dict[str, int] = {}
    workers: dict[str, WorkerLook] = {}
    memory: dict[str, Memory] = {}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the page. None: not known, or of no meaning there.

    `weight`: share of the model's users, 0 to 1; `qps`: requests ended per second; `ttft_p95` in seconds and
    `error_ratio` (5xx, of requests ended): over the time between the two looks; `memory`, `gpu_memory`:
    bytes; `uptime`: seconds; `done` of `total`: of a start, within its phase.
    """

    slot: str
    role: str
    model: str | None
    generation: int
    state: UnitState
    phase: str
    pid: int | None
    restarts: int
    done: float = 0
    total: float = 0
    weight: float | None = None
    in_flight: int | None = None
    connections: int | None = None
    qps: float | None = None
    ttft_p95: float | None = None
    error_ratio: float | None = None
    kv_usage: float | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    uptime: float | None = None

    @property
    def target(self) -> str:
        return f"{self.slot}.{self.generation}"


class Observatory:
    """Looks at the fleet in `state`; keeps connections to its workers from one look to the next."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._peers: dict[str, Peer] = {}

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def look(self, status: FleetStatus) -> Look:
        """What can be had within two seconds; what can't is left out."""
        routes = self._routes()
        addresses = {
            target.id: target.address
            for model in routes.models.values()
            for target in model.targets
            if target.state in ("ready", "draining")
        }
        pages, memory = await asyncio.gather(
            asyncio.gather(*map(self._page, addresses.values())), asyncio.to_thread(_memory, status.units)
        )
        workers = {name: page for name, page in zip(addresses, pages, strict=True) if page is not None}
        look = Look(at=time.monotonic(), routes=routes, workers=workers, memory=memory)
        for unit in status.units:
            if unit.role == "gateway":
                self._add_board(look, unit)
        return look

    def _routes(self) -> RoutesFile:
        try:
            return read_routes(self._state.routes)
        except (OSError, ValueError):
            return RoutesFile()

    async def _page(self, address: str) -> WorkerLook | None:
        client = self._clients.get(address)
        if client is None:
            uds = address.removeprefix("unix:") if address.startswith("unix:") else None
            base = "http://worker" if uds else address
            transport = httpx.AsyncHTTPTransport(uds=uds, verify=False)
            client = httpx.AsyncClient(transport=transport, base_url=base, timeout=_ASK_SECONDS)
            self._clients[address] = client
        try:
            response = await client.get("/metrics")
            return parse_page(response.text) if response.status_code == 200 else None
        except (httpx.HTTPError, OSError, ValueError):
            return None

    def _add_board(self, look: Look, unit: UnitStatus) -> None:
        peer = self._peers.setdefault(unit.slot, Peer(self._state.board(unit.slot)))
        reading = peer.read()
        if reading is not None:
            add_reading(look, unit.slot, reading)


def add_reading(look: Look, slot: str, reading: Reading) -> None:
    """What one gateway process counted; what is so just now counts only while it lives."""
    if reading.alive:
        look.connections[slot] = reading.connections
    for (name, *labels), (value, *_) in reading.numbers.items():
        if name == _REQUESTS:
            _, target, status = labels
            look.served[slot] = look.served.get(slot, 0) + value
            look.requests[target] = look.requests.get(target, 0) + value
            if status.startswith("5"):
                look.errors[target] = look.errors.get(target, 0) + value
        elif not reading.alive or value != value:  # a gauge of labels that are gone is nan
            continue
        elif name == INFLIGHT:
            look.inflight[labels[1]] = look.inflight.get(labels[1], 0) + int(value)
        elif name == QUEUE_WAITING:
            look.queued[labels[0]] = look.queued.get(labels[0], 0) + int(value)


def parse_page(text: str) -> WorkerLook:
    """A worker's metrics; ValueError when it is no such page."""
    kv, ttft = 0.0, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == _KV:
                kv = sample.value
            elif sample.name == _TTFT:
                ttft[float(sample.labels["le"])] = sample.value
    return WorkerLook(kv_usage=kv, ttft=ttft)


def rows(status: FleetStatus, now: Look, before: Look | None) -> list[Row]:
    """A row per process, gateways first; without an earlier look there are no rates."""
    return [_row(unit, now, before) for unit in sorted(status.units, key=lambda unit: unit.role != "gateway")]


def _row(unit: UnitStatus, now: Look, before: Look | None) -> Row:
    target = f"{unit.slot}.{unit.generation}"
    worker = unit.role == "worker"
    page = now.workers.get(target) if worker else None
    earlier = before.workers.get(target) if before is not None else None
    memory = now.memory.get(unit.slot)
    ended = None if before is None else _grown(now, before, target if worker else unit.slot, worker)
    errors = None if before is None else now.errors.get(target, 0) - before.errors.get(target, 0)
    seconds = now.at - before.at if before is not None else 0.0
    return Row(
        slot=unit.slot,
        role=unit.role,
        model=unit.model,
        generation=unit.generation,
        state=unit.state,
        phase=unit.phase,
        pid=unit.pid,
        restarts=unit.restarts,
        done=unit.done,
        total=unit.total,
        weight=_weight(now.routes, unit) if worker else None,
        in_flight=now.inflight.get(target, 0) if worker else None,
        connections=None if worker else now.connections.get(unit.slot),
        qps=ended / seconds if ended is not None and seconds > 0 else None,
        ttft_p95=quantile(page.ttft, earlier.ttft, 0.95) if page and earlier else None,
        error_ratio=errors / ended if worker and errors is not None and ended else None,
        kv_usage=page.kv_usage if page else None,
        memory=memory.resident if memory else None,
        gpu_memory=memory.gpu if memory else None,
        uptime=max(0.0, time.time() - memory.started) if memory else None,
    )


def _grown(now: Look, before: Look, name: str, worker: bool) -> float:
    one, other = (now.requests, before.requests) if worker else (now.served, before.served)
    return max(0.0, one.get(name, 0) - other.get(name, 0))


def _weight(routes: RoutesFile, unit: UnitStatus) -> float | None:
    """Its share among the model's ready targets; None for one that isn't in the document."""
    targets = routes.models[unit.model].targets if unit.model in routes.models else ()
    ready = sum(target.weight_bp for target in targets if target.state == "ready")
    for target in targets:
        if (target.slot, target.generation) == (unit.slot, unit.generation):
            share = target.weight_bp / max(ready, FULL_WEIGHT)
            return share if target.state == "ready" else 0.0
    return None


def quantile(now: Mapping[float, float], before: Mapping[float, float], share: float) -> float | None:
    """Of what a histogram took in between two looks, interpolated in its bucket; None when that is nothing.
    What lies beyond the last bound counts as that bound."""
    grown = [(bound, count - before.get(bound, 0)) for bound, count in sorted(now.items())]
    total = grown[-1][1] if grown else 0
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for bound, count in grown:
        if count >= share * total:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (share * total - below) / (count - below)
        low, below = bound, count
    return low


def _memory(units: Iterable[UnitStatus]) -> dict[str, Memory]:
    """By slot, of what runs."""
    on_cards = _gpu_memory() if _DRIVER.exists() else None
    found = {}
    for unit in units:
        if unit.pid is None:
            continue
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(unit.pid)
            family = [process, *process.children(recursive=True)]
            gpu = None
            if on_cards is not None and unit.role == "worker":
                gpu = sum(on_cards.get(one.pid, 0) for one in family) or None
            resident = sum(map(_resident, family))
            found[unit.slot] = Memory(resident=resident, gpu=gpu, started=process.create_time())
    return found


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _gpu_memory() -> dict[int, int]:
    """By process id, as far as the driver tells."""
    argv = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(argv, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    used: dict[int, int] = {}
    for line in out.splitlines():
        pid, _, size = line.partition(",")
        if pid.strip().isdecimal() and size.strip().isdecimal():
            used[int(pid)] = used.get(int(pid), 0) + (int(size) << 20)
    return used
