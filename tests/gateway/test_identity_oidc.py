"""Tokens of a real little issuer: which count, which don't, and what is said of them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from joserfc import jws

from contracts.errors import ApiError
from gateway.config import ConfigError, load_fleet
from gateway.identity import jwks, tokens
from gateway.identity.authenticator import Authenticator, open_authenticator
from gateway.identity.identity import Identity
from gateway.identity.kept_keys import KEPT_FILE
from gateway.identity.settings import AuthSettings
from gateway.identity.store import KEYS_FILE, KeyStore
from tests.gateway.oidc_issuer import AUDIENCE, DISCOVERY, KEYS, Issuer, ec, okp, rsa


@pytest.fixture(scope="module")
def shared_issuer() -> Iterator[Issuer]:
    """Making RSA keys takes time; most tests change nothing of it."""
    issuer = Issuer()
    issuer.keys = [rsa("rsa-1"), ec("ec-1"), okp("okp-1")]
    yield issuer
    issuer.stop()


@pytest.fixture
def issuer(shared_issuer: Issuer) -> Iterator[Issuer]:
    keys = list(shared_issuer.keys)
    shared_issuer.asked.clear()
    yield shared_issuer
    shared_issuer.keys, shared_issuer.answers, shared_issuer.pause = keys, {}, 0.0


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


# --- tokens that count


async def test_good_tokens(issuer: Issuer, tmp_path: Path) -> None:
    algorithms = ["RS256", "PS512", "ES256", "Ed25519"]
    async with checking(issuer, tmp_path, algorithms=algorithms) as auth:
        assert await ask(auth, issuer.token()) == Identity("alice")
        assert await ask(auth, issuer.token(alg="PS512", sub="bob")) == Identity("bob")
        assert await ask(auth, issuer.token(issuer.keys[1], "ES256")) == Identity("alice")
        assert await ask(auth, issuer.token(issuer.keys[2], "Ed25519", aud=["other", AUDIENCE])) == Identity(
            "alice"
        )
        assert (await auth.identify([(b"x-api-key", issuer.token().encode())], None)).user == "alice"
    assert set(issuer.asked) == {DISCOVERY, KEYS}


async def test_without_a_kid_the_only_key_of_its_type(issuer: Issuer, tmp_path: Path) -> None:
    async with checking(issuer, tmp_path) as auth:
        assert await ask(auth, issuer.token(header={"kid": None})) == Identity("alice")
    issuer.keys.append(rsa("rsa-2"))
    async with checking(issuer, tmp_path) as auth:
        error = await refusal(auth, issuer.token(header={"kid": None}))
    assert "no key of the issuer has signed it" in error.message


async def test_the_address_of_the_keys_can_be_set(issuer: Issuer, tmp_path: Path) -> None:
    async with checking(issuer, tmp_path, jwks_url=issuer.url + KEYS) as auth:
        assert await ask(auth, issuer.token()) == Identity("alice")
    assert issuer.asked == [KEYS]


async def test_claims_of_the_users_choice(issuer: Issuer, tmp_path: Path) -> None:
    chosen = {
        "user_claim": "email",
        "models_claim": "realm_access.models",
        "priority_claim": "https://x.y/class",
    }
    async with checking(issuer, tmp_path, **chosen) as auth:

        async def who(**claims: Any) -> Identity:
            return await ask(auth, issuer.token(email="a@b.c", **claims))

        assert await who() == Identity("a@b.c", models=frozenset())
        assert await who(realm_access={"models": ["m", 3]}) == Identity("a@b.c", models=frozenset({"m"}))
        assert (await who(realm_access={"models": "m n"})).models == {"m", "n"}
        assert (await who(realm_access={"models": ["*"]})).models is None
        for nonsense in (7, {"models": {"m": 1}}, {"models": None}, "text", []):
            assert (await who(realm_access=nonsense)).models == frozenset()
        assert (await who(**{"https://x.y/class": "high"})).priority == "high"
        assert (await who(**{"https://x.y/class": "urgent"})).priority == "normal"
        for verified in (True, "true"):
            assert (await who(email_verified=verified)).user == "a@b.c"
        for unverified in (False, "false", "no", 0, ""):
            error = await refusal(auth, issuer.token(email="a@b.c", email_verified=unverified))
            assert "e-mail address is not verified" in error.message


async def test_keys_beside_tokens(issuer: Issuer, tmp_path: Path) -> None:
    with KeyStore(tmp_path / KEYS_FILE, create=True, write=True) as store:
        record, key = store.create("robot")
    async with checking(issuer, tmp_path) as auth:
        assert await ask(auth, key) == Identity("robot", key_id=record.id)
        assert (await ask(auth, issuer.token())).key_id is None
        for wrong in (key[:-1] + "-", "pfk_x"):
            with pytest.raises(ApiError) as caught:
                await ask(auth, wrong)
            assert caught.value.code == "invalid_api_key"
        with pytest.raises(ApiError) as caught:
            await auth.identify([], None)
        assert caught.value.headers == {"www-authenticate": 'Bearer realm="pagefleet"'}
        assert "A token or an API key is needed" in caught.value.message


# --- tokens that don't count


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"exp": -60}, "it has expired"),
        ({"exp": None}, "no usable claim 'exp'"),
        ({"exp": "never"}, "its claim 'exp' is wrong"),
        ({"exp": True}, "its claim 'exp' is wrong"),
        ({"nbf": 60}, "it is not valid yet"),
        ({"iat": 60}, "it was issued in the future"),
        ({"aud": "another"}, "it is for another audience"),
        ({"aud": ["another", "third"]}, "it is for another audience"),
        ({"aud": []}, "it is for another audience"),
        ({"aud": None}, "no usable claim 'aud'"),
        ({"aud": {"pagefleet": 1}}, "it is for another audience"),
        ({"iss": "https://evil.example"}, "it is another issuer's"),
        ({"iss": None}, "no usable claim 'iss'"),
        ({"sub": None}, "no usable claim 'sub'"),
        ({"sub": ""}, "no usable claim 'sub'"),
        ({"sub": 7}, "its claim 'sub' is wrong"),
        ({"sub": "x" * 513}, "no usable claim 'sub'"),
        ({"sub": "a\nb"}, "no usable claim 'sub'"),
        ({"sub": "\ud800"}, ""),
    ],
)
async def test_claims_that_do_not_count(issuer: Issuer, tmp_path: Path, claims: Any, reason: str) -> None:
    for name in ("exp", "nbf", "iat"):
        if isinstance(claims.get(name), int) and claims[name] is not True:
            claims = {name: time.time() + claims[name]}
    if claims.get("sub") == "\ud800":
        token = sign(issuer, json.dumps(issuer.claims(**claims)).encode())
    else:
        token = issuer.token(**claims)
    async with checking(issuer, tmp_path) as auth:
        assert reason in (await refusal(auth, token)).message


async def test_leeway_for_clocks_that_differ(issuer: Issuer, tmp_path: Path) -> None:
    now = int(time.time())
    slow, fast = {"exp": now - 60}, {"exp": now + 900, "nbf": now + 60, "iat": now + 60}
    async with checking(issuer, tmp_path, leeway="2m") as auth:
        for claims in (slow, fast):
            assert (await ask(auth, issuer.token(**claims))).user == "alice"
    async with checking(issuer, tmp_path, leeway=0) as auth:
        for claims in (slow, fast):
            await refusal(auth, issuer.token(**claims))


def sign(issuer: Issuer, payload: bytes, header: dict[str, Any] | None = None) -> str:
    """Any payload under a good signature."""
    head = {"alg": "RS256", "kid": "rsa-1", **(header or {})}
    return jws.serialize_compact(head, payload, issuer.keys[0], algorithms=["RS256"])


def part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


async def test_forgeries(issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwks, "UNKNOWN_PAUSE", 0.2)
    good = issuer.token()
    head, payload, signature = good.split(".")
    confused = f"{part({'alg': 'HS256', 'kid': 'rsa-1'})}.{payload}"
    public = hmac.digest(issuer.keys[0].as_pem(private=False), confused.encode(), "sha256")
    confused += "." + base64.urlsafe_b64encode(public).rstrip(b"=").decode()
    stranger = rsa("rsa-1")
    embedded = {"jwk": stranger.as_dict(private=False), "jku": "http://127.0.0.1:1/", "kid": "rsa-1"}
    forged = {
        "alg none": f"{part({'alg': 'none'})}.{payload}.",
        "alg None": f"{part({'alg': 'None', 'kid': 'rsa-1'})}.{payload}.{signature}",
        "no alg": f"{part({'kid': 'rsa-1'})}.{payload}.{signature}",
        "alg of another kind": f"{part({'alg': ['RS256'], 'kid': 'rsa-1'})}.{payload}.{signature}",
        "HS256 with the public key": confused,
        "another type of key": f"{part({'alg': 'ES256', 'kid': 'rsa-1'})}.{payload}.{signature}",
        "algorithm that isn't allowed here": issuer.token(alg="RS512"),
        "another payload": f"{head}.{part(issuer.claims(sub='admin'))}.{signature}",
        "no signature": f"{head}.{payload}.",
        "signature cut": good[:-8],
        "signature of a stranger": issuer.token(stranger),
        "key brought along": issuer.token(stranger, header=embedded),
        "critical extension": sign(
            issuer, json.dumps(issuer.claims()).encode(), {"crit": ["b64"], "b64": True}
        ),
        "for something else": issuer.token(header={"typ": "logout+jwt"}),
        "the same in full": issuer.token(header={"typ": "application/DPoP+JWT"}),
        "encrypted": f"{part({'alg': 'RSA-OAEP', 'enc': 'A128GCM'})}.a.b.c.d",
        "no JSON inside": sign(issuer, b"alice"),
        "a list inside": sign(issuer, b"[]"),
        "nested deeply": sign(issuer, b"[" * 10_000),
        "header nested deeply": part({}) + "." + base64.b64encode(b"[" * 2000).decode() + ".x",
        "kid of another kind": f"{part({'alg': 'RS256', 'kid': {'a': 1}})}.{payload}.{signature}",
        "one part": "abc",
        "two parts": f"{head}.{payload}",
        "dots": "...",
        "no base64": f"{head}.%%%.{signature}",
        "bytes": b"\xff\xfe.\x00.\xff",
    }
    async with checking(issuer, tmp_path) as auth:
        assert await ask(auth, good) == Identity("alice")
        for typ in ("at+jwt", "application/at+JWT", "jwt", None):
            assert (await ask(auth, issuer.token(header={"typ": typ}))).user == "alice"
        for name, token in forged.items():
            error = await refusal(auth, token)
            assert error.message, name
        assert await ask(auth, good) == Identity("alice")
    assert len(issuer.asked) <= 4


async def test_an_oversized_token_is_refused_unread(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with checking(issuer, tmp_path) as auth:
        assert (await ask(auth, issuer.token(note="x" * 8000))).user == "alice"
        huge = issuer.token(note="x" * 20_000)
        monkeypatch.setattr(tokens.hashlib, "sha256", None)
        assert "more than 16384 bytes" in (await refusal(auth, huge)).message


# --- what is remembered


async def test_a_remembered_token_expires_in_time(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with checking(issuer, tmp_path, leeway=0) as auth:
        token = issuer.token(exp=int(time.time()) + 60)
        assert (await ask(auth, token)).user == "alice"
        monkeypatch.setattr(tokens.jws, "validate_compact", None)  # not checked again
        assert (await ask(auth, token)).user == "alice"
        monkeypatch.undo()
        later = time.time() + 60
        monkeypatch.setattr(time, "time", lambda: later)
        assert "has expired" in (await refusal(auth, token)).message


async def test_what_is_remembered_stays_bounded_and_holds_no_token(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "MAX_KNOWN", 5)
    async with checking(issuer, tmp_path) as auth:
        for number in range(12):
            await ask(auth, issuer.token(sub=f"user{number}"))
            await refusal(auth, issuer.token(sub=f"user{number}", aud="x"))
        known = auth._tokens._known  # type: ignore[union-attr]
        assert len(known) == 5
        assert all(len(name) == 32 for name in known)


# --- the issuer's keys change, or can't be had


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


# --- the fleet file


def problems(tmp_path: Path, auth: str) -> str:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"gateway:\n  auth: {auth}\nmodels:\n  - {{name: a, source: o/n}}\n")
    try:
        fleet = load_fleet(file)
    except ConfigError as error:
        return str(error)
    return "\n".join(fleet.warnings())


OIDC = "mode: oidc, issuer: 'https://id.example.com', audience: pagefleet"


@pytest.mark.parametrize(
    ("auth", "said"),
    [
        ("{mode: oidc}", "mode oidc needs issuer and audience"),
        ("{mode: oidc, issuer: 'https://x'}", "mode oidc needs audience"),
        ("{mode: oidc, issuer: 'http://id.example.com', audience: a}", "an https:// address is needed"),
        (f"{{{OIDC}, jwks_url: 'ftp://x/'}}", "gateway.auth.jwks_url: an https:// address is needed"),
        (f"{{{OIDC}, algorithms: [HS256]}}", "'HS256' can't be allowed"),
        (f"{{{OIDC}, algorithms: [none]}}", "'none' can't be allowed"),
        (f"{{{OIDC}, algorithms: []}}", "algorithms"),
        (f"{{{OIDC}, leeway: 1h}}", "a duration from 0s to 10m is needed"),
        (f"{{{OIDC}, cache: 1s}}", "a duration from 10s to 24h is needed"),
        (f"{{{OIDC}, user_claim: ''}}", "the name of a claim has 1 to 128"),
        (f"{{{OIDC}, user_claim: 'a\"b'}}", "without quotes"),
        (f"{{{OIDC}, user_clam: x}}", "did you mean 'user_claim'?"),
        (f"{{{OIDC}, trusted_proxies: [127.0.0.1]}}", "no effect with mode oidc"),
        ("{mode: keys, audience: x}", "gateway.auth.audience has no effect without mode oidc"),
        (f"{{{OIDC}}}", ""),
    ],
)
def test_settings(tmp_path: Path, auth: str, said: str) -> None:
    found = problems(tmp_path, auth)
    assert said in found
    assert bool(found) == bool(said)
