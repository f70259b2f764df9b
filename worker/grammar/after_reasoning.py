"""Forms of answers that begin once the model has thought: reasoning is free, what follows has the form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from worker.params import Thinking
from worker.text.reasoning import CLOSE, OPEN

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def after_reasoning(source: str, thinking: Thinking, tokenizer: LLTokenizer) -> str:
    """llguidance's grammar for `source` (a grammar of its own) behind reasoning.

    `thinking`: "open" where the prompt has opened it, so that it ends at the closing mark; "may" where the
    model opens it, or doesn't.
    """
    form: dict[str, Any] = {"grammars": [{"lark_grammar": source}]}
    if source.startswith("{"):
        form = json.loads(source)
    form["grammars"][0]["name"] = "answer"
    opened = "thinking breaks @answer"
    start = opened if thinking == "open" else f"{_mark(OPEN, tokenizer)} {opened} | @answer"
    close = _mark(CLOSE, tokenizer)
    # Text never matches a special token, so the rule ends there by itself; else it ends where the mark is.
    thought = f": /(?s:.*)/ {close}" if close.startswith("<") else f"[suffix={close}]: /(?s:.*)/"
    rules = f"start: {start}\nthinking{thought}\nbreaks: /\\n{{0,2}}/"
    return json.dumps({**form, "grammars": [{"lark_grammar": rules}, *form["grammars"]]})


def _mark(mark: str, tokenizer: LLTokenizer) -> str:
    """The mark as Lark writes it: a token, or text."""
    tokens = tokenizer.tokenize_str(mark, parse_special=True)
    if len(tokens) == 1 and tokenizer.is_special_token(tokens[0]):
        return f"<[{tokens[0]}]>"
    return json.dumps(mark)
