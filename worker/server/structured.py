"""The form that an answer must have (StructuredOutputs), from a request's fields: OpenAI's response_format,
vLLM's structured_outputs, and the guided_* of its earlier versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from contracts.errors import bad_request, unavailable
from contracts.headers import QUEUE_FULL, REFUSED
from worker.grammar.check import CheckerBusy, GrammarChecker
from worker.grammar.checker import Settings
from worker.grammar.compiling import GrammarError
from worker.params import MAX_SCHEMA, ParamError, SamplingParams, StructuredOutputs
from worker.server.schemas import ResponseFormat, Sampling, StructuredFields
from worker.server.state import ServerState

_FORMATS = "'text', 'json_object' and 'json_schema' are"
_NOT_OFFERED = (
    "structural_tag",
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_additional_properties",
)

Given = tuple[str, str, Any]  # the request's field, that of StructuredOutputs, its value


def form_field(request: Sampling) -> str | None:
    """The request's field that asks for a form. ApiError 400 when several do."""
    fields = [field for field, _, _ in _given(request)]
    if len(fields) > 1:
        raise bad_request(
            f"{fields[0]} and {fields[1]} are both given, but an answer has one form; leave one of them out",
            fields[1],
        )
    return fields[0] if fields else None


def form_of(request: Sampling) -> StructuredOutputs | None:
    """The form that the request asks for. ApiError 400 when it asks for several, or one is out of bounds."""
    if form_field(request) is None:
        return None
    ((field, name, value),) = _given(request)
    if value == []:
        raise bad_request(f"{field} must hold at least one string", field)
    try:
        return StructuredOutputs(**{name: value})
    except ParamError as error:
        raise bad_request(str(error).replace(name, field, 1), field) from error


def with_form(
    request: Sampling, params: SamplingParams, form: StructuredOutputs, asked_by: str
) -> SamplingParams:
    """`params` with the form that the field `asked_by` asks for; ApiError 400 when another one does too."""
    field = form_field(request)
    if field is not None:
        raise bad_request(
            f"{asked_by} and {field} both say what the answer must look like; leave one of them out", field
        )
    return msgspec.structs.replace(params, structured_outputs=form)


async def check_form(state: ServerState, params: SamplingParams, field: str) -> None:
    """ApiError 400 naming `field` when the form that `params` ask for can't be used, 503 when that can't be
    known now."""
    if params.structured_outputs is not None:
        await check_forms(state, [(field, params.structured_outputs)])


async def check_forms(state: ServerState, forms: Iterable[tuple[str, StructuredOutputs]]) -> None:
    """The same of several forms, each with the field that asks for it."""
    for field, form in forms:
        await _check(state, form, field)


async def _check(state: ServerState, form: StructuredOutputs, field: str) -> None:
    _, _, text = state.ready()
    tokenizer = text.need_tokenizer(field)
    if state.grammars is None:
        names = [tokenizer.token_text(token) for token in tokenizer.special_ids]
        state.grammars = GrammarChecker(Settings(special_tokens=names))
    try:
        await state.grammars.check(form)
    except GrammarError as error:
        raise bad_request(f"{field} can't be used: {error}", field) from error
    except CheckerBusy:
        raise unavailable(
            "Too many requests wait for their schemas or grammars to be checked; try again.",
            QUEUE_FULL,
            headers={REFUSED: QUEUE_FULL},
        ) from None


def _given(request: Sampling) -> Iterator[Given]:
    yield from _from_format(request.response_format)
    yield from _from_structured(request.structured_outputs)
    if _is_set(request.guided_json):
        yield "guided_json", "json", _schema_text(request.guided_json, "guided_json")
    for name in ("regex", "choice", "grammar"):
        value = getattr(request, f"guided_{name}")
        if value is not None:
            yield f"guided_{name}", name, value


def _from_format(format: ResponseFormat | None) -> Iterator[Given]:
    if format is None or format.type == "text":
        return
    if format.type == "json_object":
        yield "response_format", "json_object", True
    elif format.type == "json_schema":
        field = "response_format.json_schema"
        if format.json_schema is None:
            raise bad_request(f"{field} is missing.", field)
        field += ".schema"
        if not _is_set(format.json_schema.schema):
            raise bad_request(f"{field} is missing.", field)
        yield field, "json", _schema_text(format.json_schema.schema, field)
    else:
        raise bad_request(
            f"response_format.type {format.type[:50]!r} is not supported; {_FORMATS}", "response_format.type"
        )


def _from_structured(fields: StructuredFields | None) -> Iterator[Given]:
    if fields is None:
        return
    for name in _NOT_OFFERED:
        if getattr(fields, name):
            raise bad_request(
                f"structured_outputs.{name} is not supported; leave it out", f"structured_outputs.{name}"
            )
    found = False
    if _is_set(fields.json):
        found = True
        yield "structured_outputs.json", "json", _schema_text(fields.json, "structured_outputs.json")
    for name in ("regex", "choice", "grammar", "json_object"):
        value = getattr(fields, name)
        if value is not None and value is not False:
            found = True
            yield f"structured_outputs.{name}", name, value
    if not found:
        raise bad_request(
            "structured_outputs needs one of json, regex, choice, grammar and json_object",
            "structured_outputs",
        )


def _is_set(raw: msgspec.Raw) -> bool:
    return bool(raw) and memoryview(raw).tobytes() != b"null"


def _schema_text(raw: msgspec.Raw, field: str) -> str:
    """A schema's JSON; clients send it as an object, or as text."""
    if len(memoryview(raw)) > 4 * MAX_SCHEMA:  # more than escapes can account for
        raise bad_request(f"{field} may have at most {MAX_SCHEMA} characters", field)
    try:
        text = bytes(raw).decode()
        return msgspec.json.decode(raw, type=str) if text.startswith('"') else text
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise bad_request(f"{field} is not valid JSON: {error}", field) from None
