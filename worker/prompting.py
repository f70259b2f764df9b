"""From what a caller of `LLM` or `AsyncLLM` gives to requests of the engine; whatever is wrong is said before
anything runs."""

from __future__ import annotations

import itertools
import operator
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, SupportsIndex, TypedDict

import msgspec

from contracts.options import WorkerOptions
from worker.ipc.messages import EngineInfo, EngineRequest
from worker.outputs import Answer, RequestOutput
from worker.params import SamplingParams, choice_seeds
from worker.text.template import ChatTemplate, up_to_mark, with_mark
from worker.text.tokenizer import Tokenizer
from worker.text.vocabulary import fit, truncate
from worker.weights.source import ModelSource


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Message = Mapping[str, Any]
Prepared = list[tuple[EngineRequest, Answer]]


class Prompting:
    """Tokenizer and chat template of a model, and `info`, once its engine has loaded."""

    def __init__(self, source: ModelSource, options: WorkerOptions) -> None:
        self.tokenizer = Tokenizer.from_source(source, options.tokenizer)
        self.info: EngineInfo | None = None
        self._numbers = itertools.count()
        text = self.tokenizer.chat_template if self.tokenizer is not None else None
        if options.chat_template is not None:
            text = Path(options.chat_template).expanduser().read_text(encoding="utf-8")
        self._template_text = text
        self._template: ChatTemplate | None = None

    @property
    def vocab_limit(self) -> int | None:
        return self.tokenizer.vocab_size if self.tokenizer is not None else None

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text, if it was given as such, and token ids."""
        if isinstance(prompt, Mapping):
            prompt = _of_mapping(prompt)
        if not isinstance(prompt, str):
            return None, _token_ids(prompt)
        if self.tokenizer is None:
            raise ValueError("this model came without a tokenizer: give token ids, or the option tokenizer")
        try:
            return prompt, self.tokenizer.encode(prompt)
        except TypeError:  # what tokenizers says of text that has no UTF-8
            raise ValueError("a prompt is no valid Unicode: it has half of a surrogate pair") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        continue_final_message: bool = False,
    ) -> tuple[str, list[int]]:
        """A conversation through the chat template, and its token ids; `continue_final_message`: up to the
        end of the last message's content. ValueError when there is no template, or it refuses these."""
        if not messages:
            raise ValueError("a conversation is empty: at least one message is needed")
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message goes on with the last message: it needs add_generation_prompt=False"
            )
        if self._template is None:
            if self.tokenizer is None or self._template_text is None:
                raise ValueError("the model has no chat template: use generate, or the option chat_template")
            ends = self.tokenizer.bos_token, self.tokenizer.eos_token
            self._template = ChatTemplate(self._template_text, *ends)
        assert self.tokenizer is not None
        mark = secrets.token_hex(16)
        if continue_final_message:
            messages = [*messages[:-1], with_mark(messages[-1], mark)]
        text = self._template.render(messages, tools, add_generation_prompt, **variables)
        if continue_final_message:
            text = up_to_mark(text, mark)
        return text, self.tokenizer.encode(text, add_special_tokens=False)

    def prepare(
        self,
        prompt: tuple[str | None, list[int]],
        params: SamplingParams,
        *,
        continuation: bool,
        request_id: str | None = None,
        **fields: Any,
    ) -> tuple[RequestOutput, Prepared]:
        """The result to come, and a request with its answer for each of the `n`. `fields`: of EngineRequest.
        ValueError for what can't run."""
        info = self.info
        assert info is not None
        if info.pooling is not None:
            raise ValueError("this model makes embeddings: use embed, or the option runner='generate'")
        text, tokens = prompt
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        result = RequestOutput(text, truncate(tokens, params, info.max_model_len), request_id=name)
        _check_length(result, params, info)
        ends = self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        params = fit(params, self.tokenizer, info.vocab_size, (*ends, *info.eos_token_ids))
        prepared = []
        for index, seed in enumerate(choice_seeds(params)):
            # The prompt's log-probabilities are told once.
            own = params if index == 0 else msgspec.structs.replace(params, prompt_logprobs=None)
            answer = Answer(result, index, own, self.tokenizer, continuation=continuation)
            request = EngineRequest(
                f"{name}-{index}",
                result.prompt_token_ids,
                own,
                seed,
                end_token_ids=ends,
                sibling=index > 0,
                **fields,
            )
            prepared.append((request, answer))
        return result, prepared


def each(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
    """Parameters of every prompt. ValueError when their number is another."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise TypeError("sampling_params must be SamplingParams, or a list of them: one for each prompt")
    if len(params) != prompts:
        raise ValueError(f"{prompts} prompts but {len(params)} sampling parameters")
    return list(params)


def salt_of(prompt: Prompt) -> str:
    """Only prompts of the same salt share cached pages."""
    salt = (prompt.get("cache_salt") or "") if isinstance(prompt, Mapping) else ""
    if not isinstance(salt, str):
        raise TypeError(f"cache_salt of a prompt must be text; it can't be {type(salt).__name__}")
    return salt


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A prompt alone is a list of one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise TypeError(_wrong_prompt(prompts))
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], SupportsIndex) else several


def _token_ids(prompt: Sequence[int]) -> list[int]:
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise TypeError(_wrong_prompt(prompt))
    tokens = list(prompt)
    if not set(map(type, tokens)) <= {int}:
        if any(isinstance(token, bool) or not isinstance(token, SupportsIndex) for token in tokens):
            raise TypeError("token ids of a prompt must be whole numbers")
        tokens = list(map(operator.index, tokens))  # those of numpy, say
    return tokens


def _wrong_prompt(prompt: object) -> str:
    return (
        "a prompt is text, a list of token ids, or a dictionary with prompt or prompt_token_ids; "
        f"it can't be {type(prompt).__name__}"
    )


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> Iterator[Sequence[Message]]:
    """A conversation alone, or each of several."""
    if messages and isinstance(messages[0], Mapping):
        yield messages  # type: ignore[misc]
    else:
        yield from messages  # type: ignore[misc]


def _of_mapping(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    """vLLM's spelling of prompts."""
    given: str | Sequence[int] | None = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if given is None or set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}:
        raise ValueError(
            "a prompt as a dictionary has prompt (text) or prompt_token_ids, "
            f"and this one has {', '.join(sorted(map(str, prompt))) or 'nothing'}; "
            "besides them only cache_salt is known"
        )
    return given


def _check_length(result: RequestOutput, params: SamplingParams, info: EngineInfo) -> None:
    length, longest = len(result.prompt_token_ids), info.max_model_len
    if length == 0:
        raise ValueError("a prompt is empty")
    if length + (params.max_tokens != 0) > longest:
        raise ValueError(f"a prompt has {length} tokens; max_model_len is {longest}, the answer included")
    if max(result.prompt_token_ids) >= info.vocab_size or min(result.prompt_token_ids) < 0:
        raise ValueError(f"token ids of a prompt must be from 0 to {info.vocab_size - 1}")
