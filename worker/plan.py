"""`python -m worker.plan`: what workers would take, asked before any is started.

Reads a JSON list of questions from stdin, writes a list of answers in the same order to stdout. A process of
its own, since who plans a fleet doesn't import workers; it doesn't import torch, and never the network.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from contracts.options import WorkerOptions


class Question(msgspec.Struct, frozen=True):
    """`card_bytes`: size of the card it would run on; null: in the host's memory."""

    source: str
    options: dict[str, Any] = {}
    card_bytes: int | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes as worker.engine.estimate has them, or why there are none.

    problem: what is wrong, with the option to change; unknown: what must be fetched first.
    """

    estimate: dict[str, int | None] | None = None
    total: int | None = None
    problem: str | None = None
    unknown: str | None = None


def answer(question: Question) -> Answer:
    """What one worker takes. Never fails: what is wrong is in the answer."""
    from worker.engine.estimate import estimate
    from worker.weights.source import SourceError, resolve_source

    try:
        source = resolve_source(question.source)
    except SourceError as error:
        if "HF_HUB_OFFLINE" in str(error):
            return Answer(unknown=f"{question.source} isn't in the local cache; its size needs the network")
        return Answer(problem=str(error))
    try:
        options = WorkerOptions.model_validate(question.options)
        found = estimate(source.config, options, question.card_bytes)
    except ValueError as error:
        return Answer(problem=str(error))
    return Answer(estimate=msgspec.structs.asdict(found), total=found.total)


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the library is loaded: planning never downloads
    questions = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Question])
    sys.stdout.buffer.write(msgspec.json.encode([answer(question) for question in questions]) + b"\n")


if __name__ == "__main__":
    main()
