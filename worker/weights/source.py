"""What a model's `source` means: a directory, a GGUF file, random weights, or a model on the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from contracts.sources import NEEDED, RANDOM, hub_id, mistake
from worker.model.config import ModelConfig, UnsupportedModel, token_ids
from worker.model.gguf_config import config_from_gguf
from worker.model.hf_config import config_from_hf
from worker.weights.gguf_header import GgufError, GgufHeader, NotGguf, read_gguf_header
from worker.weights.hub import OnProgress, fetch

SAFETENSORS_INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")


class SourceError(ValueError):
    """There is no usable model behind the source; the message says what was looked at and what to do."""


class NotCached(SourceError):
    """A hub id that isn't in the local cache, where the network may not be asked."""


class SourceUnavailable(SourceError):
    """The hub, the network or the disk failed: another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found and understood, before any weight is read.

    kind: "safetensors" (path: the directory), "gguf" (path: the file) or "random" (path: the config.json).
    generation: generation_config.json if there is one, with `eos_token_ids`, every id that ends an answer.
    """

    kind: Literal["safetensors", "gguf", "random"]
    path: Path
    config: ModelConfig
    generation: dict[str, Any]


def resolve_source(
    source: str, on_progress: OnProgress | None = None, revision: str | None = None
) -> ModelSource:
    """Find what `source` names: an existing path, `random:CONFIG.json`, a hub id `org/name`, or one GGUF file
    of a hub repository, `org/name/file.gguf`; `org/name@REVISION` is a certain branch, tag or commit of it.
    The hub is asked only when no such path exists, and it isn't one with a mistake in it. `revision` says the
    same as `@REVISION`.

    `on_progress(done, total)` hears how many bytes of a download are there (see `worker.weights.hub.fetch`).

    Raises:
        SourceError: nothing is there, or it can't be served; the message names the reason.
    """
    path = Path(source).expanduser()
    here = source.startswith(RANDOM) or (source and path.exists())
    if here and revision is not None:
        raise SourceError(f"{source}: revision {revision} is for models of the hub; leave it out for files")
    if source.startswith(RANDOM):
        return _random(source)
    if not here:
        path = _from_hub(source, on_progress, revision)
    if path.is_dir():
        return _directory(path)
    if path.suffix.lower() in _PICKLES:
        raise _pickle(path)
    return _gguf(path)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises SourceError with the file's name, and the line of a syntax error."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"{path}: can't be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise SourceError(f"{path}: line {error.lineno}: not valid JSON: {error.msg}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"{path}: not valid JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path}: not a JSON object")
    return value


def _random(source: str) -> ModelSource:
    path = Path(source.removeprefix(RANDOM)).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise SourceError(
            f"{source}: there is no file {path}; random: needs a config.json or a directory with one"
        )
    return _with_hf_config("random", path, path)


def _directory(path: Path) -> ModelSource:
    files = sorted(path.iterdir())
    ggufs = [f for f in files if f.suffix == ".gguf"]
    if not (path / "config.json").is_file():
        if len(ggufs) == 1:
            return _gguf(ggufs[0])
        if ggufs:
            raise SourceError(
                f"{path}: several GGUF files, name one: {', '.join(f.name for f in ggufs[:20])}"
            )
        raise SourceError(f"{path}: no config.json in this directory (nor a GGUF file)")
    if not any(f.suffix == ".safetensors" or f.name == SAFETENSORS_INDEX for f in files):
        for file in files:
            if file.suffix in _PICKLES:
                raise _pickle(file)
        raise SourceError(f"{path}: config.json but no *.safetensors in this directory")
    return _with_hf_config("safetensors", path, path / "config.json")


def _with_hf_config(kind: Literal["safetensors", "random"], path: Path, config_path: Path) -> ModelSource:
    config = _describe(config_path, lambda: config_from_hf(read_json(config_path)))
    generation_path = config_path.with_name("generation_config.json")
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return _source(kind, path, config, generation, token_ids(generation.get("eos_token_id")))


def _gguf(path: Path) -> ModelSource:
    if not path.is_file():  # who opens a pipe waits
        raise SourceError(f"{path}: neither a file nor a directory; {NEEDED}")
    try:
        header = read_gguf_header(path)
    except NotGguf as error:
        raise SourceError(f"{error}; {NEEDED}") from error
    except GgufError as error:
        raise SourceError(str(error)) from error
    except OSError as error:
        raise SourceError(f"{path}: can't be read: {error.strerror}") from error
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise SourceError(
            f"{path}: one part of a split GGUF; join the parts with `llama-gguf-split --merge` first"
        )
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    factors = _rope_factors(header)
    return _source(
        "gguf", path, _describe(path, lambda: config_from_gguf(header.metadata, shapes, factors)), {}
    )


def _rope_factors(header: GgufHeader) -> Mapping[str, list[float]]:
    """The few float32 tensors that are configuration rather than weights."""
    names = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
    found = {}
    for tensor in header.tensors:
        if tensor.name in names:
            if tensor.type_name != "F32" or len(tensor.shape) != 1:
                raise SourceError(
                    f"{header.path}: {tensor.name} is {tensor.type_name} {tensor.shape}, not a row of F32"
                )
            values = np.fromfile(header.path, "<f4", tensor.shape[0], offset=tensor.offset)
            found[tensor.name] = [float(value) for value in values]
    return found


def _source(
    kind: Literal["safetensors", "gguf", "random"],
    path: Path,
    config: ModelConfig,
    generation: dict[str, Any],
    eos: tuple[int, ...] = (),
) -> ModelSource:
    # generation_config.json often knows an end token that config.json lacks (chat models), and the reverse.
    config = replace(config, eos_token_ids=tuple(dict.fromkeys(eos + config.eos_token_ids)))
    return ModelSource(kind, path, config, {**generation, "eos_token_ids": config.eos_token_ids})


def _describe(path: Path, read: Callable[[], ModelConfig]) -> ModelConfig:
    try:
        return read()
    except UnsupportedModel as error:
        raise SourceError(f"{path}: {error}") from error


def _pickle(path: Path) -> SourceError:
    return SourceError(
        f"{path}: pickle checkpoints are refused because loading one runs code it brings along; "
        "convert it to safetensors or GGUF"
    )


def _from_hub(source: str, on_progress: OnProgress | None, revision: str | None) -> Path:
    match = hub_id(source, (Path(),) if revision is None else ())
    if match is None:
        raise SourceError(f"{source}: no such file or directory{mistake(source)}")
    if revision is not None and match["revision"] not in (None, revision):
        raise SourceError(f"{source}: it names one revision, and the option revision another: {revision}")
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        DisabledRepoError,
        HFValidationError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # A repository that needs a licence accepted (GatedRepoError) is one that isn't found.
    answers = (
        RepositoryNotFoundError,
        RevisionNotFoundError,
        RemoteEntryNotFoundError,
        DisabledRepoError,
        HFValidationError,
    )
    try:
        return fetch(match["repo"], match["file"], revision or match["revision"], on_progress)
    except Exception as error:  # the library lets pass whatever the network, the disk or a mirror brings up
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        kind: type[SourceError]
        if constants.HF_HUB_OFFLINE:
            where, kind = "the local cache only: HF_HUB_OFFLINE is set", NotCached
        else:
            where = f"{constants.ENDPOINT} and the local cache"
            kind = SourceError if isinstance(error, answers) else SourceUnavailable
        raise kind(
            f"{source}: no such path, and not found on the hub ({where}): {type(error).__name__}: {reason}"
        ) from error
