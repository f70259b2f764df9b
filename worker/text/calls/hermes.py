"""Calls as Hermes 2 and 3, Qwen2.5 and Qwen3 write them, one after the other:
`<tool_call>{"name": …, "arguments": {…}}</tool_call>` (NousResearch/Hermes-Function-Calling)."""

from __future__ import annotations

from worker.text.calls.format import CallFormat, Mark

HERMES = CallFormat(
    name="hermes",
    marks=(Mark("<tool_call>", "object", "</tool_call>"),),
    template_signs=("<tool_call>",),
    own_prompt=True,
    template_counter_signs=("<function=",),  # Qwen3-Coder puts XML between the same marks
)
