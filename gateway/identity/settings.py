"""The fleet file's `gateway.auth`: who may call, and whose word on that is taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from contracts.units import Duration
from gateway.identity.proxies import ForwardedHeader, checked_proxy
from gateway.identity.urls import is_secure

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA"
]

_OIDC_ONLY = ("issuer", "audience", "jwks_url", "user_claim", "models_claim", "priority_claim")


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _asymmetric(value: object) -> object:
    if value not in get_args(Algorithm):
        raise ValueError(
            f"{value!r:.20} can't be allowed: whoever checks such a token could make one; known are "
            f"{', '.join(get_args(Algorithm))}"
        )
    return value


def _secure(value: str) -> str:
    if not is_secure(value):
        raise ValueError("an https:// address is needed; http:// only of this machine (localhost, 127.0.0.1)")
    return value


def _claim_name(value: str) -> str:
    if (
        not 1 <= len(value) <= 128
        or not value.isascii()
        or not value.isprintable()
        or set(value) & {'"', "\\"}
    ):
        raise ValueError("the name of a claim has 1 to 128 printable ASCII characters without quotes")
    return value


def _within(least: float, most: float, words: str) -> AfterValidator:
    def check(value: float) -> float:
        if not least <= value <= most:
            raise ValueError(f"a duration {words} is needed")
        return value

    return AfterValidator(check)


Claim = Annotated[str, AfterValidator(_claim_name)]
Url = Annotated[str, AfterValidator(_secure)]


class AuthSettings(BaseModel):
    """Who may call, and whose word on a client's user and address is taken.

    `trusted_proxies`: addresses, networks and ``unix:``; `forwarded_header`: the one header of theirs that
    is read for the address. From `issuer` on: tokens, with mode `oidc`; `jwks_url` null: where the issuer's
    discovery document says; `leeway` and `cache` in seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["none", "keys", "oidc"] = "none"
    trusted_proxies: tuple[Annotated[str, AfterValidator(checked_proxy)], ...] = ()
    forwarded_header: Annotated[ForwardedHeader, BeforeValidator(_lower)] = "x-forwarded-for"
    issuer: Url | None = None
    audience: Annotated[str, Field(min_length=1)] | None = None
    jwks_url: Url | None = None
    user_claim: Claim = "sub"
    models_claim: Claim | None = None
    priority_claim: Claim | None = None
    algorithms: Annotated[
        tuple[Annotated[Algorithm, BeforeValidator(_asymmetric)], ...], Field(min_length=1)
    ] = ("RS256", "ES256")
    leeway: Annotated[Duration, _within(0, 600, "from 0s to 10m")] = 30.0
    cache: Annotated[Duration, _within(10, 86400, "from 10s to 24h")] = 600.0

    @model_validator(mode="after")
    def _complete(self) -> AuthSettings:
        missing = [name for name in ("issuer", "audience") if getattr(self, name) is None]
        if self.mode == "oidc" and missing:
            raise ValueError(
                f"mode oidc needs {' and '.join(missing)}: whose tokens count, and for whom they must be made"
            )
        return self

    def without_effect(self) -> Iterator[str]:
        """Lines about keys that are set and mean nothing beside the others."""
        if self.mode != "none" and self.trusted_proxies:
            whose = "users are those of keys" if self.mode == "keys" else "users are those of tokens and keys"
            yield f"gateway.auth.trusted_proxies has no effect with mode {self.mode}: {whose}"
        elif self.forwarded_header != "x-forwarded-for" and not self.trusted_proxies:
            yield "gateway.auth.forwarded_header has no effect without trusted_proxies"
        if self.mode != "oidc":
            for name in _OIDC_ONLY:
                if getattr(self, name) != type(self).model_fields[name].default:
                    yield f"gateway.auth.{name} has no effect without mode oidc"
