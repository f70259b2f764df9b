"""The output items of a response while they grow, and the typed events that tell of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Final

from worker.text.answer import CallArguments, CallEnd, CallStart, Content, Part, Reasoning

Event = dict[str, Any]

_TEXT_EVENTS: Final = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class OutputItems:
    """Items of one response: reasoning, messages and function calls, in the order in which they were written.

    What a method returns are the events that tell of it, without their sequence numbers.
    """

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self.items: list[dict[str, Any]] = []
        self._open = False  # the last item grows

    def push(self, parts: Sequence[Part], logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
        """`logprobs`: of the tokens that the first text among `parts` came from."""
        events: list[Event] = []
        for part in parts:
            match part:
                case Content(text):
                    events += self._text("message", text, logprobs or [])
                    logprobs = None
                case Reasoning(text):
                    events += self._text("reasoning", text, [])
                case CallStart(name):
                    events += [*self.close("completed"), *self._begin_call(name)]
                case CallArguments(text):
                    self.items[-1]["arguments"] += text
                    events.append(self._event("response.function_call_arguments.delta", delta=text))
                case CallEnd():
                    events += self.close("completed")
        return events

    def finish(self, status: str) -> list[Event]:
        """The end of the last item. A response without any has an empty message."""
        events = [] if self.items else self._text("message", "", [])
        return events + self.close(status)

    def close(self, status: str) -> list[Event]:
        """The end of the item that grows, if there is one."""
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            arguments, name = item["arguments"], item["name"]
            kind = "response.function_call_arguments.done"
            events.append(self._event(kind, arguments=arguments, name=name))
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            kind = _TEXT_EVENTS[item["type"]] + ".done"
            events.append(self._event(kind, content_index=0, text=part["text"], **more))
            events.append(self._event("response.content_part.done", content_index=0, part=deepcopy(part)))
        return [*events, self._item_event("response.output_item.done")]

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        if not self._open or self.items[-1]["type"] != kind:
            events += [*self.close("completed"), *self._begin_text(kind)]
        part = self.items[-1]["content"][0]
        part["text"] += text
        more = {}
        if kind == "message":
            part["logprobs"] += logprobs
            more["logprobs"] = logprobs
        if text:
            events.append(self._event(_TEXT_EVENTS[kind] + ".delta", content_index=0, delta=text, **more))
        return events

    def _begin_text(self, kind: str) -> list[Event]:
        part: dict[str, Any]
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events = self._begin({"id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}, kind)
        else:
            part = {"type": "reasoning_text", "text": ""}
            events = self._begin({"id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": []}, kind)
        self.items[-1]["content"].append(part)
        return [
            *events,
            self._event("response.content_part.added", content_index=0, part=deepcopy(part)),
        ]

    def _begin_call(self, name: str) -> list[Event]:
        ids = {"id": f"fc_{uuid.uuid4().hex}", "call_id": self._new_call_id()}
        return self._begin({**ids, "name": name, "arguments": ""}, "function_call")

    def _begin(self, item: dict[str, Any], kind: str) -> list[Event]:
        self.items.append({"type": kind, "status": "in_progress", **item})
        self._open = True
        return [self._item_event("response.output_item.added")]

    def _item_event(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, "item": deepcopy(self.items[-1])}

    def _event(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": kind, **place, **fields}
