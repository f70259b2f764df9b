"""Request sets for serving benchmarks, the same on every machine and in every language.

Randomness is splitmix64 seeded with the FNV-1a hash of "<name>-<seed>". Shapes (kinds, lengths, arrivals) and
token ids come from two streams, so that other content can be had with exactly the same shapes.

    python -m bench.workload mixed > mixed.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

VOCABULARY = 151_643  # ids below are ordinary tokens of Qwen's 152,064-row vocabulary
MIXED_1000_SHA256 = "95c2abe2bf5113ce8c98f63bd041d441c4cb6f6bd986a07e8e4e45c621dce92b"
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Request:
    """`arrival` is in seconds from the start; 0 for closed sets."""

    id: int
    kind: str
    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0


def splitmix64(name: str) -> Iterator[int]:
    """64-bit numbers of the stream called `name`."""
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = ((state ^ byte) * 0x100000001B3) & _MASK
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        yield z ^ (z >> 31)


def _below(stream: Iterator[int], bound: int) -> int:
    return (next(stream) * bound) >> 64


def _tokens(stream: Iterator[int], count: int, vocabulary: int = VOCABULARY) -> list[int]:
    return [_below(stream, vocabulary) for _ in range(count)]


def fixed(batch: int, prompt: int, new: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[Request]:
    """`batch` requests of `prompt` random tokens and `new` outputs each."""
    stream = splitmix64(f"fixed-tokens-{seed}")
    return [Request(i, "F", _tokens(stream, prompt, vocabulary), new) for i in range(batch)]


def mixed(
    count: int = 1000, seed: int = 0, content_seed: int | None = None, vocabulary: int = VOCABULARY
) -> list[Request]:
    """80 % A (prompt 32 to 128, 128 new), 15 % B (256, 512), 5 % C (1024, 1024), shuffled."""
    shapes = splitmix64(f"mixed-shape-{seed}")
    content = splitmix64(f"mixed-tokens-{seed if content_seed is None else content_seed}")
    b, c = count * 15 // 100, count * 5 // 100
    kinds = ["A"] * (count - b - c) + ["B"] * b + ["C"] * c
    for i in range(count - 1, 0, -1):
        j = _below(shapes, i + 1)
        kinds[i], kinds[j] = kinds[j], kinds[i]
    requests = []
    for i, kind in enumerate(kinds):
        length = 32 + _below(shapes, 97) if kind == "A" else {"B": 256, "C": 1024}[kind]
        new = {"A": 128, "B": 512, "C": 1024}[kind]
        requests.append(Request(i, kind, _tokens(content, length, vocabulary), new))
    return requests


def poisson(
    rate: float,
    seconds: float,
    prompt: int = 128,
    new: int = 128,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    content_seed: int | None = None,
) -> list[Request]:
    """Open-loop arrivals at `rate` a second for `seconds`."""
    label = int(rate) if rate == int(rate) else rate
    shapes = splitmix64(f"poisson-shape-{label}-{seed}")
    content = splitmix64(f"poisson-tokens-{label}-{seed if content_seed is None else content_seed}")
    requests: list[Request] = []
    now = 0.0
    while True:
        now += -math.log(1.0 - (next(shapes) >> 11) / 2**53) / rate
        if now >= seconds:
            return requests
        requests.append(Request(len(requests), "A", _tokens(content, prompt, vocabulary), new, now))


def shared_prefix(
    count: int = 64, prefix: int = 4096, unique: int = 64, new: int = 64, seed: int = 0
) -> list[Request]:
    """`count` requests that share their first `prefix` tokens."""
    stream = splitmix64(f"prefix-tokens-{seed}")
    head = _tokens(stream, prefix)
    return [Request(i, "P", head + _tokens(stream, unique), new) for i in range(count)]


def json_lines(requests: list[Request]) -> str:
    return "".join(json.dumps(asdict(r), separators=(",", ":")) + "\n" for r in requests)


def sha256(requests: list[Request]) -> str:
    return hashlib.sha256(json_lines(requests).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["mixed", "poisson", "prefix", "fixed"])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=47)
    parser.add_argument("--seconds", type=float, default=20)
    arguments = parser.parse_args()
    requests = {
        "mixed": lambda: mixed(arguments.count, arguments.seed),
        "poisson": lambda: poisson(arguments.rate, arguments.seconds, seed=arguments.seed),
        "prefix": lambda: shared_prefix(seed=arguments.seed),
        "fixed": lambda: fixed(arguments.count, 128, 128, arguments.seed),
    }[arguments.kind]()
    print(json_lines(requests), end="")


if __name__ == "__main__":
    main()
