"""Attacks on who a request is from, over raw sockets: TCP and Unix peers, headers in every shape."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.client_protocol import ClientProtocol
from tests.gateway.rig import Rig, http_post, one_worker, until

BODY = b'{"model":"m","user":"body"}'
PEER = "127.0.0.1"


@contextlib.asynccontextmanager
async def audited(folder: Path, **auth: Any) -> AsyncIterator[Rig]:
    audit = {"file": str(folder / "audit.jsonl")}
    async with one_worker(folder, auth={"mode": "none", **auth}, audit=audit) as rig:
        yield rig


class Asked:
    """Requests with these header lines, and as whom each counts."""

    def __init__(self, rig: Rig, socket: str | None = None) -> None:
        self._rig = rig
        self._socket = socket
        self._audit = rig.folder / "audit.jsonl"

    async def user(self, *lines: bytes) -> str:
        """The user that the audit has for it; its status where that isn't 200."""
        before = self._lines()
        head = b"".join(line + b"\r\n" for line in lines)
        data = http_post(BODY, b"connection: close\r\n" + head)
        if self._socket is None:
            reader, writer = await asyncio.open_connection(PEER, self._rig.port)
        else:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        writer.write(data)
        status = (await reader.read()).split(b" ")[1].decode()
        writer.close()
        await until(lambda: len(self._lines()) > len(before))
        return status if status != "200" else str(json.loads(self._lines()[-1])["user"])

    def _lines(self) -> list[str]:
        return self._audit.read_text().splitlines() if self._audit.exists() else []


SPOOFS = [
    [b"x-user-id: root"],
    [b"X-USER-ID: root", b"x-forwarded-for: 9.9.9.9"],
    [b"x-forwarded-for: 10.0.0.1", b"forwarded: for=9.9.9.9"],
    [b"x-forwarded-for: 10.0.0.1, 10.0.0.2, 9.9.9.9", b"x-real-ip: 9.9.9.9"],
    [b"x-user-id:", b"x-user-id: root"],
    [b"x-user-id: root"] * 3,
]


@pytest.mark.parametrize("lines", SPOOFS)
async def test_nobody_takes_an_untrusted_peers_word(tmp_path: Path, lines: list[bytes]) -> None:
    async with audited(tmp_path, trusted_proxies=["10.0.0.0/8", "unix:"]) as rig:
        assert await Asked(rig).user(*lines) == PEER


# What a trusted peer sends, whose networks are 127.0.0.0/8 and 10.0.0.0/8: as whom it counts.
THROUGH_A_PROXY = [
    ([], PEER),
    ([b"x-forwarded-for: 203.0.113.9"], "203.0.113.9"),
    ([b"x-forwarded-for: root, 9.9.9.9, 203.0.113.9"], "203.0.113.9"),
    ([b"x-forwarded-for: 9.9.9.9", b"x-forwarded-for: 203.0.113.9, 10.1.2.3"], "203.0.113.9"),
    ([b"x-forwarded-for: 9.9.9.9, unknown, 10.1.2.3"], "10.1.2.3"),
    ([b"x-forwarded-for: 203.0.113.9:4711"], "203.0.113.9"),
    ([b"x-forwarded-for: [2001:DB8::1]:443"], "2001:db8::1"),
    ([b"x-forwarded-for: ::ffff:203.0.113.9"], "203.0.113.9"),
    ([b"x-forwarded-for: fe80::1%eth0"], PEER),
    ([b"x-forwarded-for: 203.0.113.9,"], PEER),
    ([b"x-forwarded-for: 0x7f.1, 0300.1.1.1"], PEER),
    ([b"x-forwarded-for: 1.2.3.4\t"], "1.2.3.4"),
    ([b"x-forwarded-for: \xff\xfe"], PEER),
    ([b"forwarded: for=9.9.9.9"], PEER),
    ([b"x-user-id: ann"], "ann"),
    ([b"x-user-id: ann", b"X-User-Id: ann"], "ann"),
    ([b"x-user-id: root", b"x-user-id: ann"], "400"),
    ([b"x-user-id: root, ann"], "root, ann"),
    ([b"x_user_id: root", b"x-user-id: ann"], "ann"),
    ([b"x-user-id:", b"x-forwarded-for: 203.0.113.9"], "203.0.113.9"),
    ([b"x-user-id: ann", b"x-forwarded-for: 203.0.113.9"], "ann"),
    ([b"x-user-id: " + b"a" * 5000], "a" * 512),
]


async def test_of_what_comes_through_a_proxy_only_the_proxys_part_counts(tmp_path: Path) -> None:
    async with audited(tmp_path, trusted_proxies=["127.0.0.0/8", "10.0.0.0/8"]) as rig:
        asked = Asked(rig)
        for lines, user in THROUGH_A_PROXY:
            assert (lines, await asked.user(*lines)) == (lines, user)


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_peer_on_a_unix_socket_is_trusted_by_its_own_name_only(tmp_path: Path, trusted: bool) -> None:
    """Not by a network that holds every address there is."""
    proxies = ["unix:"] if trusted else ["0.0.0.0/0", "::/0"]
    async with audited(tmp_path, trusted_proxies=proxies) as rig:
        path = str(tmp_path / "gateway.sock")
        protocol = partial(
            ClientProtocol, rig.server.config, rig.server.server_state, {}, silence=rig.settings.timeouts.idle
        )
        async with await asyncio.get_running_loop().create_unix_server(protocol, path):
            asked = Asked(rig, path)
            assert await asked.user() == "local"
            assert await asked.user(b"x-user-id: ann") == ("ann" if trusted else "local")
            seen = await asked.user(b"x-forwarded-for: 9.9.9.9, 203.0.113.9")
            assert seen == ("203.0.113.9" if trusted else "local")


async def test_without_proxies_a_name_is_a_label_and_addresses_are_nobodys_word(tmp_path: Path) -> None:
    async with audited(tmp_path) as rig:
        asked = Asked(rig)
        assert await asked.user(b"x-forwarded-for: 9.9.9.9") == "body"
        assert await asked.user(b"x-user-id: ann") == "ann"
        assert await asked.user(b"x-user-id: ann", b"x-user-id: root") == "400"
