"""What a worker tells its gateway about the tokens of one request; never part of an answer to a client."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_IDS = 64  # requests that one question may name


class Usage(msgspec.Struct, frozen=True):
    """What one request used, whatever became of it.

    `completion_tokens` are those that were generated, also for an answer that nobody waited for; what follows
    a stop string doesn't count. `finish_reason`: "stop", "length", "abort" or "error"; of several answers
    the one that says most; "" where nothing was generated.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def header(self) -> str:
        """The value of `contracts.headers.USAGE` in an answer."""
        return f"{self.prompt_tokens},{self.completion_tokens},{self.cached_tokens},{self.finish_reason}"


class UsageReport(msgspec.Struct, frozen=True):
    """An entry of ``GET /internal/usage/{ids}``. `usage` is final once `state` is "ended"."""

    state: Literal["ended", "running", "unknown"]
    usage: Usage = Usage()


def parse_usage(value: bytes) -> Usage | None:
    """The usage in a header's value; None when it isn't one."""
    parts = value.split(b",")
    if len(parts) != 4:
        return None
    prompt, completion, cached, reason = parts
    if not (prompt.isdigit() and completion.isdigit() and cached.isdigit()):
        return None
    return Usage(int(prompt), int(completion), int(cached), reason.decode("latin-1"))
