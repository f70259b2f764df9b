"""The public keys that an OpenID Connect issuer signs its tokens with, kept fresh in the background.

They are fetched from `jwks_url`, or from where the issuer's discovery document says (OpenID Connect Discovery
1.0, RFC 8414); never from anything that a token says. While the issuer can't be reached, the keys known so
far go on, also in a gateway that starts then.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
from joserfc.jwk import ECKey, JWKRegistry, OctKey, OKPKey, RSAKey

from gateway.identity.kept_keys import KeptKeys
from gateway.identity.urls import is_secure

FETCH_SECONDS = 5.0
UNKNOWN_PAUSE = 5.0  # seconds between two fetches for the sake of keys that nobody knows
MAX_WAITING = 256  # requests that wait for one; made-up keys are free, and a request that waits is not
FIRST_RETRY, LAST_RETRY = 1.0, 60.0
UNREACHABLE_LIMIT = 24 * 3600.0  # seconds that known keys outlive an issuer that can't be reached
MAX_DOCUMENT = 512 * 1024  # bytes
MAX_KEYS = 64
MIN_RSA_BITS = 2048

PublicKey = RSAKey | ECKey | OKPKey

log = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # else there is a line for every fetch


class IssuerUnusable(Exception):
    """The issuer can't be reached, or what it says can't be used."""


class SigningKeys:
    """The keys of `issuer`, for one event loop; `run` keeps them fresh, every `cache` seconds. `kept`: where
    they are found again by the next process."""

    def __init__(self, issuer: str, jwks_url: str | None, cache: float, kept: KeptKeys | None = None) -> None:
        self.version = 0  # grows when the keys change
        self._issuer = issuer
        self._jwks_url = jwks_url
        self._cache = cache
        self._keys: tuple[PublicKey, ...] = ()
        self._document: Any = None
        self._fetched_at = 0.0
        self._asked_at = float("-inf")
        self._fetching: asyncio.Task[None] | None = None
        self._waiting = 0
        self._complaint = ""
        self._client = httpx.AsyncClient(timeout=FETCH_SECONDS)  # here: it takes 20 ms to load the CAs
        self._kept = kept

    def find(self, kid: str | None, key_type: str) -> PublicKey | None:
        """The key of that id; without an id, the only one of that type. None when there is none, or which
        one isn't clear."""
        fitting = [key for key in self._keys if key.key_type == key_type and kid in (None, key.get("kid"))]
        return fitting[0] if len(fitting) == 1 else None

    @property
    def usable(self) -> bool:
        """Whether there are keys, and they aren't too old."""
        age = time.monotonic() - self._fetched_at
        return bool(self._keys) and age <= self._cache + UNREACHABLE_LIMIT

    async def refresh(self) -> bool:
        """For a token whose key isn't known: fetches, once for all who ask at the same time. False when the
        issuer could not be asked, so that nobody knows whether there is such a key.

        Made-up ids make no storm: soon after the last fetch who asks waits until the next one may be, as the
        issuer may have a new key since; and when that one failed, or too many wait, isn't served.
        """
        fetching = self._fetching
        if fetching is None:
            pause = self._asked_at + UNKNOWN_PAUSE - time.monotonic()
            if pause > 0 and self._complaint:
                return False
            fetching = self._start_fetch(pause)
        if self._waiting >= MAX_WAITING:
            return False
        self._waiting += 1
        try:
            await asyncio.wait([fetching], timeout=UNKNOWN_PAUSE + FETCH_SECONDS)
        finally:
            self._waiting -= 1
        if not fetching.done():
            self._recall()
        return fetching.done() and not self._complaint

    async def run(self) -> None:
        """Fetches for ever; ends by being cancelled."""
        retry = FIRST_RETRY
        try:
            while True:
                await asyncio.wait([self._fetching or self._start_fetch()])
                if self._complaint:
                    pause, retry = min(retry, self._cache), min(2 * retry, LAST_RETRY)
                else:
                    pause, retry = self._cache, FIRST_RETRY
                await asyncio.sleep(pause * random.uniform(0.9, 1.1))
        finally:
            if self._fetching is not None:
                self._fetching.cancel()
            await self._client.aclose()

    def _start_fetch(self, pause: float = 0.0) -> asyncio.Task[None]:
        """One that asks the issuer after `pause` seconds."""
        self._fetching = asyncio.create_task(self._fetch(pause), name="signing keys")
        self._fetching.add_done_callback(self._fetched)
        return self._fetching

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._fetching = None
        if not task.cancelled() and task.exception() is not None:
            self._complaint = repr(task.exception())  # so that it is tried again soon
            log.error("signing keys: %s", self._complaint)

    async def _fetch(self, pause: float) -> None:
        if pause > 0:
            await asyncio.sleep(pause)
        self._asked_at = time.monotonic()
        try:
            async with asyncio.timeout(2 * FETCH_SECONDS):
                document = await self._get(self._jwks_url or await self._discover())
            keys = tuple(_usable_keys(_listed(document)))
            if not keys:
                raise IssuerUnusable("it has no key that signatures can be checked with")
        except (IssuerUnusable, httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            if reason != self._complaint:
                log.error("the keys of %s can't be fetched: %s", self._issuer, reason)
            self._complaint = reason
            self._recall()
            return
        if self._complaint or document != self._document:
            log.info("%d signing keys of %s", len(keys), self._issuer)
        self._complaint = ""
        self._fetched_at = time.monotonic()
        if document != self._document:
            self._document, self._keys = document, keys
            self.version += 1
        if self._kept is not None:
            self._kept.write([dict(key.as_dict(private=False)) for key in keys])

    def _recall(self) -> None:
        """The issuer can't be asked: without any keys, those of the process before this count."""
        if self._keys or self._kept is None:
            return
        listed, age = self._kept.read()
        self._keys = tuple(_usable_keys(listed))
        if self._keys:
            self._fetched_at = time.monotonic() - age
            log.warning("%d signing keys of %s as they were %d s ago", len(self._keys), self._issuer, age)

    async def _discover(self) -> str:
        """The address of the keys by the issuer's own document, which must name the issuer itself."""
        document = await self._get(self._issuer.rstrip("/") + "/.well-known/openid-configuration")
        address = document.get("jwks_uri")
        if document.get("issuer") != self._issuer:
            raise IssuerUnusable("its discovery document is another issuer's; check gateway.auth.issuer")
        if not isinstance(address, str) or not is_secure(address):
            raise IssuerUnusable("its discovery document has no https jwks_uri")
        return address

    async def _get(self, url: str) -> dict[str, Any]:
        """A JSON object. Redirects aren't followed: they could lead anywhere."""
        body = bytearray()
        async with self._client.stream("GET", url, headers={"accept": "application/json"}) as response:
            if response.status_code != 200:
                raise IssuerUnusable(f"{url} answers {response.status_code}")
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MAX_DOCUMENT:
                    raise IssuerUnusable(f"{url} answers with more than {MAX_DOCUMENT} bytes")
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise IssuerUnusable(f"{url} answers with something else than a JSON object") from None


def _listed(document: dict[str, Any]) -> list[Any]:
    """The entries of a JWK set (RFC 7517)."""
    listed = document.get("keys")
    if not isinstance(listed, list) or len(listed) > MAX_KEYS:
        raise IssuerUnusable(f"its key set has no list of at most {MAX_KEYS} keys")
    return listed


def _usable_keys(listed: list[Any]) -> Iterator[PublicKey]:
    """The keys of a JWK set that signatures are checked with; others are left out."""
    for entry in listed:
        try:
            key = _imported(entry)
        except Exception as error:  # the library has many ways to say that it knows no such key
            log.warning("a signing key is left out: %s", type(error).__name__)
            continue
        if key is not None:
            yield key


def _imported(entry: Any) -> PublicKey | None:
    """None for a key that is for something else. Symmetric ones that are published are nobody's secret."""
    if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC", "OKP"):
        return None
    if entry.get("use", "sig") != "sig" or "verify" not in entry.get("key_ops", ("verify",)):
        return None
    key = JWKRegistry.import_key(entry)
    if isinstance(key, RSAKey) and key.public_key.key_size < MIN_RSA_BITS:
        raise ValueError(f"an RSA key must have {MIN_RSA_BITS} bits")
    return None if key.is_private or isinstance(key, OctKey) else key
