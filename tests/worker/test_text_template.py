from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from worker.text import template as module
from worker.text.template import ChatTemplate, TemplateError, up_to_mark, with_mark

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{{- system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not message.content.startswith('<result>') %}
        {%- set ns.last = (messages | length - 1) - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- generation %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endgeneration %}
    {%- if loop.index0 == ns.last %}{{- '(last question)' }}{%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""
PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "tools": TOOLS, "phi": PHI}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Is 1 < 2 & \"3\" > '2'?"}],
    "turns": [
        {"role": "system", "content": "  Du bist höflich.\n"},
        {"role": "user", "content": "你好 👋"},
        {"role": "assistant", "content": "Hallo!\n\n"},
        {"role": "user", "content": "<|im_end|> {{ 7 * 7 }} {% raw %}"},
    ],
}
TOOL = {"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "a": "<&>'"}}}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str, chat: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for extra in ({}, {"enable_thinking": False, "date_string": "1 Jan 2030"}):
        expected, _ = render_jinja_template(
            conversations=[CHATS[chat]],
            chat_template=TEMPLATES[name],
            tools=[TOOL],
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="</s>",
            **extra,
        )
        ours = ChatTemplate(TEMPLATES[name], "<s>", "</s>").render(
            CHATS[chat], [TOOL], add_generation_prompt, **extra
        )
        assert ours == expected[0]


@pytest.mark.parametrize("text", ["The answer is", " padded \n", "</s>", "user", "x <|im_end|> x"])
@pytest.mark.parametrize("name", ["chatml", "headers", "phi"])
def test_a_message_goes_on_as_in_transformers(name: str, text: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [*CHATS["turns"], {"role": "assistant", "content": text}]
    expected, _ = render_jinja_template(
        conversations=[chat],
        chat_template=TEMPLATES[name],
        continue_final_message=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    chat[-1] = with_mark(chat[-1], "MARK")
    prompt = ChatTemplate(TEMPLATES[name], "<s>", "</s>").render(chat, add_generation_prompt=False)
    assert up_to_mark(prompt, "MARK") == expected[0]


def test_a_message_that_cannot_go_on_is_refused() -> None:
    for content in ("", " \n", None, [], [{"type": "text", "text": ""}]):
        with pytest.raises(TemplateError, match="no text"):
            with_mark({"role": "assistant", "content": content}, "MARK")
    with pytest.raises(TemplateError, match="show"):
        up_to_mark("prompt", "MARK")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert with_mark({"content": parts}, "M") == {"content": [parts[0], {"type": "text", "text": "bM "}]}


def test_messages_are_data_not_template() -> None:
    text = ChatTemplate(CHATML).render(CHATS["turns"])
    assert "{{ 7 * 7 }} {% raw %}" in text


def test_no_html_escaping_and_no_ascii_escaping() -> None:
    text = ChatTemplate("{{ messages[0] | tojson }}").render([{"role": "user", "content": "<&'ü👍"}])
    assert text == '{"role": "user", "content": "<&\'ü👍"}'
    indented = ChatTemplate("{{ tools | tojson(indent=2) }}").render([], [{"b": 1}])
    assert indented == '[\n  {\n    "b": 1\n  }\n]'


def test_date_of_today() -> None:
    before = datetime.now().strftime("%Y-%m-%d")
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([])
    assert text in (before, datetime.now().strftime("%Y-%m-%d"))


def test_message_of_raise_exception_is_passed_on() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate!') }}")
    with pytest.raises(TemplateError, match=r"^Roles must alternate!$"):
        template.render([])


def test_none_and_missing_content_are_empty() -> None:
    messages = [{"role": "user", "content": None}, {"role": "assistant"}]
    assert ChatTemplate(PHI).render(messages) == "<|user|>\n<|end|>\n<|assistant|>\n<|end|>\n<|assistant|>\n"


def test_parts_become_a_string_for_templates_that_want_one() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    text = ChatTemplate(PHI).render([{"role": "user", "content": parts}])
    assert text == "<|user|>\none\ntwo\nthree<|end|>\n<|assistant|>\n"


@pytest.mark.parametrize(
    "loop",
    [
        "{% for part in message.content %}[{{ part.text }}]{% endfor %}",
        "{% for part in message['content'] | list %}[{{ part['text'] }}]{% endfor %}",
        "{% set content = message.content %}{% for part in content %}[{{ part.text }}]{% endfor %}",
    ],
)
def test_parts_stay_parts_for_templates_that_loop_over_them(loop: str) -> None:
    template = ChatTemplate("{% for message in messages %}" + loop + "{% endfor %}")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "[one][two]"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text"}, 7])
def test_parts_that_are_no_text_are_refused_by_their_place(part: object) -> None:
    with pytest.raises(TemplateError, match=re.escape("messages[1].content[0]")):
        ChatTemplate(PHI).render([{"role": "user", "content": "x"}, {"role": "user", "content": [part]}])


def test_message_that_is_no_object_is_refused() -> None:
    bad: Any = ["hello"]
    with pytest.raises(TemplateError, match=re.escape("messages[0]")):
        ChatTemplate(PHI).render(bad)


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "Be kind."}]
    assert ChatTemplate(PHI).render(messages, add_generation_prompt=False) == "<|system|>\nBe kind.<|end|>\n"
    knows = ChatTemplate("{% if messages[0].role == 'developer' %}dev{% endif %}")
    assert knows.render(messages) == "dev"
    assert messages[0]["role"] == "developer"


def test_arguments_of_tool_calls_reach_the_template_as_objects() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    text = ChatTemplate(HEADERS).render(messages, add_generation_prompt=False)
    assert '{"name": "f", "parameters": {"city": "Zürich"}}<|eot_id|>' in text
    assert call["function"]["arguments"] == '{"city": "Zürich"}'  # type: ignore[index]
    broken = {"type": "function", "function": {"name": "f", "arguments": "{"}}
    with pytest.raises(TemplateError, match="must be JSON"):
        ChatTemplate(HEADERS).render([{"role": "assistant", "tool_calls": [broken]}])
    for arguments in ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"):
        extreme = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        with pytest.raises(TemplateError, match="nested too deeply, or have a number with too many digits"):
            ChatTemplate(HEADERS).render([{"role": "assistant", "tool_calls": [extreme]}])


def test_invalid_template_names_the_line() -> None:
    with pytest.raises(TemplateError, match=r"not valid.*line 2"):
        ChatTemplate("fine\n{% for x in %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.nothing.at.all }}",
        "{{ 1 + messages }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'x' %}",
    ],
)
def test_whatever_a_template_does_wrong_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template failed"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 100000000 }}",
        "{{ 1000000000 * ['a'] }}",
        "{{ 10 ** 1000000000 }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{% for i in range(2000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    ],
)
def test_runaway_templates_end(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template failed"):
        ChatTemplate(source).render([])


def test_size_of_a_prompt_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROMPT_CHARS", 1000)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert len(template.render([{"role": "user", "content": "x" * 1000}])) == 1000
    with pytest.raises(TemplateError, match="exceeds 1000 characters"):
        template.render([{"role": "user", "content": "x" * 600}] * 2)


def test_one_rendering_leaves_nothing_for_the_next() -> None:
    template = ChatTemplate("{% for i in range(900000) %}{% endfor %}{{ messages | length }}")
    for _ in range(2):  # the budget of numbers is each rendering's own
        assert template.render([]) == "0"
