"""StructuredOutputs compiled by llguidance: a matcher, which knows the tokens that may come next.

llguidance (github.com/guidance-ai/llguidance) follows the answer with an Earley parser over derivatives of
regular expressions, lazily: compiling is quick, the work is done as the answer goes. Its limits bound what a
single step of that may cost.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from contracts.errors import bounded
from worker.grammar.after_reasoning import after_reasoning
from worker.grammar.closing import close_objects
from worker.params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# A thread that compiles needs so much stack: llguidance descends into chains of rules, and a chain as long as
# the longest grammar must not end the process.
STACK_BYTES = 256 << 20
MAX_GBNF = 16_384  # characters; it is converted in Python
_MAX_ERROR = 500  # characters of a message
# Between two elements of a document. Without a bound, a small model may write nothing else.
_WHITESPACE = r"[ \n\r\t]{1,24}"
# Parts of llguidance's messages about its own limits, which its caller has set.
_LIMITS = ("too many", "too large", "precomputation failed", "Current row has", "fuel")
# In front of an error in a schema or a regular expression that is part of a grammar, and behind it: the place
# in the grammar, which was made here of what the client sent.
_PART: Final = re.compile(
    r'at \d+\(\d+\): (?:failed to compile JSON schema: |invalid regex ".*?" \(in regex\): )', re.DOTALL
)
# Errors about references; llguidance names the schema itself by this address.
_OWN_ADDRESS: Final = "json-schema:///"
_NO_PLACE: Final = re.compile(r"Pointer '(.*?)' does not exist", re.DOTALL)
_ELSEWHERE: Final = re.compile(r"Resource '(.*?)' is not present in a registry.*", re.DOTALL)
_EXCERPT: Final = re.compile(r"\n +\d+ \| .*", re.DOTALL)
# oneOf as most schemas mean it (one of several kinds of things): that only one fits isn't enforced.
SCHEMA_OPTIONS: Final[JsonCompileOptions] = {
    "whitespace_pattern": _WHITESPACE,
    "coerce_one_of": True,
    "lenient": False,
}
NOTHING_MATCHES = "no answer can have this form"


class GrammarError(ValueError):
    """A schema, regular expression or grammar that can't be used; the message says why."""


def compile_matcher(tokenizer: LLTokenizer, form: StructuredOutputs) -> LLMatcher:
    """A matcher before the first token of an answer; the tokens that may come first are worked out already.

    Call it on a thread with STACK_BYTES; it leaves the interpreter to others. Raises GrammarError.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=500_000, step_lexer_fuel=50_000, max_lexer_states=20_000, verbose_errors=False
    )
    source = _source(form)
    if form.thinking != "no":
        source = after_reasoning(source, form.thinking, tokenizer)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(readable(matcher.get_error()))
    if matcher.is_stopped() and not matcher.is_accepting():
        raise GrammarError(NOTHING_MATCHES)
    return matcher


def readable(error: str) -> str:
    """llguidance's message, for a person and of bounded length."""
    if error.startswith("NoExtension"):
        return NOTHING_MATCHES
    text = error.removesuffix("\n<non-verbose/>").strip()
    text = text.replace("Unimplemented keys:", "keywords that can't be enforced:")
    text = text.replace(_OWN_ADDRESS, "")
    text = _NO_PLACE.sub(r"a $ref leads to '#\1', which isn't in the schema", text)
    text = _ELSEWHERE.sub(r"a $ref leads to '\1'; only references within the schema are followed", text)
    part = _PART.match(text)
    if part is not None:
        text = _EXCERPT.sub("", text[part.end() :])
    if any(limit in text for limit in _LIMITS):
        text = f"it takes too much to follow ({text.partition(';')[0]}); make it smaller or less ambiguous"
    return bounded(text, _MAX_ERROR)


def _source(form: StructuredOutputs) -> str:
    """The form in llguidance's own format. GrammarError when it isn't even that."""
    from llguidance import LLMatcher

    if isinstance(form.json, str):
        return _schema_source(form.json)
    if form.json_object:
        return _schema_source('{"type": "object"}')
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, form.choice)))
    assert form.grammar is not None
    return LLMatcher.grammar_from_lark(_lark(form.grammar))


def _schema_source(text: str) -> str:
    from llguidance import LLMatcher

    try:
        schema = json.loads(text)
        close_objects(schema)
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"the schema is not valid JSON: {error}") from None
    if schema is False:
        raise GrammarError(NOTHING_MATCHES)
    if schema is True:
        schema = {}
    elif not isinstance(schema, dict):
        raise GrammarError("a schema must be an object, or true or false")
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SCHEMA_OPTIONS)
    except ValueError as error:
        raise GrammarError(str(error)) from None


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(text):
        return text
    if len(text) > MAX_GBNF:
        raise GrammarError(
            f"a grammar in GBNF may have at most {MAX_GBNF} characters, not {len(text)}; write it in Lark's "
            "syntax, with a rule named start"
        )
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply") from None
    except Exception as error:  # the converter raises bare ones too
        raise GrammarError(f"it is neither Lark (there is no rule named start) nor GBNF: {error}") from None
