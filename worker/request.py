"""Request, Row and Step: what the scheduler decides and the runner executes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from worker.grammar.constraint import Constraint
from worker.ipc.messages import EngineRequest, FinishReason
from worker.params import SamplingParams

# Requests run in the order of arrival + priority * AGEING + class * CLASS_AGEING seconds, so that urgent ones
# go first and nothing starves.
AGEING = 10.0
CLASS_AGEING = 60.0


class Request:
    """Tokens, pages and progress of one sequence.

    `tokens` is prompt and output, as far as known on the host. With overlapped steps, up to `pending` more
    tokens have been sampled on the device and not read back yet. `computed` counts tokens whose keys and
    values are in the cache, those of steps in flight included.
    """

    __slots__ = (
        "_lag",
        "arrival",
        "cache_salt",
        "cached_tokens",
        "computed",
        "constraint",
        "deadline",
        "finish_reason",
        "first_row",
        "first_scheduled",
        "hashes",
        "id",
        "in_flight",
        "order",
        "pages",
        "params",
        "pending",
        "pooling",
        "prompt_hashes",
        "prompt_length",
        "published",
        "reclaimed",
        "row",
        "scored",
        "seed",
        "service_class",
        "shaped_for",
        "sibling",
        "stop_tokens",
        "token_limit",
        "tokens",
        "turn",
    )

    def __init__(
        self, message: EngineRequest, *, max_model_len: int, eos_token_ids: frozenset[int], number: int
    ) -> None:
        params = message.params
        self.id = message.request_id
        self.params = params
        self.seed = message.seed
        self.arrival = message.arrival
        self.deadline = message.deadline
        self.service_class = message.service_class
        self.pooling = message.pooling
        self.sibling = message.sibling
        self._lag = message.priority * AGEING + message.service_class * CLASS_AGEING
        self.order = (message.arrival + self._lag, number)
        self.turn = self.order  # in which prompts are computed, see Scheduler.add
        self.reclaimed = 0  # times that its pages were taken for a more urgent class
        self.tokens = list(message.prompt_token_ids)
        self.prompt_length = len(self.tokens)
        self.constraint: Constraint | None = None  # set before it is scheduled, when it asks for a form
        self.pending = 0
        # Leading tokens of the prompt whose log-probabilities have been computed, or aren't wanted; the first
        # has none.
        self.scored = self.prompt_length if params.prompt_logprobs is None else 1
        self.computed = 0
        self.pages: list[int] = []
        self.published = 0  # leading pages that the prefix cache knows
        self.hashes: list[bytes] = []  # of its leading full pages, as far as they were needed
        self.prompt_hashes: list[bytes] = []  # those of the prompt; all answers to one share the list
        self.cache_salt = message.cache_salt
        self.row = -1  # row of the device's batch state, while running
        self.first_row = 0  # of the rotary table, where position 0 lies
        self.in_flight = 0  # steps launched and not collected that hold this request
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self.first_scheduled = 0.0
        ends = frozenset() if params.ignore_eos else eos_token_ids.union(message.end_token_ids)
        self.stop_tokens = ends.union(params.stop_token_ids)
        if params.max_tokens == 0:
            self.stop_tokens = frozenset()  # the token that is sampled all the same is dropped
        self.shaped_for = _shaped_for(params, self.stop_tokens)
        self.token_limit = max_model_len  # prompt + output never get longer
        if self.pooling is not None:
            self.token_limit = self.prompt_length
        elif params.max_tokens is not None:
            self.token_limit = min(self.token_limit, self.prompt_length + params.max_tokens)

    def reclaim(self, now: float) -> None:
        """Its pages went to a more urgent class: it waits as if it had just arrived, or it would be back
        before the next of that class and lose them again."""
        self.reclaimed += 1
        self.order = (max(self.order[0], now + self._lag), self.order[1])

    @property
    def length(self) -> int:
        """Tokens so far, those not read back included."""
        return len(self.tokens) + self.pending

    @property
    def output_length(self) -> int:
        return self.length - self.prompt_length

    @property
    def position(self) -> int:
        """Place in the answer, from 0, of the token being sampled, which counts as pending already."""
        return self.output_length - 1

    @property
    def unread(self) -> int:
        """Tokens before the one being sampled that the host doesn't know yet."""
        return self.pending - 1

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.scored < self.prompt_length

    @property
    def decoding(self) -> bool:
        """Everything but the last token is in the cache: one row brings the next token."""
        return self.computed == self.length - 1 and self.computed > 0

    def append(self, token: int) -> FinishReason | None:
        """Add a sampled token; the reason when it is the last."""
        self.tokens.append(token)
        outputs = len(self.tokens) - self.prompt_length
        if self.constraint is not None and self.constraint.take(token):
            return "stop"
        if token in self.stop_tokens and outputs >= self.params.min_tokens:
            return "stop"
        if len(self.tokens) >= self.token_limit:
            return "length"
        return None


def _shaped_for(params: SamplingParams, stop_tokens: frozenset[int]) -> int:
    """For how many tokens of the answer logits are changed before the draw: by bias, penalties or masks."""
    lasting = (
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
    )
    if lasting:
        return sys.maxsize
    return params.min_tokens if stop_tokens else 0


@dataclass(slots=True)
class Row:
    """One sequence's part of a step: tokens [start, start + count); `sample` when a new token follows from
    it."""

    request: Request
    start: int
    count: int
    sample: bool
    decode: bool


@dataclass(slots=True)
class Step:
    """Rows of one step, decoding sequences first."""

    rows: list[Row] = field(default_factory=list)
    scores: bool = False  # for some of them, log-probabilities of the prompt are wanted
    pools: bool = False  # some of them belong to requests with `pooling`

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)
