"""SamplingParams: how one request's tokens are chosen. vLLM's names and meanings.

The same object travels to the engine process (msgspec), so it holds plain values only. Bounds are checked on
construction; the error names the field, the value and the bound.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, NoReturn

import msgspec

from worker.vllm_python import known_parameters

_M64 = (1 << 64) - 1
MAX_N = 128
MAX_STOP = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MIN_REPETITION_PENALTY = 0.01  # it divides: far below, logits leave float32 and every draw is the same token
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256  # characters; 8192 all together
MAX_BAD_WORDS_LENGTH = 8192
MAX_BAD_WORD_TOKENS = 4 * (MAX_BAD_WORD_LENGTH + 1)  # a byte each at worst, and the space before it
MAX_SCHEMA = 262_144  # characters of a JSON schema
MAX_REGEX = 16_384  # characters
MAX_GRAMMAR = 65_536  # characters
MAX_CHOICES = 1024
MAX_CHOICE_LENGTH = 4096  # characters; 65,536 all together
GREEDY_TEMPERATURE = 1e-5  # below it, arg max; the distribution would be one token to float32 anyway


class Bounds(NamedTuple):
    """`above`: `low` itself is too low; `whole`: no fractions."""

    low: float
    high: float
    above: bool = False
    whole: bool = False


# Of every number among the sampling parameters: what checks them, and what the API's description says.
BOUNDS: Final[Mapping[str, Bounds]] = {
    "n": Bounds(1, MAX_N, whole=True),
    "temperature": Bounds(0, 2),
    "top_p": Bounds(0, 1, above=True),
    "top_k": Bounds(-1, 1 << 31, whole=True),
    "min_p": Bounds(0, 1),
    "seed": Bounds(-(2**63), 2**63 - 1, whole=True),
    "repetition_penalty": Bounds(MIN_REPETITION_PENALTY, 2),
    "presence_penalty": Bounds(-2, 2),
    "frequency_penalty": Bounds(-2, 2),
    "logprobs": Bounds(0, MAX_LOGPROBS, whole=True),
    "prompt_logprobs": Bounds(0, MAX_LOGPROBS, whole=True),
    "truncate_prompt_tokens": Bounds(-1, 1 << 31, whole=True),  # but not 0
    "max_tokens": Bounds(0, 1 << 31, whole=True),  # 0 only for the sake of prompt_logprobs
    "min_tokens": Bounds(0, 1 << 31, whole=True),
}
OPTIONAL: Final = frozenset(
    {"seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "max_tokens"}
)  # None: as if there were none
TOKEN: Final = Bounds(0, 1 << 31, whole=True)
BIAS: Final = Bounds(-100, 100)


class ParamError(ValueError):
    """A sampling parameter out of bounds; `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


Thinking = Literal["no", "may", "open"]
FORMS: Final = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer must look like: exactly one of the fields is set.

    Whether a schema, a regular expression or a grammar can be compiled is found where that is done.

    Args:
        json: a JSON schema as text; Python callers may give the schema itself.
        regex: the whole answer matches it (Rust's `regex` syntax; no look-around, no back-references).
        choice: the answer is one of these strings.
        grammar: in Lark's syntax, or in GBNF; the answer is derived from its start (root) rule.
        json_object: any JSON object.
        thinking: what comes before it: "may": reasoning, if the model opens it; "open": the rest of reasoning
            that the prompt has opened. Reasoning has any form, and must be closed.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    json_object: bool = False
    thinking: Thinking = "no"

    def __post_init__(self) -> None:
        if isinstance(self.json, (dict, bool)):
            msgspec.structs.force_setattr(self, "json", json.dumps(self.json))
        if isinstance(self.choice, str):
            _fail("choice", "choice must be a list of strings")
        msgspec.structs.force_setattr(self, "choice", tuple(self.choice or ()))
        given = [name for name in FORMS if getattr(self, name) not in (None, (), False)]
        if not given:
            _fail("structured_outputs", f"structured_outputs needs one of {', '.join(FORMS)}")
        if len(given) > 1:
            _fail(given[1], f"only one of {' and '.join(given)} may be given: an answer has one form")
        if not isinstance(self.json_object, bool):
            _fail("json_object", f"json_object must be true or false, not {self.json_object!r}")
        for name, longest in (("json", MAX_SCHEMA), ("regex", MAX_REGEX), ("grammar", MAX_GRAMMAR)):
            _check_text(name, getattr(self, name), longest)
        if len(self.choice) > MAX_CHOICES:
            _fail("choice", f"choice may hold at most {MAX_CHOICES} strings, not {len(self.choice)}")
        for text in self.choice:
            _check_text("choice", text, MAX_CHOICE_LENGTH)
        if sum(map(len, self.choice)) > MAX_GRAMMAR:
            _fail("choice", f"the strings of choice may have at most {MAX_GRAMMAR} characters together")


class _Parameters(type(msgspec.Struct)):  # type: ignore[misc]
    """Tells those who come from vLLM about parameters that aren't here; costs nothing where all are."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        try:
            return super().__call__(*args, **given)
        except TypeError:
            known = known_parameters(given, cls.__struct_fields__)
            if len(known) == len(given):
                raise
        return super().__call__(*args, **known)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=_Parameters):
    """Sampling parameters of one request.

    Args:
        n: answers per prompt, 1 to 128.
        temperature: 0 to 2; below 1e-5 is greedy.
        top_p: smallest set of tokens whose probabilities sum to at least this, (0, 1].
        top_k: most likely tokens kept; 0 or -1 keeps all.
        min_p: tokens less likely than min_p times the likeliest are dropped, [0, 1].
        seed: same seed, prompt and parameters, same tokens, whatever else runs.
        max_tokens: most tokens generated; None: what max_model_len leaves; 0 only with prompt_logprobs, which
            are all that is computed then.
        min_tokens: end-of-sequence and stop tokens are masked before this many.
        stop: strings that end the answer; they are not part of it unless include_stop_str_in_output.
        stop_token_ids: tokens that end the answer.
        ignore_eos: go on after the end-of-sequence token.
        repetition_penalty: over prompt and output, 0.01 to 2; 1 is none (CTRL, arXiv 1909.05858).
        presence_penalty, frequency_penalty: over the output, -2 to 2.
        logit_bias: token id -> addend, -100 to 100.
        allowed_token_ids: the only tokens that may come, at most 16,384; None: all.
        bad_words: texts that must not come, at most 256. Whoever has the tokenizer makes tokens of them.
        bad_words_token_ids: the same as tokens: the last one of each is masked where the others come just
            before it in the output.
        logprobs: number of alternatives reported a token, 0 to 20; None: none at all.
        prompt_logprobs: the same for the tokens of the prompt.
        truncate_prompt_tokens: keep the last so many tokens of a prompt; -1: as many as leave room for
            max_tokens; None: all.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: as vLLM takes it; a token's text here never depends on its neighbours,
            so there are no such spaces to leave out.
        structured_outputs: the form that the answer must have; None: any.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        # Python callers may write stop="x", stop=["x"] or stop=None, whatever the annotation says.
        stop: object = self.stop
        stops = (stop,) if isinstance(stop, str) else _listed("stop", self.stop)
        msgspec.structs.force_setattr(self, "stop", stops)
        ends = _listed("stop_token_ids", self.stop_token_ids)
        msgspec.structs.force_setattr(self, "stop_token_ids", ends)
        words: object = self.bad_words
        if isinstance(words, str):
            _fail("bad_words", "bad_words must be a list of strings")
        msgspec.structs.force_setattr(self, "bad_words", _listed("bad_words", self.bad_words))
        sequences = tuple(map(tuple, self.bad_words_token_ids or ()))
        msgspec.structs.force_setattr(self, "bad_words_token_ids", sequences)
        if self.allowed_token_ids is not None:
            allowed = _listed("allowed_token_ids", self.allowed_token_ids)
            msgspec.structs.force_setattr(self, "allowed_token_ids", allowed)
        bias: object = self.logit_bias
        if bias is None:
            msgspec.structs.force_setattr(self, "logit_bias", {})
        for name, bounds in BOUNDS.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                _check_number(name, value, bounds)
        self._check_ends()
        self._check_tokens()
        form: object = self.structured_outputs
        if isinstance(form, dict):
            unknown = form.keys() - set(FORMS)
            if unknown:
                _fail(
                    "structured_outputs",
                    f"structured_outputs has no {min(unknown)!r}; it has {', '.join(FORMS)}",
                )
            msgspec.structs.force_setattr(self, "structured_outputs", StructuredOutputs(**form))
        elif form is not None and not isinstance(form, StructuredOutputs):
            _fail("structured_outputs", "structured_outputs must be a StructuredOutputs, a dict or None")

    def _check_ends(self) -> None:
        """What ends the answer."""
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            _fail(
                "max_tokens",
                f"max_tokens must be a whole number from 1 to {1 << 31}, not 0, which needs prompt_logprobs",
            )
        if self.max_tokens == 0 and self.n > 1:
            _fail("n", f"n must be 1 with max_tokens 0, not {self.n}: nothing is generated")
        if self.truncate_prompt_tokens == 0:
            _fail("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, not 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail(
                "min_tokens", f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        _check_texts("stop", self.stop, MAX_STOP, MAX_STOP_LENGTH)
        _check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)

    def _check_tokens(self) -> None:
        """What makes single tokens likelier, or impossible."""
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            _fail(
                "logit_bias",
                f"logit_bias may hold at most {MAX_LOGIT_BIAS} tokens, not {len(self.logit_bias)}",
            )
        for token, bias in self.logit_bias.items():
            _check_number("logit_bias", token, TOKEN)
            _check_number("logit_bias", bias, BIAS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                _fail("allowed_token_ids", "allowed_token_ids is empty: no token could come; leave it out")
            _check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
        if sum(map(len, self.bad_words)) > MAX_BAD_WORDS_LENGTH:
            _fail("bad_words", f"bad_words may have at most {MAX_BAD_WORDS_LENGTH} characters all together")
        if any(not word.strip() for word in self.bad_words):
            _fail("bad_words", "each of bad_words must have more than spaces")
        if len(self.bad_words_token_ids) > 2 * MAX_BAD_WORDS:
            _fail("bad_words_token_ids", f"bad_words_token_ids may hold at most {2 * MAX_BAD_WORDS} lists")
        for word in self.bad_words_token_ids:
            if not word:
                _fail("bad_words_token_ids", "each of bad_words_token_ids must have a token")
            _check_ids("bad_words_token_ids", word, MAX_BAD_WORD_TOKENS)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


def choice_seeds(params: SamplingParams) -> list[int]:
    """A 64-bit seed for each of the `n` answers; the first is the user's own, or a random one."""
    base = (params.seed if params.seed is not None else secrets.randbits(64)) & _M64
    return [(base + i * 0x9E3779B97F4A7C15) & _M64 for i in range(params.n)]


def _check_number(name: str, value: object, bounds: Bounds) -> None:
    low, high = bounds.low, bounds.high
    if bounds.whole:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            _fail(name, f"{name} must be a whole number from {low} to {high}, not {value!r}")
        return
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not (low < value if bounds.above else low <= value) or not value <= high:  # type: ignore[operator]
        words = f"above {low:g} and at most {high:g}" if bounds.above else f"from {low:g} to {high:g}"
        _fail(name, f"{name} must be {words}, not {value!r}")


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        _fail(name, f"{name} must be a list, not {type(values).__name__}")
    return tuple(values)


def _check_text(name: str, value: object, longest: int) -> None:
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= longest):
        size = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
        _fail(name, f"{name} must be text of 1 to {longest} characters, not {size}")


def _check_texts(name: str, texts: tuple[object, ...], most: int, longest: int) -> None:
    if len(texts) > most:
        _fail(name, f"{name} may hold at most {most} strings, not {len(texts)}")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= longest:
            _fail(name, f"each string of {name} must have 1 to {longest} characters")


def _check_ids(name: str, ids: tuple[int, ...], most: int) -> None:
    """Token ids by type and count; whether the vocabulary has them is for whoever knows it."""
    if len(ids) > most:
        _fail(name, f"{name} may hold at most {most} ids, not {len(ids)}")
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > 1 << 31):
        _fail(name, f"{name} must hold token ids, whole numbers from 0 to {1 << 31}")


def _fail(param: str, message: str) -> NoReturn:
    raise ParamError(param, message)
