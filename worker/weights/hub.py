"""Models of the Hugging Face hub: fetched into its cache, with progress while they come."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

FILES: Final = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "tiktoken.model"]
IGNORED: Final = ["original/*", "consolidated*"]  # the same weights again, in the authors' own layout
_REPORT_SECONDS = 0.5

OnProgress = Callable[[int, int], None]


def fetch(
    repo: str, file: str | None, revision: str | None = None, on_progress: OnProgress | None = None
) -> Path:
    """The file, or without one the directory of the model, in the local cache; downloaded if it isn't there;
    files that are there whole aren't fetched again, and a connection that breaks is taken up where it was.
    `revision`: a branch, tag or commit; None: the main branch.

    `on_progress(done, total)`, in bytes, is called twice a second from a thread of its own while something
    comes; total is 0 while it isn't known. Raises whatever the library, the network and the disk bring up.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if on_progress is None:
        return _download(repo, file, revision)
    bars: list[Any] = []
    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    with _reporting(lambda: on_progress(*_state(bars, blobs))):
        return _download(repo, file, revision, tqdm_class=_bar_class(bars))


def _download(repo: str, file: str | None, revision: str | None, **options: Any) -> Path:
    import huggingface_hub

    if file:
        return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision, **options))
    return Path(
        huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=FILES, ignore_patterns=IGNORED, **options
        )
    )


def _bar_class(bars: list[Any]) -> type[Any]:
    """A class for the library's progress bars: draws nothing, puts those that count bytes into `bars`."""
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            if options.get("unit") == "B":
                bars.append(self)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0  # a disabled bar doesn't count by itself

    return Silent


def _state(bars: list[Any], blobs: Path) -> tuple[int, int]:
    """Bytes done and in total."""
    # What is received and what is written have a bar each with the same total: their mean moves with either.
    count = max(1, len(bars))
    done, total = (sum(int(value or 0) for value in values) // count for values in _values(bars))
    if done < total:
        return done, total
    # Nothing is coming here; another worker may be fetching the same model while this one waits its turn.
    return _size(blobs), 0


def _values(bars: list[Any]) -> tuple[list[float | None], list[float | None]]:
    return [bar.n for bar in bars], [bar.total for bar in bars]


def _size(folder: Path) -> int:
    size = 0
    with contextlib.suppress(OSError):  # files are renamed and removed meanwhile
        for path in folder.iterdir():
            size += path.stat().st_size
    return size


@contextlib.contextmanager
def _reporting(report: Callable[[], None]) -> Iterator[None]:
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(_REPORT_SECONDS):
            report()

    thread = threading.Thread(target=repeat, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
