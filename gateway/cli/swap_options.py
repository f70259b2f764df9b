"""What people write after `pagefleet swap start`: steps and settings, refused when nobody could mean them.

JSON, in which they travel to the supervisor, has no infinity (it would arrive as null: the default), no dates
and no integers beyond 64 bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import click
import yaml

from gateway.cli.common import fail
from gateway.fleet.errors import EXIT_INVALID
from gateway.fleet.rollout import Options

_LARGEST = 2**63
_PERCENT = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*%?\s*")


class StepsParam(click.ParamType[Any]):
    """``5%,25%,100%``; the signs may be left out."""

    name = "PERCENTS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):  # the default
            return value
        parts = [_PERCENT.fullmatch(part) for part in str(value).split(",")]
        steps = tuple(float(part[1]) for part in parts if part is not None)
        if len(steps) < len(parts):
            what = f"{value!r:.100} is no list of percentages; write them as in 5%,25%,100%"
            self.fail(what, param, ctx)
        return steps


def settings_of(texts: Iterable[str]) -> dict[str, Any]:
    """Worker options of ``max_num_seqs=8``, …: values are read as in the fleet file. What is wrong ends the
    command with code 2."""
    settings: dict[str, Any] = {}
    for text in texts:
        name, is_setting, written = text.partition("=")
        name = name.strip().replace("-", "_")
        if not is_setting or not name:
            fail(f"--set {text:.80}: write it as OPTION=VALUE, such as max_num_seqs=8", EXIT_INVALID)
        if name in settings:
            fail(f"--set {name} is given twice; leave one out", EXIT_INVALID)
        settings[name] = _value(text, written)
    return settings


def _value(text: str, written: str) -> Any:
    try:
        value = yaml.safe_load(written)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that is none
        fail(f"--set {text:.80}: the value isn't YAML; put text in quotes", EXIT_INVALID)
    problem = _problem(value)
    if problem is not None:
        fail(f"--set {text:.80}: {problem}", EXIT_INVALID)
    return value


def _problem(value: Any) -> str | None:
    """Why no option can have such a value."""
    match value:
        case None | bool() | str():
            return None
        case int():
            return None if -_LARGEST <= value < _LARGEST else "the number is too large"
        case float():
            return None if math.isfinite(value) else "a finite number is needed"
        case list():
            return next(filter(None, map(_problem, value)), None)
        case dict():
            keys = None if all(isinstance(key, str) for key in value) else "keys must be text"
            return keys or next(filter(None, map(_problem, value.values())), None)
    return f"no option takes a {type(value).__name__}; put text in quotes"


def refuse_bad(options: Options) -> Options:
    """The same options; the command ends with code 2 when there can't be such a rollout."""
    problems = options.problems()
    if problems:
        fail("; ".join(problems), EXIT_INVALID)
    return options
