"""From the tokens of one answer to its text: decoding, stop strings, and which bytes each token brought."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from worker.params import SamplingParams
from worker.text.detokenize import Detokenizer
from worker.text.stop import StopMatcher
from worker.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token of the answer.

    index: its place among the tokens pushed, from 0. data: its bytes as far as they are in the text.
    offset: where it begins, in characters of the answer's text.
    """

    index: int
    data: bytes
    offset: int


@dataclass(slots=True)
class TextDelta:
    """What a push brought.

    text: new text to show. stopped: the stop string that ended the answer, if one did.
    tokens: the tokens whose text is hereby complete, in order; filled only if the request wants logprobs.
    Over a whole answer their bytes joined are the text's (what isn't UTF-8 is U+FFFD in the text).
    """

    text: str
    stopped: str | None = None
    tokens: list[TokenText] = field(default_factory=list)


class OutputText:
    """The text of one answer while its tokens arrive.

    Tokens among the first `params.min_tokens` never complete a stop string.

    Args:
        continuation: the text goes on after a prompt that is text itself (completions), so a SentencePiece
            vocabulary's leading space is kept.
        shown: special tokens that are in the text though others aren't.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        continuation: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, params.skip_special_tokens, continuation=continuation, shown=shown
        )
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._unstoppable = params.min_tokens if params.stop else 0
        self._ledger = _Ledger() if params.logprobs is not None else None
        self._stopped: str | None = None
        self._finished = False

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stopped

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The text that `token_ids` bring. After a stop string was found, nothing more comes."""
        if self._finished:
            return TextDelta("", self._stopped)
        shown: list[str] = []
        if self._unstoppable:
            head, token_ids = token_ids[: self._unstoppable], token_ids[self._unstoppable :]
            self._unstoppable -= len(head)
            shown.append(self._decode(head))
        text, self._stopped = self._matcher.push(self._decode(token_ids))
        shown.append(text)
        self._finished = self._stopped is not None
        return self._delta("".join(shown))

    def finish(self) -> TextDelta:
        """The text held back: the start of a stop string that didn't come, an unfinished character."""
        if self._finished:
            return TextDelta("", self._stopped)
        self._finished = True
        text, self._stopped = self._matcher.push(self._detokenizer.finish())
        return self._delta(text + self._matcher.flush())

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._ledger is None:
            return self._detokenizer.push(token_ids)
        texts = []
        for token in token_ids:
            data = self._detokenizer.bytes_of(token)
            text = self._detokenizer.push_bytes(data)
            self._ledger.add(data, text, self._detokenizer.pending)
            texts.append(text)
        return "".join(texts)

    def _delta(self, text: str) -> TextDelta:
        tokens = self._ledger.release(len(text), last=self._finished) if self._ledger is not None else []
        return TextDelta(text, self._stopped, tokens)


@dataclass(frozen=True, slots=True)
class _Decoded:
    index: int
    data: bytes
    text: str  # the characters it completed
    start: int  # characters decoded before it
    end: int  # characters that must be shown before it is
    carried: bytes  # of an unfinished character before it


class _Ledger:
    """Tokens decoded but not yet shown, and how far into the decoded text each of them reaches."""

    def __init__(self) -> None:
        self._tokens: deque[_Decoded] = deque()
        self._count = 0
        self._decoded = 0
        self._shown = 0
        self._carried = b""

    def add(self, data: bytes, text: str, pending: bytes) -> None:
        """The next token: its bytes, the text it completed, the bytes it left of an unfinished character."""
        start, self._decoded = self._decoded, self._decoded + len(text)
        end = self._decoded + (1 if pending else 0)
        self._tokens.append(_Decoded(self._count, data, text, start, end, self._carried))
        self._count += 1
        self._carried = pending

    def release(self, shown: int, last: bool) -> list[TokenText]:
        """Tokens complete now that `shown` more characters are; with `last` also the rest of a cut one."""
        self._shown += shown
        released = []
        while self._tokens and self._tokens[0].end <= self._shown:
            token = self._tokens.popleft()
            released.append(TokenText(token.index, token.data, token.start))
        if last and self._tokens:
            cut = self._tokens[0]
            data = _bytes_of_start(cut, max(0, self._shown - cut.start))
            if data:
                released.append(TokenText(cut.index, data, cut.start))
            self._tokens.clear()
        return released


def _bytes_of_start(token: _Decoded, characters: int) -> bytes:
    """The bytes of `token` that the first of its characters came from, where they may be no UTF-8 at all."""
    wanted = token.text[:characters]
    for length in range(len(token.data)):
        if wanted and (token.carried + token.data[:length]).decode("utf-8", "replace") == wanted:
            return token.data[:length]
    return b""


def token_logprob_bytes(
    tokenizer: Tokenizer, token_id: int, skip_special_tokens: bool = True
) -> tuple[str, list[int]]:
    """`token` and `bytes` of an entry of `logprobs.content`: part of a character shows as U+FFFD in `token`.

    A special token that the text leaves out has its name in `token`, and no bytes.
    """
    hidden = skip_special_tokens and token_id in tokenizer.special_ids
    data = tokenizer.token_bytes(token_id)
    return data.decode("utf-8", "replace"), [] if hidden else list(data)
