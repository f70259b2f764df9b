"""GGUF headers: equal to what the gguf library reads; no file, however broken, does more than raise."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worker.gguf_files import write_gguf
from worker.weights.gguf_header import GGML_TYPES, GgufError, read_gguf_header

METADATA = {
    "a.bool": True,
    "a.int": 7,
    "a.float": 0.5,
    "a.text": "naïve 日本",
    "a.strings": ["", "Ġthe", "日本"],
    "a.ints": [1, -2, 3],
    "a.floats": [0.5, 1.5],
    "a.bools": [True, False],
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    tensors = {"one": np.arange(6, dtype=np.float32).reshape(2, 3), "two": np.zeros(5, np.float16)}
    return write_gguf(tmp_path / "small.gguf", "llama", METADATA, tensors)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str) -> bytes:
    return u64(len(value.encode())) + value.encode()


def kv(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def row(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = b"".join(u64(n) for n in shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def blob(tensors: list[bytes], pairs: list[bytes], tail: bytes = b"\0" * 256, version: int = 3) -> bytes:
    counts = u64(len(tensors)) + u64(len(pairs))
    return b"GGUF" + struct.pack("<I", version) + counts + b"".join(pairs) + b"".join(tensors) + tail


def test_types_are_ggmls() -> None:
    expected = {int(t): (t.name, *sizes) for t, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert expected == GGML_TYPES


def test_values_and_tensor_table(small: Path) -> None:
    header = read_gguf_header(small)
    found = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in header.metadata.items()}
    assert found == {"general.architecture": "llama", **METADATA}
    one, two = header.tensors
    assert (one.name, one.shape, one.type_name, one.nbytes) == ("one", (2, 3), "F32", 24)
    assert (two.name, two.shape, two.type_name, two.nbytes) == ("two", (5,), "F16", 10)
    assert np.fromfile(small, "<f4", 6, offset=one.offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert [(t.name, t.offset, t.nbytes) for t in header.tensors] == [
        (t.name, t.data_offset, t.n_bytes) for t in gguf.GGUFReader(small).tensors
    ]


@pytest.mark.model
def test_demo_model(demo_model: Path) -> None:
    header = read_gguf_header(demo_model)
    assert len(header.tensors) == 272
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    assert header.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert max(t.offset + t.nbytes for t in header.tensors) == demo_model.stat().st_size


def test_large_vocabulary_is_read_at_once(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(152_000)]
    path = tmp_path / "vocab.gguf"
    path.write_bytes(
        blob([], [kv("tokens", 9, struct.pack("<IQ", 8, len(tokens)) + b"".join(text(t) for t in tokens))])
    )
    started = time.monotonic()
    assert read_gguf_header(path).metadata["tokens"] == tokens
    assert time.monotonic() - started < 30


def test_version_2_and_alignment(tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(blob([row("t", (4,))], [kv("general.alignment", 4, struct.pack("<I", 64))], version=2))
    (tensor,) = read_gguf_header(path).tensors
    assert tensor.offset % 64 == 0


STRINGS_WITHOUT_BYTES = struct.pack("<IQ", 8, 1 << 40)
NESTED = struct.pack("<IQ", 9, 1) * 6 + struct.pack("<IQ", 0, 0)
BROKEN = {
    "empty": (b"", "too short"),
    "magic": (b"GGML" + bytes(60), "not a GGUF file"),
    "version 1": (blob([], [], version=1), "version 1"),
    "big-endian": (blob([], [], version=3 << 24), "big-endian"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(64), r"\d+ tensors can't fit"),
    "metadata count": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(64),
        "metadata entries can't fit",
    ),
    "string length": (blob([], [kv("k", 8, u64(1 << 62))]), "truncated or corrupt"),
    "string array": (blob([], [kv("k", 9, STRINGS_WITHOUT_BYTES)]), "strings of 'k' can't fit"),
    "number array": (blob([], [kv("k", 9, struct.pack("<IQ", 6, 1 << 50))]), "values of 'k' can't fit"),
    "nesting": (blob([], [kv("k", 9, NESTED)]), "unknown value type 9"),
    "value type": (blob([], [kv("k", 77, b"")]), "unknown value type 77"),
    "key length": (blob([], [u64(70_000) + bytes(70_000)]), "metadata key of 70000 bytes"),
    "key not UTF-8": (blob([], [u64(2) + b"\xff\xfe" + bytes(12)]), "isn't UTF-8"),
    "key twice": (blob([], [kv("k", 0, b"1"), kv("k", 0, b"2")]), "'k' appears twice"),
    "alignment 0": (blob([], [kv("general.alignment", 4, bytes(4))]), "general.alignment is 0"),
    "alignment text": (blob([], [kv("general.alignment", 8, text("x"))]), "general.alignment is 'x'"),
    "rank": (blob([row("t", (1,) * 5)], []), "'t' has 5 dimensions"),
    "tensor twice": (blob([row("t", (1,)), row("t", (1,))], []), "'t' appears twice"),
    "tensor type": (blob([row("t", (1,), kind=99)], []), "unknown ggml type 99"),
    "removed type": (blob([row("t", (1,), kind=4)], []), "unknown ggml type 4"),
    "row of half a block": (blob([row("t", (48, 2), kind=3)], []), "multiple of Q4_1's block, 32"),
    "tensor beyond the end": (blob([row("t", (1 << 40,))], []), "tensor 't' takes"),
    "product overflows 64 bits": (blob([row("t", (1 << 40, 1 << 40))], []), "tensor 't' takes"),
    "offset beyond the end": (blob([row("t", (1,), offset=1 << 62)], []), "tensor 't' takes"),
    "offset not aligned": (blob([row("t", (1,), offset=4)], []), "tensor 't' takes"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    data, message = BROKEN[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(GgufError, match=message) as caught:
        read_gguf_header(path)
    assert str(path) in str(caught.value)


def test_every_truncation_is_refused(small: Path) -> None:
    data = small.read_bytes()
    end = max(t.offset + t.nbytes for t in read_gguf_header(small).tensors)
    for length in range(0, end, 3):
        small.write_bytes(data[:length])
        with pytest.raises(GgufError):
            read_gguf_header(small)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes_never_crash(small: Path, changes: list[tuple[int, int]]) -> None:
    original = small.read_bytes()
    data = bytearray(original)
    for at, value in changes:
        data[at % len(data)] = value
    small.write_bytes(data)
    try:
        header = read_gguf_header(small)
    except GgufError:
        return
    finally:
        small.write_bytes(original)
    assert all(t.offset + t.nbytes <= len(data) for t in header.tensors)


def test_needs_neither_torch_nor_the_gguf_library() -> None:
    code = "import sys, worker.weights.source; print([m for m in ('torch', 'gguf') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
