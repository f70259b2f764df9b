"""The page of who watches a fleet: its processes with their numbers, by model, in 80 columns or more."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.cli.change_display import summary
from gateway.cli.display import STYLES, start_share, start_words
from gateway.fleet.admin import FleetStatus
from gateway.fleet.figures import Look, Row
from gateway.fleet.rollout import Rollout
from gateway.fleet.state import FULL_WEIGHT
from gateway.fleet.unit import UnitStatus

NONE = "-"
# Titles with their widths; with the name, and a space between all, 80 columns.
_COLUMNS = (("STATE", 8), ("WEIGHT", 6), ("BUSY", 5), ("QPS", 5), ("TTFT95", 6), ("ERR", 4), ("KV", 4))
_TAIL = (("MEM", 5), ("UP", 4), ("RST", 3))
_GPU = (("GPU", 5),)
_SPARED = ("RST", "UP", "GPU", "MEM", "KV", "ERR", "TTFT95", "QPS", "BUSY", "WEIGHT")  # in this order
_SHORTEST_NAME, _LONGEST_NAME = 12, 60


def page(
    status: FleetStatus,
    rows: Sequence[Row],
    look: Look,
    *,
    width: int,
    window: float | None = None,
    rollouts: Sequence[RenderableType] = (),
) -> RenderableType:
    """Everything at one moment. `width`: of the terminal; `window`: seconds that the rates are of."""
    head = f"{status.url}  supervisor {status.supervisor}  up {age(time.time() - status.started)}"
    head += f"  rates over {window:.0f}s" if window else ""
    head += "  stopping" if status.stopping else ""
    table = _table(rows, width)
    for row in rows:
        if row.role == "gateway":
            table.add_row(*_cells(row, table))
    for model in dict.fromkeys(row.model for row in rows if row.role == "worker"):
        mine = [row for row in rows if row.role == "worker" and row.model == model]
        table.add_row(*_model_cells(str(model), mine, look, table))
        for row in mine:
            table.add_row(*_cells(row, table))
    return Group(Text(head), table, *rollouts, *map(Text, summary(status.change)), *_notes(status.units))


def _table(rows: Sequence[Row], width: int) -> Table:
    cards = any(row.gpu_memory is not None for row in rows)
    columns = dict((*_COLUMNS, *(_GPU if cards else ()), *_TAIL))
    for title in _SPARED:  # whole numbers or none
        if width - sum(size + 1 for size in columns.values()) < _SHORTEST_NAME:
            columns.pop(title, None)
    room = width - sum(size + 1 for size in columns.values())
    longest = max((len(row.target) + 2 for row in rows), default=0)
    name = max(_SHORTEST_NAME, min(room, _LONGEST_NAME, longest))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("PROCESS", width=name, no_wrap=True)
    for title, size in columns.items():
        table.add_column(
            title,
            width=size,
            no_wrap=True,
            overflow="crop",
            justify="left" if title == "STATE" else "right",
        )
    return table


def _cells(row: Row, table: Table) -> Iterator[Text]:
    """One process: a gateway has connections where a worker has requests."""
    name = row.target if row.role == "gateway" else f"  {row.target}"
    known = {
        "PROCESS": Text(_shortened(name, table.columns[0].width or _LONGEST_NAME)),
        "STATE": Text(row.state, style=STYLES[row.state]),
        "BUSY": Text(number(row.in_flight if row.role == "worker" else row.connections)),
        "QPS": Text(number(row.qps)),
        "TTFT95": Text(seconds(row.ttft_p95)),
        "ERR": Text(percent(row.error_ratio), style="red" if row.error_ratio else ""),
        "WEIGHT": Text(percent(row.weight)),
        "KV": Text(percent(row.kv_usage)),
        "MEM": Text(size(row.memory)),
        "GPU": Text(size(row.gpu_memory)),
        "UP": Text(age(row.uptime)),
        "RST": Text(str(row.restarts)),
    }
    if row.role == "gateway":
        known |= dict.fromkeys(("WEIGHT", "TTFT95", "ERR", "KV", "GPU"), Text(""))
    return (known[str(column.header)] for column in table.columns)


def _shortened(name: str, width: int) -> str:
    """Without its middle: slots of a model differ at their ends."""
    if len(name) <= width:
        return name
    end = width // 2
    return f"{name[: width - end - 1]}…{name[-end:]}"


def _model_cells(model: str, rows: Sequence[Row], look: Look, table: Table) -> Iterator[Text]:
    """A model: the sums of its workers, and who waits for one."""
    waiting = look.queued.get(model, 0)
    rates = [row.qps for row in rows if row.qps is not None]
    known = {
        "PROCESS": Text(model, "bold"),
        "STATE": Text(f"{waiting} wait" if waiting else "", "yellow"),
        "BUSY": Text(number(sum(row.in_flight or 0 for row in rows)), "bold"),
        "QPS": Text(number(sum(rates)) if rates else NONE, "bold"),
    }
    return (known.get(str(column.header), Text("")) for column in table.columns)


def _notes(units: Iterable[UnitStatus]) -> Iterator[Text]:
    """What doesn't fit into a cell: how far a start is, why something went wrong."""
    for unit in units:
        if unit.state == "starting":
            yield Text(f"{unit.slot}: {start_words(unit)}")
        elif unit.error:
            yield Text(f"{unit.slot}: {unit.error}; log: {unit.log}")
        elif unit.last_exit:
            yield Text(f"{unit.slot}: before its last restart: {unit.last_exit}; log: {unit.log}")


