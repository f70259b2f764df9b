"""/v1/embeddings of a worker: bodies, answers and errors over a scripted engine."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.worker.fake_engine import (
    MODEL,
    POOLING,
    POOLING_INFO,
    FakeEngine,
    eventually,
    in_process,
    make_state,
)
from worker.server import embeddings
from worker.server.state import ServerState

URL = "/v1/embeddings"


def state_of(engine: FakeEngine | None = None, **options: Any) -> ServerState:
    return make_state(engine or FakeEngine(info=POOLING_INFO), **options)


async def ask(state: ServerState, **fields: Any) -> httpx.Response:
    async with in_process(state) as client:
        return await client.post(URL, json={"model": MODEL, **fields})


def unit(*numbers: float) -> Any:
    vector = np.array(numbers)
    return pytest.approx(vector / np.linalg.norm(vector), abs=1e-6)


async def test_answer() -> None:
    answer = (await ask(state_of(), input="abc")).json()
    assert answer["object"] == "list"
    assert answer["model"] == MODEL
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    (item,) = answer["data"]
    assert (item["object"], item["index"]) == ("embedding", 0)
    assert item["embedding"] == unit(3, ord("a"), 0, 0)


@pytest.mark.parametrize(
    ("value", "lengths"),
    [("abc", [3]), (["a", "bc"], [1, 2]), ([97, 98], [2]), ([[97], [98, 99, 100]], [1, 3])],
)
async def test_every_form_of_input(value: Any, lengths: list[int]) -> None:
    engine = FakeEngine(info=POOLING_INFO)
    answer = (await ask(state_of(engine), input=value)).json()
    assert [item["index"] for item in answer["data"]] == list(range(len(lengths)))
    assert [len(request.prompt_token_ids) for request in engine.submitted] == lengths
    assert {request.pooling for request in engine.submitted} == {"last"}
    assert answer["usage"]["prompt_tokens"] == sum(lengths)


async def test_base64_is_little_endian_float32() -> None:
    state = state_of()
    numbers = (await ask(state, input="abc")).json()["data"][0]["embedding"]
    coded = (await ask(state, input="abc", encoding_format="base64")).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == pytest.approx(numbers)


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("name", ["normalize", "use_activation"])
async def test_whether_vectors_have_length_1_is_the_model_s_word(name: str, normalizes: bool) -> None:
    pooling = msgspec.structs.replace(POOLING, normalize=normalizes)
    engine = FakeEngine(info=msgspec.structs.replace(POOLING_INFO, pooling=pooling))
    assert (await ask(state_of(engine), input="abc", **{name: normalizes})).status_code == 200
    response = await ask(state_of(engine), input="abc", **{name: not normalizes})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert f"must be {str(normalizes).lower()}" in response.json()["error"]["message"]


async def test_a_cut_vector() -> None:
    answer = (await ask(state_of(), input="abc", dimensions=2)).json()
    assert answer["data"][0]["embedding"] == unit(3, ord("a"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["ok", ""]}, "input[1]"),
        ({"input": ["ok", 5]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [258]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "dimensions": 3}, "dimensions"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 5}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "priority": 10**7}, "priority"),
        ({"input": "x", "cache_salt": "s" * 257}, "cache_salt"),
        ({"input": "x", "request_id": "a b"}, "request_id"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "padding": "max_length"}, "padding"),
        ({"input": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "x", "endianness": "big"}, "endianness"),
        ({"prompt": "x"}, "prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ],
)
async def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    response = await ask(state_of(), **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


async def test_what_says_what_is_so_anyway_is_accepted() -> None:
    fields = {
        "stream": False,
        "n": 1,
        "padding": "do_not_pad",
        "embed_dtype": "float32",
        "endianness": "native",
    }
    assert (await ask(state_of(), input="abc", **fields)).status_code == 200


async def test_ids_from_outside_may_repeat() -> None:
    state = state_of()
    answers = await asyncio.gather(
        *(ask(state, input="abc", request_id=name) for name in ("mine", "embd-mine"))
    )
    assert [answer.json()["id"] for answer in answers] == ["embd-mine", "embd-mine"]


async def test_as_long_as_the_context_and_no_longer() -> None:
    assert (await ask(state_of(), input="x" * 512)).status_code == 200
    response = await ask(state_of(), input=["short", "x" * 513])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_model_that_generates_names_the_option() -> None:
    response = await ask(make_state(), input="abc")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "wrong_runner"
    assert "--runner pooling" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/responses", {"input": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ],
)
async def test_a_model_for_embeddings_does_not_answer(path: str, fields: dict[str, Any]) -> None:
    engine = FakeEngine(info=POOLING_INFO)
    async with in_process(state_of(engine)) as client:
        response = await client.post(path, json={"model": MODEL, **fields})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "wrong_runner"
        assert not engine.submitted
        # Rollouts try every model by its next tokens.
        assert (await client.post("/generate", json={"model": MODEL, "prompt": "abc"})).status_code == 200


@pytest.mark.parametrize("format", ["float", "base64"])
async def test_many_vectors_are_written_on_a_thread(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    fields = {"input": [f"text {i}" for i in range(20)], "encoding_format": format}
    few = (await ask(state_of(), **fields)).json()
    monkeypatch.setattr(embeddings, "_MANY_NUMBERS", 1)
    many = (await ask(state_of(), **fields)).json()
    assert (many["data"], many["usage"]) == (few["data"], few["usage"])
    assert many.keys() == few.keys()


async def test_too_many_for_the_queue() -> None:
    engine = FakeEngine(info=POOLING_INFO, paused=True)
    state = state_of(engine, max_waiting=2)
    first = asyncio.create_task(ask(state, input=["x"] * 9))
    await eventually(lambda: engine.in_flight == 9)
    response = await ask(state, input=["x", "y"])
    assert response.status_code == 503
    assert response.headers["x-pagefleet-refused"] == "queue_full"
    engine.paused = False
    assert (await first).status_code == 200


async def test_what_it_used_is_in_the_header() -> None:
    async with in_process(state_of()) as client:
        response = await client.post(
            URL, json={"model": MODEL, "input": ["abc", "d"]}, headers={"x-pagefleet-usage": "bill-1"}
        )
        assert response.headers["x-pagefleet-usage"] == "4,0,0,stop"


async def test_abort_by_the_operator() -> None:
    engine = FakeEngine(info=POOLING_INFO, paused=True)
    state = state_of(engine)
    asking = asyncio.create_task(ask(state, input=["abc", "d"]))
    await eventually(lambda: engine.in_flight == 2)
    async with in_process(state) as client:
        assert (await client.post("/admin/abort")).json() == {"aborted": 1}
    response = await asking
    assert (response.status_code, response.json()["error"]["code"]) == (503, "request_aborted")
    assert engine.in_flight == 0
    assert not state.generations


async def test_a_client_that_leaves_ends_its_work() -> None:
    engine = FakeEngine(info=POOLING_INFO, paused=True)
    state = state_of(engine)
    asking = asyncio.create_task(ask(state, input=["abc"] * 3))
    await eventually(lambda: engine.in_flight == 3)
    asking.cancel()
    await eventually(lambda: engine.in_flight == 0)
    await eventually(lambda: not state.generations)


async def test_an_engine_that_dies() -> None:
    engine = FakeEngine(info=POOLING_INFO, paused=True)
    state = state_of(engine)
    asking = asyncio.create_task(ask(state, input=["abc"] * 3))
    await eventually(lambda: engine.in_flight == 3)
    engine.die()
    response = await asking
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_dead")
    assert not state.generations
