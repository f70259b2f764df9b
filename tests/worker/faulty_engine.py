"""The engine process of a worker or an AsyncLLM, whose steps fail where a prompt holds the token POISON.

`command` starts it; run with `-m`, it is that process.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from worker.engine import process
from worker.ipc.client import engine_command
from worker.request import Step
from worker.runner.step import Launched, Runner

POISON = 13


def command(spec: str) -> list[str]:
    """`worker.ipc.client.engine_command` for this engine."""
    usual = engine_command(spec)
    return [sys.executable, "-m", "tests.worker.faulty_engine", *usual[usual.index("--options") :]]


def fail_on_poison(runner: type[Runner] | Runner, error: type[Exception] = torch.OutOfMemoryError) -> None:
    """From now on the sampler fails, after the model has run, in steps that hold POISON."""
    sample = runner.sample

    def failing(*arguments: Any) -> None:
        sample(*arguments)
        (launched,) = (value for value in arguments if isinstance(value, Launched))
        if holds_poison(launched.step):
            raise error("no memory is left, not even for this")

    runner.sample = failing  # type: ignore[method-assign,assignment]


def holds_poison(step: Step) -> bool:
    return any(POISON in row.request.tokens[: row.request.prompt_length] for row in step.rows)


if __name__ == "__main__":
    process._FAILURES_SECONDS = math.inf  # however slow the machine is
    fail_on_poison(Runner)
    process.main()
