"""Choice: one answer while it grows, from the engine's tokens to text, log-probabilities and an end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from worker.ipc.messages import PromptLogprobs, RequestOutput, TokenLogprob
from worker.params import SamplingParams
from worker.text.output import OutputText, TextDelta
from worker.text.tokenizer import Tokenizer


class LoggedToken(NamedTuple):
    """A token with its log-probability; `offset` is where its text starts in the answer, in characters."""

    logprob: TokenLogprob
    offset: int
    data: bytes  # its bytes as far as they are in the text


@dataclass(slots=True)
class Delta:
    """What one engine output adds to an answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LoggedToken] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None  # the stop string or token that ended it; None for end-of-sequence
    end: TokenLogprob | None = None  # of the token that ended it, if that isn't in the text

    def add(self, later: Delta) -> None:
        """Append what came after this."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.end = later.end


class Choice:
    """Counts an answer's tokens and turns them into text. The result doesn't depend on how they are grouped.

    Without a tokenizer there is no text, only tokens. `shown`: special tokens that are in the text though
    others aren't.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        *,
        continuation: bool,
        shown: Collection[int] = (),
    ) -> None:
        self.index = index
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finished = False
        self.prompt_logprobs: list[PromptLogprobs] = []
        self._params = params
        self._text = (
            OutputText(tokenizer, params, continuation=continuation, shown=shown) if tokenizer else None
        )
        self._logprobs: dict[int, TokenLogprob] = {}  # by place in the text, until the text shows
        self._pushed = 0

    def push(self, output: RequestOutput) -> Delta:
        """Take in what a step brought. Not for outputs that end with "abort" or "error"."""
        if self.completion_tokens == 0:
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs += output.prompt_logprobs
        delta = Delta()
        visible = self._visible(output)
        # Token by token where a stop string may come, so that the tokens after it aren't counted.
        size = 1 if self._params.stop else max(1, len(visible))
        for start in range(0, len(visible), size):
            tokens = visible[start : start + size]
            self._count(delta, tokens)
            self._show(delta, tokens, output.logprobs[start : start + size] if output.logprobs else None)
            if self.finished:
                return delta
        self._count(delta, output.token_ids[len(visible) :])
        if output.logprobs is not None and len(visible) < len(output.token_ids):
            delta.end = output.logprobs[-1]
        if output.finish_reason is not None:
            self._finish(delta, output)
        return delta

    def _visible(self, output: RequestOutput) -> Sequence[int]:
        """The tokens that may show: the token that ended the answer doesn't, unless asked for."""
        ends = output.stop_token is not None and output.token_ids[-1:] == [output.stop_token]
        if ends and not self._params.include_stop_str_in_output:
            return output.token_ids[:-1]
        return output.token_ids

    def _count(self, delta: Delta, tokens: Sequence[int]) -> None:
        self.completion_tokens += len(tokens)
        delta.token_ids += tokens

    def _show(self, delta: Delta, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        if self._text is None:
            delta.logprobs += [LoggedToken(logprob, 0, b"") for logprob in logprobs or ()]
            return
        if logprobs is not None:
            self._logprobs.update(enumerate(logprobs, self._pushed))
        self._pushed += len(tokens)
        self._add(delta, self._text.push(tokens))

    def _add(self, delta: Delta, shown: TextDelta) -> None:
        delta.text += shown.text
        for token in shown.tokens:
            delta.logprobs.append(LoggedToken(self._logprobs.pop(token.index), token.offset, token.data))
        if shown.stopped is not None:
            self.finished = True
            delta.finish_reason, delta.stop_reason = "stop", shown.stopped

    def _finish(self, delta: Delta, output: RequestOutput) -> None:
        if self._text is not None:
            self._add(delta, self._text.finish())
        if self.finished:
            return
        self.finished = True
        delta.finish_reason = "stop" if output.finish_reason == "stop" else "length"
        if output.stop_token in self._params.stop_token_ids:
            delta.stop_reason = output.stop_token
