"""An issuer's keys as it last gave them, in the state directory: a gateway that starts while the issuer is
away has them from there. They are public; who may write there could make API keys as well."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

KEPT_FILE = "issuer-keys.json"  # in the state directory

log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True):
    """`at`: Unix time at which the issuer gave them. From elsewhere than `issuer` and `jwks_url` they are
    nobody's."""

    issuer: str
    jwks_url: str | None
    at: float
    keys: list[dict[str, Any]]


class KeptKeys:
    """The file at `path`, for the keys of `issuer` from `jwks_url`. Gateways share it; the last one wins."""

    def __init__(self, path: Path, issuer: str, jwks_url: str | None) -> None:
        self._path = path
        self._whose = (issuer, jwks_url)
        self._complained = False

    def read(self) -> tuple[list[dict[str, Any]], float]:
        """The keys, as a JWK set lists them, and how many seconds they are old; none from a file that holds
        another issuer's, or nonsense."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return [], 0.0
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("the issuer's keys in %s can't be used: %s", self._path, error)
            return [], 0.0
        if (kept.issuer, kept.jwks_url) != self._whose:
            return [], 0.0
        return kept.keys, max(0.0, time.time() - kept.at)

    def write(self, keys: list[dict[str, Any]]) -> None:
        """They are the issuer's now. What can't be written is said once."""
        data = msgspec.json.encode(_Kept(*self._whose, time.time(), keys))
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=f".{KEPT_FILE}-", dir=self._path.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                os.replace(temporary, self._path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            self._complained = False
        except OSError as error:
            if not self._complained:
                log.warning("the issuer's keys can't be kept in %s: %s", self._path, error)
            self._complained = True
