"""Forms are tried out in a process of their own: what is wrong is said, what is hostile ends there."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from worker.grammar import check
from worker.grammar.check import CheckerBusy, GrammarChecker
from worker.grammar.checker import Settings
from worker.grammar.compiling import MAX_GBNF, GrammarError, readable
from worker.params import MAX_GRAMMAR, MAX_SCHEMA, ParamError, StructuredOutputs

PATIENCE = 120.0  # seconds: the machine may be starved


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    """One that ends what is endless late: on a busy machine anything takes more of a processor, too."""
    checker = GrammarChecker(Settings(special_tokens=["<|im_end|>"], cpu_seconds=30))
    yield checker
    checker.close()


@pytest.fixture
async def hasty() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(Settings(cpu_seconds=1))
    yield checker
    checker.close()


async def problem(checker: GrammarChecker, **fields: Any) -> str:
    try:
        async with asyncio.timeout(PATIENCE):
            await checker.check(StructuredOutputs(**fields))
    except GrammarError as error:
        return str(error)
    return ""


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def chain(rules: int) -> str:
    return "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(rules)) + f'a{rules}: "x"\n'


def needs(child: str) -> dict[str, Any]:
    """An object in an object, and so on."""
    return {"type": "object", "properties": {child: {"$ref": "#"}}, "required": [child]}


LIST_OF_ITSELF = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a~1b"}}
OR_NULL = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
GOOD: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"json": {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}},
    {"json": {"oneOf": [{"type": "string"}, {"type": "null"}]}},
    {"json": True},
    {"json": {**needs("child"), "required": []}},
    {"json": {**needs("child"), "properties": {"child": OR_NULL}}},
    {"json": {**needs("child"), "type": ["object", "string"]}},
    {"json": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {**LIST_OF_ITSELF, "minItems": 0}}}},
    {"json_object": True},
    {"regex": "[a-f]{3}(-[0-9]+)?"},
    {"choice": ["yes", "no", 'é"\n\\/😀']},
    {"grammar": 'start: "a" /[0-9]+/'},
    {"grammar": 'root ::= item+\nitem ::= "- " [^\\n]+ "\\n"'},
    {"grammar": 'start: "a" <|im_end|>'},
    {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"regex": "(((((a*)*)*)*)*)*b"},
    {"grammar": chain(4000)},
]

BAD: list[tuple[dict[str, Any], str]] = [
    ({"json": '{"type":'}, "not valid JSON: Expecting value: line 1 column 9"),
    ({"json": "[]"}, "must be an object"),
    ({"json": {"type": "strnig"}}, "strnig"),
    ({"json": {"not": {"type": "string"}}}, '"not"'),
    ({"json": {"type": "string", "format": "made-up"}}, "made-up"),
    ({"json": {"$ref": "https://example.com/schema.json"}}, "'https://example.com/schema.json'; only"),
    ({"json": {"$ref": "file:///etc/passwd"}}, "file:///etc/passwd"),
    ({"json": {"$ref": "#/$defs/nowhere"}}, "a $ref leads to '#/$defs/nowhere', which isn't in the schema"),
    ({"json": {"$ref": "#"}}, "no answer can have this form"),
    ({"json": {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}}}, "Schema intersection"),
    ({"json": needs("child")}, "no answer can have this form"),
    ({"json": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": LIST_OF_ITSELF}}}, "no answer can have this form"),
    ({"json": {"type": "object", "anyOf": [needs("a"), needs("b")]}}, "no answer can have this form"),
    ({"json": {"allOf": [{"type": "object"}, needs("a")]}}, "no answer can have this form"),
    ({"json": False}, "no answer can have this form"),
    ({"json": nested(20_000)}, "nested too deeply"),
    ({"json": nested(300)}, "recursion limit"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": "(" * 5000 + "a" + ")" * 5000}, "regex"),
    ({"grammar": 'start: "a" nowhere'}, "nowhere"),
    ({"grammar": 'root ::= "a" nowhere'}, "nowhere"),
    ({"grammar": "root ::= (\n"}, "Expected ')' at line 2"),
    ({"grammar": "a: b"}, "neither Lark"),
    ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "nested too deeply"),
    ({"grammar": "root ::= " + '"a" ' * (MAX_GBNF // 3)}, f"at most {MAX_GBNF} characters"),
    ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply"),
    ({"json": {"allOf": [{"properties": {f"p{i}": {}}} for i in range(500)]}}, "smaller or less ambiguous"),
    ({"grammar": "start: start"}, "no answer can have this form"),
    ({"grammar": "start: <|no_such_token|>"}, "no_such_token"),
]


async def test_what_can_be_compiled_passes(checker: GrammarChecker) -> None:
    for fields in GOOD:
        assert await problem(checker, **fields) == "", fields


async def test_what_is_wrong_is_said(checker: GrammarChecker) -> None:
    for fields, part in BAD:
        found = await problem(checker, **fields)
        assert part in found, fields
        assert len(found) < 700


@pytest.mark.parametrize(
    "error",
    [
        "lexer error: too many states: 20000 >= 20000",
        "Parser Error: Current row has 5999 items; max is 2000; consider making your grammar left-recursive",
        "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable limits.precompute",
    ],
)
def test_limits_of_the_library_are_told_with_the_way_out(error: str) -> None:
    """Its own advice is for whoever calls it."""
    told = readable(error)
    assert told == f"it takes too much to follow ({error.split(';')[0]}); make it smaller or less ambiguous"


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a"},
        {"grammar": 'start: "a" %json {"not": {}}'},
        {"grammar": "start: A\nA: /(a/"},
    ],
)
async def test_of_a_part_of_a_grammar_its_own_error_is_told(
    checker: GrammarChecker, fields: dict[str, Any]
) -> None:
    """Not the place in a grammar that was made around it, nor that."""
    found = await problem(checker, **fields)
    assert found.startswith(("regex parse error:\n    (a\n", "keywords that can't be enforced"))
    assert " | " not in found
    assert "start" not in found
    assert (await problem(checker, grammar="start: foo")).startswith('at 1(8): unknown name: "foo"')


async def test_what_takes_too_long_or_too_much_ends_the_process_not_the_server(
    hasty: GrammarChecker,
) -> None:
    endless = {"type": "integer", "multipleOf": 999_983}
    assert "too much time or memory" in await problem(hasty, json=endless)
    assert await problem(hasty, json_object=True) == ""
    starved = GrammarChecker(Settings(memory_bytes=320 << 20))
    try:
        large = {"enum": [f"{i:07}" * 3 for i in range(MAX_SCHEMA // 30)]}
        assert "too much time or memory" in await problem(starved, json=large)
    finally:
        starved.close()


async def test_verdicts_are_remembered(checker: GrammarChecker) -> None:
    assert await problem(checker, regex="(a") == await problem(checker, regex="(a") != ""
    checker.close()
    assert await problem(checker, regex="(a") != ""
    assert checker._process is None


async def test_a_process_that_died_is_replaced(checker: GrammarChecker) -> None:
    assert await problem(checker, regex="a") == ""
    assert checker._process is not None
    checker._process.kill()
    assert "too much time" in await problem(checker, regex="b")
    assert await problem(checker, regex="c") == ""


async def test_a_process_that_hangs_is_replaced(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await problem(checker, regex="a") == ""
    assert checker._process is not None
    checker._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(check, "_LONGEST", 0.2)
    assert "too much time" in await problem(checker, regex="b")
    monkeypatch.undo()
    assert await problem(checker, regex="c") == ""


async def test_a_client_that_leaves_does_not_break_the_exchange(checker: GrammarChecker) -> None:
    leaving = asyncio.ensure_future(problem(checker, regex="(a"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert await problem(checker, regex="b") == ""
    assert "unclosed" in await problem(checker, regex="(a")


async def test_so_many_may_wait_and_no_more(checker: GrammarChecker) -> None:
    forms = [StructuredOutputs(regex=f"a{{{i}}}") for i in range(80)]
    async with asyncio.timeout(PATIENCE):
        results = await asyncio.gather(*map(checker.check, forms), return_exceptions=True)
    assert results.count(None) == 64
    assert sum(isinstance(result, CheckerBusy) for result in results) == 16


async def test_many_may_wait_for_one_form(checker: GrammarChecker) -> None:
    form = StructuredOutputs(regex="[a-z]{3}")
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(*(checker.check(form) for _ in range(300))) == [None] * 300


async def test_nothing_is_checked_for_those_who_have_left(hasty: GrammarChecker) -> None:
    """Forms take a process up to five seconds each: who asks for many and leaves must not hold up others."""
    endless = [{"type": "integer", "multipleOf": 999_983 + 2 * i} for i in range(64)]
    leaving = [asyncio.ensure_future(hasty.check(StructuredOutputs(json=form))) for form in endless]
    await asyncio.sleep(0)
    with pytest.raises(CheckerBusy):
        await hasty.check(StructuredOutputs(regex="a"))
    for one in leaving:
        one.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    async with asyncio.timeout(PATIENCE):
        while len(hasty._checks) > 1:
            await asyncio.sleep(0.01)
    assert await problem(hasty, regex="a") == ""
    assert len(hasty._found) <= 2


async def test_close_leaves_no_process(checker: GrammarChecker) -> None:
    assert await problem(checker, regex="a") == ""
    assert checker._process is not None
    process = psutil.Process(checker._process.pid)
    checker.close()
    assert not process.is_running()


def test_forms_are_bounded() -> None:
    forms: list[dict[str, Any]] = [
        {"json": "x" * (MAX_SCHEMA + 1)},
        {"grammar": "x" * (MAX_GRAMMAR + 1)},
        {"choice": []},
        {"regex": "a", "json_object": True},
        {"json": json.dumps({}), "choice": ["a"]},
    ]
    for fields in forms:
        with pytest.raises(ParamError):
            StructuredOutputs(**fields)
