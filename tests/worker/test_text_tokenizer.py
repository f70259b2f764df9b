from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from tests.worker.text_models import (
    PIECES,
    byte_level,
    byte_level_metadata,
    sentencepiece,
    sentencepiece_metadata,
    spell,
    write_directory,
)
from worker.text.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from worker.text.template import ChatTemplate
from worker.text.tokenizer import Tokenizer, TokenizerError, need_tokenizer
from worker.weights.source import resolve_source

TEXTS = [
    "", " ", "hello world", "  hello\n\n  world ", "1234567 12.5e-3", "don't WE'LL", "héllo 中文 👍🏽",
    "<|user|>hello<|end|>", "x<tool>y", "a\r\n\tb",
]  # fmt: skip


def build(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizer_from_gguf(metadata))


def texts_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [
        tokenizer.token_bytes(token).decode("utf-8", "replace")
        for token in tokenizer.encode(text, add_special_tokens=False)
    ]


@pytest.mark.model
def test_demo_model_gives_the_reference_prompts(demo_model: Path, reference_tokens: Path) -> None:
    tokenizer = Tokenizer.from_path(demo_model)
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    prompts = json.loads(reference_tokens.read_text())["prompts"]
    assert len(prompts) == 8
    for prompt in prompts:
        text = template.render(prompt["messages"])
        assert text == prompt["prompt_text"]
        assert tokenizer.encode(text, add_special_tokens=False) == prompt["prompt_ids"]
        assert tokenizer.decode(prompt["prompt_ids"], skip_special_tokens=False) == text


@pytest.mark.model
def test_demo_model_facts(demo_model: Path) -> None:
    tokenizer = Tokenizer.from_path(demo_model)
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.encode("hi") == tokenizer.encode("hi", add_special_tokens=False)
    assert texts_of(tokenizer, "year 2024") == ["year", " ", "2", "0", "2", "4"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [byte_level, sentencepiece], ids=["byte-level", "sentencepiece"])
def test_text_comes_back(make: Any, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    if "<|" not in text or not tokenizer.strips_leading_space:  # around markers a prefix space is added
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "12345", ["12345"]),
        ("smollm", "12345", ["1", "2", "3", "4", "5"]),
        ("qwen2", "12345", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", "12345", ["123", "45"]),
        ("gpt-4o", "helloWorld", ["hello", "World"]),
        ("tekken", "helloWorld", ["hello", "World"]),
        ("qwen2", "helloWorld", ["helloWorld"]),
        ("gpt-2", "it's", ["it", "'s"]),
        ("gpt-2", "IT'S", ["IT", "'", "S"]),
        ("llama-bpe", "IT'S", ["IT", "'S"]),
        ("gpt-4o", "it's", ["it's"]),
        ("llama-bpe", "a\n\n b", ["a", "\n\n", " b"]),
        ("gpt-2", "a   b", ["a", "  ", " b"]),
        ("qwen2", "e\u0301", ["é"]),
        ("llama-bpe", "e\u0301", ["e", "\u0301"]),
        ("default", "a,b 1234", ["a", ",", "b", " ", "123", "4"]),
    ],
)
def test_pre_tokenizers_split_as_their_families_do(pre: str, text: str, pieces: list[str]) -> None:
    # Every split is in the vocabulary, and so is the text unsplit: only the pre-tokenizer can keep it apart.
    tokenizer = build(byte_level_metadata(pre, (*pieces, text)))
    assert texts_of(tokenizer, text) == pieces


def test_every_pre_tokenizer_keeps_all_bytes() -> None:
    for pre in PRE_TOKENIZERS:
        tokenizer = build(byte_level_metadata(pre, ("hello",)))
        for text in TEXTS:
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), False) == text


def test_words_in_the_vocabulary_are_taken_whole_where_the_family_says_so() -> None:
    for pre, pieces in (("llama-bpe", ["xyz"]), ("qwen2", ["x", "y", "z"])):
        metadata = byte_level_metadata(pre)
        metadata["tokenizer.ggml.tokens"].append(spell("xyz"))  # no merge leads to it
        metadata["tokenizer.ggml.token_type"].append(1)
        assert texts_of(build(metadata), "xyz") == pieces


