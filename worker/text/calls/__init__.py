"""Tool calls in a model's text: the formats there are, and the readers of them."""

from __future__ import annotations

from worker.text.calls.format import CallFormat
from worker.text.calls.hermes import HERMES
from worker.text.calls.llama3_json import LLAMA3_JSON
from worker.text.calls.marked import MarkedCalls
from worker.text.calls.mistral import MISTRAL
from worker.text.calls.phi4_mini_json import PHI4_MINI_JSON
from worker.text.calls.pythonic import LLAMA4_PYTHONIC, PYTHONIC
from worker.text.calls.qwen3_coder import QWEN3_CODER

__all__ = ["CALL_FORMATS", "CallFormat", "MarkedCalls", "call_format_of"]

CALL_FORMATS = {
    format.name: format
    for format in (HERMES, QWEN3_CODER, LLAMA4_PYTHONIC, PYTHONIC, LLAMA3_JSON, PHI4_MINI_JSON, MISTRAL)
}


def call_format_of(template: str) -> CallFormat | None:
    """The format that a chat template teaches; None where none of those known is recognized."""
    return next((format for format in CALL_FORMATS.values() if format.is_taught_by(template)), None)
