"""Bearer tokens of an OpenID Connect issuer → who it is.

A token counts when one of the issuer's own keys signed it (JWS, RFC 7515, by an asymmetric algorithm that the
fleet file allows), it is for this audience, and now is its time (RFC 7519). Nothing else in it is believed:
no key, no address of keys and no algorithm of its own choosing.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
from joserfc import jws
from joserfc.errors import ExpiredTokenError, InvalidClaimError, JoseError, MissingClaimError
from joserfc.jws import JWSRegistry
from joserfc.jwt import JWTClaimsRegistry

from gateway.identity import errors
from gateway.identity.identity import MAX_USER, Identity, Priority
from gateway.identity.jwks import SigningKeys
from gateway.identity.kept_keys import KEPT_FILE, KeptKeys
from gateway.identity.settings import AuthSettings

MAX_TOKEN = 16 * 1024  # bytes
MAX_KNOWN = 10_000  # tokens that needn't be checked again

_KEY_TYPES = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
_ALL_MODELS = "*"
_FAR = 1e11  # Unix time; an integer of JSON may be too large for a float


class _Known(NamedTuple):
    identity: Identity
    expires: float
    keys: int  # version of the keys it was checked with


class _Registry(JWSRegistry):
    max_header_length = 4096  # some issuers put certificates there


class TokenVerifier:
    """Checks tokens against `keys`. One that was good is remembered by its hash until it expires or the keys
    change: checking a signature takes some 100 µs."""

    def __init__(self, settings: AuthSettings, keys: SigningKeys) -> None:
        self.keys = keys
        self._settings = settings
        self._registry = _Registry(algorithms=settings.algorithms, strict_check_header=False)
        self._claims = JWTClaimsRegistry(
            leeway=round(settings.leeway),
            iss={"essential": True, "value": settings.issuer or ""},
            aud={"essential": True, "value": settings.audience or ""},
            exp={"essential": True},
        )
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    def identify(self, token: bytes) -> Identity:
        """ApiError 401 for a token that doesn't count; KeysStale when it may do so once the keys have been
        refreshed."""
        if len(token) > MAX_TOKEN:
            raise errors.token_too_long(MAX_TOKEN)
        if not self.keys.usable:
            raise errors.KeysStale(errors.signing_keys_missing())
        name = hashlib.sha256(token).digest()
        known = self._known.get(name)
        if known is not None and known.keys == self.keys.version and time.time() < known.expires:
            return known.identity
        self._known.pop(name, None)
        claims = self._checked(token)
        identity = self._identity(claims)
        expires = min(claims["exp"], _FAR) + self._settings.leeway
        self._known[name] = _Known(identity, expires, self.keys.version)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return identity

    async def refresh(self) -> bool:
        """After KeysStale; whether the keys are now the issuer's own."""
        return await self.keys.refresh()

    async def run(self) -> None:
        """Keeps the keys fresh, until it is cancelled."""
        await self.keys.run()

    def _checked(self, token: bytes) -> dict[str, Any]:
        """The claims of a token that counts; what is wrong with them is told only after a good signature."""
        try:
            signed = jws.extract_compact(token, registry=self._registry)
            header = signed.headers()
            algorithm, kid = header.get("alg"), header.get("kid")
        except (JoseError, ValueError, TypeError, AttributeError, RecursionError):
            raise errors.token_malformed() from None
        if algorithm not in self._settings.algorithms:
            raise errors.token_algorithm(self._settings.algorithms)
        if "crit" in header or not isinstance(kid, (str, type(None))):  # there is no extension we know
            raise errors.token_malformed()
        if _is_for_something_else(header.get("typ")):
            raise errors.token_type()
        key = self.keys.find(kid, _KEY_TYPES[algorithm[:2]])
        if key is None:
            raise errors.KeysStale(errors.signing_key_unknown())
        try:
            good = jws.validate_compact(signed, key, registry=self._registry)
        except (JoseError, ValueError, TypeError):
            good = False
        if not good:
            raise errors.token_signature()
        return self._validated(signed.payload)

    def _validated(self, payload: bytes | None) -> dict[str, Any]:
        try:
            claims = msgspec.json.decode(payload or b"", type=dict[str, Any])
            self._claims.validate(claims)
        except ExpiredTokenError:
            raise errors.token_expired() from None
        except MissingClaimError as error:
            raise errors.token_claim_missing(error.claim) from None
        except InvalidClaimError as error:
            raise errors.token_claim_wrong(error.claim) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise errors.token_malformed() from None
        return claims

    def _identity(self, claims: dict[str, Any]) -> Identity:
        settings = self._settings
        user = _claim(claims, settings.user_claim)
        if not isinstance(user, str) or not 1 <= len(user) <= MAX_USER or not user.isprintable():
            raise errors.token_claim_missing(settings.user_claim)
        # Anybody can write anybody's address there. Some issuers write the mark as a text.
        if settings.user_claim == "email" and claims.get("email_verified") not in (None, True, "true"):
            raise errors.token_claim_wrong("email_verified")
        models: frozenset[str] | None = None
        if settings.models_claim is not None:
            models = _names(_claim(claims, settings.models_claim))
        priority: Priority = "normal"
        if settings.priority_claim is not None:
            said = _claim(claims, settings.priority_claim)
            priority = next((known for known in get_args(Priority) if known == said), "normal")
        return Identity(user, models=models, priority=priority)


def open_verifier(settings: AuthSettings, state_dir: Path) -> TokenVerifier:
    """For the issuer that the fleet file names."""
    issuer = settings.issuer or ""
    kept = KeptKeys(state_dir / KEPT_FILE, issuer, settings.jwks_url)
    return TokenVerifier(settings, SigningKeys(issuer, settings.jwks_url, settings.cache, kept))


def _is_for_something_else(kind: object) -> bool:
    """Whether a header's `typ` is that of tokens that issuers sign for other ends, as logout+jwt or dpop+jwt
    (RFC 8725, 3.11). Those of access are at+jwt (RFC 9068), plain JWT or without any."""
    name = kind.lower() if isinstance(kind, str) else ""
    return name.endswith("+jwt") and not name.endswith("at+jwt")


def _claim(claims: dict[str, Any], name: str) -> Any:
    """A claim by its name, which may hold dots; else a nested one (`realm_access.roles`)."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _names(value: Any) -> frozenset[str] | None:
    """Models of a list, or of a text with spaces between; None for all. No claim, no models."""
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list):
        return frozenset()
    found = frozenset(name for name in names if isinstance(name, str))
    return None if _ALL_MODELS in found else found
