"""Golden prompts: what counts as the expected answer, and a worker whose model says what the test wants."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.driver import proof
from gateway.fleet.driver.peer import Lost, Peer, Refused, number_in
from gateway.fleet.driver.proof import Unproven, matches, run_golden
from gateway.settings import Golden
from tests.worker.fake_engine import MODEL
from tests.worker.talking import worker
from worker.server.lifecycle import HttpServer, uvicorn_config

THINKS = "<think>\nTwo and two make four, or so it"


@pytest.mark.parametrize(
    ("said", "expect", "good"),
    [
        (THINKS, "make four", True),  # all its tokens went into the reasoning
        (f"{THINKS} seems.\n</think>\n\nIt is 4.", "/is 4/", True),
        ("It is 4.", "is 4", True),
        (THINKS, "five", False),
        ("", None, False),
    ],
)
async def test_golden_prompts_hear_what_a_model_thinks_and_says(
    tmp_path: Path, said: str, expect: str | None, good: bool
) -> None:
    state = worker(said)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / "worker.sock"))
    server = HttpServer(uvicorn_config(state))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    peer = Peer(tmp_path / "worker.sock", "bytes-0", 0, MODEL)
    try:
        if good:
            await run_golden(peer, [Golden(prompt="2 + 2?", expect=expect)])
        else:
            with pytest.raises(Unproven, match=r"2 \+ 2\?|nothing"):
                await run_golden(peer, [Golden(prompt="2 + 2?", expect=expect)])
    finally:
        await peer.close()
        server.should_exit = True
        await serving


@pytest.mark.parametrize(
    ("expect", "answer", "good"),
    [
        ("4", "It is 4.", True),
        ("four", "It is 4.", False),
        ("/[Ff]our|4/", "It is 4.", True),
        ("/^4/", "It is 4.", False),
        ("/a.b/", "a\nb", True),
        ("/größe\x00?/", "größe", True),
        ("/", "1/2", True),
    ],
)
async def test_a_golden_answer_is_a_substring_or_a_regular_expression(
    expect: str, answer: str, good: bool
) -> None:
    assert await matches(expect, answer) is good


ODD: list[Any] = [
    *({}, {"choices": None}, {"choices": []}, {"choices": [1]}, {"choices": [{"message": None}]}),
    *({"choices": [{"message": "x"}]}, {"choices": [{"message": {"content": ["x"]}}]}),
    *({"logprobs": 1}, {"logprobs": True}, {"logprobs": 0.5}, {"logprobs": [{"logprob": float("nan")}]}),
    *({"logprobs": [1]}, {"logprobs": "x"}, {"logprobs": {"a": 1}}, {"logprobs": [{"logprob": "-1"}]}),
]


@pytest.mark.parametrize("odd", ODD, ids=str)
async def test_an_answer_of_another_shape_proves_nothing(odd: dict[str, Any]) -> None:
    """And is no mistake of ours, after which it would be asked again for ten minutes."""

    class Peer:
        target = "m-0.1"

        async def prompt(self, path: str, **_: object) -> dict[str, Any]:
            is_odd = ("logprobs" in odd) == (path == "/generate")
            return odd if is_odd else {"token_ids": [1], "logprobs": [{"logprob": -0.5}]}

    with pytest.raises(proof.Unproven):
        await proof.run_golden(Peer(), [Golden(prompt="x")])  # type: ignore[arg-type]


ANSWERS: dict[str, bytes] = {
    "no HTTP": b"I am no HTTP server\r\n\r\n",
    "nothing": b"",
    "half": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
    "no JSON": b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{\xff}",
    "a number": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n7\n",
    "a list": b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n[]\n",
    "nested": b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"[" * 200_000,
    "a nested error": b"HTTP/1.1 500 No\r\ncontent-length: 200000\r\n\r\n" + b"[" * 200_000,
    "an error in no text": b'HTTP/1.1 500 No\r\ncontent-length: 15\r\n\r\n{"error": "\xff"}',
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_a_worker_that_answers_nonsense_is_lost_or_refuses(kind: str, tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWERS[kind])
        writer.close()

    place = tmp_path / "worker.sock"
    async with await asyncio.start_unix_server(answer, place):
        peer = Peer(place, "m-0", 1, "m")
        for question in (
            peer.get("/health"),
            peer.post("/admin/abort"),
            peer.prompt("/generate", prompt=[1]),
            peer.timed([1], 2, "salt"),
        ):
            with pytest.raises((Lost, Refused)):
                await question
        await peer.close()


def test_a_count_that_is_none_is_not_counted() -> None:
    for odd in (None, "7", -1, 0.5, [1], {}):
        assert number_in({"aborted": odd}, "aborted", 3) == 3
    assert number_in({"aborted": 2}, "aborted", 3) == 2
    assert number_in({}, "aborted", 3) == 3


async def test_an_expression_that_comes_to_no_end_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "MATCH_WITHIN", 1.0)
    looks = 0

    async def look() -> None:
        nonlocal looks
        while True:
            looks += 1
            await asyncio.sleep(0.01)

    looking = asyncio.create_task(look())
    with pytest.raises(proof.Unproven, match=r"wasn't found in 'a+b' within 1 s"):
        await matches("/^(a+)+$/", "a" * 64 + "b")
    looking.cancel()
    assert looks > 5, "the supervisor stood still meanwhile"
