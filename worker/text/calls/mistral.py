"""Calls as Mistral's models up to tokenizer v7 write them: `[TOOL_CALLS] [{"name": …, "arguments": {…}}]`."""

from __future__ import annotations

from worker.text.calls.format import CallFormat, Mark

MISTRAL = CallFormat(
    name="mistral",
    marks=(Mark("[TOOL_CALLS]", "list"),),
    template_signs=("[TOOL_CALLS]",),
    template_counter_signs=("[ARGS]",),  # from v11 on a call is NAME[ARGS]{…}
    short_ids=True,
)
