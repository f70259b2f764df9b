"""Bodies of requests, from JSON to the types of schemas.py; what is wrong with them is a 400 that names the
field as the client wrote it."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from contracts.errors import bad_request, invalid_json
from worker.server.not_offered import check_offered_in

MAX_TEMPLATE_VARIABLES = 65_536  # bytes of JSON

T = TypeVar("T")

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def decode(body: bytes, type: type[T], within: str = "") -> T:
    """The request in `body`. ApiError 400: not JSON, or a field of the wrong type, named in `param`; in the
    place of a missing field, one that is sent instead and refused. RecursionError: nested too deeply.

    `within`: the field that `body` is the value of, where that is read apart.
    """
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        if not within and _MISSING.match(str(error)):
            check_offered_in(body, type)
        raise _wrong_type(str(error), type, within) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid_json(error, body) from error


def template_variables(raw: msgspec.Raw) -> dict[str, Any]:
    """What `chat_template_kwargs` holds. It is looked at apart, so that its size can be limited first:
    millions of nested lists would keep the process busy for seconds."""
    if not raw:
        return {}
    if len(memoryview(raw)) > MAX_TEMPLATE_VARIABLES:
        raise bad_request(
            f"chat_template_kwargs may have at most {MAX_TEMPLATE_VARIABLES} bytes", "chat_template_kwargs"
        )
    try:
        return msgspec.json.decode(raw, type=dict[str, Any] | None) or {}
    except msgspec.ValidationError:
        raise bad_request("chat_template_kwargs must be an object", "chat_template_kwargs") from None


def _wrong_type(message: str, type: Any, within: str) -> Exception:
    found = _PATH.search(message)
    path = found["path"].removesuffix("[...]") if found else ""
    allowed = _values(type, _STEP.findall(path)) if message.startswith("Invalid enum value") else ()
    if within:
        path = f"{within}.{path}" if path and path[0] != "[" else within + path
    text = message[: found.start()] if found else message
    missing = _MISSING.match(text)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return bad_request(f"{path} is missing.", path)
    where = path or "The request body"
    if allowed:
        text = f"{text[0].lower()}{text[1:]}; it is one of {', '.join(map(repr, allowed))}"
        return bad_request(f"{where} has an {text}.", path)
    return bad_request(f"{where} has the wrong type or value: {text}", path or None)


def _values(kind: Any, steps: Sequence[str]) -> tuple[Any, ...]:
    """The values that a field may have, `steps` on from a value of the type `kind`; none where they aren't
    listed."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return next(filter(None, (_values(one, steps) for one in arguments)), ())
    if not steps:
        return arguments if origin is Literal else ()
    if steps[0].startswith("["):
        return _values(arguments[0], steps[1:]) if origin is list else ()
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return ()
    inner = (field.type for field in msgspec.structs.fields(kind) if field.encode_name == steps[0])
    return next((_values(one, steps[1:]) for one in inner), ())
