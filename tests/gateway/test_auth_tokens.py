"""A gateway with tokens: from the first header to what the worker sees, while the issuer's keys change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.identity import jwks
from tests.gateway.oidc_issuer import AUDIENCE, Issuer, rsa
from tests.gateway.rig import error_of, http_post, one_worker


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    yield issuer
    issuer.stop()


def settings(issuer: Issuer, **changes: Any) -> dict[str, Any]:
    return {"auth": {"mode": "oidc", "issuer": issuer.url, "audience": AUDIENCE, **changes}}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_a_good_token(tmp_path: Path, issuer: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with one_worker(tmp_path, **settings(issuer)) as rig:
        token = issuer.token()
        answer = await rig.post(headers=bearer(token))
        assert answer.status_code == 200
        assert "authorization" not in rig.workers[0].requests[0].headers
        listed = await rig.client.get("/v1/models", headers=bearer(token))
        assert [card["id"] for card in listed.json()["data"]] == ["m", "nick", "idle"]
        expired = issuer.token(exp=1)
        refused = await rig.post(headers=bearer(expired))
        assert refused.status_code == 401
        assert error_of(refused)["code"] == "invalid_token"
        assert (
            'error="invalid_token", error_description="it has expired"' in refused.headers["www-authenticate"]
        )
        assert (await rig.client.get("/v1/models", headers=bearer(expired))).status_code == 401
        missing = await rig.post()
        assert missing.headers["www-authenticate"] == 'Bearer realm="pagefleet"'
        assert len(rig.workers[0].requests) == 1
        metrics = (await rig.client.get("/metrics")).text
    for secret in (token, expired):
        for part in secret.split(".")[1:]:
            assert part not in caplog.text + metrics


async def test_models_of_a_token(tmp_path: Path, issuer: Issuer) -> None:
    async with one_worker(tmp_path, **settings(issuer, models_claim="models")) as rig:
        nothing = bearer(issuer.token())
        everything = bearer(issuer.token(models="m idle"))
        assert (await rig.post(headers=nothing)).status_code == 404
        assert (await rig.client.get("/v1/models", headers=nothing)).json()["data"] == []
        assert (await rig.post(headers=everything)).status_code == 200


async def test_refused_before_the_body_is_read(tmp_path: Path, issuer: Issuer) -> None:
    async with one_worker(tmp_path, **settings(issuer)) as rig:
        head = http_post(b"", b"authorization: Bearer a.b.c\r\n").replace(
            b"content-length: 0", b"content-length: 9"
        )
        assert (await rig.raw(head)).startswith(b"HTTP/1.1 401 ")


async def test_the_first_request_with_a_new_key_is_served(
    tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "UNKNOWN_PAUSE", 0.0)
    async with one_worker(tmp_path, **settings(issuer)) as rig:
        assert (await rig.post(headers=bearer(issuer.token()))).status_code == 200
        issuer.keys = [rsa("next")]
        answers = await asyncio.gather(*(rig.post(headers=bearer(issuer.token())) for _ in range(10)))
        assert [answer.status_code for answer in answers] == [200] * 10


async def test_without_the_issuers_keys(tmp_path: Path, issuer: Issuer) -> None:
    issuer.stop()
    async with one_worker(tmp_path, **settings(issuer)) as rig:
        answer = await rig.post(headers=bearer(issuer.token()))
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "keys_unavailable"
        assert answer.headers["retry-after"] == "5"
        assert (await rig.client.get("/health")).status_code == 200
    issuer.start()


async def test_the_sdk_raises_what_it_should(tmp_path: Path, issuer: Issuer) -> None:
    async with one_worker(tmp_path, **settings(issuer)) as rig:
        url = f"http://127.0.0.1:{rig.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=issuer.token(aud="x"), max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="for another audience"):
                await client.models.list()
        async with openai.AsyncOpenAI(base_url=url, api_key=issuer.token(), max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["m", "nick", "idle"]


async def test_who_leaves_while_keys_are_fetched(tmp_path: Path, issuer: Issuer) -> None:
    issuer.pause = 1.5
    async with one_worker(tmp_path, **settings(issuer)) as rig:
        with pytest.raises(httpx.ReadTimeout):
            await rig.post(headers=bearer(issuer.token()), timeout=httpx.Timeout(60, read=0.1))
        assert (await rig.post(headers=bearer(issuer.token()))).status_code == 200
