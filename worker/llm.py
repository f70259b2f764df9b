"""LLM: the engine in the caller's own process, for offline work.

with LLM("models/SmolLM2-135M-Instruct.Q4_1.gguf") as llm:
    for result in llm.generate(["Paris is", "Rome is"], SamplingParams(temperature=0, max_tokens=8)):
        print(result.outputs[0].text)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.progress import BarColumn as Bar
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from contracts.options import WorkerOptions
from worker.embed import EmbeddingRequestOutput, embed_all
from worker.engine.config import resolve
from worker.engine.loop import Engine
from worker.ipc.messages import EngineInfo, EngineRequest, EngineStats, FinishReason, TokenLogprob
from worker.ipc.messages import RequestOutput as StepOutput
from worker.params import SamplingParams, choice_seeds
from worker.text.output import OutputText
from worker.text.template import ChatTemplate
from worker.text.tokenizer import Tokenizer
from worker.text.vocabulary import fit, truncate
from worker.weights.source import resolve_source

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `text` is empty when the model came without a tokenizer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` answers. `prompt` is None when token ids were given.

    `prompt_logprobs`: one for each token of the prompt, None for the first, if they were asked for.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None


class LLM:
    """A model to generate with. Not thread safe; one call runs at a time.

    Args:
        model: directory, GGUF file, hub id or random:CONFIG.json.
        options: the worker's options by name, e.g. max_model_len=4096, max_num_seqs=64.

    Raises:
        ValueError: an unknown or invalid option, or a source that can't be served.
        EngineError: it doesn't fit this machine.
    """

    def __init__(self, model: str, **options: Any) -> None:
        parsed = WorkerOptions.model_validate(options)
        source = resolve_source(model)
        self.tokenizer = Tokenizer.from_source(source, parsed.tokenizer)
        vocab_limit = self.tokenizer.vocab_size if self.tokenizer is not None else None
        self._engine = Engine.load(resolve(source, parsed, vocab_limit))
        self._ids = itertools.count()
        self._template: ChatTemplate | None = None

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
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in their order; all run together.

        A prompt is text or a list of token ids; `params` is one for all, or one for each. Raises ValueError,
        before anything runs, when a prompt is empty or too long, or when text is given and the model has no
        tokenizer.
        """
        return self._answer(_as_list(prompts), params, progress, continuation=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """The same for one conversation or several, through the model's chat template."""
        if self._template is None:
            tokenizer = self.tokenizer
            if tokenizer is None or tokenizer.chat_template is None:
                raise ValueError(
                    "the model has no chat template; use generate, or give the option chat_template"
                )
            self._template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
        several: list[Sequence[Message]] = [messages] if _one_conversation(messages) else list(messages)  # type: ignore[list-item, arg-type]
        assert self.tokenizer is not None
        prompts = [
            self.tokenizer.encode(
                self._template.render(conversation, **template_kwargs), add_special_tokens=False
            )
            for conversation in several
        ]
        return self._answer(prompts, params, progress, continuation=False)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, progress: bool = False
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings of all prompts, in their order, by a model that makes them (option `runner`).

        `dimensions`: numbers that each vector is cut to, where the model was trained for that. ValueError as
        for `generate`, and for a model that generates.
        """
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        return embed_all(self._engine, encoded, self._ids, dimensions, progress)

    def close(self) -> None:
        """Give the memory back."""
        del self._engine

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        *,
        continuation: bool,
    ) -> list[RequestOutput]:
        if self.info.pooling is not None:
            raise ValueError("this model makes embeddings: use embed, or the option runner='generate'")
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            each = list(params)
            if len(each) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
        results = [RequestOutput(*self._encode(prompt), outputs=[]) for prompt in prompts]
        for result, its in zip(results, each):
            result.prompt_token_ids = truncate(result.prompt_token_ids, its, self.info.max_model_len)
            self._check_length(result, its)
        return self._run(results, [self._fit(its) for its in each], progress, continuation)

    def _fit(self, params: SamplingParams) -> SamplingParams:
        ends = self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        return fit(params, self.tokenizer, self.info.vocab_size, (*ends, *self.info.eos_token_ids))

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if not isinstance(prompt, str):
            return None, list(prompt)
        if self.tokenizer is None:
            raise ValueError("this model came without a tokenizer: give token ids, or the option tokenizer")
        return prompt, self.tokenizer.encode(prompt)

    def _check_length(self, result: RequestOutput, params: SamplingParams) -> None:
        length, longest = len(result.prompt_token_ids), self.info.max_model_len
        if length == 0:
            raise ValueError("a prompt is empty")
        if length + (params.max_tokens != 0) > longest:
            raise ValueError(f"a prompt has {length} tokens; max_model_len is {longest}, the answer included")

    def _run(
        self, results: list[RequestOutput], each: list[SamplingParams], progress: bool, continuation: bool
    ) -> list[RequestOutput]:
        active: dict[str, _Answer] = {}
        ends = self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        try:
            for result, params in zip(results, each):
                for index, seed in enumerate(choice_seeds(params)):
                    answer = _Answer(result, index, params, self.tokenizer, continuation)
                    name = f"llm-{next(self._ids)}"
                    active[name] = answer
                    message = EngineRequest(
                        name,
                        result.prompt_token_ids,
                        # The prompt's log-probabilities are told once.
                        params if index == 0 else msgspec.structs.replace(params, prompt_logprobs=None),
                        seed,
                        arrival=time.monotonic(),
                        end_token_ids=ends,
                    )
                    refused = self._engine.add(message)
                    if refused is not None:
                        raise ValueError(refused.error)
            self._step_until_done(active, progress)
        finally:
            for name in active:  # after an exception or Ctrl-C: leave nothing running
                self._engine.abort(name)
            self._engine.drain()
        return results

    def _step_until_done(self, active: dict[str, _Answer], progress: bool) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} answers"),
            Bar(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, transient=True, disable=not progress) as bar:
            task = bar.add_task("generate", total=len(active))
            while active:
                for output in self._engine.step():
                    answer = active.get(output.request_id)
                    if answer is None:
                        continue
                    if answer.take(output):
                        self._engine.abort(
                            output.request_id
                        )  # a stop string; no effect on what has ended by itself
                        del active[output.request_id]
                        bar.advance(task)


class _Answer:
    """Collects one answer, and finds stop strings in it."""

    def __init__(
        self,
        result: RequestOutput,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        continuation: bool,
    ) -> None:
        self._result = result
        self._show_stop_token = params.include_stop_str_in_output
        if params.prompt_logprobs is not None:
            result.prompt_logprobs = [None]
        self.output = CompletionOutput(index, "", [], logprobs=None if params.logprobs is None else [])
        result.outputs.append(self.output)
        self._text = (
            OutputText(tokenizer, params, continuation=continuation) if tokenizer is not None else None
        )

    def take(self, step: StepOutput) -> bool:
        """Add a step's tokens; True when the answer is complete."""
        output = self.output
        if step.cached_tokens:
            self._result.cached_tokens = step.cached_tokens
        for piece in step.prompt_logprobs or ():
            assert self._result.prompt_logprobs is not None
            self._result.prompt_logprobs += piece.entries(self._result.prompt_token_ids)
        output.token_ids += step.token_ids
        if output.logprobs is not None:
            output.logprobs += step.logprobs or []
        output.finish_reason = step.finish_reason
        if step.finish_reason == "error":
            raise RuntimeError(step.error)
        if self._text is not None:
            hidden = step.stop_token is not None and not self._show_stop_token
            visible = step.token_ids[:-1] if hidden else step.token_ids
            output.text += self._text.push(visible).text
            if step.finish_reason is not None:
                output.text += self._text.finish().text
            if self._text.stopped is not None:
                output.finish_reason = "stop"
        return output.finish_reason is not None


def _one_conversation(messages: Sequence[Any]) -> bool:
    return not messages or isinstance(messages[0], dict)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
