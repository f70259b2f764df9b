"""Trusted proxies: whose word on the client's address and user is taken.

The address is found by the rule of the right-most untrusted hop: each hop appends the address it was called
from, so the list is read from its end, and only as far as the hop that wrote an entry is trusted. What a
client wrote itself stands to the left of that and is never reached. Sources: RFC 7239 (Forwarded), nginx's
`real_ip_recursive`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from gateway.asgi import Headers, Scope

ForwardedHeader = Literal["x-forwarded-for", "forwarded"]
Peer = tuple[str, int] | None  # as ASGI's scope has it; None: a Unix socket

LOCAL = "local"  # the address of a peer on a Unix socket
UNIX = "unix:"  # how trusted proxies name such peers, as nginx does
MAX_HOPS = 16
_LONGEST = 64  # bytes of an address with port and brackets
_LONGEST_ELEMENT = 2048  # bytes of one element of Forwarded

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_WITH_PORT = re.compile(r"\[([^\[\]]+)\](?::\d{1,5})?|([\d.]+):\d{1,5}")
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = rb'"(?:[^"\\]|\\.)*"'
_PAIR = re.compile(rb'\s*(%b)=(%b|[^\s",;=]+)\s*(?:;|$)' % (_TOKEN, _QUOTED))
_GONE = ("unknown", 0)
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")


class Origin(NamedTuple):
    """`address`: where the request came from, as far as it can be believed. `trusted`: the peer is a trusted
    proxy, so that its other headers are its own word too."""

    address: str
    trusted: bool


class TrustedProxies:
    """Networks (``10.0.0.0/8``, ``::1``) and ``unix:``; ValueError names one that is none.

    One header only is read: a proxy that maintains `X-Forwarded-For` passes on whatever `Forwarded` a client
    made up, and the other way round.
    """

    def __init__(self, networks: Iterable[str] = (), header: ForwardedHeader = "x-forwarded-for") -> None:
        names = tuple(networks)
        self.header = header
        self._unix = UNIX in names
        self._networks = tuple(_network(name) for name in names if name != UNIX)
        self._name = header.encode()
        self._element = _x_forwarded_for if header == "x-forwarded-for" else _forwarded
        self._read = lru_cache(maxsize=4096)(self._read_address)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self._unix or bool(self._networks)

    def origin(self, headers: Headers, peer: Peer) -> Origin:
        """Where a request with these headers comes from. Never fails: what can't be read isn't believed."""
        known = Origin(LOCAL, self._unix) if peer is None else self._read(peer[0]) or Origin(peer[0], False)
        if not known.trusted:
            return known
        lines = [value for name, value in headers if name == self._name]
        return Origin(self._walk(b",".join(lines), known.address), True) if lines else known

    def _walk(self, value: bytes, address: str) -> str:
        """The right-most address in `value` that isn't a trusted proxy's, else the last readable one."""
        parts = value.rsplit(b",", MAX_HOPS)
        if len(parts) > MAX_HOPS:
            del parts[0]
        while parts:
            text = self._element(parts)
            # A zone (after %) means nothing on another machine.
            hop = None if len(text) > _LONGEST or b"%" in text else self._read(text.decode("latin-1"))
            if hop is None:
                break
            address, trusted = hop
            if not trusted:
                break
        return address

    def _read_address(self, text: str) -> Origin | None:
        """None for what is no address, as `unknown` and obfuscated names (`_abc`): proxies make new ones for
        each request (RFC 7239 §6.3), so they are nobody's identity."""
        match = _WITH_PORT.fullmatch(text)
        try:
            address = ipaddress.ip_address((match[1] or match[2]) if match else text)
        except ValueError:
            return None
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return Origin(str(address), any(address in network for network in self._networks))


def peer_of(scope: Scope) -> Peer:
    """Who is at the other end of a request's connection.

    uvicorn says None for a TCP peer too, one that was gone at once: it must not pass for a Unix socket's.
    """
    client: Peer = scope.get("client")
    server = scope.get("server")
    if client is None and server is not None and server[1] is not None:
        return _GONE
    return client


def checked_proxy(name: str) -> str:
    """An address or network in its usual form, or ``unix:``; ValueError for what can't be trusted."""
    return name if name == UNIX else str(_network(name))


def _x_forwarded_for(parts: list[bytes]) -> bytes:
    """Takes the last element; what it says is an address, or nonsense."""
    return parts.pop().strip()


def _forwarded(parts: list[bytes]) -> bytes:
    """Takes the last element. A comma can be inside quotes, so it is the shortest end that is one: an open
    quote that a client left can't swallow what a proxy appended to it."""
    element = b""
    while parts:
        part = parts.pop()
        if not element and not part.strip():
            continue
        element = part + b"," + element if element else part
        if len(element) > _LONGEST_ELEMENT:
            break
        pairs = _pairs(element)
        if pairs is not None:
            found = [value for name, value in pairs if name.lower() == b"for"]
            return found[0] if len(found) == 1 else b""
    return b""


def _pairs(element: bytes) -> list[tuple[bytes, bytes]] | None:
    pairs = []
    position = 0
    while position < len(element):
        match = _PAIR.match(element, position)
        if match is None:
            return None
        value = match[2]
        pairs.append((match[1], value[1:-1].replace(b"\\", b"") if value[:1] == b'"' else value))
        position = match.end()
    return pairs or None


def _network(name: str) -> _Network:
    try:
        network = ipaddress.ip_network(name.strip())
    except ValueError as error:
        raise ValueError(
            f"{name!r} is no trusted proxy: {error}; write an address, a network such as 10.0.0.0/8, "
            f"or {UNIX} for peers on a Unix socket"
        ) from None
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        raise ValueError(f"{name!r} holds IPv4 addresses; write it as an IPv4 network")
    return network
