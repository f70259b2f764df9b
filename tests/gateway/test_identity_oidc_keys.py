"""The issuer's keys: changed, kept while it is down, and what of its answers is taken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ApiError
from gateway.identity import jwks
from gateway.identity.authenticator import Authenticator
from gateway.identity.identity import Identity
from gateway.identity.kept_keys import KEPT_FILE
from tests.gateway.oidc_checks import ask, checking, refusal
from tests.gateway.oidc_issuer import DISCOVERY, KEYS, Issuer, ec, rsa


async def test_rotated_keys(issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwks, "UNKNOWN_PAUSE", 0.5)
    async with checking(issuer, tmp_path) as auth:
        old = issuer.token()
        await ask(auth, old)
        old_key, new_key = issuer.keys[0], rsa("rsa-2")
        issuer.keys = [old_key, new_key]
        new = issuer.token(new_key)
        asked = len(issuer.asked)
        answers = await asyncio.gather(*(ask(auth, new) for _ in range(20)))
        assert {answer.user for answer in answers} == {"alice"}
        assert len(issuer.asked) == asked + 2  # the document and the keys, once for all
        assert (await ask(auth, old)).user == "alice"
        issuer.keys = [new_key]
        await refusal(auth, issuer.token(rsa("rsa-3")))  # makes it fetch
        assert "no key of the issuer" in (await refusal(auth, old)).message  # also a remembered one
        assert (await ask(auth, new)).user == "alice"


async def test_made_up_keys_make_no_storm(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "UNKNOWN_PAUSE", 0.5)
    async with checking(issuer, tmp_path, jwks_url=issuer.url + KEYS) as auth:
        await ask(auth, issuer.token())
        stranger = rsa("x")
        made_up = [issuer.token(stranger, header={"kid": f"made-up-{number}"}) for number in range(50)]
        await asyncio.gather(*(refusal(auth, token) for token in made_up))
    assert len(issuer.asked) == 2


async def test_a_key_that_came_just_after_a_fetch_is_waited_for(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are good: a 401 would send their users to the login. But only so many wait."""
    monkeypatch.setattr(jwks, "UNKNOWN_PAUSE", 1.0)
    monkeypatch.setattr(jwks, "MAX_WAITING", 10)
    async with checking(issuer, tmp_path, jwks_url=issuer.url + KEYS) as auth:
        await ask(auth, issuer.token())
        new = rsa("rsa-new")
        issuer.keys = [*issuer.keys, new]
        answers = await asyncio.gather(
            *(ask(auth, issuer.token(new)) for _ in range(30)), return_exceptions=True
        )
        served = [answer for answer in answers if isinstance(answer, Identity)]
        errors = [answer for answer in answers if isinstance(answer, ApiError)]
        assert len(served) == 10
        assert {(error.status, error.code) for error in errors} == {(503, "keys_unavailable")}
        assert (await ask(auth, issuer.token(new))).user == "alice"
    assert len(issuer.asked) == 2


async def test_the_background_fetch(issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwks, "UNKNOWN_PAUSE", 1000)
    async with checking(issuer, tmp_path) as auth:
        await ask(auth, issuer.token())
        auth._tokens.keys._cache = 0.1  # type: ignore[union-attr]
    keys = jwks.SigningKeys(issuer.url, None, 0.1)
    running = asyncio.create_task(keys.run())
    await eventually(lambda: keys.version == 1)
    issuer.keys = [rsa("rsa-9")]
    await eventually(lambda: keys.find("rsa-9", "RSA") is not None)
    assert keys.version == 2
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_old_keys_outlive_an_issuer_that_is_down(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jwks, "UNKNOWN_PAUSE", 0.0)
    async with checking(issuer, tmp_path) as auth:
        await ask(auth, issuer.token())
        issuer.stop()
        try:
            for _ in range(3):  # fetches, in vain; and nobody can say that the issuer has no such key
                with pytest.raises(ApiError) as caught:
                    await ask(auth, issuer.token(rsa("rsa-2")))
                assert (caught.value.status, caught.value.code) == (503, "keys_unavailable")
            assert (await ask(auth, issuer.token(sub="new"))).user == "new"
            said = [r for r in caplog.records if "can't be fetched" in r.getMessage()]
            assert [r.levelno for r in said] == [logging.ERROR]
            monkeypatch.setattr(jwks, "UNREACHABLE_LIMIT", -1000)
            with pytest.raises(ApiError) as caught:
                await ask(auth, issuer.token())
            assert (caught.value.status, caught.value.code) == (503, "keys_unavailable")
        finally:
            issuer.start()
        monkeypatch.setattr(jwks, "UNREACHABLE_LIMIT", 1000)
        assert (await ask(auth, issuer.token())).user == "alice"