def test_sentencepiece_merges_the_best_score_first_and_falls_back_to_bytes() -> None:
    tokenizer = sentencepiece()
    assert texts_of(tokenizer, "hello world") == [" hello", " w", "or", "ld"]
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("ü", False)] == [
        b" ",
        b"\xc3",
        b"\xbc",
    ]
    assert texts_of(tokenizer, "é") == [" ", "é"]
    without_prefix = sentencepiece(add_space_prefix=False)
    assert texts_of(without_prefix, "hello") == ["h", "el", "lo"]
    assert without_prefix.decode(without_prefix.encode(" hello", False)) == " hello"


def test_phi3_markers_swallow_the_white_space_after_them() -> None:
    metadata = sentencepiece_metadata(PIECES)
    assert texts_of(build(metadata), "<|user|>\nhello") == ["<|user|>", " ", "\n", "h", "el", "lo"]
    metadata["general.architecture"] = "phi3"
    assert texts_of(build(metadata), "<|user|>\nhello") == ["<|user|>", " hello"]
    assert texts_of(build(metadata), "<s>\nhello")[:3] == ["<s>", " ", "\n"]


@pytest.mark.parametrize("make", [byte_level, sentencepiece], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, False, None])
def test_begin_and_end_tokens_as_the_file_says(make: Any, add_bos: bool | None, add_eos: bool | None) -> None:
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    tokenizer = make(**{key: value for key, value in flags.items() if value is not None})
    plain = tokenizer.encode("hello", add_special_tokens=False)
    bos = tokenizer.encode(tokenizer.bos_token, add_special_tokens=False)
    default_bos = tokenizer.strips_leading_space  # SentencePiece models expect one unless told otherwise
    expected_bos = bos if (default_bos if add_bos is None else add_bos) else []
    expected_eos = list(tokenizer.eos_token_ids[:1]) if add_eos else []
    assert tokenizer.encode("hello") == expected_bos + plain + expected_eos


def test_begin_token_with_a_colon_in_it() -> None:
    metadata = byte_level_metadata(add_bos_token=True)
    metadata["tokenizer.ggml.tokens"][-3] = "<|end:1|>"
    metadata["tokenizer.ggml.bos_token_id"] = len(metadata["tokenizer.ggml.tokens"]) - 3
    tokenizer = build(metadata)
    assert tokenizer.encode("a") == [metadata["tokenizer.ggml.bos_token_id"], *tokenizer.encode("a", False)]


def test_special_and_user_defined_tokens() -> None:
    tokenizer = byte_level()
    user, end, tool = (tokenizer.encode(t, False) for t in ("<|user|>", "<|end|>", "<tool>"))
    assert [len(user), len(end), len(tool)] == [1, 1, 1]
    assert tokenizer.special_ids == {*user, *end}
    ids = [*user, *tokenizer.encode("hello", False), *tool, *end]
    assert tokenizer.decode(ids) == "hello<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>hello<tool><|end|>"
    assert tokenizer.visible_bytes(end[0]) == b""
    assert tokenizer.token_bytes(end[0]) == b"<|end|>"


def test_ids_without_a_token_are_nothing() -> None:
    tokenizer = byte_level()
    for token in (-1, tokenizer.vocab_size, 1 << 40):
        assert tokenizer.token_bytes(token) == b""
    assert tokenizer.decode([104, -1, 105, 1 << 40]) == tokenizer.decode([104, 105])


def test_added_tokens_spell_themselves_even_in_letters_of_the_byte_alphabet() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<é>", "<｜x▁y｜>"]
    metadata["tokenizer.ggml.token_type"] += [4, 3]
    tokenizer = build(metadata)
    text = "a<é>b<｜x▁y｜>"
    assert tokenizer.decode(tokenizer.encode(text, False), skip_special_tokens=False) == text


def test_turn_ends_are_found_by_name() -> None:
    metadata = byte_level_metadata()
    del metadata["tokenizer.ggml.eos_token_id"]
    assert build(metadata).eos_token_ids == (metadata["tokenizer.ggml.tokens"].index("<|end|>"),)
    metadata["tokenizer.ggml.eot_token_id"] = 7
    assert build(metadata).eos_token_ids[0] == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "nobody-knows"}, "nobody-knows.*qwen2.*--tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'.*gpt2.*llama"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.merges": ["h zzz"]}, "merges don't fit"),
        ({"tokenizer.ggml.merges": ["hz"]}, "isn't two pieces"),
        ({"tokenizer.ggml.merges": []}, "no merges"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries for"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": []}, "a score for each token"),
    ],
)
def test_unusable_metadata_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build(byte_level_metadata() | change)


