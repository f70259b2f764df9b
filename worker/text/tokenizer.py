"""Text to token ids and back, from a model's own files; torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from worker.text.gguf_tokenizer import tokenizer_from_gguf
from worker.text.parts import TokenizerError, TokenizerParts
from worker.text.pretrained import tokenizer_from_directory, tokenizer_from_file
from worker.weights.gguf_header import GgufError, read_gguf_header

if TYPE_CHECKING:
    from worker.weights.source import ModelSource

__all__ = ["Tokenizer", "TokenizerError", "need_tokenizer"]


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        vocab_size: largest token id + 1, added tokens included. A model may have more rows (padding).
        eos_token_ids: every id that ends an answer, from the generation configuration and the tokenizer.
        bos_token, eos_token: their texts; None if the model has none.
        chat_template: Jinja source; None if the model brings none.
        tool_template: the one for chats with tools; None if that is the same.
        special_ids: control tokens, which `skip_special_tokens` leaves out.
        strips_leading_space: decoding drops the one space that encoding puts in front (SentencePiece).
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._spelling = parts.spelling
        self.eos_token_ids = parts.eos_token_ids
        self.bos_token, self.eos_token = parts.bos_token, parts.eos_token
        self.chat_template = parts.chat_template
        self.tool_template = parts.tool_template
        self.special_ids = parts.special_ids
        self.strips_leading_space = parts.spelling.strip_leading_space
        self._added = {id_: token.content for id_, token in self._backend.get_added_tokens_decoder().items()}
        # Ids may have gaps, so counting the entries isn't enough.
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    @classmethod
    def from_source(cls, source: ModelSource, tokenizer: str | None = None) -> Tokenizer | None:
        """The tokenizer of a model, or of `tokenizer` (a directory, tokenizer.json or GGUF file) when given.

        None when the model is `random:` and no tokenizer is named: such a model serves token ids only.

        Raises:
            TokenizerError: there is none, or it can't be served.
        """
        if tokenizer is None and source.kind == "random":
            return None
        parts = _read(Path(tokenizer).expanduser() if tokenizer else source.path)
        ends = (*source.generation.get("eos_token_ids", ()), *parts.eos_token_ids)
        return cls(replace(parts, eos_token_ids=tuple(dict.fromkeys(ends))))

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """The tokenizer in a directory, a tokenizer.json or a GGUF file. Raises TokenizerError."""
        return cls(_read(Path(path).expanduser()))

    def to_json(self) -> str:
        """The pipeline as a tokenizer.json."""
        return str(self._backend.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in it are recognized, as chat templates need.

        Args:
            text: any text.
            add_special_tokens: also put the model's begin (and end) token there, if it is trained with one.
        """
        # encode_batch, for one text too: unlike encode it lets other threads run meanwhile.
        return list(self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token become nothing."""
        bytes_of = self.visible_bytes if skip_special_tokens else self.token_bytes
        data = b"".join([bytes_of(token) for token in ids])
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes `token_id` stands for; a character may be spread over several tokens."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        data = self._bytes[token_id]
        if data is None:
            data = self._bytes[token_id] = self._look_up(token_id)
        return data

    def visible_bytes(self, token_id: int) -> bytes:
        """The same, but nothing for a special token."""
        return b"" if token_id in self.special_ids else self.token_bytes(token_id)

    def token_id(self, text: str) -> int | None:
        """The token that is exactly `text`; None if there is none."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def token_text(self, token_id: int) -> str:
        """`token_id` alone as text; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _look_up(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None and self._spelling.alphabet == "byte-level":
            return added.encode("utf-8", "replace")
        text = self._backend.id_to_token(token_id)
        return b"" if text is None else self._spelling.to_bytes(text)


def need_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, for a request that needs text. Raises TokenizerError when the model has none."""
    if tokenizer is None:
        raise TokenizerError(
            "this model has no tokenizer (random weights), so it takes and gives token ids only; "
            "start it with --tokenizer to use text"
        )
    return tokenizer


def _read(path: Path) -> TokenizerParts:
    if path.is_dir():
        ggufs = [] if (path / "tokenizer.json").is_file() else sorted(path.glob("*.gguf"))
        if len(ggufs) != 1:
            return tokenizer_from_directory(path)
        path = ggufs[0]
    if not path.is_file():
        raise TokenizerError(f"{path}: no such file or directory; --tokenizer takes a directory or a file")
    if path.suffix == ".json":
        return tokenizer_from_file(path)
    try:
        return tokenizer_from_gguf(read_gguf_header(path).metadata)
    except GgufError as error:
        raise TokenizerError(str(error)) from error
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
