"""A request's headers → who it is. Runs for every request; nothing here waits."""

from __future__ import annotations

import hmac
import logging
import time
from pathlib import Path
from typing import Protocol

from gateway.asgi import Headers
from gateway.identity import errors
from gateway.identity.identity import MAX_USER, Identity
from gateway.identity.keyring import KeyRing
from gateway.identity.proxies import Peer, TrustedProxies
from gateway.identity.secret import KEY, PREFIX, digest
from gateway.identity.settings import AuthSettings
from gateway.identity.store import KEYS_FILE

log = logging.getLogger(__name__)


class Verifier(Protocol):
    """Checks tokens, see gateway.identity.tokens."""

    def identify(self, token: bytes) -> Identity: ...
    async def refresh(self) -> bool: ...
    async def run(self) -> None: ...


class Authenticator:
    """With a key ring, callers are the users of their keys, or of their tokens where those are checked.
    Without, they are who they or their proxies say.

    `needs_body_user`: whether `authenticate` wants the `user` of the body; else it can be asked before the
    body is read, so that nobody without a key makes the gateway read 64 MiB.
    """

    def __init__(
        self, proxies: TrustedProxies, ring: KeyRing | None = None, tokens: Verifier | None = None
    ) -> None:
        self.proxies = proxies
        self._ring = ring
        self._tokens = tokens
        self._proxied = bool(proxies)
        self.needs_body_user = ring is None and not self._proxied

    @property
    def wants_keys(self) -> bool:
        """Whether callers need a key or a token."""
        return self._ring is not None

    def authenticate(self, headers: Headers, peer: Peer, body_user: str | None = None) -> Identity:
        """ApiError 401 `invalid_api_key` or `invalid_token` for a caller without a good key or token;
        KeysStale, only with tokens, when `authenticate_again` must be asked.

        Without keys: the header X-User-Id, else the body's `user`, else the client's address. Where proxies
        are trusted, X-User-Id is theirs to give, and the body's `user`, which no proxy checks, counts for
        nothing.
        """
        if self._ring is not None:
            key = presented_key(headers)
            if self._tokens is None or key.startswith(PREFIX):
                return _holder(self._ring, key)
            if not key:
                raise errors.credentials_missing()
            return self._tokens.identify(key)
        if not self._proxied:
            user = _claimed_user(headers) or (body_user or "")[:MAX_USER]
            return Identity(user or self.proxies.origin(headers, peer).address)
        origin = self.proxies.origin(headers, peer)
        user = _claimed_user(headers) if origin.trusted else ""
        return Identity(user or origin.address)

    async def authenticate_again(self, headers: Headers, peer: Peer) -> Identity:
        """After KeysStale: with the issuer's newest keys, for which it waits a moment. ApiError when the
        token doesn't count with them either: 401, or 503 when they couldn't be had."""
        assert self._tokens is not None
        fresh = await self._tokens.refresh()
        try:
            return self.authenticate(headers, peer)
        except errors.KeysStale as stale:
            raise (stale.answer if fresh else errors.signing_keys_missing()) from None

    async def identify(self, headers: Headers, peer: Peer) -> Identity:
        """Both at once, where speed doesn't matter."""
        try:
            return self.authenticate(headers, peer)
        except errors.KeysStale:
            return await self.authenticate_again(headers, peer)

    async def run(self) -> None:
        """Keeps what it checks tokens with fresh, until it is cancelled."""
        if self._tokens is not None:
            await self._tokens.run()

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()


def open_authenticator(settings: AuthSettings, state_dir: Path) -> Authenticator:
    """As the fleet file says, to be closed. StoreUnusable when keys are asked for and can't be read."""
    proxies = TrustedProxies(settings.trusted_proxies, settings.forwarded_header)
    if settings.mode == "none":
        return without_keys(proxies)
    if settings.mode == "keys":
        return with_keys(proxies, state_dir)
    return with_tokens(proxies, state_dir, settings)


def without_keys(proxies: TrustedProxies) -> Authenticator:
    """Mode `none`, which says so in the log."""
    who = "trusted proxies say" if proxies else "callers say themselves"
    log.warning("auth: none; whoever reaches this gateway may use it, and users are who %s", who)
    return Authenticator(proxies)


def with_keys(proxies: TrustedProxies, state_dir: Path) -> Authenticator:
    """Mode `keys`. StoreUnusable when the file of keys in `state_dir` can't be read."""
    path = state_dir / KEYS_FILE
    ring = KeyRing(path)
    log.info("auth: keys; %d known", len(ring))
    if not len(ring):
        log.warning("there is no API key in %s yet; `pagefleet keys create` makes one", path)
    return Authenticator(proxies, ring)


def with_tokens(proxies: TrustedProxies, state_dir: Path, settings: AuthSettings) -> Authenticator:
    """Mode `oidc`: the issuer's tokens, and keys beside them, for programs that have no account there."""
    from gateway.identity.tokens import open_verifier  # what it needs takes time to import

    ring = KeyRing(state_dir / KEYS_FILE)
    log.info("auth: tokens of %s, and keys; %d known", settings.issuer, len(ring))
    return Authenticator(proxies, ring, open_verifier(settings, state_dir))


def _holder(ring: KeyRing, key: bytes) -> Identity:
    if not key:
        raise errors.key_missing()
    match = KEY.fullmatch(key)
    entry = ring.find(match[1]) if match else None
    if entry is None or not hmac.compare_digest(entry.digest, digest(key)):
        raise errors.key_unknown()
    # Only who holds the key learns what became of it.
    if entry.revoked:
        raise errors.key_revoked(str(entry.identity.key_id))
    if entry.expires <= time.time():
        raise errors.key_expired(str(entry.identity.key_id), entry.expires)
    return entry.identity


def presented_key(headers: Headers) -> bytes:
    """The bearer token, else `x-api-key`, else nothing. ApiError 400 for two different ones of a kind: a
    proxy before this may have checked the other one."""
    bearer = key = b""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            bearer = _same(bearer, value[7:].strip())
        elif name == b"x-api-key":
            key = _same(key, value.strip())
    return bearer or key


def _same(known: bytes, other: bytes) -> bytes:
    if known and other != known:
        raise errors.credentials_ambiguous()
    return other


def _claimed_user(headers: Headers) -> str:
    """X-User-Id. ApiError 400 when it is there with different values: which one is the proxy's?"""
    claimed = b""
    for name, value in headers:
        if name == b"x-user-id":
            value = value.strip()
            if claimed and value != claimed:
                raise errors.user_ambiguous()
            claimed = value
    try:
        return claimed.decode()[:MAX_USER]
    except UnicodeDecodeError:
        return claimed.decode("latin-1")[:MAX_USER]
