"""Threads that compile kernels while weights load."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels import ahead


def test_who_serves_on_the_machine_goes_before_who_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)  # there may be none
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with ThreadPoolExecutor(1, initializer=ahead._begin_thread, initargs=(3,)) as threads:
        inside = threads.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    assert (inside, devices) == (min(19, before + ahead.NICENESS), [3])
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
