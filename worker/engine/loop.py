"""Engine: the scheduler and the runner, step by step."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from contracts.units import format_bytes
from worker.engine.blocks import PagePool
from worker.engine.budget import plan_pages
from worker.engine.config import EngineConfig
from worker.engine.grammars import Grammars
from worker.engine.loading import largest_step, leading_cache, load, make_runner, smallest_steps
from worker.engine.pace import Pace, read_share
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.ipc.messages import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    Progress,
    RequestOutput,
    TokenLogprob,
)
from worker.params import SamplingParams
from worker.request import Request, Row
from worker.runner.kv_cache import KvCache
from worker.runner.prompt_logprobs import Scored
from worker.runner.sampler import NOT_FINITE, NOTHING_LEFT
from worker.runner.step import Launched, Runner, activation_bytes, dry_run

OnProgress = Callable[[Progress], None]
# SchedulerConfig.worth_waiting: a step takes an H200 4 ms, and two CPU cores 40 ms, in which they compute a
# page's worth of tokens.
COMPILING_WAIT = 0.005  # seconds, while there is nothing else to do
WORTH_WAITING = {"cuda": 256, "cpu": 16}
LEAST_PIECE = {"cuda": 64, "cpu": 1}  # Pace.least: rows of a tile of prefill attention
NOT_FINITE_ERROR = "the model produced values that are not finite numbers"
_FAILURES = {
    NOT_FINITE: NOT_FINITE_ERROR,
    NOTHING_LEFT: "no token could follow: what the request allows and what it forbids leave none",
}


class Engine:
    """Requests in, tokens out. `step` runs one step of whatever is there; nothing happens between calls."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        scheduler: Scheduler,
        info: EngineInfo,
        grammars: Grammars,
    ) -> None:
        self.config = config
        self.info = info
        self.runner = runner
        self.scheduler = scheduler
        self._grammars = grammars
        self.failure = ""  # why nothing can run any more
        # What the last step has found so far; after its exception too, and then with the ends of requests
        # that were lost to it.
        self.outputs: list[RequestOutput] = []
        self._requests: dict[str, Request] = {}
        self._launched: deque[tuple[Launched, float]] = deque()  # and when
        self._collected = 0.0  # when the last step was known to have ended
        # On a GPU the next step is scheduled and launched while this one runs.
        self._depth = 2 if config.device.type == "cuda" else 1
        self._number = 0
        # Of the request that came last: the prompt, with all that its pages' hashes depend on, and these.
        self._prompt: tuple[Sequence[int], str, int] = ((), "", 0)
        self._prompt_hashes: list[bytes] = []
        self._steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @classmethod
    def load(cls, config: EngineConfig, on_progress: OnProgress = lambda progress: None) -> Engine:
        """Load the weights, size and allocate the KV cache, warm up. EngineError says what doesn't fit."""
        started = time.monotonic()
        torch.set_num_threads(config.threads)
        grammars = Grammars(config.source, config.tokenizer, config.eos_token_ids, config.threads)
        if config.device.type == "cuda":
            grammars.prepare()  # on a CPU the first form waits instead: starts are quick there
        model = load(config, lambda done, total: on_progress(Progress("weights", done, total)))
        if config.device.type == "cpu":
            model.pack()
        weight_bytes = model.weight_bytes
        on_progress(Progress("kv_cache", 0, 1))

        def try_largest() -> None:
            # Through the leading layers: the next ones take the same memory again, and on a card that others
            # use too a step of this size through all of them is felt by everybody.
            dry_run(model, leading_cache(config), [largest_step(config)])

        activations = activation_bytes(try_largest, config.device)
        budget = plan_pages(config, weight_bytes, activations)
        kv_cache = KvCache(
            config.source.config, budget.num_pages, config.page_size, config.kv_dtype, config.device
        )
        runner = make_runner(config, model, kv_cache, budget.max_model_len)
        on_progress(Progress("warm_up", 0, 1))
        dry_run(model, kv_cache, smallest_steps(config))
        runner.warm_up(lambda done, total: on_progress(Progress("graphs", done, total)))
        info = EngineInfo(
            max_model_len=budget.max_model_len,
            page_size=config.page_size,
            num_pages=budget.num_pages,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=config.vocab_limit,
            dtype=str(config.dtype).removeprefix("torch."),
            kv_cache_dtype=str(config.kv_dtype).removeprefix("torch."),
            device=str(config.device),
            weight_bytes=weight_bytes,
            kv_cache_bytes=kv_cache.nbytes,
            load_seconds=time.monotonic() - started,
            eos_token_ids=tuple(sorted(config.eos_token_ids)),
            pooling=config.pooling,
        )
        pool = PagePool(budget.num_pages, config.page_size, prefix_cache=config.prefix_cache)
        limits = SchedulerConfig(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.chunked_prefill,
            worth_waiting=WORTH_WAITING[config.device.type],
        )
        least = LEAST_PIECE[config.device.type]
        pace = Pace(config.tpot_target, read_share(config.source.config), least)
        return cls(config, runner, Scheduler(limits, pool, pace), info, grammars)

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or bool(self._launched)

    def add(self, message: EngineRequest) -> RequestOutput | None:
        """Queue a request; an output with the reason when it can never run. RuntimeError once there is a
        `failure`."""
        if self.failure:
            raise RuntimeError(self.failure)
        self._number += 1
        request = Request(
            message,
            max_model_len=self.info.max_model_len,
            eos_token_ids=self.config.eos_token_ids,
            number=self._number,
        )
        error = self._refusal(request)
        if error is not None:
            return RequestOutput(request.id, [], finish_reason="error", error=error)
        request.first_row = self.runner.model.first_row(request.token_limit)
        # Not by its word alone: with another prompt's hashes it would read that prompt's pages.
        prompt = message.prompt_token_ids, request.cache_salt, request.first_row
        if request.sibling and prompt == self._prompt:
            request.prompt_hashes = self._prompt_hashes
        self._prompt, self._prompt_hashes = prompt, request.prompt_hashes
        self._requests[request.id] = request
        self._prompt_tokens += request.prompt_length
        if not self._grammars.needed(request) or self._grammars.begin(request):
            self.scheduler.add(request)
        return None

    def _refusal(self, request: Request) -> str | None:
        longest = self.info.max_model_len
        if request.pooling is not None:
            longest += 1  # no token follows
        if request.id in self._requests:
            return f"request id {request.id} is in use"
        if not request.tokens:
            return "the prompt is empty"
        if request.prompt_length + (request.params.max_tokens != 0) > longest:
            return (
                f"the prompt has {request.prompt_length} tokens; "
                f"max_model_len {self.info.max_model_len} leaves no room for an answer"
            )
        if max(request.tokens) >= self.config.source.config.vocab_size or min(request.tokens) < 0:
            return f"prompt token ids must be from 0 to {self.config.source.config.vocab_size - 1}"
        return self._mask_refusal(request.params)

    def _mask_refusal(self, params: SamplingParams) -> str | None:
        if params.bad_words:
            return "bad_words come to the engine as bad_words_token_ids"
        masked = itertools.chain(params.allowed_token_ids or (), *params.bad_words_token_ids)
        if max(masked, default=0) >= self.config.source.config.vocab_size:
            return "allowed_token_ids or bad_words_token_ids has a token that the vocabulary lacks"
        return None

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request: its last output. None for an id that is unknown, or had its last output before.

        Its pages are free before the next step is scheduled.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if not self._grammars.forget(request):
            self.scheduler.finish(request, "abort")
        return RequestOutput(request_id, [], finish_reason="abort")

    def step(self) -> list[RequestOutput]:
        """Launch the next step and read the oldest one back. Empty when nothing has been sampled yet.

        After an exception everything that ran has ended (`outputs` says so) and cached prompts are forgotten:
        what the step left of them isn't known. What waits goes on waiting; unless `failure` is set, the next
        step runs it.
        """
        self.outputs = []
        try:
            self._step(time.monotonic())
        except BaseException as error:
            self._drop_work(error)
            raise
        return self.outputs

    def drain(self) -> list[RequestOutput]:
        """Read back all launched steps. As `step` after an exception."""
        self.outputs = []
        try:
            self._drain()
        except BaseException as error:
            self._drop_work(error)
            raise
        return self.outputs

    def call(self, operation: str) -> str:
        """Operations between steps: "reset_prefix_cache", "check_integrity", "ping". "" or what went
        wrong."""
        if operation == "reset_prefix_cache":
            self.scheduler.pool.reset_cache()
            for request in self.scheduler.running:
                request.published = len(request.pages)  # what it holds predates the reset: never publish it
            return ""
        if operation == "check_integrity":
            return self.check_integrity()
        return "" if operation == "ping" else f"unknown operation {operation}"

    def check_integrity(self) -> str:
        """What is wrong with the KV cache's books, or nothing: with nothing running, every page is free."""
        if self._launched:
            return "steps are in flight"
        try:
            self.scheduler.check()
        except RuntimeError as error:
            return str(error)
        pool = self.scheduler.pool
        if not self._requests and pool.num_free != pool.capacity:
            return f"{pool.capacity - pool.num_free} pages are held by nobody"
        return ""

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        taken, filled = scheduler.slots()
        return EngineStats(
            steps=self._steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_total=scheduler.pool.capacity,
            pages_used=scheduler.pool.num_used,
            slots_taken=taken,
            slots_filled=filled,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            decode_seconds=scheduler.pace.decode,
            prefill_budget=scheduler.pace.budget(self.config.max_num_batched_tokens),
        )

    def reason(self, error: BaseException) -> str:
        """Why a step failed, in words that may be shown to anybody: with the sum, when memory ran out."""
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return type(error).__name__
        info = self.info
        return (
            f"out of memory: weights {format_bytes(info.weight_bytes)} "
            f"+ KV cache {format_bytes(info.kv_cache_bytes)}, "
            f"the rest activations of up to {info.max_num_batched_tokens} tokens; "
            "lower max_num_batched_tokens, kv_cache_memory_bytes or gpu_memory"
        )

    # ---- inside

    def _step(self, now: float) -> None:
        for request in self.scheduler.late(now):
            self.outputs.append(self._too_late(request))
        if self._grammars.compiling:
            self._take_compiled()
        step = self.scheduler.schedule(now)
        if step.rows:
            launched = self.runner.forward(step)
            form = None
            if any(request.constraint is not None for request in launched.host.sampled):
                # What may come next depends on the tokens of the steps before. The device computes meanwhile.
                self._drain()
                form = self._grammars.mask(launched.host.sampled, self.runner.begin_form)
            self.runner.sample(launched, form)
            self._launched.append((launched, now))
            self._steps += 1
        if self._launched and (len(self._launched) >= self._depth or not step.rows):
            self._collect(*self._launched.popleft())

    def _drain(self) -> None:
        while self._launched:
            self._collect(*self._launched.popleft())

    def _drop_work(self, error: BaseException) -> None:
        """After an exception within a step."""
        if self.config.device.type == "cuda":
            try:
                # What was launched writes to pages that are free in a moment.
                torch.cuda.synchronize(self.config.device)
            except RuntimeError as broken:
                self.failure = f"the device failed, and no step can run in this process any more: {broken}"
        self._launched.clear()
        self._collected = math.inf
        self.runner.forget_rows()
        self.scheduler.drop_running()
        waiting = {request.id for request in self.scheduler.waiting}
        for name, request in list(self._requests.items()):
            if name not in waiting and not self._grammars.waits(request):
                del self._requests[name]
                message = self.failure or f"the engine failed in a step of this request: {self.reason(error)}"
                self.outputs.append(RequestOutput(name, [], finish_reason="error", error=message))

    def _take_compiled(self) -> None:
        """Queue requests whose forms are compiled, and end those whose forms can't be."""
        busy = self._launched or self.scheduler.running or self.scheduler.waiting
        for request, error in self._grammars.ready(0.0 if busy else COMPILING_WAIT):
            if not error:
                self.scheduler.add(request)
                continue
            del self._requests[request.id]
            message = f"structured output: {error}"
            output = RequestOutput(request.id, [], finish_reason="error", error=message, refused=True)
            self.outputs.append(output)

    def _too_late(self, request: Request) -> RequestOutput:
        del self._requests[request.id]
        self.scheduler.finish(request, "error")
        waited = max(0.0, request.deadline - request.arrival)  # it may have come too late
        error = f"the request waited for {waited:.3g} s, as long as it may, and has not begun"
        return RequestOutput(request.id, [], finish_reason="error", error=error, late=True)

    def _collect(self, launched: Launched, since: float) -> None:
        tokens, logprobs = launched.read()
        vectors = launched.pooled.read() if launched.pooled is not None else {}
        self._time(launched, since)
        outputs = self.outputs
        if launched.scored is not None:
            outputs += self._prompt_logprobs(launched.scored)
        place = 0
        for row in launched.step.rows:
            request = row.request
            self.scheduler.collected(request)
            if not row.sample:
                if request.finish_reason is None:
                    self.scheduler.prefilled(request)
                    if request in vectors:
                        outputs.append(self._embed(request, vectors[request]))
                continue
            token, entry = tokens[place], logprobs[place]
            place += 1
            if request.finish_reason is None:
                outputs.append(self._advance(row, token, entry))

    def _prompt_logprobs(self, scored: Scored) -> list[RequestOutput]:
        return [
            RequestOutput(request.id, [], prompt_logprobs=[entries])
            for request, entries in scored.read()
            if request.finish_reason is None
        ]

    def _embed(self, request: Request, vector: np.ndarray) -> RequestOutput:
        """The last output of a request whose prompt is pooled."""
        reason: FinishReason = "stop" if np.isfinite(vector).all() else "error"
        output = RequestOutput(request.id, [], finish_reason=reason, cached_tokens=request.cached_tokens)
        output.queue_time = max(0.0, request.first_scheduled - request.arrival)
        if reason == "stop":
            output.pooled = vector.astype("<f4", copy=False).tobytes()
        else:
            output.error = NOT_FINITE_ERROR
        self.scheduler.finish(request, reason)
        del self._requests[request.id]
        return output

    def _time(self, launched: Launched, since: float) -> None:
        """Tell the pace how long the step took: it was launched at `since`, and ran when the one before had
        ended."""
        if self._depth > 1 and launched.sampled is None and launched.pooled is None:
            self._collected = math.inf  # the device may be at it still, and the next one's time is both's
            return
        now = time.monotonic()
        if self._collected < math.inf:
            self.scheduler.pace.observe(launched.step, now - max(since, self._collected))
        self._collected = now

    def _advance(self, row: Row, token: int, logprob: TokenLogprob | None) -> RequestOutput:
        request = row.request
        output = RequestOutput(request.id, [token], [logprob] if logprob is not None else None)
        if len(request.tokens) == request.prompt_length:
            output.cached_tokens = request.cached_tokens
            output.queue_time = max(0.0, request.first_scheduled - request.arrival)
        error = _FAILURES.get(token, "")
        if request.constraint is not None and request.constraint.error:
            error, output.refused = f"structured output: {request.constraint.error}", True
        output.refused = output.refused or token == NOTHING_LEFT  # by the request's own masks
        if error:
            output.token_ids = []
            output.finish_reason = "error"
            output.error = error
            self.scheduler.finish(request, "error")
        else:
            output.finish_reason = self.scheduler.update(request, token)
            if output.finish_reason == "stop":
                output.stop_token = token
        if output.finish_reason is not None:
            del self._requests[request.id]
            if request.params.max_tokens == 0:
                output.token_ids, output.logprobs = [], None
        self._generation_tokens += len(output.token_ids)
        return output
