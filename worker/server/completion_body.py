"""How the choices of /v1/completions look: the answer, and before it, where asked for, the prompt again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from worker.server.choice import Delta, LoggedToken
from worker.server.echo import echo
from worker.server.generation import Generation, Step
from worker.server.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from worker.server.schemas import CompletionRequest
from worker.text.tokenizer import Tokenizer

_LONG = 2048  # tokens of prompts whose log-probabilities take a few milliseconds to write


class CompletionBody:
    """Choices of one request. `prompts`: as the client sent them, texts or token ids."""

    def __init__(
        self,
        request: CompletionRequest,
        generation: Generation,
        tokenizer: Tokenizer | None,
        prompts: Sequence[str | list[int]],
    ) -> None:
        self._request = request
        self._generation = generation
        self._tokenizer = tokenizer
        self._named = None if request.return_tokens_as_token_ids else tokenizer  # how logprobs name tokens
        self._prompts = prompts
        self._begun: set[int] = set()
        self._answers = len(generation.prompts) * generation.params.n
        told = request.echo or generation.params.prompt_logprobs is not None
        self._long = bool(told) and sum(map(len, generation.prompts)) > _LONG
        self._lengths: dict[int, int] = {}  # of the text of choices so far

    @property
    def long(self) -> bool:
        """Whether much is still to be said of the prompts: on a thread, so that other answers go on."""
        return self._long and len(self._begun) < self._answers

    def choice(self, index: int, answer: Delta) -> dict[str, Any]:
        """A whole choice."""
        choice = self._piece(index, answer)
        if self._request.echo:
            prompt = self._echo(index)
            choice["text"] = prompt["text"] + choice["text"]
            if prompt["logprobs"] is not None:
                choice["logprobs"] = {
                    name: values + choice["logprobs"][name] for name, values in prompt["logprobs"].items()
                }
        if self._request.return_token_ids:
            choice["prompt_token_ids"] = self._prompt(index)
        if self._request.prompt_logprobs is not None:
            entries = self._generation.prompt_logprobs(index)
            choice["prompt_logprobs"] = prompt_logprobs(
                entries, self._tokenizer, self._request.prompt_logprobs
            )
        return choice

    def pieces(self, step: Step) -> list[dict[str, Any]]:
        """What a step brings to the choices of a stream."""
        return [piece for choice, delta in step for piece in self._pieces(choice.index, delta)]

    def _pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """What a step brings to a choice of a stream, if it shows: first the prompt, where it is echoed."""
        told = delta.token_ids if self._request.return_token_ids else ()
        if not (delta.text or delta.logprobs or told or delta.finish_reason is not None):
            return []
        pieces = [self._piece(index, delta)]
        if index not in self._begun:
            self._begun.add(index)
            if self._request.echo:
                pieces.insert(0, self._echo(index))
            if self._request.return_token_ids:
                pieces[0]["prompt_token_ids"] = self._prompt(index)
        return pieces

    def _prompt(self, index: int) -> list[int]:
        """Token ids of the prompt of a choice."""
        return self._generation.prompts[index // self._generation.params.n]

    def _piece(self, index: int, delta: Delta) -> dict[str, Any]:
        start = 0
        if self._request.echo:
            start = len(self._echoes[index // self._generation.params.n][0])
            self._add_end(index, delta)
        piece: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": completion_logprobs(delta, self._named, self._generation.params, start=start),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._request.return_token_ids:
            piece["token_ids"] = delta.token_ids
        return piece

    def _add_end(self, index: int, delta: Delta) -> None:
        """With an echo, the token that ends the answer has log-probabilities though it isn't in the text: who
        scores prompts counts on an entry for every token."""
        length = self._lengths[index] = self._lengths.get(index, 0) + len(delta.text)
        if delta.end is not None:
            delta.logprobs.append(LoggedToken(delta.end, length, b""))

    def _echo(self, index: int) -> dict[str, Any]:
        """The prompt, as the first piece of a choice."""
        params = self._generation.params
        text, offsets = self._echoes[index // params.n]
        logprobs = None
        if params.logprobs is not None:
            entries = self._generation.prompt_logprobs(index)
            logprobs = echoed_logprobs(entries, self._prompt(index), offsets, self._named, params)
        piece = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return {**piece, "stop_reason": None, **({"token_ids": []} if self._request.return_token_ids else {})}

    @cached_property
    def _echoes(self) -> list[tuple[str, list[int]]]:
        """By prompt: its text, and where in it each token begins."""
        params, generation = self._generation.params, self._generation
        cut = params.truncate_prompt_tokens is not None
        return [
            echo(
                given if isinstance(given, str) and not cut else None,
                tokens,
                self._tokenizer,
                params.skip_special_tokens,
            )
            for given, tokens in zip(self._prompts, generation.prompts)
        ]
