"""Forms that begin after reasoning, with llguidance as it runs in the engine."""

from __future__ import annotations

import msgspec
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from worker.grammar.compiling import compile_matcher
from worker.grammar.vocabulary import token_table
from worker.params import StructuredOutputs, Thinking
from worker.text.parts import TokenizerParts
from worker.text.pieces import BYTE_OF_CHAR, Spelling
from worker.text.tokenizer import Tokenizer

THOUGHT = 'Hm, {"a": 1}? <b>\n'
CITY = '{"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}'
FORMS = [
    (StructuredOutputs(json=CITY), '{"city": "Rome"}'),
    (StructuredOutputs(json_object=True), '{"a": [1, {}]}'),
    (StructuredOutputs(regex="[ab]+c"), "abac"),
    (StructuredOutputs(choice=("yes", "no")), "no"),
    (StructuredOutputs(grammar='start: "x" y\ny: "z"'), "xz"),
]


def tokenizer(marks: str) -> Tokenizer:
    """One token a byte; the marks of reasoning are special tokens, tokens, or text."""
    backend = Backend(models.BPE(vocab=dict(BYTE_OF_CHAR), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>")])
    special = {256}
    if marks != "text":
        add = backend.add_special_tokens if marks == "special" else backend.add_tokens
        add([AddedToken("<think>", special=marks == "special"), AddedToken("</think>")])
        special |= {257, 258} if marks == "special" else set()
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            spelling=Spelling("byte-level"),
            special_ids=frozenset(special),
            eos_token_ids=(256,),
            bos_token=None,
            eos_token="<|im_end|>",
            chat_template=None,
        )
    )


@pytest.mark.parametrize("marks", ["special", "token", "text"])
@pytest.mark.parametrize(("form", "answer"), FORMS)
def test_what_has_the_form_is_what_follows_the_reasoning(
    marks: str, form: StructuredOutputs, answer: str
) -> None:
    model = tokenizer(marks)
    table = token_table(model, frozenset())

    def accepts(thinking: Thinking, text: str) -> bool:
        thoughtful = msgspec.structs.replace(form, thinking=thinking)
        matcher = compile_matcher(table, thoughtful)
        ids = model.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    thought = f"<think>\n{THOUGHT}</think>"
    assert accepts("may", f"{thought}\n\n{answer}")
    assert accepts("may", f"{thought}{answer}")
    assert accepts("may", answer)
    assert accepts("open", f"{THOUGHT}</think>\n\n{answer}")
    assert accepts("no", answer)
    assert not accepts("may", f"{thought}\n\n?")
    assert not accepts("may", thought)
    assert not accepts("may", f"{THOUGHT}{answer}")
    assert not accepts("open", f"{THOUGHT}</think>?")
    assert not accepts("open", THOUGHT)
    assert not accepts("no", f"{thought}{answer}")


def test_an_answer_does_not_end_while_it_thinks() -> None:
    model = tokenizer("token")
    form = StructuredOutputs(choice=("yes",), thinking="open")
    matcher = compile_matcher(token_table(model, frozenset()), form)
    assert matcher.try_consume_tokens(model.encode("Hm")) == 2
    assert matcher.try_consume_tokens([256]) == 0
