"""LLM: the engine in the caller's own process, for offline work.

with LLM("models/SmolLM2-135M-Instruct.Q4_1.gguf") as llm:
    for result in llm.generate(["Paris is", "Rome is"], SamplingParams(temperature=0, max_tokens=8)):
        print(result.outputs[0].text)
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from rich.progress import BarColumn as Bar
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from worker.embed import EmbeddingRequestOutput, embed_all
from worker.engine.config import resolve
from worker.engine.loop import Engine
from worker.interrupts import interrupts_held
from worker.ipc.messages import EngineInfo, EngineStats
from worker.loading_bar import LoadingBar
from worker.outputs import Answer, CompletionOutput, RequestOutput
from worker.params import SamplingParams
from worker.prompting import Message, Prepared, Prompt, Prompting, as_list, conversations, each, salt_of
from worker.spellings import options_of
from worker.text.tokenizer import Tokenizer
from worker.vllm_python import check_arguments, missing
from worker.weights.source import resolve_source

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]


class LLM:
    """A model to generate with, in this process. Not thread safe; one call runs at a time.

    While it loads, a line on stderr shows how far it is, where that is a terminal.

    Args:
        model: directory, GGUF file, hub id or random:CONFIG.json.
        options: the worker's options by name, e.g. max_model_len=4096, max_num_seqs=64.

    Raises:
        ValueError: an unknown or invalid option, or a source that can't be served.
        EngineError: it doesn't fit this machine.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._loaded: Engine | None = None
        parsed = options_of(options)
        with LoadingBar(model) as bar:
            source = resolve_source(model, bar.downloading, parsed.revision)
            self._prompting = Prompting(source, parsed)
            self._loaded = Engine.load(resolve(source, parsed, self._prompting.vocab_limit), bar.show)
        self._prompting.info = self._loaded.info
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._prompting.tokenizer

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats()

    def check_integrity(self) -> str:
        """What is wrong with the KV cache's books, or nothing: with nothing running, every page is free."""
        return self._engine.check_integrity()

    def reset_prefix_cache(self) -> None:
        self._engine.call("reset_prefix_cache")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in their order; all run together, as many at a time as `max_num_seqs`.

        A prompt is text, a list of token ids, or {"prompt": text} or {"prompt_token_ids": ids}, which may
        have a `cache_salt`; `sampling_params` is one for all, or one for each. `progress` (vLLM's `use_tqdm`)
        draws a bar on the terminal. `priority`: of each prompt; lower runs earlier. `others`: arguments of
        vLLM's that say what is so anyway.

        Raises ValueError, before anything runs, when a prompt is empty or too long, or when text is given and
        the model has no tokenizer. After an exception, Ctrl-C included, nothing goes on running
        and the next call works; only after a failure of the device itself every one is a RuntimeError.
        """
        check_arguments(LLM.generate, others)
        given = as_list(prompts)
        encoded = [self._prompting.encode(prompt) for prompt in given]
        if priority is not None and len(priority) != len(given):
            raise ValueError(f"{len(given)} prompts but {len(priority)} priorities")
        fields = [
            {"cache_salt": salt_of(prompt), "priority": urgency}
            for prompt, urgency in zip(given, priority or itertools.repeat(0))
        ]
        return self._answer(encoded, sampling_params, progress or use_tqdm, continuation=True, fields=fields)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        use_tqdm: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """The same for one conversation or several, through the model's chat template.

        `tools`: JSON schemas of functions that the template shows to the model; a call in the answer is text.
        `continue_final_message`: the answer goes on in the last message, without `add_generation_prompt`.
        """
        check_arguments(LLM.chat, others)
        variables = chat_template_kwargs or {}
        encoded = [
            self._prompting.render(
                conversation, tools, add_generation_prompt, variables, continue_final_message
            )
            for conversation in conversations(messages)
        ]
        return self._answer(
            encoded, sampling_params, progress or use_tqdm, continuation=continue_final_message
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        progress: bool = False,
        use_tqdm: bool = False,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings of all prompts, in their order, by a model that makes them (option `runner`).

        `dimensions`: numbers that each vector is cut to, where the model was trained for that. ValueError as
        for `generate`, and for a model that generates.
        """
        check_arguments(LLM.embed, others)
        encoded = [self._prompting.encode(prompt) for prompt in as_list(prompts)]
        return embed_all(self._engine, encoded, self._ids, dimensions, progress or use_tqdm)

    def close(self) -> None:
        """Give the memory back. Whatever is asked afterwards is a RuntimeError."""
        if self._loaded is None:
            return
        on_gpu = self._loaded.config.device.type == "cuda" and not self._loaded.failure
        self._loaded = None
        gc.collect()  # graphs and modules refer to each other
        if on_gpu:
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing("LLM", name)

    @property
    def _engine(self) -> Engine:
        if self._loaded is None:
            raise RuntimeError("this LLM is closed; make another one")
        return self._loaded

    def _answer(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        *,
        continuation: bool,
        fields: Iterable[Mapping[str, Any]] = itertools.repeat({}),
    ) -> list[RequestOutput]:
        engine = self._engine
        results: list[RequestOutput] = []
        requests: Prepared = []
        for prompt, params, own in zip(prompts, each(sampling_params, len(prompts)), fields):
            result, prepared = self._prompting.prepare(prompt, params, continuation=continuation, **own)
            results.append(result)
            requests += prepared
        active: dict[str, Answer] = {}
        with interrupts_held() as let_interrupts_through:
            try:
                for request, answer in requests:
                    active[request.request_id] = answer
                    refused = engine.add(msgspec.structs.replace(request, arrival=time.monotonic()))
                    if refused is not None:
                        raise ValueError(refused.error)
                self._step_until_done(engine, active, progress, let_interrupts_through)
            finally:
                for name in active:  # after an exception or Ctrl-C: leave nothing running
                    engine.abort(name)
                engine.drain()
        return results

    def _step_until_done(
        self, engine: Engine, active: dict[str, Answer], progress: bool, before_step: Callable[[], None]
    ) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} answers"),
            Bar(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, transient=True, disable=not progress) as bar:
            task = bar.add_task("generate", total=len(active))
            while active:
                before_step()
                for output in engine.step():
                    answer = active.get(output.request_id)
                    if answer is None:
                        continue
                    if answer.take(output):
                        # A stop string; no effect on what has ended by itself.
                        engine.abort(output.request_id)
                        del active[output.request_id]
                        bar.advance(task)
