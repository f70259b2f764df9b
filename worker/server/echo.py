"""The prompt as text, for answers that begin with it."""

from __future__ import annotations

from collections.abc import Sequence

from worker.text.detokenize import Detokenizer
from worker.text.tokenizer import Tokenizer


def echo(
    given: str | None, tokens: Sequence[int], tokenizer: Tokenizer | None, skip_special_tokens: bool
) -> tuple[str, list[int]]:
    """The prompt's text, and where in it each token begins, in characters.

    Args:
        given: the text that the prompt came as, which is its text then; None: it came as token ids.
        tokens: the prompt's tokens.
        tokenizer: None: there is no text.
        skip_special_tokens: leave special tokens out of the text of a prompt that came as token ids.
    """
    if tokenizer is None:
        return "", [0] * len(tokens)
    if given is not None:
        # A mark that was put before the text takes no room in it.
        marked = tokens[0] in tokenizer.special_ids and not given.startswith(tokenizer.token_text(tokens[0]))
        _, offsets = _decode(tokens[marked:], tokenizer, skip_special_tokens=False)
        return given, [0] * marked + [min(offset, len(given)) for offset in offsets]
    return _decode(tokens, tokenizer, skip_special_tokens)


def _decode(tokens: Sequence[int], tokenizer: Tokenizer, skip_special_tokens: bool) -> tuple[str, list[int]]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    pieces: list[str] = []
    offsets: list[int] = []
    length = 0
    for token in tokens:
        offsets.append(length)
        pieces.append(detokenizer.push([token]))
        length += len(pieces[-1])
    return "".join(pieces) + detokenizer.finish(), offsets
