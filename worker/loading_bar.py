"""How far a model is loaded, drawn on stderr while it loads in the caller's own process."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from worker.ipc.messages import Progress

_WORDS: Final = {
    "download": "downloading",
    "weights": "reading weights",
    "kv_cache": "making room",
    "warm_up": "warming up",
    "graphs": "capturing graphs",
}


class LoadingBar:
    """One line that names the phase, with a bar where its end is known. Nothing where stderr is no terminal,
    and gone when loading is over.

    Args:
        model: what is loaded, as the caller named it.
    """

    def __init__(self, model: str) -> None:
        console = Console(stderr=True)
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.fields[model]}: {task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task("looking", total=None, model=model)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, progress: Progress) -> None:
        """What the engine is at; also from another thread."""
        words = _WORDS.get(progress.phase, progress.phase)
        known = progress.total > 1
        self._bars.update(
            self._task,
            description=words,
            completed=progress.done if known else 0,
            total=progress.total if known else None,
        )

    def downloading(self, done: int, total: int) -> None:
        """Bytes of a download; `total` 0: not known."""
        self.show(Progress("download", done, total))
