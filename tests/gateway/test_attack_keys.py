"""Keys that come and go under load, over processes: what holds from the moment at which a command returns."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gateway.identity.store import KEYS_FILE, KeyStore
from tests.gateway.gateway_processes import BODY, PROCESSES, Gateways, gateways
from tests.gateway.rig import http_post, one_worker, until
from tests.gateway.test_auth_processes import keys

CLIENTS = 50
ROUNDS = 4


@dataclass
class Life:
    """Of a key: when the command that made it had returned, when that which ended it began and had."""

    key: str
    made: float = math.inf
    ending: float = math.inf
    ended: float = math.inf


@dataclass
class Load:
    """Clients that never rest, each with any key of `lives`, on connections kept as long as may be."""

    running: Gateways
    lives: list[Life]
    wrong: list[str] = field(default_factory=list)
    processes: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    over: bool = False

    async def client(self, number: int) -> None:
        count = number
        while not self.over:
            reader, writer = await self.running.connect()
            kept = True
            try:
                while kept and not self.over:
                    count += 1
                    kept = await self._ask(reader, writer, self.lives[count % len(self.lives)])
            finally:
                writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, life: Life) -> bool:
        began = time.monotonic()
        writer.write(http_post(BODY, f"authorization: Bearer {life.key}\r\n".encode()))
        head = await reader.readuntil(b"\r\n\r\n")
        ended = time.monotonic()
        length = re.search(rb"content-length: (\d+)", head)
        process = re.search(rb"x-request-id: ([0-9a-f]+)-", head)
        assert length is not None, head
        assert process is not None, head
        await reader.readexactly(int(length[1]))
        status = int(head.split()[1])
        self.processes[process[1].decode()] += 1
        if began > life.ended:
            self._expect(401, status, "after the end")
        elif ended < life.ending and began > life.made:
            self._expect(200, status, "good")
        elif status not in (200, 401):
            self.wrong.append(f"{status} on the way")
        return b"connection: close" not in head

    def _expect(self, expected: int, status: int, when: str) -> None:
        self.answers[when] += 1
        if status != expected:
            self.wrong.append(f"{status} {when}")


async def test_a_key_ends_in_the_very_second_on_connections_that_are_kept_alive(tmp_path: Path) -> None:
    """A stream that it began goes on."""
    answers: list[tuple[float, int, float]] = []
    with KeyStore(tmp_path / KEYS_FILE, create=True, write=True) as store:
        store.create("bob")
    async with one_worker(tmp_path, auth={"mode": "keys"}) as rig:
        with KeyStore(tmp_path / KEYS_FILE, write=True) as store:
            expires = time.time() + 2
            _, key = store.create("ann", expires=expires)

        async def use() -> None:
            """Over one connection, up to the first refusal."""
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            status = 200
            while status == 200:
                began = time.time()
                writer.write(http_post(BODY, f"authorization: Bearer {key}\r\n".encode()))
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                assert length is not None, head
                body = await reader.readexactly(int(length[1]))
                status = int(head.split()[1])
                answers.append((began, status, time.time()))
            assert b"expired" in body
            writer.close()

        stream = {"model": "m", "stream": True, "fake": {"do": "sse", "gate_at": 1}}
        running = asyncio.create_task(rig.post(stream, headers={"authorization": f"Bearer {key}"}))
        await until(lambda: rig.workers[0].requests)
        await asyncio.gather(*(use() for _ in range(10)))
        rig.workers[0].gate.set()
        assert (await running).text.endswith("data: [DONE]\n\n")
    assert {status for began, status, _ in answers if began >= expires} <= {401}
    assert {status for _, status, ended in answers if ended < expires} <= {200}
    assert sum(status == 401 for _, status, _ in answers) == 10


async def test_from_the_return_of_a_command_on_it_holds_on_every_process(tmp_path: Path) -> None:
    """Keys are made, rotated and revoked while fifty clients use all of them."""
    async with gateways(tmp_path, auth="keys") as (running, _):

        async def made(*arguments: str) -> Life:
            life = Life(await asyncio.to_thread(keys, tmp_path, *arguments))
            life.made = time.monotonic()
            return life

        lives = [await made("create", "--user", "ann"), await made("create", "--user", "bob")]
        load = Load(running, lives)
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(load.client(number))
            await until(lambda: len(load.processes) == PROCESSES)
            current = lives[0]
            for _ in range(ROUNDS):
                seen = load.answers.total()
                await until(lambda seen=seen: load.answers.total() > seen + 2 * CLIENTS)
                short = await made("create", "--user", "carol")
                lives.append(short)
                current.ending = time.monotonic()
                successor = await made("rotate", current.key, "--grace", "0s")
                current.ended = time.monotonic()
                lives.append(successor)
                current = successor
                short.ending = time.monotonic()
                await asyncio.to_thread(keys, tmp_path, "revoke", short.key)
                short.ended = time.monotonic()
                seen = load.answers["after the end"]
                await until(lambda seen=seen: load.answers["after the end"] > seen + 2 * CLIENTS)
            load.over = True
    assert load.wrong == []
    assert len(load.processes) == PROCESSES
    assert load.answers["good"] > CLIENTS
