"""`python -m gateway` without the second that its imports take: forked from a process that has made them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import gateway.accounting
import gateway.inbound
from gateway.__main__ import main

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


class ForkedGateway:
    """As subprocess.Popen. `listener`: its socket, for `--fd`; `log` is appended to."""

    def __init__(self, options: Sequence[str], log: Path, listener: socket.socket | None = None) -> None:
        self._process = _FORKS.Process(target=_run, args=(options, log, listener))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(options: Sequence[str], log: Path, listener: socket.socket | None) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 2)
    for module in (gateway.accounting, gateway.inbound):  # else all would be the same process to others
        setattr(module, "_PROCESS", secrets.token_hex(8).encode())  # noqa: B010
    place = [] if listener is None else ["--fd", str(listener.detach())]
    main([*options, *place], prog_name="pagefleet gateway")
