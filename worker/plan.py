"""`python -m worker.plan`: what workers would take, asked before any is started.

Reads a JSON list of questions from stdin, writes a list of answers in the same order to stdout. A process of
its own, since who plans a fleet doesn't import workers; it doesn't import torch, and never the network.
"""

from __future__ import annotations

import os
import sys

import msgspec

from contracts.options import WorkerOptions
from contracts.plan import Answer, Question


def answer(question: Question) -> Answer:
    """What one worker takes. Never fails: what is wrong is in the answer."""
    from worker.engine.estimate import estimate
    from worker.weights.source import NotCached, resolve_source

    try:
        options = WorkerOptions.model_validate(question.options)
        source = resolve_source(question.source, revision=options.revision)
    except NotCached:
        return Answer(unknown=f"{question.source} isn't in the local cache; its size needs the network")
    except ValueError as error:
        return Answer(problem=str(error))
    try:
        return Answer(estimate=estimate(source.config, options, question.card_bytes))
    except ValueError as error:
        return Answer(problem=str(error))


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the library is loaded: planning never downloads
    questions = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Question])
    sys.stdout.buffer.write(msgspec.json.encode([answer(question) for question in questions]) + b"\n")


if __name__ == "__main__":
    main()
