"""Swaps of a model while users are on it: what they notice.

    pagefleet up configs/demo.yaml --detach
    python -m bench.swap_under_load --model smollm2 --to models/SmolLM2-135M-Instruct.Q4_1.gguf --swaps 5

Each user asks one thing after the other, every third a stream. Told: requests, failures, first tokens before
and during the swaps, the longest gap inside a stream, and how long each phase of each swap took.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import machine
from gateway.cli.common import ask_supervisor
from gateway.cli.swap_client import Swaps
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.rollout import Options, Rollout
from gateway.fleet.statedir import StateDir

WARM_UP = 10.0  # seconds of load before the first swap, to compare with


@dataclass(frozen=True)
class Traffic:
    """`tokens` of each answer; `think`: mean seconds from a user's answer to his next request; of so many
    requests, one is a stream: `stream_of`; `prompt_ids`: token ids of a prompt, for a model without a
    tokenizer, else it is text."""

    model: str
    users: int
    tokens: int = 32
    think: float = 0.0
    stream_of: int = 3
    prompt_ids: int = 0


@dataclass
class Seen:
    """What all users saw; `firsts`: when and how long until the first byte of a stream."""

    requests: int = 0
    failures: list[str] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)
    longest_gap: float = 0.0

    def shown(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "failures": len(self.failures),
            "first_failures": self.failures[:5],
            "longest_gap_in_a_stream_s": round(self.longest_gap, 3),
        }


@contextlib.asynccontextmanager
async def users_of(url: str, traffic: Traffic) -> AsyncIterator[Seen]:
    """Users from now to the end of the block; requests that are under way then aren't counted."""
    seen, limits = Seen(), httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
        users = [asyncio.create_task(_user(client, n, traffic, seen)) for n in range(traffic.users)]
        try:
            yield seen
        finally:
            for one in users:
                one.cancel()
            await asyncio.gather(*users, return_exceptions=True)


async def _user(client: httpx.AsyncClient, who: int, traffic: Traffic, seen: Seen) -> None:
    dice = random.Random(who)
    await asyncio.sleep(dice.random() * traffic.think)
    for number in itertools.count(1):
        body: dict[str, Any] = {
            "model": traffic.model, "user": f"user-{who}", "max_tokens": traffic.tokens, "ignore_eos": True,
            "prompt": _prompt(who, number, traffic.prompt_ids),
        }  # fmt: skip
        if traffic.prompt_ids:
            body["return_token_ids"] = True  # else nothing is sent until there is text
        try:
            is_stream = (who + number) % traffic.stream_of == 0
            await (stream if is_stream else whole)(client, body, seen)
        except (httpx.HTTPError, AssertionError) as error:
            seen.failures.append(f"user {who}, {number}: {error!r}")
        seen.requests += 1
        await asyncio.sleep(dice.expovariate(1 / traffic.think) if traffic.think else 0)


def _prompt(who: int, number: int, ids: int) -> str | list[int]:
    """None that was there before."""
    if ids:
        return [1 + (31 * who + 7 * number + place * (number + 1)) % 251 for place in range(ids)]
    return f"User {who} asks for the {number}. time about the sea."


async def whole(client: httpx.AsyncClient, body: dict[str, Any], seen: Seen) -> None:
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text[:200]


async def stream(client: httpx.AsyncClient, body: dict[str, Any], seen: Seen) -> None:
    began = last = time.monotonic()
    tail = b""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for piece in answer.aiter_bytes():
            now = time.monotonic()
            if last == began:
                seen.firsts.append((began, now - began))
            else:
                seen.longest_gap = max(seen.longest_gap, now - last)
            last, tail = now, (tail + piece)[-64:]
    assert tail.rstrip().endswith(b"data: [DONE]"), tail


def swap(swaps: Swaps, args: argparse.Namespace) -> Rollout:
    """One, to its end."""
    steps = tuple(float(step.rstrip("%")) for step in args.steps.split(","))
    asked = StartRequest(source=str(Path(args.to).absolute()) if Path(args.to).exists() else args.to,
                         options=Options(steps=steps, hold=args.hold))  # fmt: skip
    found = swaps.start(args.model, asked)
    while found.exit_code is None:
        found = swaps.next(args.model, found.rollout.revision, 10)
    return found.rollout


def phases(rollout: Rollout) -> dict[str, float]:
    """Seconds of each phase."""
    spent: dict[str, float] = {}
    for entry, following in itertools.pairwise(rollout.log):
        spent[entry.phase] = round(spent.get(entry.phase, 0.0) + following.at - entry.at, 2)
    return spent


def percentile(times: list[float], share: float) -> float | None:
    return round(sorted(times)[int(share * (len(times) - 1))], 4) if times else None


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    state = StateDir(Path(args.state_dir))
    status = ask_supervisor(state, "GET", "/status")
    assert status is not None, f"no fleet is up in {state.root}"
    rollouts, spans = [], []
    async with users_of(status.url, Traffic(args.model, args.users, args.tokens)) as seen:
        await asyncio.sleep(WARM_UP)
        for _ in range(args.swaps):
            began = time.monotonic()
            rollouts.append(await asyncio.to_thread(swap, Swaps(state), args))
            spans.append((began, time.monotonic()))
        await asyncio.sleep(2)
    during = [took for at, took in seen.firsts if any(begin <= at <= end for begin, end in spans)]
    before = [took for at, took in seen.firsts if at < spans[0][0]]
    return {
        "users": args.users,
        "swaps": [{"outcome": one.phase, "cut": one.cut, "seconds": phases(one)} for one in rollouts],
        **seen.shown(),
        "first_token_s": {
            when: {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99), "streams": len(times)}
            for when, times in (("before", before), ("during", during))
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--to", required=True, help="what it is swapped for, again and again")
    parser.add_argument("--state-dir", default=".pagefleet")
    parser.add_argument("--swaps", type=int, default=3)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", default="5%,50%,100%")
    parser.add_argument("--hold", type=float, default=5.0, help="seconds on each step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    host = machine.host()
    machine.publish({"machine": host, **asyncio.run(measure(args))}, args.out)


if __name__ == "__main__":
    main()
