"""Headers → identity: with keys, without, and what answers tell."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from contracts.errors import ApiError, model_not_found
from gateway.identity.authenticator import Authenticator, with_keys, without_keys
from gateway.identity.identity import Identity, KeyLimits
from gateway.identity.keyring import POLL_EVERY
from gateway.identity.proxies import TrustedProxies
from gateway.identity.secret import new_key
from gateway.identity.store import KeyStore

PEER = ("203.0.113.9", 4711)
PROXY = ("10.0.0.1", 4711)


@pytest.fixture
def auth(store: KeyStore, tmp_path: Path) -> Iterator[Authenticator]:
    auth = with_keys(TrustedProxies(), tmp_path)
    yield auth
    auth.close()


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", b"Bearer " + key.encode())]


def refusal(auth: Authenticator, headers: list[tuple[bytes, bytes]]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        auth.authenticate(headers, PEER)
    assert caught.value.status == 401
    assert caught.value.headers["www-authenticate"].startswith("Bearer")
    body = caught.value.body()["error"]
    assert (body["type"], body["param"], body["code"]) == ("invalid_request_error", None, "invalid_api_key")
    return caught.value


def make(store: KeyStore, user: str = "alice", **options) -> str:
    _, key = store.create(user, **options)
    time.sleep(POLL_EVERY)
    return key


# --- with keys


def test_a_fleet_without_a_key_is_told_how_to_make_one(tmp_path: Path, caplog) -> None:
    with_keys(TrustedProxies(), tmp_path).close()
    assert "pagefleet keys create" in caplog.text


def test_a_key_is_its_user(store: KeyStore, auth: Authenticator) -> None:
    limits = KeyLimits(qps=5, tokens_per_minute=100)
    record, key = store.create("alice", models=["m"], priority="low", limits=limits)
    time.sleep(POLL_EVERY)
    expected = Identity("alice", record.id, frozenset({"m"}), "low", limits)
    assert auth.authenticate(bearer(key), PEER) == expected
    # Neither the body nor a header makes it somebody else, whoever sends it.
    assert auth.authenticate([*bearer(key), (b"x-user-id", b"root")], PROXY, "root") == expected
    assert not auth.needs_body_user


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer KEY")],
        [(b"authorization", b"bearer   KEY ")],
        [(b"x-api-key", b" KEY")],
        [(b"authorization", b"Basic dTpw"), (b"x-api-key", b"KEY")],
        [(b"x-api-key", b"else"), (b"authorization", b"BEARER KEY")],
    ],
)
def test_where_a_key_may_stand(store: KeyStore, auth: Authenticator, headers) -> None:
    key = make(store).encode()
    assert auth.authenticate([(n, v.replace(b"KEY", key)) for n, v in headers], PEER).user == "alice"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic dTpw")],
        [(b"x-api-key", b"  ")],
        [(b"api-key", b"pfk_x")],
    ],
)
def test_no_key(auth: Authenticator, headers) -> None:
    assert "needed" in refusal(auth, headers).message


@pytest.mark.parametrize(
    "text",
    [
        "sk-123",
        "pfk_",
        pytest.param(new_key()[1], id="of another store"),
        "KEY" + "x",
        "KEY KEY",
        "HALF",
        "OTHERSECRET",
        "x" * 60_000,
        "ü",
        "Bearer KEY",
    ],
)
def test_what_is_no_good_key(store: KeyStore, auth: Authenticator, text: str) -> None:
    key = make(store)
    other = key[: len("pfk_0123456789_")] + new_key()[1][len("pfk_0123456789_") :]
    sent = text.replace("KEY", key).replace("HALF", key[:-20]).replace("OTHERSECRET", other)
    error = refusal(auth, [(b"authorization", b"Bearer " + sent.encode())])
    assert "not valid" in error.message


def test_only_the_holder_learns_what_became_of_a_key(store: KeyStore, auth: Authenticator) -> None:
    record, key = store.create("alice")
    old, old_key = store.create("bob")
    store.revoke([record.id])
    store.rotate(old.id, grace=0)
    time.sleep(POLL_EVERY)
    assert f"{record.id} was revoked" in refusal(auth, bearer(key)).message
    assert f"{old.id} expired at 20" in refusal(auth, bearer(old_key)).message
    guess = key[:-1] + ("a" if key[-1] != "a" else "b")
    assert "not valid" in refusal(auth, bearer(guess)).message


def test_a_key_expires_by_itself(store: KeyStore, auth: Authenticator, monkeypatch) -> None:
    expires = time.time() + 1000
    key = make(store, expires=expires)
    assert auth.authenticate(bearer(key), PEER).user == "alice"
    monkeypatch.setattr(time, "time", lambda: expires)
    assert "expired" in refusal(auth, bearer(key)).message


def test_both_keys_are_good_during_the_grace_of_a_rotation(
    store: KeyStore, auth: Authenticator, monkeypatch
) -> None:
    record, old = store.create("alice")
    ended, _, new = store.rotate(record.id, grace=1000)
    time.sleep(POLL_EVERY)
    assert auth.authenticate(bearer(old), PEER).user == auth.authenticate(bearer(new), PEER).user == "alice"
    monkeypatch.setattr(time, "time", lambda: ended.expires)
    refusal(auth, bearer(old))
    assert auth.authenticate(bearer(new), PEER).user == "alice"


# --- models


def test_models_of_a_key() -> None:
    everything = Identity("a")
    some = Identity("a", "id", frozenset({"m", "alias"}))
    assert everything.may_use("x", "y")
    assert some.may_use("m", "m")
    assert some.may_use("other-name-of-m", "m")
    assert some.may_use("alias", "n")
    assert not some.may_use("n", "n")
    some.require("m", "m")
    with pytest.raises(ApiError) as caught:
        some.require("n", "n")
    assert caught.value.status == 404
    assert caught.value.body() == model_not_found("n").body()


# --- what OpenAI's SDK makes of it


def sdk_error(error: ApiError) -> openai.APIStatusError:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(error.status, content=msgspec.json.encode(error.body()), headers=error.headers)

    transport = httpx.Client(transport=httpx.MockTransport(answer))
    client = openai.OpenAI(api_key="x", base_url="http://x/v1", http_client=transport, max_retries=0)
    with pytest.raises(openai.APIStatusError) as caught:
        client.models.list()
    return caught.value


def test_sdk_classes(auth: Authenticator) -> None:
    error = sdk_error(refusal(auth, []))
    assert type(error) is openai.AuthenticationError
    assert error.code == "invalid_api_key"
    with pytest.raises(ApiError) as caught:
        Identity("a", "id", frozenset()).require("m", "m")
    error = sdk_error(caught.value)
    assert type(error) is openai.NotFoundError
    assert (error.code, error.param) == ("model_not_found", "model")


# --- without keys


def test_without_keys_callers_are_who_they_say(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        auth = without_keys(TrustedProxies())
    assert "auth: none" in caplog.text
    assert auth.needs_body_user
    user = (b"x-user-id", b" alice ")
    assert auth.authenticate([user], PEER, "bob") == Identity("alice")
    assert auth.authenticate([*bearer("sk-any"), (b"x-user-id", b"  ")], PEER, "bob") == Identity("bob")
    assert auth.authenticate([], PEER, "") == auth.authenticate([], PEER) == Identity("203.0.113.9")
    assert auth.authenticate([], None) == Identity("local")
    assert auth.authenticate([(b"x-forwarded-for", b"1.2.3.4")], PEER) == Identity("203.0.113.9")
    assert auth.authenticate([(b"x-user-id", "björn".encode())], PEER).user == "björn"
    assert auth.authenticate([(b"x-user-id", "björn".encode("latin-1"))], PEER).user == "björn"
    assert len(auth.authenticate([(b"x-user-id", b"x" * 9999)], PEER).user) == 512
    assert len(auth.authenticate([], PEER, "x" * 9999).user) == 512


def test_with_trusted_proxies_only_they_name_users() -> None:
    auth = without_keys(TrustedProxies(["10.0.0.0/8"]))
    assert not auth.needs_body_user
    headers = [(b"x-user-id", b"alice"), (b"x-forwarded-for", b"198.51.100.7")]
    assert auth.authenticate(headers, PROXY) == Identity("alice")
    assert auth.authenticate(headers, PEER, "alice") == Identity("203.0.113.9")
    assert auth.authenticate(headers[1:], PROXY, "alice") == Identity("198.51.100.7")
    assert auth.authenticate([], PROXY, "alice") == Identity("10.0.0.1")


@pytest.mark.parametrize(("name", "form"), [(b"authorization", b"Bearer %b"), (b"x-api-key", b"%b")])
def test_two_keys_in_one_request(store: KeyStore, auth: Authenticator, name, form) -> None:
    """Whoever was before the gateway may have looked at the other one, whichever is taken."""
    ann, bob = make(store).encode(), make(store).encode()
    twice = [(name, form % ann), (b"accept", b"*/*"), (name, form % ann)]
    assert auth.authenticate(twice, PEER).user == "alice"
    for other in (bob, b"x", b"pfk_"):
        for pair in ((ann, other), (other, ann)):
            with pytest.raises(ApiError) as caught:
                auth.authenticate([(name, form % key) for key in pair], PEER)
            assert (caught.value.status, caught.value.code) == (400, "ambiguous_credentials")
            assert ann.decode() not in caught.value.message


def test_two_users_in_one_request() -> None:
    auth = without_keys(TrustedProxies(["10.0.0.0/8"]))
    twice = [(b"x-user-id", b"alice"), (b"x-user-id", b"alice ")]
    assert auth.authenticate(twice, PROXY).user == "alice"
    with pytest.raises(ApiError) as caught:
        auth.authenticate([*twice, (b"x-user-id", b"mallory")], PROXY)
    assert (caught.value.status, caught.value.code) == (400, "ambiguous_user")
    assert auth.authenticate([*twice, (b"x-user-id", b"mallory")], PEER).user == PEER[0]


# --- secrets


def test_no_key_in_answers_logs_or_reprs(store: KeyStore, tmp_path: Path, caplog) -> None:
    keys = [make(store), make(store, "bob"), new_key()[1]]
    caplog.set_level(logging.DEBUG)
    auth = with_keys(TrustedProxies(), tmp_path)
    store.revoke([keys[1].split("_")[1]])
    time.sleep(POLL_EVERY)
    seen = [repr(auth), repr(auth.authenticate(bearer(keys[0]), PEER)), repr(vars(auth._ring))]
    for key in (*keys[1:], keys[0][:-1], keys[0] + "x"):
        error = refusal(auth, bearer(key))
        seen += [repr(error), str(error.body()), str(error.headers)]
    auth.close()
    text = "\n".join([*seen, caplog.text])
    for key in keys:
        assert key.rpartition("_")[2][:12] not in text
