"""Sources: each kind is found, and whatever can't be served says why before any weight is read."""

from __future__ import annotations

import ast
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.worker.gguf_files import write_gguf
from worker.weights.source import SourceError, resolve_source

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
GGUF_METADATA = {
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 7,
}


def directory(path: Path, *files: str, **changes: Any) -> Path:
    """A model directory: config.json with `changes`, and empty `files`."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    for name in files:
        (path / name).touch()
    return path


def gguf_file(path: Path, extra: dict[str, Any] | None = None, **tensors: np.ndarray) -> Path:
    embedding = {"token_embd.weight": np.zeros((100, 64), np.float32)}
    return write_gguf(path, "llama", {**GGUF_METADATA, **(extra or {})}, {**embedding, **tensors})


def test_directory(tmp_path: Path) -> None:
    path = directory(tmp_path, "model.safetensors")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2], "temperature": 0.6}))
    source = resolve_source(str(path))
    assert (source.kind, source.path) == ("safetensors", path)
    assert source.config.eos_token_ids == (5, 2)
    assert source.generation == {"eos_token_id": [5, 2], "temperature": 0.6, "eos_token_ids": (5, 2)}


def test_end_tokens_of_both_configurations_count(tmp_path: Path) -> None:
    path = directory(tmp_path, "model.safetensors")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert resolve_source(str(path)).config.eos_token_ids == (9, 2)


def test_gguf_file_and_directory_with_one(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf")
    for name in (path, tmp_path):
        source = resolve_source(str(name))
        assert (source.kind, source.path) == ("gguf", path)
        assert source.config.eos_token_ids == (7,)
        assert source.generation == {"eos_token_ids": (7,)}


def test_random(tmp_path: Path) -> None:
    path = directory(tmp_path)
    for name in (path, path / "config.json"):
        source = resolve_source(f"random:{name}")
        assert (source.kind, source.path) == ("random", path / "config.json")


REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "no weights": ({}, [], r"no \*\.safetensors"),
    "pickle": ({}, ["pytorch_model.bin"], r"pytorch_model\.bin: pickle checkpoints are refused because"),
    "architecture": ({"architectures": ["BertModel"]}, ["a.safetensors"], "'BertModel' is not supported"),
    "rope": ({"rope_scaling": {"type": "ntk"}}, ["a.safetensors"], "rope scaling 'ntk'"),
    "awq": ({"quantization_config": {"quant_method": "awq"}}, ["a.safetensors"], "quantization_config"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_directory_refused(case: str, tmp_path: Path) -> None:
    changes, files, message = REFUSED[case]
    with pytest.raises(SourceError, match=message) as caught:
        resolve_source(str(directory(tmp_path, *files, **changes)))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n'a': 1}", "line 2: not valid JSON"),
        ("[1]", "not a JSON object"),
        ("\xff", "not valid JSON"),
        ("[" * 200_000, "not valid JSON"),
        ("{}", "architecture None is not supported"),
    ],
)
def test_broken_config(text: str, message: str, tmp_path: Path) -> None:
    directory(tmp_path, "model.safetensors")
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=message) as caught:
        resolve_source(str(tmp_path))
    assert "config.json" in str(caught.value)


def test_paths_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.pt").touch()
    Path("notes.txt").write_text("no model, but long enough to have a header")
    Path("empty").mkdir()
    Path("short.txt").touch()
    os.mkfifo("pipe.gguf")
    Path("many").mkdir()
    for name in ("many/a.gguf", "many/b.gguf"):
        Path(name).touch()
    cases = {
        "": "no such file or directory",
        "missing": "no such file or directory; .*; a model of the hub is written org/name, org/name@rev",
        "/no/such/place": "no such file or directory; needed is a .gguf file, or a directory with config",
        "./mny": r"no such file or directory; did you mean '\./many'\?",
        "many/c.gguf": r"no such file or directory; did you mean 'many/[ab]\.gguf'\?",
        "many/model": "; the hub's model of that name is many/model@main",
        "org/model.safetensors": "no such file or directory; .*; a file of the hub is written org/name/file",
        "~/no/such.gguf": "no such file or directory",
        "a/b/c": "no such file or directory; .*; a model of the hub is written org/name",
        "../a/b": "no such file or directory",
        "random:missing.json": "no file missing.json",
        "model.pt": "pickle checkpoints are refused",
        "notes.txt": "not a GGUF file .*; needed is a .gguf file, or a directory with config.json",
        "short.txt": "too short to be a GGUF file; needed is a .gguf file",
        "pipe.gguf": "neither a file nor a directory; needed is a .gguf file",
        "empty": "no config.json",
        "many": "several GGUF files, name one: a.gguf, b.gguf",
    }
    for source, message in cases.items():
        with pytest.raises(SourceError, match=message):
            resolve_source(source)


def test_a_directory_of_that_name_is_no_way_to_the_hub_without_a_revision(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    for offline in ({}, {"HF_HUB_OFFLINE": "1"}):
        (found,) = resolve_elsewhere(tmp_path, "org/model", HF_ENDPOINT=endpoint, **offline)
        assert found.startswith("SourceError org/model: no such file or directory; ")
        assert found.endswith("; the hub's model of that name is org/model@main")
        assert hub.served == set()
    assert resolve_elsewhere(tmp_path, "org/model@main", HF_ENDPOINT=endpoint) == ["safetensors"]


def test_gguf_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="split GGUF"):
        resolve_source(str(gguf_file(tmp_path / "a.gguf", {"split.count": 2})))
    with pytest.raises(SourceError, match="'ntk'"):
        resolve_source(str(gguf_file(tmp_path / "b.gguf", {"llama.rope.scaling.type": "ntk"})))
    half = {"rope_freqs.weight": np.ones(16, np.float16)}
    with pytest.raises(SourceError, match=r"rope_freqs\.weight is F16"):
        resolve_source(str(gguf_file(tmp_path / "c.gguf", **half)))
    wrong = {"rope_freqs.weight": np.ones(9, np.float32)}
    with pytest.raises(SourceError, match="has 9 values, not 16"):
        resolve_source(str(gguf_file(tmp_path / "d.gguf", **wrong)))


COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """As much of the hub as a download asks for: a repository's list of files, and each of them."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.files = files
        self.served: set[str] = set()
        self.resumed: list[int] = []  # where downloads went on
        self.breaks = 0  # so many times a large file's connection ends half-way
        self.slow = 1  # large files come in so many pieces, with a pause after each


