"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Sequence
from functools import partial

import msgspec

from contracts.errors import ApiError, bad_request, internal_error
from worker.ipc.client import RequestStream
from worker.ipc.messages import NORMAL, EngineInfo, EngineRequest, RequestOutput
from worker.params import SamplingParams
from worker.pooling import PoolingConfig, finish_vector
from worker.server.decoding import decode
from worker.server.exchange import Exchange
from worker.server.fitting import one_kind
from worker.server.generation import priority_of, too_late
from worker.server.not_offered import check_offered
from worker.server.sampling import check_request_id, check_scheduling
from worker.server.schemas import EmbeddingRequest, Prompt
from worker.server.state import ServerState, engine_dead
from worker.server.text_model import TextModel, context_too_long

MAX_INPUTS = 2048
_MANY_NUMBERS = 1 << 16  # in an answer: some milliseconds
_ID_PREFIX = "embd-"
_NOT_SAMPLED = SamplingParams()


async def embeddings(state: ServerState, exchange: Exchange) -> None:
    """A vector for each input."""
    started = time.monotonic()
    request = decode(exchange.body, EmbeddingRequest)
    state.check_model(request.model or request.model_name or exchange.query("model"))
    _, info, text = state.ready()
    pooling = _pooling(info, request)
    inputs = _inputs(request.input, min(MAX_INPUTS, info.max_num_seqs + state.config.max_waiting))
    names = ["input"] if len(inputs) == 1 else [f"input[{i}]" for i in range(len(inputs))]
    prompts = [await _tokens(text, one, name, request, info) for one, name in zip(inputs, names)]
    job = EmbeddingJob(state, prompts, pooling, request, exchange, started)
    try:
        job.submit()
        outputs = await job.collect()
    finally:
        job.close()
    count = sum(map(len, prompts))
    head = {"id": job.id, "object": "list", "created": int(time.time()), "model": state.model_name}
    usage = {"prompt_tokens": count, "total_tokens": count}

    def body() -> bytes:
        data = [_entry(index, output, pooling, request) for index, output in enumerate(outputs)]
        return msgspec.json.encode({**head, "data": data, "usage": usage})

    # Millions of numbers take seconds to write: other requests go on meanwhile.
    many = len(outputs) * pooling.size > _MANY_NUMBERS
    await exchange.respond(await asyncio.to_thread(body) if many else body())


class EmbeddingJob:
    """The engine's work for one request: `submit`, `collect`; `close` always.

    Raises (on submit and collect): ApiError 503 when the queue is full, 500 when the engine fails.
    """

    def __init__(
        self,
        state: ServerState,
        prompts: Sequence[list[int]],
        pooling: PoolingConfig,
        request: EmbeddingRequest,
        exchange: Exchange,
        started: float,
    ) -> None:
        self._state = state
        self._engine, _, _ = state.ready()
        minted = f"{_ID_PREFIX}{uuid.uuid4().hex}"  # ids from outside may repeat
        self.id = _ID_PREFIX + (request.request_id or minted).removeprefix(_ID_PREFIX)
        self.names = frozenset((self.id, exchange.request_id))
        self._account = exchange.account
        self._error: ApiError | None = None
        service_class = exchange.service_class
        self._requests = [
            EngineRequest(
                request_id=f"{minted}-{index}",
                prompt_token_ids=prompt,
                params=_NOT_SAMPLED,
                seed=0,
                cache_salt=request.cache_salt or "",
                priority=priority_of(request.priority or 0, service_class),
                service_class=NORMAL if service_class is None else service_class,
                pooling=pooling.type,
                deadline=0.0 if exchange.patience is None else started + exchange.patience,
            )
            for index, prompt in enumerate(prompts)
        ]
        self._timers = [state.metrics.sequence(started) for _ in prompts]
        self._streams: list[RequestStream] = []
        self._done = 0

    def submit(self) -> None:
        """Hand everything to the engine, or nothing."""
        if self._error is not None:
            raise self._error
        self._state.admit(self, len(self._requests))
        now = time.monotonic()
        for request in self._requests:
            self._streams.append(self._engine.submit(msgspec.structs.replace(request, arrival=now)))
        prompt_tokens = sum(len(request.prompt_token_ids) for request in self._requests)
        self._account.open(prompt_tokens, len(self._requests))

    async def collect(self) -> list[RequestOutput]:
        """The outputs, in the order of the prompts."""
        outputs = []
        for stream, timer in zip(self._streams, self._timers):
            output = await stream.__anext__()
            if output.finish_reason == "abort":
                raise self._failure(output)
            self._done += 1
            reason = "error" if output.pooled is None else "stop"
            self._account.end_answer(0, output.cached_tokens, reason)
            timer.finish(reason)
            if reason == "error":
                raise self._failure(output)
            self._state.metrics.queue_time.observe(output.queue_time)
            outputs.append(output)
        self._state.times.first_token(time.monotonic() - self._timers[0].started)
        return outputs

    def abort(self, error: ApiError) -> None:
        """End the request from outside, with `error` as its answer."""
        self._error = error
        self.close()

    def close(self) -> None:
        """Stop what still runs. Safe at any time and more than once."""
        self._state.generations.discard(self)
        unfinished = slice(self._done, None)
        self._done = len(self._streams)
        for request, stream, timer in zip(
            self._requests[unfinished], self._streams[unfinished], self._timers[unfinished]
        ):
            self._engine.abort(request.request_id)
            timer.finish("abort")
            stream.when_ended(partial(self._account.end_answer, 0, 0, "abort"))

    def _failure(self, output: RequestOutput) -> ApiError:
        if self._error is not None:
            return self._error
        if self._engine.state == "dead":
            return engine_dead()
        if output.late:
            return too_late(output)
        return internal_error(output.error or "The request was aborted.", "engine_error")


