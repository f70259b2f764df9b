"""Processes as children of the supervisor: each in its own session, none outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.config import ENV_PREFIX
from gateway.fleet.backends.base import Role
from gateway.fleet.logs import open_log
from gateway.fleet.reaper import MARK, Record, Records, boot_id, kill_marked, start_ticks, write_records

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """A started process. `exited`: its code, negative for a signal, once it and all it started are gone."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str, started: int) -> None:
        self._process = process
        self.mark = mark
        self.record = Record(pid=process.pid, started=started, mark=mark)
        self.reason: str | None = None  # no more is known than the code
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """Asks the process itself to drain and end; its own children are its business."""
        if not self.exited.done():
            os.kill(self.pid, signal.SIGTERM)  # Popen's own way would reap it before `collect`

    def kill(self) -> None:
        """Ends the process and everything it started."""
        if not self.exited.done():
            os.kill(self.pid, signal.SIGKILL)
            kill_marked(self.mark)

    async def stop(self, patience: float) -> bool:
        """Terminates, waits `patience` seconds, then kills. True when it ended by itself."""
        self.terminate()
        done, _ = await asyncio.wait({self.exited}, timeout=patience)
        self.kill()
        await asyncio.wait({self.exited})
        return bool(done)

    def collect(self) -> bool:
        """Notices the end of the process, and kills what it leaves."""
        if self.exited.done():
            return True
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        kill_marked(self.mark)
        self.exited.set_result(self._process.wait())
        return True


class LocalBackend:
    """Starts children, notices their ends through SIGCHLD, keeps records for a successor's reaper."""

    def __init__(self, instance: str, records: Path) -> None:
        self._instance = instance
        self._path = records
        self._children: list[Child] = []

    def __enter__(self) -> LocalBackend:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._collect)
        self._write()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        kill_marked(self._instance)
        self._path.unlink(missing_ok=True)

    def spawn(
        self,
        argv: Sequence[str],
        *,
        role: Role,
        slot: str,
        generation: int,
        log: Path,
        fds: Sequence[int] = (),
        memory: Callable[[], int | None] | None = None,
    ) -> Child:
        """Starts a process. Main thread only: the death signal is tied to the thread that forks. Memory isn't
        limited."""
        mark = f"{self._instance}/{slot}.{generation}"
        output = open_log(log)
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=fds,
                env=_environment(mark),
                preexec_fn=_die_with_parent(os.getpid()),
            )
        finally:
            os.close(output)
        child = Child(process, mark, start_ticks(process.pid) or 0)
        self._children.append(child)
        self._write()
        return child

    def _collect(self) -> None:
        remaining = [child for child in self._children if not child.collect()]
        if len(remaining) != len(self._children):
            self._children = remaining
            self._write()

    def _write(self) -> None:
        processes = tuple(child.record for child in self._children)
        records = Records(
            instance=self._instance, boot_id=boot_id(), supervisor=os.getpid(), processes=processes
        )
        with contextlib.suppress(OSError):  # a full disk; the mark alone finds them all as well
            write_records(self._path, records)


def _environment(mark: str) -> dict[str, str]:
    """Ours without our own settings: children get theirs, whole and checked, on the command line."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    return {**inherited, MARK: mark, "PYTHONUNBUFFERED": "1"}


def _die_with_parent(parent: int) -> Callable[[], None]:
    def before_exec() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return before_exec
