"""What the server process and the engine process say to each other: at most one message per step each way.

Encoded with msgpack (msgspec); plain values only, so neither side can make the other run code.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec

from contracts.headers import PRIORITIES
from worker.params import SamplingParams
from worker.pooling import PoolingConfig, PoolingType

NORMAL = PRIORITIES.index("normal")

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineRequest(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to generate. `n` answers are `n` requests; the prefix cache shares their prompt."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int  # 64-bit; always set: the server draws one when the user gave none
    cache_salt: str = ""
    priority: int = 0  # lower runs first
    arrival: float = 0.0  # time.monotonic() of the server: the clock is the machine's
    # Ends that the tokenizer knows, beside the model's own; not for a request with ignore_eos.
    end_token_ids: tuple[int, ...] = ()
    service_class: int = NORMAL  # index in contracts.headers.PRIORITIES
    pooling: PoolingType | None = None  # no answer is generated: the prompt's states are pooled to a vector
    sibling: bool = False  # another answer to the prompt of the request before
    deadline: float = 0.0  # time.monotonic() until which its first step must have begun; 0: it may wait


class ToEngine(msgspec.Struct, array_like=True):
    """Everything that came in since the last message."""

    submit: list[EngineRequest] = []
    abort: list[str] = []
    call: list[tuple[int, str]] = []  # (call id, operation): "reset_prefix_cache", "check_integrity", "ping"
    shutdown: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of the token taken (raw logits, float32), its rank from 1, and the likeliest others."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive tokens of a prompt, from place `start` on: arrays in this machine's
    byte order, since a long prompt has a hundred thousand numbers.

    logprobs, ranks: float32 and int32 [count]. top_ids, top_logprobs: int32 and float32 [count, width].
    """

    start: int
    width: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    def entries(self, prompt_token_ids: Sequence[int]) -> list[TokenLogprob]:
        """One for each token of the piece; `prompt_token_ids` is the whole prompt."""
        logprobs = memoryview(self.logprobs).cast("f").tolist()
        ranks = memoryview(self.ranks).cast("i").tolist()
        ids = memoryview(self.top_ids).cast("i").tolist()
        values = memoryview(self.top_logprobs).cast("f").tolist()
        tokens = prompt_token_ids[self.start : self.start + len(logprobs)]
        width = self.width
        return [
            TokenLogprob(token, logprob, rank, list(zip(ids[at : at + width], values[at : at + width])))
            for token, logprob, rank, at in zip(tokens, logprobs, ranks, itertools.count(0, width))
        ]


class RequestOutput(msgspec.Struct, array_like=True):
    """What one step brought to one request. Every request has one that carries `finish_reason`, its last."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the token that ended it, when one did
    error: str | None = None  # with finish_reason "error"
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    queue_time: float = 0.0  # seconds from arrival to its first step; set on its first output
    pooled: bytes | None = (
        None  # of a request with `pooling`: float32, little-endian, neither cut nor normalised
    )
    refused: bool = False  # with `error`: the fault is the request's own
    # Of pieces of the prompt as they are computed, in order; outputs with them may have no tokens.
    prompt_logprobs: list[PromptLogprobs] | None = None
    late: bool = False  # with "error": its deadline passed before its first step


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges after a step, and counters since the engine started."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0  # held by sequences; cached pages nobody holds count as free
    slots_taken: int = 0  # token slots in held pages ...
    slots_filled: int = 0  # ... and how many of them hold a token: the rest is waste
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # of them found
    prompt_tokens: int = 0
    generation_tokens: int = 0
    decode_seconds: float = 0.0  # what a step without prompts takes, as estimated; 0: not known yet
    prefill_budget: int = 0  # prompt tokens that the last step beside decoding sequences was allowed


class EngineInfo(msgspec.Struct, frozen=True):
    """What the engine resolved while it loaded."""

    max_model_len: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    dtype: str
    kv_cache_dtype: str
    device: str
    weight_bytes: int
    kv_cache_bytes: int
    load_seconds: float
    eos_token_ids: tuple[int, ...] = ()  # of the model itself
    pooling: PoolingConfig | None = None  # None: the model generates


class Progress(msgspec.Struct, tag=True, frozen=True):
    """While loading: `phase` is "import", "weights", "kv_cache", "warm_up" or "graphs"; done of total in the
    phase's own unit."""

    phase: str
    done: int
    total: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: EngineInfo


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine can't start or can't go on. `message` is for a person; the process ends after it.

    `permanent`: starting again without changing an option can't help.
    """

    message: str
    permanent: bool = False


class StepDone(msgspec.Struct, tag=True):
    outputs: list[RequestOutput]
    stats: EngineStats
    replies: list[tuple[int, str]] = []  # (call id, result as text; "" = ok)


FromEngine = Progress | Ready | Failed | StepDone
