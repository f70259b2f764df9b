"""Chat templates: Jinja from the checkpoint, run in a sandbox with limits, as transformers'
`apply_chat_template` does.

A template comes with the model, so from a stranger; messages come from users. The sandbox keeps a template
away from Python's internals; the limits keep it from filling memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final, Literal, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_PROMPT_CHARS: Final = 64 << 20
MAX_RESULT: Final = MAX_PROMPT_CHARS  # what one operator may make: characters, items, bits
MAX_RANGE_TOTAL: Final = 1_000_000  # numbers that all range() calls of one rendering may give together
PART_SEPARATOR: Final = "\n"
_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class TemplateError(ValueError):
    """The chat template can't be used, or refuses these messages; the text is fit for the client."""


class _RaisedByTemplate(JinjaError):
    """`raise_exception(message)` in a template."""


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: Jinja source.
        bos_token, eos_token: what the template sees under these names; None renders as nothing.

    Attributes:
        source: as given.
        tools: how it takes tools: as the variable of that name, as text in the system message (Phi-4-mini),
            or not at all.

    Raises:
        TemplateError: the source isn't valid Jinja.
    """

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        environment = _Environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid: {error.message} (line {error.lineno})"
            ) from error
        self._takes_parts = _iterates_over_content(tree)
        self._knows_developer = "developer" in source
        self.tools = _way_of_tools(tree)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text for `messages`.

        Args:
            messages: role, content (string, None or list of text parts), and what else the template reads.
            tools: JSON schemas of functions.
            add_generation_prompt: end with the marker that begins the assistant's answer.
            kwargs: further variables of the template, such as enable_thinking.

        Raises:
            TemplateError: the template raised it or failed on these messages, or the prompt grows without
            bound.
        """
        chat = [self._prepare(index, message) for index, message in enumerate(messages)]
        if tools and self.tools == "system message":
            chat = _with_tools_in_system(chat, tools)
        variables = {
            **self._tokens,
            **kwargs,
            "messages": chat,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        _range_budget.set(MAX_RANGE_TOTAL)
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                length += len(piece)
                if length > MAX_PROMPT_CHARS:
                    raise TemplateError(f"the chat template's prompt exceeds {MAX_PROMPT_CHARS} characters")
                pieces.append(piece)
        except TemplateError:
            raise
        except _RaisedByTemplate as error:
            raise TemplateError(str(error)) from error
        except Exception as error:  # a template is a program of others: whatever it does wrong is its error
            raise TemplateError(f"the chat template failed on these messages: {error}") from error
        return "".join(pieces)

    def _prepare(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise TemplateError(f"messages[{index}] must be an object with role and content")
        ready = dict(message)
        if ready.get("role") == "developer" and not self._knows_developer:
            ready["role"] = "system"
        content = ready.get("content")
        if content is None:
            ready["content"] = ""
        elif isinstance(content, (list, tuple)) and not self._takes_parts:
            ready["content"] = PART_SEPARATOR.join(
                _part_text(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content)
            )
        if ready.get("tool_calls"):
            ready["tool_calls"] = [_with_parsed_arguments(call, index) for call in ready["tool_calls"]]
        return ready


def with_mark(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """`message` with a mark at the end of its text, by which `up_to_mark` finds it in the prompt.
    TemplateError when it has no text."""
    content = message.get("content")
    parts = list(content) if isinstance(content, (list, tuple)) else [content]
    last = parts[-1] if parts else None
    text = last.get("text") if isinstance(last, Mapping) else last
    if not isinstance(text, str) or not text.strip():
        raise TemplateError("the last message has no text to go on with")
    # If the template strips its messages, the space goes.
    marked = f"{text}{mark} "
    parts[-1] = {**last, "text": marked} if isinstance(last, Mapping) else marked
    return {**message, "content": parts[-1] if isinstance(content, str) else parts}


def up_to_mark(prompt: str, mark: str) -> str:
    """`prompt` without the mark and what the template put behind it, for an answer that goes on with its last
    message. TemplateError when the template doesn't show it."""
    end = prompt.rfind(mark)
    if end < 0:
        raise TemplateError("the chat template doesn't show the last message's text")
    before = prompt[:end]
    return before if prompt.startswith(f"{mark} ", end) else before.rstrip()


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        key = _TEXT_PARTS.get(part.get("type", "text"))
        if key is not None and isinstance(part.get(key), str):
            return str(part[key])
        raise TemplateError(f"{where}: this model reads parts of type text only, not {part.get('type')!r}")
    raise TemplateError(f"{where} must be an object with type and text")


def _with_parsed_arguments(call: Any, index: int) -> Any:
    """OpenAI carries a call's arguments as JSON text; templates of open models expect the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except json.JSONDecodeError:
        raise TemplateError(f"messages[{index}].tool_calls: function.arguments must be JSON text") from None
    except (ValueError, RecursionError):  # Python bounds the digits of a number
        raise TemplateError(
            f"messages[{index}].tool_calls: function.arguments are nested too deeply, or have a number with "
            "too many digits"
        ) from None
    return {**call, "function": {**function, "arguments": parsed}}


def _way_of_tools(tree: nodes.Template) -> Literal["variable", "system message"] | None:
    if any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name)):
        return "variable"
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        if isinstance(node, nodes.Getattr) and node.attr == "tools":
            return "system message"
        if isinstance(node, nodes.Getitem) and node.arg == nodes.Const("tools"):
            return "system message"
    return None


def _with_tools_in_system(
    chat: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Phi-4-mini's template wants the functions as JSON text in the field `tools` of the system message."""
    text = _tojson([tool.get("function", tool) for tool in tools])
    first = chat[0] if chat and chat[0].get("role") == "system" else None
    system = {**(first or {"role": "system", "content": ""}), "tools": text}
    return [system, *chat[first is not None :]]


def _iterates_over_content(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content, that is, wants the list of parts as it came."""
    aliases = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, set())
    }
    return any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, aliases: set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in aliases
    return False


# --------------------------------------------------------------------------------------- the sandbox

_range_budget: ContextVar[int] = ContextVar("range_budget", default=MAX_RANGE_TOTAL)


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The names a chat template may count on, and bounds on the operators that make much of little."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals.update(range=_range, raise_exception=_raise_exception, strftime_now=_strftime_now)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _result_size(operator, left, right) > MAX_RESULT:
            raise JinjaError(f"the result of {operator} is too large for a chat template")
        return super().call_binop(context, operator, left, right)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Size of what an operator would make: characters, items or, for a power, bits."""
    if operator == "**":
        numbers = isinstance(left, int) and isinstance(right, int)
        return left.bit_length() * right if numbers else 0
    if operator == "+":
        return len(left) + len(right) if isinstance(left, str) and isinstance(right, str) else 0
    for items, times in ((left, right), (right, left)):
        if isinstance(items, (str, list, tuple)) and isinstance(times, int):
            return len(items) * times
    return 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers gives it to templates: Jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _range(*args: int) -> range:
    numbers = range(*args)
    left = _range_budget.get() - len(numbers)
    if left < 0:
        raise JinjaError(f"the template's range() calls give more than {MAX_RANGE_TOTAL} numbers")
    _range_budget.set(left)
    return numbers


def _raise_exception(message: object) -> NoReturn:
    raise _RaisedByTemplate(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
