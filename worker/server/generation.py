"""Generation: the engine's work for one HTTP request, from admission to the last token."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from contracts.errors import ApiError, bad_request, internal_error, unavailable
from contracts.headers import LATE, PATIENCE, REFUSED
from worker.ipc.client import RequestStream, merged
from worker.ipc.messages import NORMAL, EngineRequest, RequestOutput, TokenLogprob
from worker.params import SamplingParams, choice_seeds
from worker.server.choice import Choice, Delta
from worker.server.fitting import answer_length, fit_params, fit_prompts
from worker.server.metrics import SequenceTimer
from worker.server.schemas import MAX_PROMPTS, Sampling
from worker.server.state import ServerState, engine_dead
from worker.server.usage import Account

if TYPE_CHECKING:
    from worker.server.tracing import AnswerTrace, RequestTrace

MOST_RAISED = 2  # levels; less than the distance of two classes

Step = list[tuple[Choice, Delta]]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; a prompt with n answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class _Sequence:
    """One answer and the engine request behind it."""

    def __init__(self, choice: Choice, request: EngineRequest, timer: SequenceTimer) -> None:
        self.choice = choice
        self.request = request
        self.timer = timer
        self.stream: RequestStream | None = None
        self.trace: AnswerTrace | None = None
        self.counted = False


class Generation:
    """All answers of one request: `submit`, then iterate `steps`; `close` always.

    Engine ids are minted here: ids from outside (`request.request_id` is the answer's) may repeat, and must
    never reach another client's work.

    Args:
        param: the request's field that became the prompts, for error messages.
        continuation: the answer goes on in the prompt's text (see Detokenizer).
        external_id: the id that the client knows the request by, beside its own.
        account: what the request uses is written there.
        service_class: index in contracts.headers.PRIORITIES; None when no gateway says.
        trace: of a request that is sampled.
        started: when the request arrived, time.monotonic().
        patience: seconds from `started` on within which the engine must have begun; None: it may wait.
        default_length: most tokens of an answer when the client sets no max_tokens; None: all that fit.
        shown: special tokens that are in the text though others aren't.
        form_field: the request's field that says what the answer must look like, for error messages.

    Raises (on construction and submit): ApiError 400 when the request can't fit, 503 when the queue is full.
    """

    def __init__(
        self,
        state: ServerState,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        request: Sampling,
        *,
        param: str,
        continuation: bool,
        external_id: str,
        account: Account,
        service_class: int | None,
        trace: RequestTrace | None,
        id_prefix: str,
        started: float,
        patience: float | None = None,
        default_length: int | None = None,
        shown: Collection[int] = (),
        form_field: str | None = None,
    ) -> None:
        self._state = state
        self._engine, info, text = state.ready()
        minted = uuid.uuid4().hex
        self.id = id_prefix + (request.request_id or minted).removeprefix(id_prefix)
        self.names = frozenset((self.id, external_id))
        self.created = int(time.time())
        self.params = params
        self._account = account
        self._trace = trace
        self._form_field = form_field
        self._error: ApiError | None = None
        self._begun = self._closed = False
        fitted = fit_params(params, info, text)
        # The answers of one prompt share its log-probabilities; in a stream none waits for another's.
        scored = params.n if request.stream else 1
        self.prompts = prompts = fit_prompts(prompts, fitted, info, param)
        deadline = 0.0 if patience is None else started + patience
        ends = text.tokenizer.eos_token_ids if text.tokenizer else ()
        self._sequences: list[_Sequence] = []
        for prompt in prompts:
            length = answer_length(prompt, params.max_tokens, info, param)
            if params.max_tokens is None and default_length is not None:
                length = min(length, default_length)
            if params.min_tokens > length:
                raise bad_request(
                    f"min_tokens ({params.min_tokens}) must not exceed the answer's limit of {length} tokens",
                    "min_tokens",
                )
            engine_params = msgspec.structs.replace(fitted, n=1, stop=(), max_tokens=length)
            for number, seed in enumerate(choice_seeds(params)):
                if number == scored and params.prompt_logprobs is not None:
                    engine_params = msgspec.structs.replace(engine_params, prompt_logprobs=None)
                index = len(self._sequences)
                engine_request = EngineRequest(
                    request_id=f"{minted}-{index}",
                    prompt_token_ids=prompt,
                    params=engine_params,
                    seed=seed,
                    cache_salt=request.cache_salt or "",
                    priority=priority_of(request.priority or 0, service_class),
                    end_token_ids=ends,
                    service_class=NORMAL if service_class is None else service_class,
                    sibling=number > 0,
                    deadline=deadline,
                )
                choice = Choice(index, text.tokenizer, params, continuation=continuation, shown=shown)
                self._sequences.append(_Sequence(choice, engine_request, state.metrics.sequence(started)))

    def submit(self) -> None:
        """Hand everything to the engine, or nothing."""
        if self._error is not None:
            raise self._error
        engine, _, _ = self._state.ready()
        self._state.admit(self, len(self._sequences))
        now = time.monotonic()
        for sequence in self._sequences:
            request = msgspec.structs.replace(sequence.request, arrival=now)
            sequence.stream = engine.submit(request)
            if self._trace is not None:
                sequence.trace = self._trace.answer(sequence.choice.index, len(request.prompt_token_ids))
        self._account.open(self._prompt_tokens(), len(self._sequences))

    async def steps(self) -> AsyncGenerator[Step, None]:
        """What arrives, as it arrives: all that is there at a time, in the order of the answers.

        Raises ApiError when the engine dies or fails the request, or someone aborts it.
        """
        streams = [sequence.stream for sequence in self._sequences if sequence.stream is not None]
        async with aclosing(merged(streams)) as arrivals:
            async for arrived in arrivals:
                found = [(self._sequences[place], output) for place, output in arrived]
                found = [(sequence, output) for sequence, output in found if not sequence.choice.finished]
                if found:
                    yield [(sequence.choice, self._take(sequence, output)) for sequence, output in found]
                if all(sequence.choice.finished for sequence in self._sequences):
                    return

    async def collect(self) -> list[Delta]:
        """All answers, whole. Raises as `steps`."""
        answers = [Delta() for _ in self._sequences]
        async with aclosing(self.steps()) as steps:
            async for step in steps:
                for choice, delta in step:
                    answers[choice.index].add(delta)
        return answers

    def abort(self, error: ApiError) -> None:
        """End the request from outside, with `error` as its answer."""
        self._error = error
        self.close()

    def close(self) -> None:
        """Stop what still runs. Safe at any time and more than once."""
        self._state.generations.discard(self)
        for sequence in self._sequences:
            if sequence.stream is not None and not sequence.choice.finished:
                self._engine.abort(sequence.request.request_id)
                sequence.timer.finish("abort")
                # The engine goes on until it hears of it: what it generates meanwhile is used too.
                sequence.stream.when_ended(partial(self._count, sequence, "abort"))
        if not self._closed:
            self._closed = True
            self._state.times.end(sequence.timer for sequence in self._sequences)

    def usage(self) -> Usage:
        first_answers = self._sequences[:: self.params.n]
        return Usage(
            prompt_tokens=self._prompt_tokens(),
            completion_tokens=sum(sequence.choice.completion_tokens for sequence in self._sequences),
            # Later answers always find their own prompt in the cache; that says nothing.
            cached_tokens=sum(sequence.choice.cached_tokens for sequence in first_answers),
        )

    def answer_usage(self, index: int) -> Usage:
        """Of the answer `index` so far, with its own prompt."""
        choice = self._sequences[index].choice
        prompt = self.prompts[index // self.params.n]
        return Usage(len(prompt), choice.completion_tokens, choice.cached_tokens)

    def prompt_logprobs(self, index: int) -> list[TokenLogprob | None]:
        """Of the prompt of the answer `index`, once that or the whole request is complete: None for its first
        token, an entry for every other."""
        first = index - index % self.params.n
        own, shared = self._sequences[index].choice, self._sequences[first].choice
        pieces = own.prompt_logprobs or shared.prompt_logprobs
        prompt = self.prompts[index // self.params.n]
        return [None, *(entry for piece in pieces for entry in piece.entries(prompt))]

    def _prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def _count(self, sequence: _Sequence, reason: str) -> None:
        """The sequence has ended. A finished choice knows better how many tokens are the answer's."""
        if sequence.counted:
            return
        sequence.counted = True
        choice, stream = sequence.choice, sequence.stream
        tokens = choice.completion_tokens if choice.finished or stream is None else stream.received
        first = choice.index % self.params.n == 0
        self._account.end_answer(tokens, choice.cached_tokens if first else 0, reason)
        if sequence.trace is not None:
            sequence.trace.end(tokens, choice.cached_tokens, reason)

    def _take(self, sequence: _Sequence, output: RequestOutput) -> Delta:
        if output.finish_reason == "abort" or output.finish_reason == "error":
            sequence.timer.finish(output.finish_reason)
            if output.finish_reason == "error":
                self._count(sequence, "error")
            raise self._failure(output)
        sequence.timer.tokens(len(output.token_ids), output.queue_time)
        if not self._begun and sequence.timer.count:
            self._begun = True
            self._state.times.first_token(sequence.timer.first - sequence.timer.started)
        if sequence.trace is not None:
            sequence.trace.first_token(output.queue_time)
        delta = sequence.choice.push(output)
        if delta.finish_reason is not None:
            sequence.timer.finish(delta.finish_reason)
            self._count(sequence, delta.finish_reason)
            if output.finish_reason is None:  # a stop string: the engine doesn't know of it
                self._engine.abort(sequence.request.request_id)
        return delta

    def _failure(self, output: RequestOutput) -> ApiError:
        if self._error is not None:
            return self._error
        if self._engine.state == "dead":
            return engine_dead()
        if output.refused:
            return bad_request(output.error or "The request can't be served.", self._form_field)
        if output.late:
            return too_late(output)
        return internal_error(output.error or "The request was aborted.", "engine_error")


def too_late(output: RequestOutput) -> ApiError:
    """The answer to a request that has waited for as long as its client will."""
    return unavailable(
        f"This worker is busy: {output.error}; wait longer ({PATIENCE}), or try again.",
        "deadline_exceeded",
        headers={REFUSED: LATE},
    )


def priority_of(wanted: int, service_class: int | None) -> int:
    """Where a gateway tells classes apart, a request can put itself back, but not before another class."""
    return wanted if service_class is None else max(wanted, -MOST_RAISED)


def check_sequences(state: ServerState, prompts: int, n: int) -> None:
    """ApiError 400 for a model that doesn't answer, or for more answers in one request than could ever be
    admitted together."""
    if prompts > MAX_PROMPTS:
        raise bad_request(f"prompt may hold at most {MAX_PROMPTS} prompts, not {prompts}", "prompt")
    _, info, _ = state.ready()
    if info.pooling is not None:
        raise bad_request(
            "This model gives embeddings (/v1/embeddings) and no answers; the worker's option --runner "
            "generate makes it answer.",
            "model",
            "wrong_runner",
        )
    most = min(MAX_PROMPTS, info.max_num_seqs + state.config.max_waiting)
    if prompts * n > most:
        raise bad_request(
            f"{prompts} prompts with n = {n} make {prompts * n} answers; at most {most} fit", "n"
        )
