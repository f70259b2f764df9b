"""Channel and EngineClient, against an engine process that runs no model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from worker.ipc.channel import ChannelClosed, EngineChannel, Frames, ServerChannel, frame
from worker.ipc.client import EngineClient, EngineDead, engine_command
from worker.ipc.messages import EngineRequest, EngineStats, FromEngine, RequestOutput, StepDone, ToEngine
from worker.params import SamplingParams

SCRIPT = Path(__file__).with_name("scripted_engine.py")


@asynccontextmanager
async def engine(mode: str) -> AsyncIterator[EngineClient]:
    client = EngineClient([sys.executable, str(SCRIPT), mode])
    await client.start()
    try:
        yield client
    finally:
        await client.shutdown()
        assert client.pid is not None
        assert not psutil.pid_exists(client.pid)


def request(name: str, prompt: list[int]) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(), 0)


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def collect(client: EngineClient, name: str, prompt: list[int]) -> list[RequestOutput]:
    return [output async for output in client.submit(request(name, prompt))]


def test_frames_are_cut_wherever_the_stream_is_split():
    payloads = [b"", b"a", b"x" * 1000, b"end"]
    data = b"".join(frame(p) for p in payloads)
    for size in (1, 2, 3, 7, 500, len(data)):
        frames = Frames()
        pieces = [frames.feed(data[i : i + size]) for i in range(0, len(data), size)]
        assert [f for piece in pieces for f in piece] == payloads


def test_a_frame_over_the_limit_is_refused_before_it_is_read():
    with pytest.raises(ChannelClosed, match="over the limit"):
        Frames().feed(b"\xff\xff\xff\xff")


async def test_the_engine_never_waits_for_a_server_that_does_not_read():
    ours, theirs = socket.socketpair()
    sender: EngineChannel[ToEngine] = EngineChannel(theirs, ToEngine)
    for step in range(200):  # 200 × 100 kB: far more than the socket's buffer
        sender.send(StepDone([RequestOutput("a", list(range(20_000)))], EngineStats(steps=step)))
    receiver: ServerChannel[FromEngine] = await ServerChannel.open(ours, FromEngine)
    steps: list[int] = []
    while len(steps) < 200:
        reading = asyncio.create_task(receiver.receive())
        while not reading.done():
            sender.receive(0)  # flushes
            await asyncio.sleep(0)
        steps += [m.stats.steps for m in reading.result() if isinstance(m, StepDone)]
    assert steps == list(range(200))
    receiver.close()
    theirs.close()


async def test_requests_come_back_in_order_and_in_full():
    async with engine("echo") as client:
        info = await client.wait_ready()
        assert info.max_model_len == 512
        names = [f"r{i}" for i in range(20)]
        results = await asyncio.gather(
            *(collect(client, n, list(range(1, 6 + i))) for i, n in enumerate(names))
        )
        for i, outputs in enumerate(results):
            assert [t for o in outputs for t in o.token_ids] == list(range(1, 6 + i))
            assert [o.finish_reason for o in outputs][-1] == "length"
        assert client.in_flight == 0
        assert await client.call("ping") == ""


async def test_outputs_merge_while_the_consumer_is_busy():
    async with engine("echo") as client:
        await client.wait_ready()
        stream = client.submit(request("a", list(range(100))))
        await until(lambda: client.in_flight == 0)
        outputs = [output async for output in stream]
        assert len(outputs) == 1
        assert outputs[0].token_ids == list(range(100))
        assert outputs[0].finish_reason == "length"


async def test_abort_ends_the_stream_and_is_idempotent():
    async with engine("slow") as client:
        await client.wait_ready()
        stream = client.submit(request("a", list(range(100))))
        other = client.submit(request("ab", [1, 2, 3]))
        await anext(stream)
        client.abort("a")
        client.abort("a")
        client.abort("never heard of")
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason == "abort"
        assert [t for o in [o async for o in other] for t in o.token_ids] == [1, 2, 3]
        await until(lambda: client.stats.running == 0)


async def test_the_engines_last_word_on_an_aborted_request_is_counted():
    async with engine("slow") as client:
        await client.wait_ready()
        stream = client.submit(request("a", list(range(100))))
        unheard_of = client.submit(request("b", [1]))
        client.abort("b")
        for _ in range(3):
            await anext(stream)
        seen = stream.received
        client.abort("a")
        assert not stream.ended
        await until(lambda: stream.ended and unheard_of.ended)
        assert seen <= stream.received < 100  # it went on until it heard of that, and not to its end
        assert unheard_of.received == 0
        called = []
        stream.when_ended(lambda: called.append(True))
        assert called == [True]


async def test_requests_before_ready_wait_for_it():
    async with engine("echo") as client:
        assert client.state == "loading"
        assert [o.finish_reason for o in await collect(client, "a", [1, 2])][-1] == "length"


async def test_death_of_the_engine_reaches_everybody_who_waits():
    async with engine("die") as client:
        await client.wait_ready()
        results = await asyncio.gather(*(collect(client, f"r{i}", [1] * 50) for i in range(3)))
        for outputs in results:
            assert outputs[-1].finish_reason == "error"
            assert "exit code 3" in (outputs[-1].error or "")
        await asyncio.wait_for(client.dead.wait(), 60)
        with pytest.raises(EngineDead, match="exit code 3"):
            client.submit(request("late", [1]))
        with pytest.raises(EngineDead):
            await client.call("ping")


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "(signal 9)"), (signal.SIGBUS, "(signal 7, SIGBUS: a file that")],
)
async def test_a_killed_engine_is_named_by_its_signal(number, words):
    async with engine("slow") as client:
        await client.wait_ready()
        stream = client.submit(request("a", [1] * 50))
        await anext(stream)
        os.kill(client.pid, number)
        outputs = [output async for output in stream]
        assert words in (outputs[-1].error or "")


async def test_a_failed_start_says_why():
    async with engine("fail") as client:
        with pytest.raises(EngineDead, match="no room for the KV cache"):
            await asyncio.wait_for(client.wait_ready(), 60)


async def test_progress_is_seen_while_loading_and_a_stuck_start_can_be_ended():
    async with engine("stall") as client:
        await until(lambda: client.progress is not None)
        assert client.progress is not None
        assert (client.progress.phase, client.progress.done, client.progress.total) == ("weights", 1, 2)
        client.kill()


async def test_an_id_in_use_is_refused():
    async with engine("slow") as client:
        await client.wait_ready()
        client.submit(request("a", [1, 2, 3]))
        with pytest.raises(ValueError, match="in use"):
            client.submit(request("a", [1]))


async def test_the_engine_ends_when_its_server_goes():
    client = EngineClient([sys.executable, str(SCRIPT), "echo"])
    await client.start()
    await client.wait_ready()
    assert client._channel is not None
    client._channel.close()
    await asyncio.wait_for(client.dead.wait(), 60)
    await client.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu", "max_model_len": 512}, "longer than the 256 positions"),
        ({"device": "cpu", "max_num_seqs": 600}, "at least max_num_seqs"),
        ({"device": "cpu", "max_model_len": 128, "kv_cache_memory_bytes": "1kB"}, "KV cache is too small"),
    ],
)
async def test_options_that_no_restart_can_help_are_told_apart(
    tmp_path: Path, options: dict[str, object], message: str
):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "vocab_size": 100,
                "max_position_embeddings": 256,
                "rms_norm_eps": 1e-5,
            }
        )
    )
    spec = json.dumps({"model": f"random:{config}", "options": options})
    client = EngineClient(engine_command(spec))
    await client.start()
    with pytest.raises(EngineDead, match=message):
        await asyncio.wait_for(client.wait_ready(), 200)  # torch alone takes long on a busy machine
    assert client.failure_is_permanent
    await client.shutdown()