class HubRequest(SimpleHTTPRequestHandler):
    server: Hub

    def answer(self) -> None:
        path = self.path.split("?")[0]
        file = path.removeprefix("/org/model/resolve/").partition("/")[2]
        if path.endswith("/revision/gone"):
            self.refuse("RevisionNotFound")
        elif path.startswith("/api/models/org/model/"):
            self.reply(
                json.dumps(self.tree() if "/tree/" in path else {"id": "org/model", "sha": COMMIT}).encode()
            )
        elif path.startswith("/org/model/") and file in self.server.files:
            self.server.served.add(file)
            self.reply(self.server.files[file], etag=f'"{file.replace("/", "-")}"')
        else:
            self.refuse("RepoNotFound")

    def refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("x-error-code", code)
        self.send_header("content-length", "0")
        self.end_headers()

    def tree(self) -> list[dict[str, Any]]:
        files = self.server.files.items()
        return [{"type": "file", "path": name, "size": len(body), "oid": COMMIT} for name, body in files]

    def reply(self, body: bytes, **headers: str) -> None:
        asked = self.headers["range"]
        if asked is not None and self.command == "GET":
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            self.server.resumed.append(start)
            headers["content-range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            body = body[start:]
        self.send_response(206 if "content-range" in headers else 200)
        for name, value in {"content-length": str(len(body)), "x-repo-commit": COMMIT, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and self.server.breaks and len(body) > 4096:
            self.server.breaks -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif self.command == "GET":
            pieces = self.server.slow if len(body) > 4096 else 1
            for start in range(0, len(body), max(1, len(body) // pieces)):
                self.wfile.write(body[start : start + max(1, len(body) // pieces)])
                if pieces > 1:
                    time.sleep(0.2)

    do_GET = do_HEAD = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    server = Hub(
        {
            "config.json": json.dumps(CONFIG).encode(),
            "model.safetensors": b"weights",
            "pytorch_model.bin": b"pickle",
            "modeling.py": b"raise SystemExit",
            "original/params.json": b"{}",
            "tokenizer.json": b"{}",
            "quant/m.gguf": gguf_file(tmp_path / "m.gguf").read_bytes(),
        }
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


RESOLVE = """
import os, sys
from worker.weights.source import SourceError, resolve_source
for source in sys.argv[1:]:
    try:
        print(resolve_source(source, revision=os.environ.get("REVISION")).kind)
    except SourceError as error:
        print(type(error).__name__, error)
"""


def resolve_elsewhere(tmp_path: Path, *sources: str, **environment: str) -> list[str]:
    """Resolve in another process: the hub's library reads its environment when it is imported."""
    environment |= {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, *sources],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_hub(hub: Hub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    found = resolve_elsewhere(
        tmp_path, "org/model", "org/model/quant/m.gguf", "org/none", HF_ENDPOINT=endpoint
    )
    assert found[:2] == ["safetensors", "gguf"]
    assert found[2].startswith(
        f"SourceError org/none: no such path, and not found on the hub ({endpoint} and the local cache)"
    )
    assert hub.served == {"config.json", "model.safetensors", "tokenizer.json", "quant/m.gguf"}

    hub.served.clear()
    found = resolve_elsewhere(tmp_path, "org/model", "org/none", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert found[0] == "safetensors"
    assert found[1].startswith("NotCached ")
    assert "the local cache only: HF_HUB_OFFLINE is set" in found[1]
    assert not hub.served


def test_a_certain_revision(hub: Hub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    sources = ("org/model@v1.2", "org/model@main/quant/m.gguf", "org/model@gone", "org/model@")
    found = resolve_elsewhere(tmp_path, *sources, HF_ENDPOINT=endpoint)
    assert found[:2] == ["safetensors", "gguf"]
    assert found[2].startswith("SourceError org/model@gone: ")
    assert "RevisionNotFoundError" in found[2]
    assert "a model of the hub is written org/name, org/name@revision or org/name/file.gguf" in found[3]
    assert (tmp_path / "hf/hub/models--org--model/refs/v1.2").read_text() == COMMIT
    offline = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "1"}
    found = resolve_elsewhere(tmp_path, "org/model@v1.2", f"org/model@{COMMIT}", "org/model@v2", **offline)
    assert found[:2] == ["safetensors"] * 2
    assert found[2].startswith("NotCached org/model@v2: ")


def test_a_hub_that_cannot_be_reached_may_be_later(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        (found,) = resolve_elsewhere(tmp_path, "org/model", HF_ENDPOINT=endpoint)
    assert found.startswith(
        f"SourceUnavailable org/model: no such path, and not found on the hub ({endpoint} "
    )


def test_a_revision_as_an_option(hub: Hub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    local = gguf_file(tmp_path / "local.gguf")
    sources = ("org/model", "org/model/quant/m.gguf", "org/model@v2", "org/model@v1", str(local))
    found = resolve_elsewhere(tmp_path, *sources, HF_ENDPOINT=endpoint, REVISION="v1")
    assert [found[0], found[1], found[3]] == ["safetensors", "gguf", "safetensors"]
    assert "it names one revision, and the option revision another: v1" in found[2]
    assert "revision v1 is for models of the hub; leave it out for files" in found[4]
    assert (tmp_path / "hf/hub/models--org--model/refs/v1").read_text() == COMMIT


def test_a_connection_that_breaks_is_taken_up_where_it_was(hub: Hub, tmp_path: Path) -> None:
    """And what is there whole is not fetched again by the next process."""
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    weights = bytes(range(256)) * (LARGE // 256)
    hub.files["model.safetensors"] = weights
    hub.breaks = 1
    assert resolve_elsewhere(tmp_path, "org/model", HF_ENDPOINT=endpoint) == ["safetensors"]
    assert hub.breaks == 0
    assert len(hub.resumed) == 1
    assert hub.resumed[0] > LARGE // 8
    (found,) = (tmp_path / "hf/hub/models--org--model/snapshots").glob("*/model.safetensors")
    assert found.read_bytes() == weights
    hub.breaks, hub.resumed = 1, []
    assert resolve_elsewhere(tmp_path, "org/model", HF_ENDPOINT=endpoint) == ["safetensors"]
    assert (hub.breaks, hub.resumed) == (1, [])


LARGE = 40 << 20
WATCH = """
import sys, threading
from worker.weights.source import resolve_source
source = sys.argv[1]
reports = [[], []]
def resolve(number):
    resolve_source(source, lambda done, total: reports[number].append((done, total)))
threads = [threading.Thread(target=resolve, args=(number,)) for number in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for report in reports:
    print(report)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("source", ["org/model", "org/model/quant/m.gguf"])
def test_a_download_shows_that_it_moves_also_to_who_waits_for_it(
    hub: Hub, tmp_path: Path, source: str
) -> None:
    """Two workers of one model: one fetches, the other waits for its lock."""
    name = source.removeprefix("org/model/") if source.count("/") > 1 else "model.safetensors"
    hub.files[name] += bytes(LARGE)
    hub.slow = 15
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", WATCH, source], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "%" not in done.stderr  # no bars in a log
    reports = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    for report in reports:
        moves = [b[0] > a[0] for a, b in itertools.pairwise(report)]
        assert sum(moves) >= 2, (report, done.stderr)
    assert any(LARGE <= total < 1.1 * LARGE for report in reports for _, total in report), reports
