"""What types can't say about a fleet file: names that collide, sources that aren't there, words for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from contracts.plain import describe_value
from contracts.sources import RANDOM, hub_id, mistake
from contracts.suggest import closest, did_you_mean
from gateway.yaml_source import KeyPath

# /rollouts/{model}/…, what the supervisor is asked (gateway/fleet/driver/routes.py).
ABOUT_ROLLOUTS = ("history", "pause", "resume", "promote", "abort", "undo")


def check_names(raw: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Names and aliases of an unvalidated fleet that collide, or a fleet without models."""
    if raw.get("models") == []:
        yield ("models",), "at least one model is needed"
    entries = _entries(raw)
    owner: dict[str, int] = {}
    for index, entry in entries:
        name = entry.get("name")
        if not isinstance(name, str):
            continue
        if name in owner:
            yield ("models", index, "name"), f"'{name}' is already the name of models[{owner[name]}]"
        owner.setdefault(name, index)
    names = dict(owner)
    for index, entry in entries:
        aliases = entry.get("aliases")
        for place, alias in enumerate(aliases if isinstance(aliases, list) else []):
            if not isinstance(alias, str):
                continue
            if alias in owner:
                kind = "name" if alias in names else "alias"
                yield (
                    ("models", index, "aliases", place),
                    f"'{alias}' is already the {kind} of models[{owner[alias]}]",
                )
            owner.setdefault(alias, index)
    yield from _ambiguous(entries)


def _ambiguous(entries: list[tuple[int, dict[str, Any]]]) -> Iterator[tuple[KeyPath, str]]:
    """Names that read as another one and what the supervisor is asked about that (`m/history` beside `m`)."""
    places: dict[str, KeyPath] = {}
    for index, entry in entries:
        if isinstance(entry.get("name"), str):
            places.setdefault(entry["name"], ("models", index, "name"))
        aliases = entry.get("aliases")
        for place, alias in enumerate(aliases if isinstance(aliases, list) else []):
            if isinstance(alias, str):
                places.setdefault(alias, ("models", index, "aliases", place))
    for name, path in places.items():
        other, _, word = name.rpartition("/")
        if word in ABOUT_ROLLOUTS and other in places:
            yield path, f"'{name}' can't be told from a question about '{other}'; name it otherwise"


def check_paths(raw: dict[str, Any], bases: tuple[Path, ...]) -> Iterator[tuple[KeyPath, str]]:
    """Paths of an unvalidated fleet that lead nowhere; the models' are made absolute in place."""
    yield from _check_audit_file(raw)
    for index, entry in _entries(raw):
        yield from _check_paths(index, entry, bases)


