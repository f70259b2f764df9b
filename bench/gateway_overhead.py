"""What a gateway costs: the same requests sent directly, through pagefleet, and through its peers.

    python -m bench.gateway_overhead --out bench/results/gateway_overhead.json

Two cores: the proxy has one; worker (bench/fake_worker.py), load generator (bench/http_load.py) and the
redis-server of pagefleet-full share the other. Interleaved rounds, medians; proxies that aren't measured are
stopped meanwhile. Requests and answers are the same for all, and every answer is checked. `added` is a
proxy's percentile less that of the direct way in the same round. At the fixed rate, latencies count from the
time a request was due. `cpu` is the processor time that the proxy itself took, by the kernel's count (ticks
of 10 ms).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench import machine
from bench.gateway_peers import WAYS
from bench.http_load import Run, chat, closed_loop, open_loop, streamed_chat
from bench.proxy_process import Place, Way, place_on_cores

CONNECTIONS = 16
RATE = 1500.0
TOKENS = 128
WARM_SECONDS = 0.3
SATURATED = 1.1  # a proxy that can't do so many times RATE is past its end there


@dataclass(frozen=True)
class Round:
    """One way in one round. Milliseconds, microseconds, events and requests a second; None: saturated."""

    p50_ms: float
    p99_ms: float
    requests_per_second: float
    cpu_us_per_request: float
    events_per_second: float
    cpu_us_per_event: float
    first_event_ms: float
    rate_p50_ms: float | None
    rate_p99_ms: float | None


def percentile(values: list[float], share: float) -> float:
    """Nearest rank, in milliseconds."""
    return 1e3 * sorted(values)[min(len(values) - 1, int(len(values) * share))]


def measure(way: Way, seconds: float, seed: int) -> Round:
    small, stream = chat(way.headers), streamed_chat(TOKENS, way.headers)
    closed_loop(way.address, small, CONNECTIONS, WARM_SECONDS)
    single = closed_loop(way.address, small, 1, seconds / 2)
    many, many_cpu = _with_cpu(way, lambda: closed_loop(way.address, small, CONNECTIONS, seconds))
    closed_loop(way.address, stream, CONNECTIONS, 0.0)
    streams, streams_cpu = _with_cpu(way, lambda: closed_loop(way.address, stream, CONNECTIONS, seconds))
    first = closed_loop(way.address, streamed_chat(8, way.headers), 1, seconds / 2)
    fixed = None
    if many.per_second > SATURATED * RATE:
        fixed = open_loop(way.address, small, RATE, 2 * seconds, seed=seed).latencies
    events = len(streams.latencies) * (TOKENS + 1)
    return Round(
        p50_ms=percentile(single.latencies, 0.5),
        p99_ms=percentile(single.latencies, 0.99),
        requests_per_second=many.per_second,
        cpu_us_per_request=1e6 * many_cpu / len(many.latencies),
        events_per_second=events / streams.seconds,
        cpu_us_per_event=1e6 * streams_cpu / events,
        first_event_ms=percentile(first.firsts, 0.5),
        rate_p50_ms=percentile(fixed, 0.5) if fixed else None,
        rate_p99_ms=percentile(fixed, 0.99) if fixed else None,
    )


def _with_cpu(way: Way, run: Callable[[], Run]) -> tuple[Run, float]:
    before = way.cpu_seconds()
    result = run()
    return result, way.cpu_seconds() - before


def median(values: Iterable[float | None]) -> float | None:
    """None unless every round has a value."""
    known = list(values)
    return statistics.median(value for value in known if value is not None) if None not in known else None


def rows(rounds: dict[str, list[Round]], versions: dict[str, str]) -> list[dict[str, Any]]:
    """Medians for each way, and what it adds to the direct one."""
    result = []
    base = rounds["direct"]
    for name, own in rounds.items():
        row: dict[str, Any] = {"way": name, "version": versions[name]}
        for measured in fields(Round):
            row[measured.name] = median(getattr(one, measured.name) for one in own)
        if name != "direct":
            for field in ("p50_ms", "p99_ms", "first_event_ms", "rate_p50_ms", "rate_p99_ms"):
                row[f"added_{field}"] = median(_less(own, base, field))
        result.append({**row, "rounds": [asdict(one) for one in own]})
    return result


def _less(own: list[Round], base: list[Round], field: str) -> Iterator[float | None]:
    for one, direct in zip(own, base, strict=True):
        mine, its = getattr(one, field), getattr(direct, field)
        yield None if mine is None or its is None else mine - its


def bars(rounds: dict[str, list[Round]]) -> list[dict[str, Any]]:
    """What is aimed at. A bar against a peer that didn't take part isn't met."""

    def ratio(way: str, peer: str, field: str) -> float | None:
        pairs = zip(rounds.get(way, []), rounds.get(peer, []))
        shares = [getattr(one, field) / getattr(other, field) for one, other in pairs]
        return statistics.median(shares) if shares else None

    def added(field: str) -> float | None:
        own = rounds.get("pagefleet")
        return median(_less(own, rounds["direct"], field)) if own else None

    def at_least(what: str, value: float | None, bar: float) -> dict[str, Any]:
        return {"what": what, "value": value, "at_least": bar, "met": value is not None and value >= bar}

    def at_most(what: str, value: float | None, bar: float) -> dict[str, Any]:
        return {"what": what, "value": value, "at_most": bar, "met": value is not None and value <= bar}

    requests, events = "requests_per_second", "events_per_second"
    return [
        at_least("requests/s, share of vllm-router's", ratio("pagefleet", "vllm-router", requests), 0.6),
        at_least("events/s, share of vllm-router's", ratio("pagefleet", "vllm-router", events), 0.9),
        at_most("added p50 at one connection, ms", added("p50_ms"), 0.5),
        at_most(f"added p99 at {RATE:g} requests/s, ms", added("rate_p99_ms"), 3.0),
        at_least("requests/s with Redis, keys and audit, share of those without",
                 ratio("pagefleet-full", "pagefleet", requests), 0.65),
    ]  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown."""
    columns = {
        "requests/s": ("requests_per_second", ".0f"),
        "CPU µs a request": ("cpu_us_per_request", ".0f"),
        "added p50, ms": ("added_p50_ms", ".2f"),
        "added p99, ms": ("added_p99_ms", ".2f"),
        f"added p99 at {RATE:g}/s, ms": ("added_rate_p99_ms", ".2f"),
        "events/s": ("events_per_second", ".0f"),
        "CPU µs an event": ("cpu_us_per_event", ".1f"),
        "added first event, ms": ("added_first_event_ms", ".2f"),
    }
    lines = ["| way | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in result["rows"]:
        values = (row.get(field) for field, _ in columns.values())
        cells = [
            "–" if value is None else format(value, style)
            for value, (_, style) in zip(values, columns.values())
        ]
        name = f"{row['way']} {row['version']}".strip()
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(names: list[str], count: int, seconds: float) -> tuple[dict[str, list[Round]], dict[str, str]]:
    """All rounds of all ways, and the ways' versions."""
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        place: Place = stack.enter_context(place_on_cores())
        ways = []
        for name in names:
            ways.append(stack.enter_context(WAYS[name](place)))
            ways[-1].pause()
            print(f"{name} is there", file=sys.stderr, flush=True)
        for number in range(count):
            for way in ways:
                way.resume()
                one = measure(way, seconds, seed=number)
                way.pause()
                rounds[way.name].append(one)
                print(json.dumps({"round": number, "way": way.name, **asdict(one)}), flush=True)
        return rounds, {way.name: way.version for way in ways}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="direct is always one"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each of the longer measurements")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = ["direct", *(name for name in WAYS if name in arguments.ways and name != "direct")]
    result: dict[str, Any] = {"machine": {**machine.host(), "load_average": os.getloadavg()[0]}}
    rounds, versions = run(names, arguments.rounds, arguments.seconds)
    result |= {"rows": rows(rounds, versions), "bars": bars(rounds)}
    print(table(result))
    for bar in result["bars"]:
        print(json.dumps(bar))
    machine.save(result, arguments.out)


if __name__ == "__main__":
    main()
