"""The requests in the bytes of a client's connection: heads as ASGI scopes, bodies, bounds on all else."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Protocol
from urllib.parse import unquote

import httptools

from contracts.errors import ApiError
from contracts.heads import MAX_HEAD, check_hosts, headers_too_large, invalid_http
from gateway.asgi import Headers, Scope

LONG_URL = 256  # bytes; not worth remembering

_OWN = frozenset((b"expect", b"host", b"transfer-encoding", b"upgrade"))
_SLASH = re.compile("%2[fF]")
_ASGI = {"version": "3.0", "spec_version": "2.3"}

Address = tuple[str, int | None] | None


class Requests(Protocol):
    """Who is told what has come."""

    def on_head(self, scope: Scope, keep_alive: bool, expects_continue: bool, upgrade: bool) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_other_protocol(self) -> None:
        """What follows the request that came last is no HTTP/1."""


@lru_cache(maxsize=256)
def _split(url: bytes) -> tuple[str, bytes]:
    """Path and query. ValueError or an error of the parser for what has none.

    A slash that is written as %2F stays so: to proxies that let some paths pass it is no slash.
    """
    path, _, query = url.partition(b"?")
    if path[:1] != b"/" or b"#" in url:
        parsed = httptools.parse_url(url)
        path, query = parsed.path, parsed.query or b""
    text = path.decode("ascii")
    return unquote(_SLASH.sub("%252F", text)) if "%" in text else text, query


class RequestReader:
    """Of one connection; the methods that begin with `on_` are for its parser.

    `asked`: a request has begun that isn't whole yet; `in_head`: nor is its head; `began`: with the latest
    piece, such a head or something else that is no request yet.
    """

    __slots__ = (
        "_body_moved", "_client", "_coded", "_ended", "_expects_continue", "_framing_size", "_head_size",
        "_headers", "_hosts", "_odd_coding", "_parser", "_piece_size", "_requests", "_server", "_upgrade",
        "_url", "asked", "began", "in_head",
    )  # fmt: skip

    def __init__(self, requests: Requests, client: Address, server: Address) -> None:
        self.asked = self.began = False
        self.in_head = True
        self._requests = requests
        self._client = client
        self._server = server
        self._head_size = 0  # of the pieces before the one that is parsed
        self._piece_size = 0
        self._framing_size = 0  # of the pieces since the body last moved: chunk extensions, trailers
        self._body_moved = self._ended = False  # in the piece that is parsed
        self._parser = httptools.HttpRequestParser(self)
        # Else a request behind one that says "close" gets no answer.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed(self, data: bytes) -> None:
        """ApiError for what is no request, or has a head or framing without end."""
        self._piece_size = len(data)
        self._body_moved = self._ended = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Answered like any request, by what it says it wants.
            self._requests.on_other_protocol()
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, ApiError):  # a callback's own
                raise error.__context__ from None
            too_large = self._head_size > MAX_HEAD
            raise (headers_too_large() if too_large else invalid_http()) from None
        if self._ended:  # how much of the piece belongs to what began behind it isn't known
            self.began = self.asked
        elif self.asked and not self.in_head:
            self._framing_size = 0 if self._body_moved else self._framing_size + len(data)
        else:
            self.began = not self._head_size
            self._head_size += len(data)
        if self._head_size > MAX_HEAD or self._framing_size > MAX_HEAD:
            raise headers_too_large()

    # --- httptools

    def on_message_begin(self) -> None:
        self.asked = self.in_head = True
        self._head_size = self._framing_size = self._hosts = 0
        self._url = b""
        self._headers: Headers = []
        self._expects_continue = self._coded = self._odd_coding = self._upgrade = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:  # a trailer: it comes too late to say who asks for what
            return
        name = name.lower()
        self._headers.append((name, value))
        if name in _OWN:
            if name == b"host":
                self._hosts += 1
            elif name == b"expect":
                self._expects_continue = value.lower() == b"100-continue"
            elif name == b"upgrade":
                self._upgrade = True
            elif value.lower() == b"chunked":
                self._coded = True
            else:
                # The parser takes nothing else off: `gzip, chunked` would be passed on as if it were JSON.
                self._odd_coding = True

    def on_headers_complete(self) -> None:
        if self._head_size + self._piece_size > MAX_HEAD:
            self._head_size = len(self._url) + sum(
                len(name) + len(value) + 4 for name, value in self._headers
            )
            if self._head_size > MAX_HEAD:
                raise ValueError("head too large")
        parser = self._parser
        version = parser.get_http_version()
        if self._odd_coding or version not in ("1.1", "1.0") or (self._coded and version == "1.0"):
            raise ValueError("not what this server speaks")
        check_hosts(self._hosts, version)
        path, query = _split(self._url) if len(self._url) < LONG_URL else _split.__wrapped__(self._url)
        scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": path,
            "query_string": query,
            "headers": self._headers,
            "client": self._client,
            "server": self._server,
        }
        self.in_head = False
        self._head_size = 0
        keep_alive = version == "1.1" and parser.should_keep_alive()
        self._requests.on_head(scope, keep_alive, self._expects_continue and version == "1.1", self._upgrade)

    def on_body(self, body: bytes) -> None:
        self._body_moved = True
        self._requests.on_body(body)

    def on_message_complete(self) -> None:
        self.asked = False
        self._ended = True
        self._head_size = 0
        self._requests.on_end()
