"""Token ids to text while they arrive, in constant work per token."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.text.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental decoding of one answer.

    The pieces of `push` and `finish` joined equal ``tokenizer.decode(all ids)``. A token's bytes don't
    depend on its neighbours, so all that has to be remembered is an unfinished UTF-8 character: at most
    three bytes.

    Args:
        skip_special_tokens: leave control tokens out of the text.
        continuation: the text goes on after other text, so a SentencePiece vocabulary's leading space stays.
        shown: special tokens that stay in the text all the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        *,
        continuation: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        self._look_up: Callable[[int], bytes] = tokenizer.token_bytes
        if skip_special_tokens:
            self._look_up = _visible_but(shown, tokenizer) if shown else tokenizer.visible_bytes
        self._utf8 = _new_decoder("replace")
        strip = tokenizer.strips_leading_space and not continuation
        self.bytes_of: Callable[[int], bytes] = self._first_bytes if strip else self._look_up

    def push(self, token_ids: Sequence[int]) -> str:
        """New text: whole characters only. Bytes that can't become a character any more are U+FFFD."""
        if len(token_ids) == 1:
            return self.push_bytes(self.bytes_of(token_ids[0]))
        return self.push_bytes(b"".join([self.bytes_of(token) for token in token_ids]))

    def push_bytes(self, data: bytes) -> str:
        """The same for the bytes of the next tokens, as `bytes_of` gives them in order."""
        return self._utf8.decode(data)

    @property
    def pending(self) -> bytes:
        """The bytes of an unfinished character: 0 to 3."""
        return self._utf8.getstate()[0]

    def finish(self) -> str:
        """What an unfinished character turns into when nothing follows: U+FFFD, or nothing."""
        return self._utf8.decode(b"", True)

    def _first_bytes(self, token_id: int) -> bytes:
        data = self._look_up(token_id)
        if data:
            self.bytes_of = self._look_up
        return data.removeprefix(b" ")


def _visible_but(shown: Collection[int], tokenizer: Tokenizer) -> Callable[[int], bytes]:
    def bytes_of(token: int) -> bytes:
        return tokenizer.token_bytes(token) if token in shown else tokenizer.visible_bytes(token)

    return bytes_of
