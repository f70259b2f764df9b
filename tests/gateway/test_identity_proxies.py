"""Whose word on the client's address counts. Whatever a client writes, it can't choose its address."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.identity.proxies import MAX_HOPS, TrustedProxies

NETWORKS = ["10.0.0.0/8", "192.168.1.7", "fd00::/8", "::1", "unix:"]
PROXY = ("10.0.0.1", 1234)
CLIENT = "203.0.113.9"
QUICK = settings(max_examples=80, deadline=None)

X_FORWARDED_FOR = TrustedProxies(NETWORKS)
FORWARDED = TrustedProxies(NETWORKS, "forwarded")


def address(proxies: TrustedProxies, *values: bytes, peer=PROXY) -> str:
    return proxies.origin([(proxies.header.encode(), value) for value in values], peer).address


# --- who is trusted


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (("10.255.0.1", 1), True),
        (("11.0.0.1", 1), False),
        (("192.168.1.7", 1), True),
        (("192.168.1.8", 1), False),
        (("::ffff:10.0.0.1", 1), True),
        (("::ffff:11.0.0.1", 1), False),
        (("fd12::1", 1), True),
        (("fd12::1%eth0", 1), True),
        (("fe80::1%eth0", 1), False),
        (("::1", 1), True),
        (("testclient", 1), False),
        (("", 1), False),
        (None, True),
    ],
)
def test_trusted_peers(peer, expected: bool) -> None:
    assert X_FORWARDED_FOR.origin([], peer).trusted is expected
    assert not TrustedProxies().origin([], peer).trusted


def test_an_untrusted_peer_is_the_client_whatever_it_says() -> None:
    for value in (b"1.2.3.4", b"10.0.0.1", b"nonsense"):
        assert address(X_FORWARDED_FOR, value, peer=(CLIENT, 1)) == CLIENT
        assert address(TrustedProxies(), value) == PROXY[0]
    assert address(TrustedProxies(["10.0.0.0/8"]), b"1.2.3.4", peer=None) == "local"
    assert address(X_FORWARDED_FOR, b"1.2.3.4", peer=None) == "1.2.3.4"
    assert address(X_FORWARDED_FOR, peer=None) == "local"


def test_addresses_have_one_spelling() -> None:
    assert address(X_FORWARDED_FOR, peer=("::ffff:203.0.113.9", 1)) == CLIENT
    assert address(X_FORWARDED_FOR, b"2001:DB8:0:0::1") == "2001:db8::1"


def test_trusted_proxies_are_truthy_when_there_are_any() -> None:
    assert not TrustedProxies()
    assert TrustedProxies(["::1"])
    assert TrustedProxies(["unix:"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("proxy.example", "'proxy.example' is no trusted proxy"),
        ("10.0.0.1/8", "host bits set"),
        ("10.0.0.0/33", "'10.0.0.0/33' is no trusted proxy"),
        ("", "'' is no trusted proxy"),
        ("::ffff:10.0.0.0/104", "write it as an IPv4 network"),
    ],
)
def test_what_is_no_network(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrustedProxies(["10.0.0.0/8", name])


# --- X-Forwarded-For


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([b"203.0.113.9"], CLIENT),
        ([b"1.2.3.4, 203.0.113.9"], CLIENT),
        ([b"1.2.3.4,203.0.113.9,10.1.1.1 , 10.2.2.2"], CLIENT),
        ([b"1.2.3.4", b"203.0.113.9", b"10.1.1.1"], CLIENT),
        ([b"10.3.3.3, 10.1.1.1"], "10.3.3.3"),
        ([b"203.0.113.9:51000"], CLIENT),
        ([b"2001:db8::1"], "2001:db8::1"),
        ([b"[2001:db8::1]"], "2001:db8::1"),
        ([b"[2001:db8::1]:443, [fd00::2]:80"], "2001:db8::1"),
        ([b"::ffff:203.0.113.9"], CLIENT),
        ([b""], PROXY[0]),
        ([b"unknown"], PROXY[0]),
        ([b"_hidden"], PROXY[0]),
        ([b"203.0.113.9, unknown, 10.1.1.1"], "10.1.1.1"),
        ([b"203.0.113.9,"], PROXY[0]),
        ([b"fe80::1%eth0"], PROXY[0]),
        ([b"203.0.113.009"], PROXY[0]),
        ([b"203.0.113.9:"], PROXY[0]),
        ([b"[2001:db8::1"], PROXY[0]),
        ([b"1" * 70], PROXY[0]),
        ([b"'; DROP TABLE users"], PROXY[0]),
    ],
)
def test_x_forwarded_for(values: list[bytes], expected: str) -> None:
    assert address(X_FORWARDED_FOR, *values) == expected


def test_only_the_configured_header_counts() -> None:
    """Proxies maintain one of the two and pass a client's own copy of the other on."""
    headers = [(b"x-forwarded-for", b"1.1.1.1"), (b"forwarded", b"for=2.2.2.2"), (b"x-real-ip", b"3.3.3.3")]
    assert X_FORWARDED_FOR.origin(headers, PROXY).address == "1.1.1.1"
    assert FORWARDED.origin(headers, PROXY).address == "2.2.2.2"


def test_the_walk_is_bounded() -> None:
    endless = b",".join([b"10.9.9.9"] * 5000)
    assert address(X_FORWARDED_FOR, b"203.0.113.9," + endless) == "10.9.9.9"
    far = b"203.0.113.9," + b",".join([b"10.9.9.9"] * (MAX_HOPS - 1))
    assert address(X_FORWARDED_FOR, far) == CLIENT
    # The piece at the cut is a part of something longer, and isn't read.
    assert address(X_FORWARDED_FOR, b"10.9.9.9," + far) == CLIENT
    for _ in range(3):
        assert address(FORWARDED, b'for="' + b"x," * 20_000) == PROXY[0]


