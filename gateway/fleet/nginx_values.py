"""Values of nginx's configuration, each checked or quoted so that it can't end its directive.

Source of the quoting: `ngx_conf_read_token` in nginx. A backslash escapes inside quotes; nothing escapes a
dollar sign.
"""

from __future__ import annotations

import ipaddress
import re

from gateway.fleet.errors import InvalidFleet

_LISTEN = re.compile(r"(?:(?P<host>[A-Za-z0-9.*-]+|\[[0-9A-Fa-f:.]+\]):)?(?P<port>\d{1,5})")
_HTTP = re.compile(r"(?:http://)?(?P<address>(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5})/?")
_BARE = re.compile(r"[A-Za-z0-9._:/+=@*,\[\]-]+")
_LONGEST_SOCKET = 107  # bytes of a Unix socket's path


def upstream_address(text: str) -> str:
    """``host:port`` or ``unix:/path``, as nginx's `server` takes it."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or len(path.encode()) > _LONGEST_SOCKET:
            raise InvalidFleet(f"{text!r}: a Unix socket is unix:/PATH, at most {_LONGEST_SOCKET} bytes long")
        return text
    match = _HTTP.fullmatch(text)
    if match is None or not 0 < int(match["address"].rpartition(":")[2]) < 65536:
        raise InvalidFleet(f"{text!r} is no address of a server; write HOST:PORT or unix:/PATH")
    return match["address"]


def word(value: object) -> str:
    """One argument of a directive, in quotes where it needs them. InvalidFleet for what can't be quoted."""
    text = str(value)
    if _BARE.fullmatch(text):
        return text
    if "$" in text or not text.isprintable():
        raise InvalidFleet(f"{text!r}: dollar signs, line breaks and the like can't be in nginx's values")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def pattern_word(pattern: str) -> str:
    """A pattern made of escaped slugs, which hold no dollar sign."""
    return '"' + pattern.replace("\\", "\\\\").replace('"', '\\"') + '"'


def listen_address(text: str) -> str:
    """``443``, ``127.0.0.1:8080``, ``[::]:443`` or ``unix:/path``, as `listen` takes it."""
    if text.startswith("unix:"):
        return upstream_address(text)
    match = _LISTEN.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise InvalidFleet(f"--listen {text!r}: write PORT, HOST:PORT, [IPV6]:PORT or unix:/PATH")
    return text


def network(name: str) -> str:
    """An address or network as `allow` takes it."""
    try:
        return str(ipaddress.ip_network(name.strip(), strict=True))
    except ValueError as error:
        raise InvalidFleet(
            f"--monitoring: {error}; write an address or a network such as 10.0.0.0/8"
        ) from None


def duration(seconds: float) -> str:
    """Whole seconds or milliseconds: nginx knows no fractions."""
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{max(1, round(seconds * 1000))}ms"
