"""HTTP to one worker on its own socket: what the driver asks it, and the prompts that it sends itself."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from contracts.headers import REFUSED

ANSWER_WITHIN = 120.0  # seconds; a prompt on a busy CPU takes its time
ASK_WITHIN = 10.0


class Lost(Exception):
    """No answer, or one that isn't HTTP and JSON: the process ends, or is gone."""


class Refused(Exception):
    """The worker answered, and not with what was asked for. `code`: of its error body."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status
        self.code = code

    @property
    def is_failure(self) -> bool:
        """The worker's failing; one that it refused before it began, or that we asked wrongly, isn't."""
        return self.status >= 500 and self.code != "refused"


@dataclass(frozen=True)
class Times:
    """Seconds of one streamed answer; `tpot` is the mean per token after the first."""

    ttft: float
    tpot: float


class Peer:
    """One worker. `target` is its id, "slot.generation"; `model` the name that it serves."""

    def __init__(self, uds: Path, slot: str, generation: int, model: str) -> None:
        self.slot = slot
        self.generation = generation
        self.model = model
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(uds), verify=False),
            base_url="http://worker",
            timeout=ANSWER_WITHIN,
        )

    @property
    def target(self) -> str:
        return f"{self.slot}.{self.generation}"

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> dict[str, Any]:
        return await self._ask("GET", path, None, ASK_WITHIN)

    async def post(self, path: str, body: Any = None) -> dict[str, Any]:
        return await self._ask("POST", path, body, ASK_WITHIN)

    async def prompt(self, path: str, **body: Any) -> dict[str, Any]:
        """A greedy answer in one piece."""
        return await self._ask("POST", path, {"model": self.model, "temperature": 0, **body}, ANSWER_WITHIN)

    async def timed(self, prompt: list[int], tokens: int, salt: str) -> Times:
        """Streams an answer of so many tokens (2 or more); no other request shares its cached prompt."""
        body = {
            "model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": tokens, "ignore_eos": True,
            "cache_salt": salt,
        }  # fmt: skip
        began = time.monotonic()
        first = 0.0
        try:
            async with self._client.stream("POST", "/generate_stream", json=body) as response:
                if response.status_code != 200:
                    raise _refused(response, await response.aread())
                async for line in response.aiter_lines():
                    piece = json.loads(line)
                    if not isinstance(piece, dict) or "error" in piece:
                        raise Lost("the stream broke off")
                    first = first or time.monotonic()
                    if piece.get("finish_reason") is not None:
                        return Times(first - began, (time.monotonic() - first) / (tokens - 1))
        except httpx.HTTPError as error:
            raise Lost(_words(error)) from None
        except (ValueError, RecursionError):
            raise Lost("a piece of the stream isn't JSON") from None
        raise Lost("the stream ended before its end")

    async def _ask(self, method: str, path: str, body: Any, within: float) -> dict[str, Any]:
        try:
            response = await self._client.request(method, path, json=body, timeout=within)
            if response.status_code != 200:
                raise _refused(response, response.content)
            answer = json.loads(response.content)
        except httpx.HTTPError as error:
            raise Lost(_words(error)) from None
        except (ValueError, RecursionError):
            raise Lost(f"the answer to {path} isn't JSON") from None
        if not isinstance(answer, dict):
            raise Lost(f"the answer to {path} isn't an object")
        return answer


@asynccontextmanager
async def peers(made: list[Peer]) -> AsyncIterator[list[Peer]]:
    """Closes them at the end."""
    try:
        yield made
    finally:
        for peer in made:
            await peer.close()


def number_in(answer: dict[str, Any], name: str, otherwise: int) -> int:
    """A count of 1 or more that a worker tells."""
    found = answer.get(name)
    return found if isinstance(found, int) and found >= 1 else otherwise


class _Error(msgspec.Struct, frozen=True):
    message: str = "it gave no reason"
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error = _Error()


def _refused(response: httpx.Response, body: bytes) -> Refused:
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except (ValueError, RecursionError):
        error = _Error()
    code = "refused" if REFUSED in response.headers else error.code or ""
    return Refused(response.status_code, code, error.message)


def _words(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
