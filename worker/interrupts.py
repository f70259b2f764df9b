"""Ctrl-C between two steps of an engine in the caller's process, never within one.

An exception out of the middle of a step would leave pages and rows that nobody gives back.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Within it SIGINT is only noted. The function given lets it through, and so does the end of the context:
    then whoever had the signal gets it, which by default raises KeyboardInterrupt. A second one isn't held.

    Only the main thread is interrupted; on any other this does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    noted: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> Any:
        if noted:
            return before(number, frame)
        noted.append((number, frame))

    def let_through() -> None:
        if noted:
            before(*noted.pop())

    signal.signal(signal.SIGINT, note)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, before)
        let_through()
