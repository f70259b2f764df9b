"""A tokenizer from the files of a Hugging Face model directory: tokenizer.json and its companions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from worker.text.gguf_tokenizer import set_template
from worker.text.parts import TokenizerError, TokenizerParts
from worker.text.pieces import spelling_of_decoder


def tokenizer_from_directory(directory: Path) -> TokenizerParts:
    """Read `directory`/tokenizer.json, and tokenizer_config.json, special_tokens_map.json,
    generation_config.json, chat_template.jinja (with additional_chat_templates/tool_use.jinja) or
    chat_template.json where they exist.

    Raises:
        TokenizerError: no tokenizer.json, or one that can't be read or served.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(_no_tokenizer(directory))
    return tokenizer_from_file(path)


def tokenizer_from_file(path: Path) -> TokenizerParts:
    """The same, given the tokenizer.json itself."""
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path}: not a tokenizer.json that can be read: {error}") from error
    spelling = spelling_of_decoder(backend.decoder)
    if spelling is None:
        raise TokenizerError(
            f"{path}: its decoder is neither byte-level nor SentencePiece, so tokens can't become text"
        )
    config = _read_object(path.with_name("special_tokens_map.json"))
    config |= _read_object(path.with_name("tokenizer_config.json"))
    bos, eos = _text_of(config.get("bos_token")), _text_of(config.get("eos_token"))
    _add_missing(backend, [token for token in (bos, eos, _text_of(config.get("pad_token"))) if token])
    if "add_bos_token" in config or "add_eos_token" in config:
        # As transformers does: flags that are written down win over tokenizer.json's own post-processor.
        set_template(
            backend,
            bos if config.get("add_bos_token") else None,
            eos if config.get("add_eos_token") else None,
        )
    added = backend.get_added_tokens_decoder()
    chat_template, tool_template = _chat_templates(path.parent, config)
    return TokenizerParts(
        backend=backend,
        spelling=spelling,
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=_eos_token_ids(path.parent, backend, eos),
        special_ids=frozenset(token for token, entry in added.items() if entry.special),
        chat_template=chat_template,
        tool_template=tool_template,
    )


def _no_tokenizer(directory: Path) -> str:
    other = [
        name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (directory / name).is_file()
    ]
    found = f" ({', '.join(other)} is there, but only tokenizer.json is read)" if other else ""
    return (
        f"{directory}: no tokenizer.json{found}. Point --tokenizer at a directory that has one; "
        "transformers' AutoTokenizer.save_pretrained writes it."
    )


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return value


def _text_of(token: object) -> str | None:
    """Configurations write a token as its text or as an AddedToken object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _add_missing(backend: Backend, tokens: list[str]) -> None:
    """A token named as special is one, whether tokenizer.json says so or not."""
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])


def _eos_token_ids(directory: Path, backend: Backend, eos: str | None) -> tuple[int, ...]:
    configured = _read_object(directory / "generation_config.json").get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    ids = [*ids, backend.token_to_id(eos) if eos else None]
    return tuple(dict.fromkeys(token for token in ids if isinstance(token, int)))


def _chat_templates(directory: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The template for chats, and the one for chats with tools where that is another one."""
    jinja = directory / "chat_template.jinja"
    tool_jinja = directory / "additional_chat_templates" / "tool_use.jinja"
    if jinja.is_file():
        tools = tool_jinja.read_text(encoding="utf-8") if tool_jinja.is_file() else None
        return jinja.read_text(encoding="utf-8"), tools
    template = _read_object(directory / "chat_template.json").get("chat_template") or config.get(
        "chat_template"
    )
    named: dict[Any, Any] = {"default": template}
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    default, tools = named.get("default"), named.get("tool_use")
    return default if isinstance(default, str) else None, tools if isinstance(tools, str) else None
