"""Addresses that keys may be fetched from."""

from __future__ import annotations

from urllib.parse import urlsplit

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def is_secure(url: str) -> bool:
    """Whether nobody on the way can put in keys of his own: https, or http on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and host in _THIS_MACHINE))