async def test_a_gateway_that_starts_while_the_issuer_is_down_knows_its_keys(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with checking(issuer, tmp_path) as auth:
        await ask(auth, issuer.token())
    kept = tmp_path / KEPT_FILE
    assert kept.stat().st_mode & 0o777 == 0o600
    issuer.stop()
    try:
        async with checking(issuer, tmp_path) as auth:
            assert (await ask(auth, issuer.token())).user == "alice"
            assert (await ask(auth, issuer.token(issuer.keys[1], "ES256"))).user == "alice"
            await refusal(auth, issuer.token(aud="other"))
        async with checking(issuer, tmp_path, jwks_url=issuer.url + "/other") as auth:
            assert (await unavailable(auth, issuer.token())).code == "keys_unavailable"
        monkeypatch.setattr(jwks, "UNREACHABLE_LIMIT", -1000)
        async with checking(issuer, tmp_path) as auth:
            await unavailable(auth, issuer.token())
        monkeypatch.setattr(jwks, "UNREACHABLE_LIMIT", 1000)
        good = kept.read_bytes()
        others = good.replace(issuer.url.encode(), b"https://other.example")
        assert others != good
        for nonsense in (b"\xff", b"[" * 100_000, good[:-9], others):
            kept.write_bytes(nonsense)
            async with checking(issuer, tmp_path) as auth:
                await unavailable(auth, issuer.token())
    finally:
        issuer.start()
    async with checking(issuer, tmp_path) as auth:
        assert (await ask(auth, issuer.token())).user == "alice"
    shutil.rmtree(tmp_path)  # nowhere to keep them
    async with checking(issuer, tmp_path) as auth:
        assert (await ask(auth, issuer.token())).user == "alice"


async def unavailable(auth: Authenticator, token: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await ask(auth, token)
    assert caught.value.status == 503
    return caught.value


async def test_an_issuer_that_is_down_at_the_start(issuer: Issuer, tmp_path: Path) -> None:
    issuer.stop()
    try:
        async with checking(issuer, tmp_path) as auth:
            with pytest.raises(ApiError) as caught:
                await ask(auth, issuer.token())
            assert caught.value.status == 503
            assert caught.value.headers["retry-after"] == "5"
            issuer.start()
            async with asyncio.timeout(20):  # tried again after a second
                while True:
                    with contextlib.suppress(ApiError):
                        await ask(auth, issuer.token())
                        break
                    await asyncio.sleep(0.1)
    finally:
        with contextlib.suppress(OSError):
            issuer.start()


async def test_an_issuer_that_hangs_holds_nobody_for_long(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "FETCH_SECONDS", 0.2)
    issuer.pause = 1.0
    async with checking(issuer, tmp_path) as auth:
        began = time.monotonic()
        with pytest.raises(ApiError) as caught:
            await ask(auth, issuer.token())
        assert caught.value.status == 503
        assert time.monotonic() - began < 15


UNUSABLE = {
    "another issuer's document": (
        DISCOVERY,
        200,
        b'{"issuer": "https://other", "jwks_uri": "https://other/k"}',
    ),
    "keys over plain http": (DISCOVERY, 200, b'{"issuer": "URL", "jwks_uri": "http://example.com/keys"}'),
    "an error": (DISCOVERY, 500, b"{}"),
    "a redirect": (KEYS, 302, b""),
    "no JSON": (KEYS, 200, b"<html>"),
    "a list": (KEYS, 200, b"[]"),
    "no keys": (KEYS, 200, b'{"keys": []}'),
    "keys of another kind": (KEYS, 200, b'{"keys": {"a": 1}}'),
    "symmetric keys only": (KEYS, 200, b'{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "rsa-1"}]}'),
    "nonsense": (
        KEYS,
        200,
        b'{"keys": [1, null, {"kty": "RSA"}, {"kty": "EC", "crv": 5}, {"kty": ["RSA"]}]}',
    ),
    "deep nesting": (KEYS, 200, b'{"keys": ' + b"[" * 200_000),
    "too much": (KEYS, 200, b'{"keys": [' + b" " * 600_000 + b"]}"),
    "too many": (KEYS, 200, b'{"keys": [' + b",".join([b"{}"] * 65) + b"]}"),
}


@pytest.mark.parametrize("name", UNUSABLE)
async def test_an_issuer_that_says_nonsense(issuer: Issuer, tmp_path: Path, name: str) -> None:
    path, status, body = UNUSABLE[name]
    issuer.answers[path] = (status, body.replace(b"URL", issuer.url.encode()))
    async with checking(issuer, tmp_path) as auth:
        with pytest.raises(ApiError) as caught:
            await ask(auth, issuer.token())
        assert caught.value.status == 503


async def test_weak_private_and_other_keys_are_left_out(issuer: Issuer, tmp_path: Path) -> None:
    good, weak, private = issuer.keys[0], rsa("weak", 1024), rsa("private")
    curve = {**ec("ec-2").as_dict(private=False), "crv": "brainpoolP256r1"}  # in use, and not known here
    listed = [
        curve,
        {**curve, "crv": "no such", "kid": "ec-3"},
        {**rsa("enc").as_dict(private=False), "use": "enc"},
        weak.as_dict(private=False),
        private.as_dict(private=True),
        {**good.as_dict(private=False), "key_ops": ["verify"], "alg": "RS256"},
    ]
    issuer.answers[KEYS] = (200, json.dumps({"keys": listed}).encode())
    async with checking(issuer, tmp_path, algorithms=["RS256", "RS512"]) as auth:
        assert (await ask(auth, issuer.token())).user == "alice"
        for key in (weak, private):
            assert "no key of the issuer" in (await refusal(auth, issuer.token(key))).message
        assert "signature is wrong" in (await refusal(auth, issuer.token(alg="RS512"))).message
