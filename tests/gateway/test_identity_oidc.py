"""Tokens of a real little issuer: which count, which don't, and what is said of them."""

from __future__ import annotations

import base64
import hmac
import json
import time
from pathlib import Path
from typing import Any

import pytest
from joserfc import jws

from contracts.errors import ApiError
from gateway.identity import jwks, tokens
from gateway.identity.identity import Identity
from gateway.identity.store import KEYS_FILE, KeyStore
from tests.gateway.oidc_checks import ask, checking, refusal
from tests.gateway.oidc_issuer import AUDIENCE, DISCOVERY, KEYS, Issuer, rsa


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
