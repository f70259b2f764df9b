"""What planning a fleet asks of `python -m worker.plan`, and what that answers: JSON lists, in one order."""

from __future__ import annotations

from typing import Any

import msgspec


class Question(msgspec.Struct, frozen=True):
    """One worker. `card_bytes`: size of the card it would run on; None: in the host's memory."""

    source: str
    options: dict[str, Any] = {}
    card_bytes: int | None = None


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one worker. `budget`: what weights, activations and pages may take together; None on a CPU.
    `context` and `graphs` come on top of it."""

    weights: int
    activations: int
    kv_cache: int
    graphs: int
    context: int
    num_pages: int
    page_size: int
    max_model_len: int
    budget: int | None

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.kv_cache + self.graphs + self.context


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate, or why there is none: `problem`, what is wrong, with the option to change; `unknown`, what
    must be fetched first. `invalid`: the problem is the model's or its options', not one of memory."""

    estimate: Estimate | None = None
    problem: str | None = None
    unknown: str | None = None
    invalid: bool = False

    @property
    def total(self) -> int | None:
        return None if self.estimate is None else self.estimate.total
