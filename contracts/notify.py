"""What a process tells the service manager that started it: systemd's notify protocol, sd_notify(3).

One datagram of ``NAME=value`` lines each, to the Unix socket in NOTIFY_SOCKET. Without one every call is a
no-op, so a process needn't know who started it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

_PINGS = 3  # within the time in which the watchdog wants one


class Notifier:
    """`watchdog`: seconds between signs of life that the manager is content with; None: it wants none.

    Nothing here waits: a manager that doesn't read loses what doesn't fit, and `send` says so.
    """

    def __init__(self, address: str | None = None, watchdog: float | None = None) -> None:
        self.watchdog = None if watchdog is None else watchdog / _PINGS
        self._address = address
        self._socket: socket.socket | None = None
        self._status = ""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Notifier:
        """Takes the variables out, so that child processes don't speak for this one."""
        address = environment.pop("NOTIFY_SOCKET", None)
        usec = environment.pop("WATCHDOG_USEC", "")
        addressee = environment.pop("WATCHDOG_PID", str(os.getpid()))
        is_meant = usec.isdecimal() and addressee == str(os.getpid())
        return cls(address, int(usec) / 1e6 if is_meant else None)

    @property
    def is_used(self) -> bool:
        return self._address is not None

    def ready(self, status: str) -> bool:
        """The start is over."""
        return self.send(f"READY=1\nSTATUS={status}")

    def progress(self, status: str, seconds: float) -> bool:
        """The start gets on, and may take `seconds` until its next sign of that."""
        return self.send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}\nSTATUS={status}")

    def status(self, status: str) -> None:
        """One line for people; sent when it is another than before."""
        if status != self._status and self.send(f"STATUS={status}"):
            self._status = status

    def alive(self) -> None:
        """The watchdog's time starts anew."""
        self.send("WATCHDOG=1")

    def stopping(self, status: str) -> bool:
        return self.send(f"STOPPING=1\nSTATUS={status}")

    def send(self, message: str) -> bool:
        """Whether the manager has it; True when there is none."""
        if self._address is None:
            return True
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)
            self._socket.sendto(message.encode(), _sockaddr(self._address))
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


def _sockaddr(address: str) -> str:
    """``@name`` is a name in the abstract namespace, which begins with a NUL byte."""
    return "\0" + address[1:] if address.startswith("@") else address
