"""GrammarChecker: whether a form can be compiled, found in a process of its own (worker/grammar/checker.py).

A form comes from a client: what it makes a compiler do must not end, fill or hold up the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import select
import subprocess
import sys
from collections import OrderedDict

import msgspec

from worker.grammar.checker import Settings
from worker.grammar.compiling import GrammarError
from worker.params import StructuredOutputs

_REMEMBERED = 1024  # verdicts
_MOST_WAITING = 64  # forms at a time; one is checked
_LONGEST = 120.0  # seconds for an answer, on whatever machine; the kernel's limits are those that count
_TOO_MUCH = "it takes too much time or memory to compile; make it smaller or simpler"


class CheckerBusy(Exception):
    """Too many forms wait to be checked."""


class _Check:
    """One form's, and how many wait for it."""

    def __init__(self) -> None:
        self.waiting = 0
        self.task: asyncio.Future[str]


class GrammarChecker:
    """Checks forms, one at a time, and remembers what it found. The process starts with the first one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()
        self._checks: dict[bytes, _Check] = {}  # by hash of the form, while they wait or run
        self._found: OrderedDict[bytes, str] = OrderedDict()  # by hash of the form; the last used last

    async def check(self, form: StructuredOutputs) -> None:
        """GrammarError when the form can't be used; CheckerBusy when it can't be known now."""
        line = msgspec.json.encode(form)
        key = hashlib.sha256(line).digest()
        found = self._found.get(key)
        if found is None:
            found = await self._wait_for(key, line)
        else:
            self._found.move_to_end(key)
        if found:
            raise GrammarError(found)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._close_pipes()
            self._process = None

    async def _wait_for(self, key: bytes, line: bytes) -> str:
        """What is wrong with the form, found for all who ask at the same time."""
        check = self._checks.get(key)
        if check is None:
            if len(self._checks) >= _MOST_WAITING:
                raise CheckerBusy
            check = self._checks[key] = _Check()
            check.task = asyncio.ensure_future(self._find(key, line, check))
        check.waiting += 1
        try:
            # A client that leaves must not cut the exchange with the process short.
            return await asyncio.shield(check.task)
        finally:
            check.waiting -= 1

    async def _find(self, key: bytes, line: bytes, check: _Check) -> str:
        found = ""
        try:
            async with self._turn:
                if check.waiting:  # else all have left before its turn came
                    found = self._found[key] = await asyncio.to_thread(self._ask, line)
        finally:
            del self._checks[key]
        while len(self._found) > _REMEMBERED:
            self._found.popitem(last=False)
        return found

    def _ask(self, line: bytes) -> str:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            answers = select.poll()  # not select.select: a busy server has more than 1024 descriptors
            answers.register(process.stdout, select.POLLIN)
            if not answers.poll(_LONGEST * 1000):
                process.kill()
            answer = process.stdout.readline()
        if answer:
            return str(json.loads(answer))
        code = process.wait()
        self.close()
        if code >= 0:
            raise RuntimeError(f"the process that checks grammars has ended with code {code}")
        return _TOO_MUCH  # the kernel ended it

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "worker.grammar.checker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
        return self._process

    def _close_pipes(self) -> None:
        assert self._process is not None
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
