"""As many connections to the admin socket as a supervisor can spare descriptors for, and always room for one
more: it needs some to start processes and to write down what it does."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST = 256
AT_ONCE = 64  # accepted before any of them is looked at


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, where a connection too many ends the one that is missed least, of equals the oldest: first
    who has asked nothing whole, then who only asks, and may ask again. What changes something is never given
    up: where nothing else is left, the new connection is."""

    began: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.began = self.loop.time()
        others = [one for one in self.connections if isinstance(one, BoundedProtocol) and one is not self]
        if len(others) < MOST:
            return
        least = min(others, key=lambda one: (one.importance, one.began))
        given_up = least if least.importance < _CHANGES else self
        self.connections.discard(given_up)  # at once: it hears of its end later
        given_up.transport.abort()

    @property
    def importance(self) -> int:
        if self.cycle is None or self.cycle.response_complete:
            return _SILENT
        if self.cycle.more_body:
            return _UNFINISHED
        return _QUESTION if self.cycle.scope["method"] == "GET" else _CHANGES


_SILENT, _UNFINISHED, _QUESTION, _CHANGES = range(4)
