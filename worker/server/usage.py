"""What requests used, kept for the gateway that settles its limits and writes it down."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from contracts.usage import Usage, UsageReport

KEPT = 16_384  # requests that have ended; a gateway asks at once
_WEIGHT = {"": 0, "stop": 1, "length": 2, "abort": 3, "error": 4}


class Account:
    """The tokens of one request. Its answers are opened together and end one by one; `close` when the request
    is over: it has `ended` with the last of them."""

    __slots__ = ("_cached", "_closed", "_completion", "_open", "_prompt", "_reason", "_waiters")

    def __init__(self) -> None:
        self._prompt = self._completion = self._cached = 0
        self._reason = ""
        self._open = 0
        self._closed = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def running(self) -> bool:
        """Whether an answer may still grow."""
        return self._open > 0

    @property
    def ended(self) -> bool:
        return self._closed and not self._open

    def open(self, prompt_tokens: int, answers: int) -> None:
        self._prompt = prompt_tokens
        self._open = answers

    def end_answer(self, tokens: int, cached: int, reason: str) -> None:
        self._open -= 1
        self._completion += tokens
        self._cached += cached
        if _WEIGHT[reason] > _WEIGHT[self._reason]:
            self._reason = reason
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def usage(self) -> Usage:
        return Usage(self._prompt, self._completion, self._cached, self._reason)

    async def wait_ended(self) -> None:
        while not self.ended:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        if self._waiters and self.ended:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()


class UsageBook:
    """Accounts by the names that gateways gave their requests: all that run, and `kept` that have ended."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._running: dict[str, Account] = {}
        self._ended: OrderedDict[str, Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def begin(self, name: str, account: Account) -> None:
        self._running[name] = account

    def end(self, name: str, account: Account) -> None:
        """The request is over; what the engine still has to say about it counts all the same."""
        account.close()
        if self._running.get(name) is account:
            del self._running[name]
        self._ended[name] = account
        if len(self._ended) > self._kept:
            self._ended.popitem(last=False)

    async def report(self, names: Sequence[str], wait: float) -> list[UsageReport]:
        """What became of them, in their order, once all have ended or after `wait` seconds."""
        accounts = [self._running.get(name) or self._ended.get(name) for name in names]
        open_ones = [account for account in accounts if account is not None and not account.ended]
        if open_ones:
            waits = [asyncio.ensure_future(account.wait_ended()) for account in open_ones]
            _, pending = await asyncio.wait(waits, timeout=wait)
            for waiting in pending:
                waiting.cancel()
        return [_report(account) for account in accounts]


def _report(account: Account | None) -> UsageReport:
    if account is None:
        return UsageReport("unknown")
    return UsageReport("ended" if account.ended else "running", account.usage())
