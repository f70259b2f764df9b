"""Headers of safetensors files, read without torch: what the library reads is taken, what it refuses is
refused, and a plan says so before any worker is started."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from contracts.plan import Question
from tests.worker.checkpoints import hf_tensors, save_hf, small_config
from worker.plan import answer
from worker.weights.safetensors_header import MAX_HEADER, read_safetensors_header
from worker.weights.source import SAFETENSORS_INDEX, SourceError

TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """One tensor of each type, one of them without elements, one without dimensions."""
    tensors = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in TYPES}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_what_is_in_it(file: Path) -> None:
    tensors = read_safetensors_header(file)
    assert len(tensors) == len(TYPES) + 2
    assert (tensors["torch.bfloat16"].dtype, tensors["torch.bfloat16"].shape) == ("BF16", (2, 3))


def is_read(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def is_taken(path: Path) -> bool:
    try:
        read_safetensors_header(path)
        return True
    except SourceError:
        return False


def test_what_the_library_refuses_is_refused(file: Path) -> None:
    """Bytes of the header changed at random, and every place where a copy may have broken off."""
    whole, dice = file.read_bytes(), random.Random(1)
    end = 8 + int.from_bytes(whole[:8], "little")
    cut = [whole[:keep] for keep in {0, 1, 7, 8, 9, end - 1, end, end + 1, len(whole) - 1}]
    changed = []
    for _ in range(300):
        copy = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            copy[dice.randrange(end)] = dice.choice(b'0129{}[],:"-. x\xff\x00')
        changed.append(bytes(copy))
    taken = 0
    for data in (whole, whole + b"x", *cut, *changed):
        file.write_bytes(data)
        read = is_read(file)
        taken += read
        assert is_taken(file) == read, data[:end]
    assert 1 < taken < 300, "both kinds were there"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "not a safetensors file"),
        ((MAX_HEADER + 1).to_bytes(8, "little") + bytes(99), "at most 100000000 bytes"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "truncated: its header tells of 1048584 bytes"),
        (of(b"[" * 200_000), "its header isn't that"),
        (of(b'{"a": ' * 100_000), "its header isn't that"),
        (of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(3)), "truncated"),
        (of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "can't have the bytes"),
        (of({"a": {"dtype": "F32", "shape": [1 << 62] * 9, "data_offsets": [0, 4]}}, bytes(4)), "can't have"),
        (of({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)), "its header isn't"),
    ],
)  # fmt: skip
def test_what_is_none_is_named(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=words) as caught:
        read_safetensors_header(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match="no file"):
        read_safetensors_header(tmp_path / "model.safetensors")


def test_a_plan_says_so(tmp_path: Path) -> None:
    config = small_config("llama")
    folder = save_hf(tmp_path / "hf", config, hf_tensors(config))
    question = Question(str(folder), {"device": "cpu"})
    assert answer(question).problem is None
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    told = answer(question)
    assert (told.invalid, told.estimate) == (True, None)
    assert "model.safetensors: truncated" in str(told.problem)
    (folder / SAFETENSORS_INDEX).write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}}))
    assert "names the file part-2.safetensors, which isn't in" in str(answer(question).problem)
