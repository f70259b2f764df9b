"""Whether a checkpoint is for embeddings, and how it pools: as Sentence Transformers and GGUF write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from worker.pooling import PoolingConfig, PoolingType
from worker.weights.gguf_header import read_gguf_header
from worker.weights.source import ModelSource, SourceError, read_json

POOLING_FILE: Final = Path("1_Pooling", "config.json")
MODULES_FILE: Final = "modules.json"
_MODES: Final[dict[str, PoolingType]] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}


def find_pooling(
    source: ModelSource,
    runner: Literal["auto", "generate", "pooling"] = "auto",
    pooling_type: Literal["auto", "last", "mean"] = "auto",
) -> PoolingConfig | None:
    """How `source` makes embeddings, None when it generates. The options say it, else the checkpoint.

    SourceError when the checkpoint pools in a way that isn't supported, and the options don't say another.
    """
    if runner == "generate" and pooling_type != "auto":
        raise SourceError(
            f"pooling_type {pooling_type} is for embeddings; it doesn't go with runner generate"
        )
    if runner == "generate" and source.config.headless:
        raise SourceError(
            f"{source.path}: a checkpoint without an output layer can't generate; runner pooling"
        )
    if runner == "generate":
        return None
    named = pooling_type if pooling_type != "auto" else None
    found = _declared(source, named)
    if found is None and runner == "auto" and named is None and not source.config.headless:
        return None
    kind, normalize = found or (named or "last", True)
    sizes, any_size = _cuts(source)
    return PoolingConfig(named or kind, normalize, source.config.hidden_size, sizes, any_size)


def _declared(source: ModelSource, named: PoolingType | None) -> tuple[PoolingType, bool] | None:
    """(type, normalised) as the checkpoint says; None when it says nothing of pooling."""
    if source.kind == "gguf":
        return _of_gguf(source, named)
    folder = source.path if source.kind == "safetensors" else source.path.parent
    if not (folder / POOLING_FILE).is_file():
        return None
    normalize = _check_modules(folder / MODULES_FILE)
    return named or _mode(folder / POOLING_FILE), normalize


def _mode(path: Path) -> PoolingType:
    wanted = [
        name for name, value in read_json(path).items() if name.startswith("pooling_mode_") and value is True
    ]
    if len(wanted) == 1 and wanted[0] in _MODES:
        return _MODES[wanted[0]]
    raise SourceError(
        f"{path}: pooling by {', '.join(wanted) or 'nothing'} is not supported; supported: "
        f"{', '.join(_MODES)}, one of them. --pooling-type says another, --runner generate leaves it out"
    )


def _check_modules(path: Path) -> bool:
    """Whether vectors are normalised. SourceError for modules that would change them otherwise."""
    if not path.is_file():
        return True
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.MsgspecError) as error:
        raise SourceError(f"{path}: not a list of modules: {error}") from error
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    others = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if others:
        raise SourceError(
            f"{path}: modules of type {', '.join(others)} are not supported; --runner generate leaves out "
            "all that makes embeddings"
        )
    return "Normalize" in kinds


def _of_gguf(source: ModelSource, named: PoolingType | None) -> tuple[PoolingType, bool] | None:
    metadata = read_gguf_header(source.path).metadata
    architecture = metadata.get("general.architecture")
    kind = metadata.get(f"{architecture}.pooling_type")
    if kind in (None, 0):
        return None
    if named is not None:
        return named, True
    if kind == 1:
        return "mean", True
    if kind == 3:
        return "last", True
    raise SourceError(
        f"{source.path}: {architecture}.pooling_type {kind} is not supported; supported: 1 (mean), 3 (last). "
        "--pooling-type says another, --runner generate leaves it out"
    )


def _cuts(source: ModelSource) -> tuple[tuple[int, ...], bool]:
    """Shorter sizes that the model was trained for, or whether any will do, by vLLM's keys of config.json."""
    if source.kind == "gguf":
        return (), False
    path = source.path / "config.json" if source.kind == "safetensors" else source.path
    config = read_json(path)
    sizes = config.get("matryoshka_dimensions")
    if isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes):
        return tuple(sizes), False
    return (), config.get("is_matryoshka") is True
