"""What of a chat's messages reaches the template, and answers that go on with the last one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.worker.chatting import HELLO, chat, stream, text_of
from tests.worker.fake_engine import INFO, MODEL, FakeEngine, in_process, make_state
from tests.worker.text_models import sentencepiece
from worker.server.text_model import TextModel
from worker.text.template import ChatTemplate


@pytest.mark.parametrize(
    ("last", "fields", "shown"),
    [
        ({"role": "assistant", "content": "Well, "}, {"continue_final_message": True}, "Well, "),
        ({"role": "assistant", "content": "Well."}, {}, "Well."),
        (
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"continue_final_message": True},
            "Hi",
        ),
        ({"role": "user", "content": "Hi"}, {"add_generation_prompt": False}, "Hi"),
        ({"role": "user", "content": "Hi"}, {}, ""),
        ({"role": "assistant", "content": None}, {}, ""),
    ],
)
async def test_echo_begins_with_the_last_message_where_the_answer_is_of_its_role(
    last: dict[str, Any], fields: dict[str, Any], shown: str
) -> None:
    fields = {"messages": [*HELLO, last], **fields}
    body = await chat(make_state(), echo=True, n=2, **fields)
    assert [choice["message"]["content"] for choice in body["choices"]] == [f"{shown}Hello, world!"] * 2
    chunks = await stream(make_state(), echo=True, n=2, **fields)
    assert [text_of(chunks, index) for index in (0, 1)] == [f"{shown}Hello, world!"] * 2
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_effort_is_told_to_the_template() -> None:
    template = (
        "{{ reasoning_effort | default('-') }} {{ enable_thinking | default('-') }} {{ messages[0].content }}"
    )
    for fields, told in (
        ({}, "- - Hi"),
        ({"reasoning_effort": "low"}, "low - Hi"),
        ({"reasoning_effort": "none"}, "none False Hi"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": 1}}, "none 1 Hi"),
    ):
        engine = FakeEngine()
        state = make_state(engine)
        assert state.text
        state.text.template = ChatTemplate(template)
        await chat(state, **fields)
        assert bytes(engine.submitted[0].prompt_token_ids).decode() == told


async def test_prompt_goes_through_the_template_without_extra_marks() -> None:
    engine = FakeEngine()
    state = make_state(engine)
    await chat(state, messages=[{"role": "system", "content": "S"}, *HELLO])
    assert state.text
    assert state.text.tokenizer
    prompt = state.text.tokenizer.decode(engine.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "assistant", "content": None}, "assistant\n"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            "user\na\nb",
        ),
        ({"role": "developer", "content": "d"}, "system\nd"),
        ({"role": "tool", "content": "42", "tool_call_id": "call_1"}, "tool\n42"),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            "assistant\n",
        ),
    ],
)
async def test_every_kind_of_message_reaches_the_template(message: dict[str, Any], shown: str) -> None:
    engine = FakeEngine()
    state = make_state(engine)
    await chat(state, messages=[*HELLO, message])
    assert state.text
    assert state.text.tokenizer
    prompt = state.text.tokenizer.decode(engine.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert f"<|im_start|>{shown}<|im_end|>" in prompt


@pytest.mark.parametrize("content", ["The answer is ", [{"type": "text", "text": "The answer is "}]])
async def test_an_answer_may_go_on_with_the_last_message(content: Any) -> None:
    engine = FakeEngine()
    state = make_state(engine)
    message = {"role": "assistant", "content": content}
    await chat(state, messages=[*HELLO, message], continue_final_message=True)
    assert state.text
    assert state.text.tokenizer
    prompt = state.text.tokenizer.decode(engine.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe answer is "


async def test_an_answer_that_goes_on_keeps_the_space_before_its_first_word() -> None:
    """SentencePiece vocabularies put it into the word."""
    tokenizer = sentencepiece()
    answer = [*tokenizer.encode("world", add_special_tokens=False), *tokenizer.eos_token_ids[:1]]
    info = msgspec.structs.replace(INFO, vocab_size=tokenizer.vocab_size)
    for fields, content in (({}, "world"), ({"continue_final_message": True}, " world")):
        state = make_state(FakeEngine(lambda _: answer, info=info))
        state.text = TextModel(tokenizer, ChatTemplate("{{ messages[0].content }}", "", ""))
        assert (await chat(state, **fields))["choices"][0]["message"]["content"] == content


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"add_generation_prompt": True}, "leave one of them out"),
        ({"messages": [*HELLO, {"role": "assistant", "content": None}]}, "no text to go on with"),
    ],
)
async def test_what_no_answer_can_go_on_with(fields: dict[str, Any], problem: str) -> None:
    async with in_process(make_state()) as client:
        body = {"model": MODEL, "messages": HELLO, "continue_final_message": True, **fields}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "continue_final_message"
    assert problem in answer.json()["error"]["message"]
