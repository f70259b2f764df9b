"""Small hand-built tokenizers of the kinds that are served, as GGUF metadata and as directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worker.text.gguf_tokenizer import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, tokenizer_from_gguf
from worker.text.pieces import BYTE_OF_CHAR, SPACE
from worker.text.tokenizer import Tokenizer

BYTE = 6
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def spell(text: str) -> str:
    """`text` as a byte-level vocabulary writes it."""
    return "".join(CHAR_OF_BYTE[byte] for byte in text.encode())


def byte_level_metadata(
    pre: str = "gpt-2", words: tuple[str, ...] = ("he",), **fields: Any
) -> dict[str, Any]:
    """All 256 bytes, then every prefix of `words` (so that merging reaches the word), then special tokens."""
    tokens = [CHAR_OF_BYTE[byte] for byte in range(256)]
    merges: list[str] = []
    for word in map(spell, words):
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    types = [NORMAL] * len(tokens)
    for text, kind in (("<|end|>", CONTROL), ("<|user|>", CONTROL), ("<tool>", USER_DEFINED)):
        tokens.append(text)
        types.append(kind)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|user|>"),
        **{f"tokenizer.ggml.{key}": value for key, value in fields.items()},
    }


def sentencepiece_metadata(pieces: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    """<unk>, <s>, </s>, a control token, the 256 byte pieces, then `pieces` with falling scores."""
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 260 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in fields.items()},
    }


PIECES = (
    SPACE + "h", "el", SPACE + "hel", "lo", SPACE + "hello", SPACE + "w", "or", "ld", SPACE * 2,
    SPACE, *"abcdefghijklmnopqrstuvwxyz.,!?", "é", "中",
)  # fmt: skip


def byte_level(words: tuple[str, ...] = ("hello", " world"), **fields: Any) -> Tokenizer:
    return Tokenizer(tokenizer_from_gguf(byte_level_metadata(words=words, **fields)))


def sentencepiece(**fields: Any) -> Tokenizer:
    return Tokenizer(tokenizer_from_gguf(sentencepiece_metadata(PIECES, **fields)))


def write_directory(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """Save the tokenizer as a Hugging Face directory would hold it."""
    from tokenizers import decoders, processors

    backend = tokenizer._backend
    if tokenizer.strips_leading_space:
        replace = decoders.Replace(SPACE, " ")
        strip = decoders.Strip(" ", 1, 0)
        backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    else:
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