def _pooling(info: EngineInfo, request: EmbeddingRequest) -> PoolingConfig:
    """How the model pools. ApiError 400 when it doesn't, or for fields out of bounds."""
    if info.pooling is None:
        raise bad_request(
            "This model generates and gives no embeddings; the worker's option --runner pooling makes it one "
            "for embeddings.",
            "model",
            "wrong_runner",
        )
    dimensions = request.dimensions
    if dimensions is not None and not info.pooling.allows(dimensions):
        allowed = [*sorted(info.pooling.sizes), info.pooling.size]
        sizes = f"from 1 to {info.pooling.size}" if info.pooling.any_size else " or ".join(map(str, allowed))
        raise bad_request(f"dimensions must be {sizes} for this model, not {dimensions}", "dimensions")
    for name, wanted in (("normalize", request.normalize), ("use_activation", request.use_activation)):
        if wanted not in (None, info.pooling.normalize):
            so = "true" if info.pooling.normalize else "false"
            raise bad_request(
                f"{name} must be {so} for this model, or left out: its checkpoint (modules.json) says "
                "whether vectors have length 1",
                name,
            )
    if request.request_id is not None:
        check_request_id(request.request_id)
    check_offered(request)
    check_scheduling(request.cache_salt, request.priority)
    return info.pooling


def _inputs(value: Prompt, most: int) -> list[str | list[int]]:
    """The inputs of a request: one string, one list of ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    inputs = one_kind(value, "input") if value else []
    if not 0 < len(inputs) <= most:
        raise bad_request(
            f"input must hold 1 to {most} texts or lists of token ids, not {len(inputs)}: send several "
            "requests (the worker's max_num_seqs and max_waiting allow no more in one)",
            "input",
        )
    return inputs


async def _tokens(
    text: TextModel, item: str | list[int], param: str, request: EmbeddingRequest, info: EngineInfo
) -> list[int]:
    """Token ids of one input. ApiError 400, about `param`, when it can't be one."""
    if isinstance(item, str):
        special = request.add_special_tokens is not False
        tokens = await text.encode(item, param=param, add_special_tokens=special, limit=info.max_model_len)
        await asyncio.sleep(0)  # thousands of inputs: other requests go on meanwhile
    else:
        tokens = item
    if not tokens:
        raise bad_request(f"{param} is empty: at least one token is needed", param)
    limit = min(info.max_model_len, (info.num_pages - 1) * info.page_size)
    if len(tokens) > limit:
        raise context_too_long(str(len(tokens)), limit, param)
    if max(tokens) >= info.vocab_size or min(tokens) < 0:
        raise bad_request(f"token ids in {param} must be from 0 to {info.vocab_size - 1}", param)
    return tokens


def _entry(
    index: int, output: RequestOutput, pooling: PoolingConfig, request: EmbeddingRequest
) -> msgspec.Raw:
    """A vector as it is in the answer, written by itself: nobody waits for all of them."""
    vector = finish_vector(output.pooled or b"", pooling, request.dimensions)
    as_base64 = request.encoding_format == "base64"
    written = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
    entry = {"object": "embedding", "index": index, "embedding": written}
    return msgspec.Raw(msgspec.json.encode(entry))
