"""Text of every kind goes in as it is and comes back as it was; what is no text is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.conformance.conftest import MODEL
from worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

TEXTS = {
    "umlauts": "Grüße aus Köln, ÄÖÜß",
    "combining": "e\u0301 a\u0308 n\u0303",
    "chinese": "你好，世界。",
    "japanese": "こんにちは、ｶﾀｶﾅ",
    "korean": "안녕하세요",
    "arabic": "مرحبا بالعالم",
    "hebrew with marks": "שָׁלוֹם",
    "devanagari": "नमस्ते दुनिया",
    "emoji with joiners": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "flags": "🇩🇪🇫🇷",
    "astral": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀",
    "zero width": "a\u200bb\u2060c\ufeffd",
    "right-to-left marks": "\u202eabc\u202c",
    "controls": "a\x00b\x01c\x7fd",
    "line ends": "a\nb\r\nc\rd\u2028e\u2029f",
    "tabs and spaces": "\t a \u00a0 b \u3000 c  ",
    "json in json": '{"a": ["\\"b\\"", null]}',
    "template marks": "{{ 7 * 7 }} {% for x in y %}",
    "like a special token": "<|im_end|> <|endoftext|>",
    "replacement": "\ufffd\ufffd",
    "noncharacters": "\uffff\U0010ffff",
    "long word": "a" * 300,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_tokens_of_a_text_are_that_text(http: httpx.Client, tokenizer: Tokenizer, text: str) -> None:
    made = http.post("/tokenize", json={"model": MODEL, "prompt": text}).raise_for_status().json()
    assert made["tokens"] == tokenizer.encode(text)
    assert made["count"] == len(made["tokens"])
    body = {"model": MODEL, "tokens": made["tokens"]}
    assert http.post("/detokenize", json=body).raise_for_status().json()["prompt"] == text


@pytest.mark.parametrize("name", ["controls", "template marks", "like a special token", "noncharacters"])
def test_a_chat_about_it(client: OpenAI, tokenizer: Tokenizer, name: str) -> None:
    text = TEXTS[name]
    messages: Any = [{"role": "user", "content": text}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > len(tokenizer.encode(text)) * 0.8


@pytest.mark.parametrize("name", ["umlauts", "emoji with joiners", "chinese", "line ends", "controls"])
def test_forced_text_streams_whole(client: OpenAI, tokenizer: Tokenizer, name: str) -> None:
    """Tokens of the text, one after the other, by bias: whatever the split, joined they are the text."""
    tokens = tokenizer.encode(TEXTS[name])
    token = max(set(tokens), key=lambda one: len(tokenizer.token_bytes(one)))
    chunks = client.completions.create(
        model=MODEL, prompt="x", max_tokens=4, temperature=0, logit_bias={str(token): 100}, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == (tokenizer.token_bytes(token) * 4).decode(errors="replace")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "smollm2", "prompt": "\xff\xfe"}',
        b'{"model": "smollm2", "prompt": "\xed\xa0\x80"}',
        b'{"model": "smollm2", "prompt": "\\ud800"}',
        b'{"model": "smollm2", "prompt": "\\udc00\\ud800"}',
        b'{"model": "smollm2", "prompt": "\\x41"}',
        b'{"model": "smollm2", "prompt": "a\nb"}',
    ],
    ids=["not utf-8", "utf-8 surrogate", "lone surrogate", "surrogates turned", "bad escape", "raw newline"],
)
def test_what_is_no_text_is_refused(http: httpx.Client, body: bytes) -> None:
    response = http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_escaped_and_plain_are_the_same(http: httpx.Client) -> None:
    plain = json.dumps({"model": MODEL, "prompt": TEXTS["astral"]}, ensure_ascii=False).encode()
    escaped = json.dumps({"model": MODEL, "prompt": TEXTS["astral"]}).encode()
    assert plain != escaped
    first, second = (http.post("/tokenize", content=body).json()["tokens"] for body in (plain, escaped))
    assert first == second


def test_strings_of_the_tokens(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "The quick fox", "return_token_strs": True}
    made = http.post("/tokenize", json=body).json()
    assert "".join(made["token_strs"]) == "The quick fox"
    assert len(made["token_strs"]) == made["count"]


@pytest.mark.parametrize("with_prompt", [True, False])
def test_a_chat_as_tokens(http: httpx.Client, with_prompt: bool) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": MODEL, "messages": messages, "add_generation_prompt": with_prompt}
    made = http.post("/tokenize", json=body).json()
    text = http.post("/detokenize", json={"model": MODEL, "tokens": made["tokens"]}).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\n") == with_prompt
    assert "<|im_start|>user\nhi<|im_end|>" in text


def test_special_tokens_left_out_on_request(http: httpx.Client) -> None:
    made = http.post(
        "/tokenize", json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    ).json()
    body = {"model": MODEL, "tokens": made["tokens"], "skip_special_tokens": True}
    assert "<|" not in http.post("/detokenize", json=body).json()["prompt"]
