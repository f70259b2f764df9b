"""The real bytes of a token, from the way vocabularies spell them.

Byte-level BPE (GPT-2, `bytes_to_unicode` in openai/gpt-2 encoder.py) writes every byte as one printable
character. SentencePiece writes a space as U+2581 and a byte it has no piece for as ``<0xNN>``.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, Literal, NamedTuple

Alphabet = Literal["byte-level", "sentencepiece"]

SPACE: Final = "\u2581"
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte: printable Latin-1 stands for itself, the other bytes for U+0100 onwards in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR: Final = _byte_alphabet()


class Spelling(NamedTuple):
    """How a vocabulary spells bytes, and whether decoding drops the space that encoding put in front."""

    alphabet: Alphabet
    strip_leading_space: bool = False

    def to_bytes(self, token: str) -> bytes:
        """Bytes of a vocabulary entry (added tokens of a byte-level vocabulary spell themselves)."""
        if self.alphabet == "byte-level":
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:
                return token.encode("utf-8", "replace")
        byte = _BYTE_PIECE.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace(SPACE, " ").encode("utf-8", "replace")


def spelling_of_decoder(decoder: Any) -> Spelling | None:
    """The spelling that a `tokenizers` decoder object undoes; None if it is neither of the two kinds."""
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return Spelling("byte-level")
    metaspace = next((step for step in steps if step["type"] == "Metaspace"), None)
    if metaspace is not None and metaspace.get("replacement") == SPACE:
        return Spelling("sentencepiece", metaspace.get("prepend_scheme", "always") != "never")
    if any(step["type"] == "Replace" and step["pattern"].get("String") == SPACE for step in steps):
        strips = any(s["type"] == "Strip" and s["content"] == " " and s["start"] > 0 for s in steps)
        return Spelling("sentencepiece", strips)
    return None
