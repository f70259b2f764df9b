"""Calls as Llama 3.1 to 3.3 write them, and Llama 4 with its own template: an answer that is
`{"name": …, "parameters": {…}}`, also after `<|python_tag|>`, several with semicolons between (Llama 3.1's
model card, "JSON based tool calling")."""

from __future__ import annotations

from worker.text.calls.format import CallFormat, Mark

LLAMA3_JSON = CallFormat(
    name="llama3_json",
    marks=(
        Mark("<|python_tag|>", "sequence"),
        Mark("<|python_start|>", "sequence", "<|python_end|>"),  # Llama 4's
        Mark("", "sequence", only_known=True),
    ),
    template_signs=("<|python_tag|>", 'Respond in the format {"name": function name'),
)
