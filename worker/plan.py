"""`python -m worker.plan`: what workers would take, asked before any is started.

Reads a JSON list of questions from stdin, writes a list of answers in the same order to stdout. A process of
its own, since who plans a fleet doesn't import workers; it doesn't import torch, and never the network.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from contracts.options import WorkerOptions
from contracts.plan import Answer, Question


def answer(question: Question) -> Answer:
    """What one worker takes. Never fails: what is wrong is in the answer."""
    from worker.engine.estimate import estimate
    from worker.engine.sizes import DoesNotFit
    from worker.weights.source import NotCached, resolve_source

    try:
        options = WorkerOptions.model_validate(question.options)
        source = resolve_source(question.source, revision=options.revision)
        if source.kind == "safetensors" and Path(question.source).expanduser().exists():
            check_headers(source.path)  # what of a hub's model isn't there yet, comes with the worker
        return Answer(estimate=estimate(source.config, options, question.card_bytes))
    except NotCached:
        return Answer(unknown=f"{question.source} isn't in the local cache; its size needs the network")
    except DoesNotFit as error:
        return Answer(problem=str(error))
    except ValueError as error:
        return Answer(problem=str(error), invalid=True)
    except OSError as error:
        return Answer(problem=f"{question.source}: can't be read: {error}", invalid=True)


def check_headers(directory: Path) -> None:
    """SourceError when one of the directory's safetensors files can't be one: a copy that broke off, a page
    of a server's in the place of the file, a pointer of Git LFS."""
    from worker.weights.safetensors_header import read_safetensors_header, safetensors_files

    for file in safetensors_files(directory):
        read_safetensors_header(file)


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the library is loaded: planning never downloads
    questions = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Question])
    sys.stdout.buffer.write(msgspec.json.encode([answer(question) for question in questions]) + b"\n")


if __name__ == "__main__":
    main()
