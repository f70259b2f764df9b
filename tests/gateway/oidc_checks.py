"""Tokens asked of a real authenticator, and what every refusal must look like."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ApiError
from gateway.identity.authenticator import Authenticator, open_authenticator
from gateway.identity.identity import Identity
from gateway.identity.settings import AuthSettings
from tests.gateway.oidc_issuer import AUDIENCE, Issuer


def settings(issuer: Issuer, **changes: Any) -> AuthSettings:
    usual = {"mode": "oidc", "issuer": issuer.url, "audience": AUDIENCE, "leeway": "5s"}
    return AuthSettings.model_validate({**usual, **changes})


@contextlib.asynccontextmanager
async def checking(issuer: Issuer, folder: Path, **changes: Any) -> AsyncIterator[Authenticator]:
    auth = open_authenticator(settings(issuer, **changes), folder)
    running = asyncio.create_task(auth.run())
    try:
        yield auth
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        auth.close()


async def ask(auth: Authenticator, token: str | bytes) -> Identity:
    token = token.encode() if isinstance(token, str) else token
    return await auth.identify([(b"authorization", b"Bearer " + token)], None)


async def refusal(auth: Authenticator, token: str | bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await ask(auth, token)
    error = caught.value
    assert error.status == 401
    assert error.code == "invalid_token"
    challenge = error.headers["www-authenticate"]
    assert challenge.startswith('Bearer realm="pagefleet", error="invalid_token", error_description="')
    assert challenge.count('"') == 6
    text = token if isinstance(token, str) else token.decode("latin-1")
    for part in text.split("."):
        assert len(part) < 6 or part not in error.message + challenge
    return error
