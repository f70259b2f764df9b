"""How a family of models writes calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Payload = Literal["object", "list", "sequence", "parameters", "arguments", "python"]


@dataclass(frozen=True, slots=True)
class Mark:
    """What calls stand between.

    Args:
        start: the mark before them; "": they begin the answer.
        payload: "object": one call; "list": a JSON list of calls; "sequence": calls with semicolons between;
            "parameters": one, each parameter between marks (qwen3_coder.py); "arguments": one, its name
            before a JSON object, or a list (mistral.py); "python": a list of Python's calls (pythonic.py).
        end: the mark after them; "": none.
        only_known: it is a call only if its function is one of those offered (else it may be any JSON).
    """

    start: str
    payload: Payload
    end: str = ""
    only_known: bool = False


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A way to write calls.

    Args:
        name: vLLM's name of the parser for it.
        marks: what calls stand between, any of them.
        template_signs: a chat template that has one of these in it teaches this format, ...
        template_counter_signs: ... unless it has one of these.
        own_prompt: it is so common that models follow it when they are told of it (own_prompt.py) because
            their template has no place for tools.
        short_ids: ids of calls are nine letters and digits, as the family's templates demand.
        inner: further marks, within calls.
    """

    name: str
    marks: tuple[Mark, ...]
    template_signs: tuple[str, ...]
    template_counter_signs: tuple[str, ...] = ()
    own_prompt: bool = False
    short_ids: bool = False
    inner: tuple[str, ...] = ()

    def is_taught_by(self, template: str) -> bool:
        if any(sign in template for sign in self.template_counter_signs):
            return False
        return any(sign in template for sign in self.template_signs)

    @property
    def words(self) -> tuple[str, ...]:
        """All marks; where one is a special token, it has to be seen in the text."""
        around = (word for mark in self.marks for word in (mark.start, mark.end) if word)
        return (*around, *self.inner)
