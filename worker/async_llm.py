"""AsyncLLM: the engine in a process of its own, many requests at a time from one event loop.

async with AsyncLLM("models/SmolLM2-135M-Instruct.Q4_1.gguf") as llm:
    async for result in llm.generate("Paris is", SamplingParams(max_tokens=8)):
        print(result.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from worker.ipc.client import EngineClient, EngineDead, engine_command, engine_spec, merged
from worker.ipc.messages import EngineInfo, EngineStats
from worker.outputs import NewParts, RequestOutput
from worker.params import SamplingParams
from worker.prompting import Message, Prepared, Prompt, Prompting, salt_of
from worker.spellings import options_of
from worker.text.tokenizer import Tokenizer
from worker.vllm_python import check_arguments
from worker.weights.source import resolve_source

__all__ = ["AsyncLLM", "EngineDead"]


class AsyncLLM:
    """A model to generate with, from the event loop that starts it.

    Use it as an asynchronous context manager, or `start` and `close` it. Args as for `LLM`; ValueError for an
    unknown or invalid option.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._model = model
        self._options = options_of(options)
        self._prompting: Prompting | None = None
        self._client: EngineClient | None = None
        self._running: dict[str, Prepared] = {}

    async def start(self) -> None:
        """Load tokenizer and weights. ValueError for a source that can't be served, EngineDead when the
        engine can't start; the message says why."""
        if self._client is not None:
            raise RuntimeError("this AsyncLLM was started before")
        source = await asyncio.to_thread(resolve_source, self._model, None, self._options.revision)
        prompting = await asyncio.to_thread(Prompting, source, self._options)
        client = EngineClient(engine_command(engine_spec(self._model, self._options, prompting.vocab_limit)))
        self._client = client
        await client.start()
        try:
            prompting.info = await client.wait_ready()
        except BaseException:
            await client.shutdown()
            raise
        self._prompting = prompting

    async def close(self) -> None:
        """End the engine process. Requests that still run are aborted first."""
        if self._client is not None:
            for request_id in self._running:
                self._abort(self._client, request_id)
            await self._client.shutdown()
            self._prompting = None

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def info(self) -> EngineInfo:
        info = self._ready()[0].info
        assert info is not None
        return info

    @property
    def stats(self) -> EngineStats:
        """As of the engine's last step."""
        return self._ready()[1].stats

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._ready()[0].tokenizer

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        delta: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answers to one prompt as they grow; the last one given is `finished`.

        Each output has everything so far, or with `delta` what is new since the one before. What comes while
        the caller is busy is put together. A caller who stops iterating ends the request: a task that is
        cancelled at once, others with `aclose` (contextlib.aclosing) or when the generator is collected.

        `request_id` is for `abort`; none in use may be given twice. `priority`, `cache_salt`: as over HTTP.
        `others`: arguments of vLLM's that say what is so anyway.

        Raises, in the first step of the iteration: ValueError for a prompt that can't run. In any: EngineDead
        when the engine ends, RuntimeError when it fails this request.
        """
        check_arguments(AsyncLLM.generate, others)
        encoded = self._ready()[0].encode(prompt)
        fields = {"priority": priority, "cache_salt": cache_salt or salt_of(prompt)}
        return self._stream(encoded, sampling_params, request_id, True, delta, fields)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        delta: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same for a conversation, through the model's chat template."""
        variables = chat_template_kwargs or {}
        encoded = self._ready()[0].render(messages, tools, add_generation_prompt, variables)
        fields = {"priority": priority, "cache_salt": cache_salt}
        return self._stream(encoded, sampling_params, request_id, False, delta, fields)

    async def abort(self, request_id: str) -> None:
        """End a request; its iteration ends with an output whose answers have the finish_reason "abort". Ids
        that are unknown or have ended are ignored."""
        self._abort(self._ready()[1], request_id)

    async def reset_prefix_cache(self) -> None:
        """Forget cached prompts."""
        await self._ready()[1].call("reset_prefix_cache")

    def _abort(self, client: EngineClient, request_id: str) -> None:
        for request, _ in self._running.get(request_id, ()):
            client.abort(request.request_id)

    def _ready(self) -> tuple[Prompting, EngineClient]:
        if self._client is None or self._prompting is None:
            raise RuntimeError("this AsyncLLM isn't running: use `async with`, or await start() first")
        return self._prompting, self._client

    async def _stream(
        self,
        prompt: tuple[str | None, list[int]],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        continuation: bool,
        delta: bool,
        fields: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        prompting, client = self._ready()
        result, prepared = prompting.prepare(
            prompt,
            sampling_params or SamplingParams(),
            continuation=continuation,
            request_id=request_id,
            arrival=time.monotonic(),
            **fields,
        )
        if result.request_id in self._running:
            raise ValueError(f"request id {result.request_id} is in use")
        self._running[result.request_id] = prepared
        new = NewParts(result)
        try:
            streams = [client.submit(request) for request, _ in prepared]
            async with aclosing(merged(streams)) as steps:
                async for step in steps:
                    for index, output in step:
                        request, answer = prepared[index]
                        if answer.output.finish_reason is not None:
                            continue  # by a stop string, of which the engine has been told below
                        if output.finish_reason == "error" and client.state == "dead":
                            raise EngineDead(output.error)
                        if answer.take(output):
                            client.abort(request.request_id)
                    yield new.take() if delta else result.copy()
                    if result.finished:
                        return
        finally:
            del self._running[result.request_id]
            for request, _ in prepared:
                client.abort(request.request_id)