def line(row: Row) -> str:
    """One process for a pipe: ``12:00:01 smollm2-0.1 model=smollm2 state=ready weight=100% …``"""
    known = {
        "model": row.model,
        "state": row.state,
        "phase": row.phase if row.state == "starting" else None,
        "done": f"{share}%" if (share := start_share(row)) is not None else None,
        "weight": percent(row.weight),
        "inflight": number(row.in_flight),
        "connections": number(row.connections),
        "qps": number(row.qps),
        "ttft_p95": seconds(row.ttft_p95),
        "errors": percent(row.error_ratio),
        "kv": percent(row.kv_usage),
        "memory": size(row.memory),
        "gpu": size(row.gpu_memory),
        "uptime": age(row.uptime),
        "restarts": str(row.restarts),
    }
    pairs = [f"{name}={value}" for name, value in known.items() if value not in (None, NONE)]
    return " ".join([time.strftime("%H:%M:%S"), row.target, *pairs])


def rollout_line(rollout: Rollout) -> str:
    """One rollout for a pipe."""
    verdict = rollout.verdicts.get(rollout.step_name)
    known = {
        "rollout": rollout.id,
        "phase": rollout.phase,
        "step": rollout.step_name,
        "weight": percent(rollout.standby_bp / FULL_WEIGHT),
        "verdict": verdict.outcome if verdict is not None else "",
        "paused": "yes" if rollout.paused else "",
    }
    pairs = [f"{name}={value}" for name, value in known.items() if value]
    return " ".join([time.strftime("%H:%M:%S"), rollout.model, *pairs])


def number(value: float | None) -> str:
    """At most five characters: ``0``, ``3.2``, ``410``, ``12k``."""
    if value is None:
        return NONE
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def percent(value: float | None) -> str:
    """``100%``, ``5%``; below one in a hundred ``.3%``, and never ``0%`` for more than nothing."""
    if value is None:
        return NONE
    if 0 < value < 0.0095:
        return f".{max(1, round(1000 * value))}%"
    return f"{100 * value:.0f}%"


def seconds(value: float | None) -> str:
    """``85ms``, ``1.2s``, ``42s``"""
    if value is None:
        return NONE
    if value < 0.9995:
        return f"{1000 * value:.0f}ms"
    return f"{value:.1f}s" if value < 9.95 else f"{value:.0f}s"


def size(value: float | None) -> str:
    """``850M``, ``1.2G``: powers of 1024."""
    if value is None:
        return NONE
    value /= 1 << 20
    for unit in "MGT":
        if value < 999.5:
            return f"{value:.1f}{unit}" if value < 9.95 and unit != "M" else f"{value:.0f}{unit}"
        value /= 1024
    return f"{value:.0f}P"


def age(value: float | None) -> str:
    """At most four characters: ``45s``, ``12m``, ``23h``, ``9d``."""
    if value is None:
        return NONE
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if value >= 2 * length:
            return f"{value // length:.0f}{unit}"
    return f"{value:.0f}s"
