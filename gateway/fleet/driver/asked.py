"""What `swap start` asks for: checked, before anything starts, in the words of the fleet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from contracts.options import WorkerOptions
from contracts.units import format_duration
from gateway.config_check import check_paths, describe
from gateway.fleet.errors import EXIT_CONFLICT, EXIT_INVALID, EXIT_MISFIT
from gateway.fleet.ledger import Place, Worker
from gateway.fleet.rollout import Options, Refusal, Version
from gateway.fleet.versions import options_of
from gateway.settings import ModelEntry


class SwapError(Exception):
    """Why nothing was done, with the command line's exit code for it."""

    def __init__(self, message: str, exit_code: int = EXIT_CONFLICT) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    @classmethod
    def of(cls, refusal: Refusal) -> SwapError:
        return cls(refusal.reason, refusal.exit_code)


class StartRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /rollouts/{model}`. `source`: what the model is to run, None: what it runs now;
    `set`: worker options to change; what isn't named stays as it is. `directory`: where relative paths are
    looked up."""

    source: str | None = None
    set: dict[str, Any] = {}
    options: Options = Options()
    directory: str | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout would do: the answer of a dry run. `changes`: option → (now, then); `misfit`: why both
    versions don't fit together; `problem`: why the new one can't run by itself, `invalid`: which isn't for
    want of memory; `places`: memory with all that run at a time; `seconds`: of the whole, when requests in
    flight end at once; None while nothing is known of how long a start takes."""

    model: str
    old: Version
    new: Version
    changes: dict[str, tuple[Any, Any]]
    options: Options
    workers: tuple[Worker, ...]
    places: tuple[Place, ...]
    misfit: str | None
    problem: str | None
    unknown: str | None
    seconds: float | None
    invalid: bool = False

    @property
    def exit_code(self) -> int:
        if self.invalid:
            return EXIT_INVALID
        return EXIT_MISFIT if self.misfit or self.problem else 0


def new_version(entry: ModelEntry, old: Version, asked: StartRequest) -> Version:
    """The version that is asked for; SwapError (exit code 2) names everything that is wrong with it."""
    worker = {**old.worker, **asked.set}
    directory = Path(asked.directory) if asked.directory is not None else Path("/")
    source = old.source if asked.source is None else asked.source
    raw: dict[str, Any] = {"models": [{"source": source, "worker": worker}]}
    if not source:
        raise SwapError("--to: a source is needed: a directory, a .gguf file or a hub id", EXIT_INVALID)
    problems = [f"{_place(path)}: {message}" for path, message in check_paths(raw, (directory,))]
    (found,) = raw["models"]
    try:
        options = WorkerOptions.model_validate(found["worker"])
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            name = ".".join(map(str, detail["loc"]))
            problems.append(f"--set{name and ' '}{name}: {describe(WorkerOptions, detail)}")
        raise SwapError("; ".join(problems), EXIT_INVALID) from None
    problems += asked.options.problems()
    if problems:
        raise SwapError("; ".join(problems), EXIT_INVALID)
    return Version(source=found["source"], worker=options_of(options))


def _place(path: tuple[str | int, ...]) -> str:
    """Of ``models[0].source`` or ``models[0].worker.NAME``."""
    return "--to" if path[-1] == "source" else f"--set {path[-1]}"


def changes_between(old: Version, new: Version) -> dict[str, tuple[Any, Any]]:
    """The options that differ, with their values in both."""
    before, after = (
        WorkerOptions.model_validate(version.worker).model_dump(mode="json") for version in (old, new)
    )
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def expected_seconds(start: float | None, options: Options) -> float | None:
    """Of a rollout without users to wait for: the start, and each step's hold."""
    steps = 1 if options.strategy == "recreate" else len(options.steps)
    return None if start is None else start + steps * options.hold


def in_words(seconds: float | None) -> str:
    """``about 1m30s``"""
    return "unknown" if seconds is None else f"about {format_duration(round(seconds))}"
