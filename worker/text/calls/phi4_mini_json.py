"""Calls as Phi-4-mini writes them: `<|tool_call|>[{"name": …, "arguments": {…}}]<|/tool_call|>` (its model
card), or `functools[…]`, as it does in practice."""

from __future__ import annotations

from worker.text.calls.format import CallFormat, Mark

PHI4_MINI_JSON = CallFormat(
    name="phi4_mini_json",
    marks=(Mark("<|tool_call|>", "list", "<|/tool_call|>"), Mark("functools", "list")),
    template_signs=("<|tool_call|>", "<|/tool|>", "functools["),
)
