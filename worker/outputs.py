"""What `LLM` and `AsyncLLM` give back, and how it is made of what the engine says step by step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from worker.ipc.messages import FinishReason, TokenLogprob
from worker.ipc.messages import RequestOutput as StepOutput
from worker.params import SamplingParams
from worker.text.output import OutputText
from worker.text.tokenizer import Tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `text` is empty when the model came without a tokenizer.

    stop_reason: the stop string or token that ended it; None for end-of-sequence, and while it goes on.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over its tokens; None without `logprobs`."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` answers. `prompt` is None when token ids were given.

    cached_tokens: of the prompt, taken from the prefix cache.
    prompt_logprobs: one for each token of the prompt, None for the first, if they were asked for.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    request_id: str = ""

    @property
    def finished(self) -> bool:
        """Whether all answers are complete."""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """vLLM's name of `cached_tokens`."""
        return self.cached_tokens

    def copy(self) -> RequestOutput:
        """As it is now: answers that go on growing don't change it."""
        outputs = [
            replace(one, token_ids=list(one.token_ids), logprobs=one.logprobs and list(one.logprobs))
            for one in self.outputs
        ]
        return replace(self, outputs=outputs)


class NewParts:
    """Of a result that grows, what wasn't there the last time."""

    def __init__(self, result: RequestOutput) -> None:
        self._result = result
        self._seen = [(0, 0, 0)] * len(result.outputs)

    def take(self) -> RequestOutput:
        """What is new: text, tokens and their log-probabilities; the rest as it is."""
        outputs = []
        for place, one in enumerate(self._result.outputs):
            text, tokens, logged = self._seen[place]
            logprobs = None if one.logprobs is None else one.logprobs[logged:]
            outputs.append(
                replace(one, text=one.text[text:], token_ids=one.token_ids[tokens:], logprobs=logprobs)
            )
            self._seen[place] = len(one.text), len(one.token_ids), len(one.logprobs or ())
        return replace(self._result, outputs=outputs)


class Answer:
    """One answer while it grows: adds what the engine says to its `output`, and finds stop strings.

    continuation: the text goes on in the prompt's own (see Detokenizer).
    """

    def __init__(
        self,
        result: RequestOutput,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        continuation: bool,
    ) -> None:
        self.output = CompletionOutput(index, "", [], logprobs=None if params.logprobs is None else [])
        self._result = result
        self._params = params
        if params.prompt_logprobs is not None:
            result.prompt_logprobs = [None]
        result.outputs.append(self.output)
        self._text = OutputText(tokenizer, params, continuation=continuation) if tokenizer else None

    def take(self, step: StepOutput) -> bool:
        """Add a step's tokens; True when the answer is complete. ValueError when the engine found the request
        at fault, RuntimeError when it failed."""
        if step.finish_reason == "error":
            raise (ValueError if step.refused else RuntimeError)(step.error)
        output = self.output
        if step.cached_tokens:
            self._result.cached_tokens = step.cached_tokens
        for piece in step.prompt_logprobs or ():
            assert self._result.prompt_logprobs is not None
            self._result.prompt_logprobs += piece.entries(self._result.prompt_token_ids)
        visible = self._visible(step)
        output.token_ids += step.token_ids
        if output.logprobs is not None:
            output.logprobs += step.logprobs or []
        output.finish_reason = step.finish_reason
        if step.stop_token in self._params.stop_token_ids:
            output.stop_reason = step.stop_token
        if self._text is not None:
            self._show(self._text, visible, last=step.finish_reason is not None)
        return output.finish_reason is not None

    def _visible(self, step: StepOutput) -> list[int]:
        """The tokens whose text shows: not the one that ended the answer, unless asked for."""
        hidden = step.stop_token is not None and not self._params.include_stop_str_in_output
        return step.token_ids[:-1] if hidden else step.token_ids

    def _show(self, text: OutputText, visible: list[int], last: bool) -> None:
        output = self.output
        # Token by token where a stop string may come, so that no token after it is part of the answer.
        size = 1 if self._params.stop else max(1, len(visible))
        before = len(output.token_ids) - len(visible)
        for start in range(0, len(visible), size):
            output.text += text.push(visible[start : start + size]).text
            if text.stopped is not None:
                self._cut(before + start + size)
                break
        if last and text.stopped is None:
            output.text += text.finish().text
        if text.stopped is not None:
            output.finish_reason, output.stop_reason = "stop", text.stopped

    def _cut(self, length: int) -> None:
        del self.output.token_ids[length:]
        if self.output.logprobs is not None:
            del self.output.logprobs[length:]
