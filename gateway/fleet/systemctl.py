"""systemd, asked through `systemctl`: the manager of the system, or of this user."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.fleet.errors import FleetError

CALL_SECONDS = 20.0

Properties = Mapping[str, str]


class SystemdError(FleetError):
    """systemd isn't there, doesn't know the unit, or doesn't allow it; the message has its words."""


@dataclass(frozen=True)
class Manager:
    """`user`: the one of this user (``systemctl --user``), else the system's."""

    user: bool

    @staticmethod
    def ours() -> Manager:
        """The one that has started this process; by hand, the system's for root and else the user's own."""
        return Manager("MANAGERPID" in os.environ or os.geteuid() != 0)

    @property
    def command(self) -> str:
        """As a person types it."""
        return "systemctl --user" if self.user else "systemctl"

    async def call(self, *arguments: str) -> str:
        """What systemctl prints; SystemdError when it fails, or takes too long."""
        argv = self._argv(arguments)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise SystemdError(f"{argv[0]} can't be run: {error.strerror}") from None
        try:
            async with asyncio.timeout(CALL_SECONDS):
                out, words = await process.communicate()
        except TimeoutError:
            raise SystemdError(f"`{' '.join(argv)}` has not answered for {CALL_SECONDS:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return self._result(argv, process.returncode, out, words)

    async def show(self, pattern: str, *names: str) -> list[Properties]:
        """Properties of each unit that is loaded and fits the pattern, or of the one unit of that name."""
        return _blocks(await self.call("show", pattern, f"--property={','.join(names)}"))

    def call_now(self, *arguments: str, patience: float | None = None) -> str:
        """The same where there is no event loop; it may take `patience` seconds."""
        argv = self._argv(arguments)
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SystemdError(f"`{' '.join(argv)}` failed: {error}") from None
        return self._result(argv, done.returncode, done.stdout, done.stderr)

    def show_now(self, units: Sequence[str], *names: str) -> list[Properties]:
        """Properties of units, in the order in which they are named."""
        arguments = ("show", *units, f"--property={','.join(names)}")
        return _blocks(self.call_now(*arguments, patience=CALL_SECONDS)) if units else []

    def _argv(self, arguments: Sequence[str]) -> list[str]:
        return ["systemctl", *(["--user"] if self.user else []), "--no-ask-password", *arguments]

    @staticmethod
    def _result(argv: list[str], code: int | None, out: bytes, words: bytes) -> str:
        if code != 0:
            text = words.decode(errors="replace").strip() or f"exit code {code}"
            raise SystemdError(f"`{' '.join(argv)}` failed: {text}")
        return out.decode(errors="replace")


def _blocks(text: str) -> list[Properties]:
    """`systemctl show` separates units by empty lines."""
    blocks = [
        dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in text.split("\n\n")
    ]
    return [block for block in blocks if block]
