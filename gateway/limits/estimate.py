"""What a request may come to in tokens, from its body: what is reserved until its real usage is known."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

# Where a request sets no max_tokens: what answers of a chat usually come to, and the API's own default for
# completions. What it used is charged in the end.
USUAL_ANSWER = 256
COMPLETION = 16
BYTES_PER_TOKEN = 4  # of English text; other languages take more tokens, and are charged them in the end
MAX_ANSWERS = 128
_LARGE = 1 << 20  # bytes of texts that would take long to look at one by one: they are estimated


class _Sized(msgspec.Struct):
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Sized)
_texts = msgspec.json.Decoder(list[str])


def sequences(n: object, prompt: bytes) -> int:
    """How many a worker computes for a request: `n` answers to each prompt of the field `prompt`, as JSON."""
    answers = min(n, MAX_ANSWERS) if isinstance(n, int) and _is_count(n) else 1
    return answers * _prompt(prompt)[1] if prompt[:1] == b"[" else answers


class _Reserved(NamedTuple):
    """Tokens of the prompts, and of all answers: at their longest if the request says (`stated`)."""

    prompt: int
    answers: int
    stated: bool


def reservation(body: bytes, *, embeds: bool = False) -> int:
    """Tokens of the prompts, estimated, and of all answers at their longest. `body` is a JSON object.
    `embeds`: it asks for embeddings, which have inputs and no answers."""
    reserved = _reserved(body, embeds)
    return reserved.prompt + reserved.answers


def explanation(body: bytes, *, embeds: bool = False) -> str:
    """What `reservation` is made of, and how a client gets it down."""
    prompt, answers, stated = _reserved(body, embeds)
    if embeds:
        return f"Its input counts as about {prompt} tokens: shorten it."
    if stated:
        return (
            f"Its prompt counts as about {prompt} tokens, its max_tokens as {answers}: shorten the prompt "
            "or lower max_tokens."
        )
    return (
        f"Its prompt counts as about {prompt} tokens, and without max_tokens {answers} are reserved for the "
        "answer: shorten the prompt or set max_tokens."
    )


def _reserved(body: bytes, embeds: bool) -> _Reserved:
    try:
        sized = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # the worker will say what is wrong
        return _Reserved(0, USUAL_ANSWER, False)
    if embeds:
        return _Reserved(max(1, _prompt(bytes(sized.input))[0]), 0, False)
    prompt, prompts = _prompt(bytes(sized.prompt))
    limits = (sized.max_tokens, sized.max_completion_tokens, sized.max_output_tokens)
    chat = len(sized.messages) + len(sized.input)
    stated = next(filter(_is_count, limits), None)
    answer = stated or (USUAL_ANSWER if chat else COMPLETION)
    answers = min(sized.n, MAX_ANSWERS) if _is_count(sized.n) else 1
    return _Reserved(prompt + chat // BYTES_PER_TOKEN, prompts * answers * int(answer), stated is not None)


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _prompt(raw: bytes) -> tuple[int, int]:
    """(tokens, number of prompts) of the field `prompt`: text, texts, token ids, or lists of those."""
    start = raw[:64].replace(b" ", b"").replace(b"\n", b"")
    if start.startswith(b'["'):
        if len(raw) > _LARGE:
            return len(raw) // BYTES_PER_TOKEN, raw.count(b'"') // 2
        try:
            texts = _texts.decode(raw)
        except msgspec.MsgspecError:
            return 0, 1
        return sum(map(len, texts)) // BYTES_PER_TOKEN + len(texts), len(texts)
    if start.startswith(b"["):
        return raw.count(b",") + 1, max(1, raw.count(b"[") - 1)
    return len(raw) // BYTES_PER_TOKEN, 1