def _check_audit_file(raw: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """A place where no file can be written; a gateway that runs goes on without, so it is said here."""
    file: Any = raw
    for name in ("gateway", "audit", "file"):
        file = file.get(name) if isinstance(file, dict) else None
    if not isinstance(file, str) or not file:
        return
    try:
        path = Path(file).expanduser().absolute()
        place = next(place for place in (path, *path.parents) if place.exists())
        if path.is_dir():
            problem = f"{path} is a directory; name a file in it"
        elif place != path and not place.is_dir():
            problem = f"{place} is no directory"
        elif not os.access(place, os.W_OK):
            problem = f"{place} can't be written to; name another place, or change its owner"
        else:
            return
    except (OSError, ValueError, RuntimeError) as error:
        problem = str(error)
    yield ("gateway", "audit", "file"), problem


def _entries(raw: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    models = raw.get("models")
    if not isinstance(models, list):
        return []
    return [(index, entry) for index, entry in enumerate(models) if isinstance(entry, dict)]


def _check_paths(index: int, entry: dict[str, Any], bases: tuple[Path, ...]) -> Iterator[tuple[KeyPath, str]]:
    source = entry.get("source")
    if isinstance(source, str) and source:
        resolved, problem = _resolve_source(source, bases)
        entry["source"] = resolved
        if problem:
            yield ("models", index, "source"), problem
    worker = entry.get("worker")
    if not isinstance(worker, dict):
        return
    for option in ("tokenizer", "chat_template"):
        value = worker.get(option)
        if isinstance(value, str) and value:
            found = _find(value, bases)
            if found is None:
                yield ("models", index, "worker", option), _not_there(value, bases)
            else:
                worker[option] = str(found)


def _resolve_source(source: str, bases: tuple[Path, ...]) -> tuple[str, str | None]:
    """The source with an absolute path, and what is wrong with it; hub ids stay as they are."""
    prefix = RANDOM if source.startswith(RANDOM) else ""
    found = _find(source.removeprefix(prefix), bases)
    if found is None:
        if not prefix and hub_id(source, bases) is not None:
            return source, None
        hint = mistake(source, bases) if not prefix else ""
        return source, _not_there(source.removeprefix(prefix), bases) + hint
    if prefix and found.is_dir():
        if not (found / "config.json").is_file():
            return source, f"there is no config.json in the directory {found}, which random: needs"
    elif found.is_dir() and not (found / "config.json").exists() and not any(found.glob("*.gguf")):
        return source, f"the directory {found} holds no model: neither config.json nor a .gguf file is in it"
    return prefix + str(found), None


def _find(text: str, bases: tuple[Path, ...]) -> Path | None:
    for base in bases:
        try:
            path = base / Path(text).expanduser()
            if path.exists():
                return path.resolve()
        except (OSError, ValueError, RuntimeError):  # too long, a NUL in it, no such user: not there either
            return None
    return None


def _not_there(text: str, bases: tuple[Path, ...]) -> str:
    if Path(text).is_absolute():
        return f"{text} isn't there"
    return f"{text} isn't there; looked in {' and '.join(dict.fromkeys(map(str, bases)))}"


def check_variable(root: type[BaseModel], name: str, value: str, prefix: str) -> str | None:
    """What is wrong with the name of an environment variable: it looks like a key of the fleet, and is none.

    Variables of other things that begin with `prefix` are none of ours: those of workers and tests, and the
    addresses that Kubernetes gives to every container (PAGEFLEET_GATEWAY_PORT=tcp://…).
    """
    section, nested, _ = name.removeprefix(prefix).partition("__")
    if section.lower() in root.model_fields or re.match(r"(tcp|udp|sctp)://", value):
        return None
    keys = {_flat(key): prefix + key for key in _variables(root)}
    close = closest(_flat(name.removeprefix(prefix)), keys, 0.85)
    if close is not None:
        return f"there is no such setting; did you mean {keys[close]}?"
    if nested:
        names = ", ".join(f"{prefix}{field.upper()}__…" for field in root.model_fields)
        return f"there is no such setting; known are {names}"
    return None


def _flat(key: str) -> str:
    return re.sub("_+", "_", key)


def _variables(block: type[BaseModel], path: str = "") -> Iterator[str]:
    """`GATEWAY`, `GATEWAY__PORT` and so on: every key that the environment can set."""
    for name, field in block.model_fields.items():
        yield path + name.upper()
        inner = _block_in(field.annotation)
        if inner is not None and get_origin(field.annotation) is not tuple:
            yield from _variables(inner, f"{path}{name.upper()}__")


def describe(root: type[BaseModel], detail: ErrorDetails) -> str:
    """One pydantic error in words that name the value and the way out."""
    if detail["type"] == "extra_forbidden":
        return _unknown_key(root, detail["loc"])
    if detail["type"] == "missing":
        return "this key is needed"
    if detail["type"] == "string_pattern_mismatch":
        allowed = "letters, digits and . _ : / @ + - are allowed, starting with a letter or digit"
        return f"{allowed}, not {detail['input']!r:.100}"
    return describe_value(detail)


def _unknown_key(root: type[BaseModel], path: KeyPath) -> str:
    block = _block_at(root, path[:-1])
    known = sorted(block.model_fields) if block else []
    return "unknown key" + (did_you_mean(str(path[-1]), known) or f"; known here: {', '.join(known)}")


def _block_at(root: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    block: type[BaseModel] | None = root
    for part in path:
        if isinstance(part, int):
            continue
        field = block.model_fields.get(part) if block else None
        block = _block_in(field.annotation) if field else None
    return block


def _block_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(_block_in, get_args(annotation)) if found), None)
