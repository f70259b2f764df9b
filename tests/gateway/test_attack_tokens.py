"""Tokens and key sets written by hand, as RFC 7515, 7517 and 7518 say: nothing of the library that checks
them."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from contracts.errors import ApiError
from gateway.identity import jwks
from gateway.identity.authenticator import Authenticator
from tests.gateway.oidc_checks import ask, checking
from tests.gateway.oidc_issuer import AUDIENCE, KEYS, Issuer

HASHES = {"256": hashes.SHA256(), "384": hashes.SHA384(), "512": hashes.SHA512()}
CURVES = {"256": ("P-256", ec.SECP256R1(), 32), "384": ("P-384", ec.SECP384R1(), 48)}
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
EC = {bits: ec.generate_private_key(curve) for bits, (_, curve, _) in CURVES.items()}
ED = ed25519.Ed25519PrivateKey.generate()
FAR = 99_999_999_999


@functools.cache
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def number(value: int, size: int) -> str:
    return text(value.to_bytes(size, "big"))


def key_set() -> list[dict[str, Any]]:
    public = rsa_key().public_key().public_numbers()
    keys = [{"kty": "RSA", "kid": "R", "n": number(public.n, 256), "e": "AQAB", "x5c": ["AAAA"], "x5t": "?"}]
    for bits, (curve, _, size) in CURVES.items():
        point = EC[bits].public_key().public_numbers()
        place = {"x": number(point.x, size), "y": number(point.y, size)}
        keys.append({"kty": "EC", "kid": f"E{bits}", "crv": curve, **place})
    public_ed = text(ED.public_key().public_bytes_raw())
    return [*keys, {"kty": "OKP", "kid": "Ed", "crv": "Ed25519", "x": public_ed}]


def signature(algorithm: str, message: bytes) -> bytes:
    if algorithm == "EdDSA":
        return ED.sign(message)
    kind, bits = algorithm[:2], algorithm[2:]
    chosen = HASHES[bits]
    if kind == "RS":
        return rsa_key().sign(message, padding.PKCS1v15(), chosen)
    if kind == "PS":
        return rsa_key().sign(message, padding.PSS(padding.MGF1(chosen), chosen.digest_size), chosen)
    r, s = decode_dss_signature(EC[bits].sign(message, ec.ECDSA(chosen)))
    size = CURVES[bits][2]
    return r.to_bytes(size, "big") + s.to_bytes(size, "big")


def token(payload: bytes, algorithm: str = "RS256", kid: str | None = None) -> str:
    usual = {"R": "R", "P": "R", "E": f"E{algorithm[2:]}"}[algorithm[0]] if algorithm != "EdDSA" else "Ed"
    head = {"alg": algorithm, "kid": usual if kid is None else kid}
    message = f"{text(json.dumps(head).encode())}.{text(payload)}"
    return f"{message}.{text(signature(algorithm, message.encode()))}"


@contextlib.asynccontextmanager
async def own_issuer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Issuer, Authenticator]]:
    monkeypatch.setattr(jwks, "UNKNOWN_PAUSE", 0.1)
    issuer = Issuer()
    issuer.answers[KEYS] = (200, json.dumps({"keys": key_set()}).encode())
    try:
        async with checking(issuer, folder, algorithms=ALGORITHMS, leeway="0s") as auth:
            yield issuer, auth
    finally:
        issuer.stop()


async def outcome(auth: Authenticator, sent: str) -> str:
    """The user, or why it doesn't count."""
    try:
        return (await ask(auth, sent)).user
    except ApiError as error:
        return error.message.partition(": ")[2].rstrip(".") if error.status == 401 else str(error.status)


async def test_signatures_of_every_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with own_issuer(tmp_path, monkeypatch) as (issuer, auth):
        for algorithm in ALGORITHMS:
            claims = {"iss": issuer.url, "aud": ["x", AUDIENCE], "sub": algorithm, "exp": time.time() + 900.5}
            good = token(json.dumps(claims).encode(), algorithm)
            assert await outcome(auth, good) == algorithm
            message, _, signed = good.rpartition(".")
            raw = base64.urlsafe_b64decode(signed + "==")
            for other in (bytes([raw[0] ^ 1]) + raw[1:], raw[:-1], raw + b"\0", b"\0" * len(raw), b""):
                assert await outcome(auth, f"{message}.{text(other)}") != algorithm


async def test_claims_at_their_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = int(time.time())
    monkeypatch.setattr(time, "time", lambda: now + 0.9)
    expired, early = "it has expired", "it is not valid yet"
    others, no_user = "it is for another audience", "it has no usable claim 'sub'"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"exp": now + 1}, "ann"),
        ({"exp": now}, expired),
        ({"exp": -1}, expired),
        ({"exp": True}, "its claim 'exp' is wrong"),
        ({"exp": str(FAR)}, "its claim 'exp' is wrong"),
        ({"exp": 1e308}, "ann"),
        ({"exp": 10**400}, "ann"),
        ({"nbf": now}, "ann"),
        ({"nbf": now + 1}, early),
        ({"aud": []}, others),
        ({"aud": [1, AUDIENCE]}, others),
        ({"aud": AUDIENCE + " "}, others),
        ({"sub": "Zoë 用户"}, "Zoë 用户"),
        ({"sub": "a\u202eb"}, no_user),
        ({"sub": "a\nb"}, no_user),
        ({"sub": 7}, "its claim 'sub' is wrong"),
        ({"sub": "a\ud800"}, "it is neither a signed JWT nor an API key"),
    ]
    async with own_issuer(tmp_path, monkeypatch) as (issuer, auth):
        usual = {"iss": issuer.url, "aud": AUDIENCE, "sub": "ann", "exp": FAR}
        for claims, said in cases:
            assert await outcome(auth, token(json.dumps({**usual, **claims}).encode())) == said, claims


async def test_ids_of_keys_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with own_issuer(tmp_path, monkeypatch) as (issuer, auth):
        claims = json.dumps({"iss": issuer.url, "aud": AUDIENCE, "sub": "ann", "exp": FAR}).encode()
        assert await outcome(auth, token(claims)) == "ann"
        for kid in ("../../../../etc/passwd", "R\0", "", "r", "R' OR 1=1", issuer.url + KEYS):
            said = await outcome(auth, token(claims, kid=kid))
            assert said == "no key of the issuer has signed it", kid
        assert {path for path in issuer.asked if not path.startswith("/.well-known/")} == {KEYS}
