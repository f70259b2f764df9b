"""Chat templates with tools and reasoning, in the ways of the families that are served, cut down to what
tests need; and text sides of a worker with them."""

from __future__ import annotations

from tests.worker.fake_engine import byte_tokenizer
from worker.server.text_model import TextModel
from worker.text.calls import call_format_of
from worker.text.reasoning import reasoning_format_of
from worker.text.template import ChatTemplate
from worker.text.tokenizer import Tokenizer

# As Qwen2.5 and Qwen3 do it.
QWEN = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}{{- "\n" + (tool | tojson) }}{%- endfor %}
    {{- "\n</tools>\nCall with <tool_call></tool_call> tags.<|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\n' }}
        {{- message.content }}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
"""
QWEN25 = QWEN + "{%- endif %}"
THOUGHT = r"""{%- if message.reasoning_content %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        """
QWEN3 = (
    QWEN.replace("{{- message.content }}", THOUGHT + "{{- message.content }}")
    + r"""
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
)
# As DeepSeek-R1 does it: the reasoning is opened in the prompt.
R1 = (
    "{% for message in messages %}{{ '<｜' + message['role'] + '｜>' + "
    "message['content'].split('</think>')[-1] }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
# As Phi-4-mini does it: tools are text in the system message.
PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
    "message['tools'] is not none %}{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + "
    "'<|/tool|><|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# As Llama 3.1 does it.
LLAMA = r"""
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary}.\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""


def text_side(template: str, tokenizer: Tokenizer | None = None) -> TextModel:
    """The text side of a worker whose model has this template, and the byte tokenizer if no other."""
    tokenizer = tokenizer or byte_tokenizer()
    compiled = ChatTemplate(template, tokenizer.bos_token, tokenizer.eos_token)
    return TextModel(tokenizer, compiled, call_format_of(template), reasoning_format_of(template))