def test_addresses_that_were_seen_do_not_pile_up() -> None:
    proxies = TrustedProxies(["10.0.0.0/8"])
    for number in range(6000):
        address(proxies, str(ipaddress.ip_address(0x30000000 + number)).encode())
    info = proxies._read.cache_info()
    assert info.currsize == info.maxsize < 6000


# --- Forwarded


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([b"for=203.0.113.9"], CLIENT),
        ([b'For="203.0.113.9:1234";proto=http;by=10.0.0.1'], CLIENT),
        ([b'proto=https ; FOR="[2001:db8::17]:4711"'], "2001:db8::17"),
        ([b"for=1.2.3.4, for=203.0.113.9, for=10.1.1.1"], CLIENT),
        ([b"for=1.2.3.4", b"for=203.0.113.9;by=10.0.0.9"], CLIENT),
        ([b'for=203.0.113.9;host="a,b;for=1.2.3.4"'], CLIENT),
        ([b'for=203.0.113.9;host="a, for=\\"1.2.3.4\\""'], CLIENT),
        ([b'host="a, for=1.2.3.4;y=";for="203.0.113.9:80"'], CLIENT),
        ([b'for="203.0.113\\.9"'], CLIENT),
        ([b'for=", for=203.0.113.9'], CLIENT),
        ([b'for="1.2.3.4', b"for=203.0.113.9"], CLIENT),
        ([b'for="\\', b"for=203.0.113.9"], CLIENT),
        ([b"for=203.0.113.9, "], CLIENT),
        ([b"for=_secret"], PROXY[0]),
        ([b"for=unknown, for=10.1.1.1"], "10.1.1.1"),
        ([b"by=203.0.113.9"], PROXY[0]),
        ([b"for=1.2.3.4;for=203.0.113.9"], PROXY[0]),
        ([b"203.0.113.9"], PROXY[0]),
        ([b"for"], PROXY[0]),
        ([b"for="], PROXY[0]),
        ([b'for="203.0.113.9'], PROXY[0]),
        ([b""], PROXY[0]),
    ],
)
def test_forwarded(values: list[bytes], expected: str) -> None:
    assert address(FORWARDED, *values) == expected


# --- properties

public_v4 = st.integers(0x30000000, 0x50000000).map(lambda n: str(ipaddress.IPv4Address(n)))
public_v6 = st.integers(0, 2**64 - 1).map(lambda n: str(ipaddress.IPv6Address((0x20010DB8 << 96) + n)))
clients = st.one_of(public_v4, public_v6)
hops = st.lists(
    st.one_of(
        st.integers(0, 2**24 - 1).map(lambda n: str(ipaddress.IPv4Address((10 << 24) + n))),
        st.integers(0, 2**64 - 1).map(lambda n: str(ipaddress.IPv6Address((0xFD << 120) + n))),
    ),
    max_size=6,
)
ports = st.one_of(st.none(), st.integers(0, 65535))
forged = st.lists(
    st.one_of(
        st.binary(max_size=40).map(lambda text: text.replace(b"\r", b"").replace(b"\n", b"")),
        st.sampled_from(
            [b"10.0.0.1", b"1.2.3.4", b"for=1.2.3.4", b'for="', b'"', b'for="\\', b"", b",", b"_x"]
        ),
        st.text('for=";,\\ 1.', max_size=30).map(str.encode),
    ),
    max_size=4,
)
hosts = st.one_of(
    st.text('for=";,\\ 1.', max_size=8),
    st.sampled_from(
        ["a, for=1.2.3.4;y=", 'a, for="1.2.3.4"', 'a\\", for=1.2.3.4', ',for=1.2.3.4;y="', ",,,"]
    ),
)


def with_port(address: str, port: int | None) -> str:
    if port is None:
        return address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def element(proxies: TrustedProxies, address: str, port: int | None, host: str = "") -> bytes:
    """What a well-behaved proxy appends; `host` is a client's own text, quoted."""
    text = with_port(address, port)
    if proxies is X_FORWARDED_FOR:
        return text.encode()
    if ":" in address and port is None:
        text = f"[{text}]"
    host = host.replace("\\", "\\\\").replace('"', '\\"')
    return f'host="{host}";for="{text}";by="10.0.0.1"'.encode()


@pytest.mark.parametrize("proxies", [X_FORWARDED_FOR, FORWARDED], ids=["x-forwarded-for", "forwarded"])
@QUICK
@given(client=clients, port=ports, chain=hops, forgery=forged, joined=st.booleans(), host=hosts)
def test_nothing_that_a_client_writes_changes_its_address(
    proxies: TrustedProxies,
    client: str,
    port: int | None,
    chain: list[str],
    forgery: list[bytes],
    joined: bool,
    host: str,
) -> None:
    """Client → proxies of `chain` → the proxy that is our peer. Each appends what called it, to the last line
    or as a line of its own."""
    honest = [element(proxies, client, port, host), *(element(proxies, hop, port) for hop in chain)]
    lines = [b", ".join([*forgery, *honest])] if joined else [*forgery, *honest]
    assert address(proxies, *lines) == client


@pytest.mark.parametrize("proxies", [X_FORWARDED_FOR, FORWARDED], ids=["x-forwarded-for", "forwarded"])
@QUICK
@given(lines=forged, peer=st.one_of(clients, st.just("10.0.0.1"), st.text(max_size=10)))
def test_any_bytes_give_an_address(proxies: TrustedProxies, lines: list[bytes], peer: str) -> None:
    found = address(proxies, *lines, peer=(peer, 1))
    if found != peer:
        ipaddress.ip_address(found)
