"""The few ASGI shapes the gateway speaks, and JSON answers over them. No framework on the hot path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON = b"application/json"


async def send_bytes(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes,
    headers: Headers | None = None,
    lines: bytes = b"",
) -> None:
    """One complete answer with its length. `lines`: more headers, as whole lines."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                *(headers or []),
            ],
            "lines": lines,
        }
    )
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: Any, headers: Headers | None = None) -> None:
    await send_bytes(send, status, msgspec.json.encode(value), JSON, headers)