@pytest.mark.parametrize("make", [byte_level, sentencepiece], ids=["byte-level", "sentencepiece"])
def test_directory_gives_the_same_tokenizer_as_its_gguf(make: Any, tmp_path: Path) -> None:
    original = make()
    loaded = Tokenizer.from_path(
        write_directory(
            tmp_path, make(), bos_token=original.bos_token, eos_token={"content": original.eos_token}
        )
    )
    for text in TEXTS:
        assert loaded.encode(text, False) == original.encode(text, False)
        ids = original.encode(text, False)
        assert loaded.decode(ids) == original.decode(ids)
    assert loaded.vocab_size == original.vocab_size
    assert loaded.special_ids == original.special_ids
    assert loaded.strips_leading_space == original.strips_leading_space
    assert (loaded.bos_token, loaded.eos_token) == (original.bos_token, original.eos_token)
    assert Tokenizer.from_path(tmp_path / "tokenizer.json").encode("hello") == loaded.encode("hello")


def test_directory_flags_decide_on_begin_and_end_tokens(tmp_path: Path) -> None:
    plain = byte_level()
    config = {"bos_token": "<|user|>", "eos_token": "<|end|>", "add_bos_token": True}
    loaded = Tokenizer.from_path(write_directory(tmp_path, byte_level(), **config))
    assert loaded.encode("hello") == plain.encode("<|user|>hello", False)
    off = Tokenizer.from_path(write_directory(tmp_path, byte_level(), **config | {"add_bos_token": False}))
    assert off.encode("hello") == plain.encode("hello", False)


def test_directory_end_tokens_and_template(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level(), eos_token="<|end|>", chat_template="from config")
    end = byte_level().eos_token_ids[0]
    assert Tokenizer.from_path(tmp_path).eos_token_ids == (end,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, end]}))
    loaded = Tokenizer.from_path(tmp_path)
    assert loaded.eos_token_ids == (3, end)
    assert loaded.chat_template == "from config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write_directory(tmp_path, byte_level(), chat_template=named)
    loaded = Tokenizer.from_path(tmp_path)
    assert (loaded.chat_template, loaded.tool_template) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("from file")
    loaded = Tokenizer.from_path(tmp_path)
    assert (loaded.chat_template, loaded.tool_template) == ("from file", None)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools in a file")
    assert Tokenizer.from_path(tmp_path).tool_template == "tools in a file"


def test_source_decides_and_tokenizer_overrides(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "model", byte_level(), eos_token="<|end|>")
    end = byte_level().eos_token_ids[0]
    source: Any = SimpleNamespace(kind="safetensors", path=directory, generation={"eos_token_ids": (5,)})
    loaded = Tokenizer.from_source(source)
    assert loaded is not None
    assert loaded.eos_token_ids == (5, end)
    random: Any = SimpleNamespace(kind="random", path=tmp_path / "config.json", generation={})
    assert Tokenizer.from_source(random) is None
    overridden = Tokenizer.from_source(random, str(directory))
    assert overridden is not None
    assert overridden.encode("hello") == loaded.encode("hello")
    with pytest.raises(TokenizerError, match=r"token ids only.*--tokenizer"):
        need_tokenizer(None)
    assert need_tokenizer(loaded) is loaded


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such file"):
        Tokenizer.from_path(tmp_path / "nowhere")
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"no tokenizer.json \(tokenizer.model is there"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer.json: not a tokenizer.json"):
        Tokenizer.from_path(tmp_path)
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="decoder is neither"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF but not really, only some bytes")
    with pytest.raises(TokenizerError, match=r"x\.gguf"):
        Tokenizer.from_path(tmp_path / "x.gguf")


@pytest.mark.model
def test_other_threads_run_while_a_long_text_is_tokenized(demo_model: Path) -> None:
    """A megabyte takes seconds; a server that stood still meanwhile would be taken for dead."""
    tokenizer = Tokenizer.from_source(resolve_source(str(demo_model)))
    assert tokenizer is not None
    gaps: list[float] = []
    done = threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not done.is_set():
            time.sleep(0.005)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    tokenizer.encode("ab " * 300_000)
    took = time.monotonic() - started
    done.set()
    watcher.join()
    assert max(gaps) < took / 2


def test_gguf_may_have_a_template_for_tools() -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = Tokenizer(tokenizer_from_gguf({**byte_level_metadata(), **templates}))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("plain", "tools")
