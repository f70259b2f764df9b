"""Forms with the real model through the worker's server, at temperature 1: what comes has the form."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.worker.real_worker import RealWorker, real_worker, wait_until

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{2}$"},
        "title": {"type": "string", "minLength": 2, "maxLength": 16},
        "status": {"enum": ["open", "done", None]},
        "labels": {"type": "array", "items": {"enum": ["bug", "docs"]}, "minItems": 1, "maxItems": 2},
        "owner": {"$ref": "#/$defs/person"},
        "points": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 13}, {"type": "null"}]},
    },
    "required": ["id", "title", "status", "labels", "owner", "points"],
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {
                "email": {"type": "string", "pattern": "^[a-z]{2,6}@[a-z]{2,6}[.](com|org)$"},
                "active": {"type": "boolean"},
            },
            "required": ["email", "active"],
            "additionalProperties": False,
        }
    },
}
ASK = [{"role": "user", "content": "Make up a ticket as JSON."}]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[RealWorker]:
    options = ("--max-model-len", "1024", "--max-num-seqs", "16")
    with real_worker(tmp_path_factory.mktemp("worker"), demo_model, *options) as running:
        running.client.timeout = httpx.Timeout(500)
        yield running


def chat(worker: RealWorker, **fields: Any) -> dict[str, Any]:
    response = worker.post("/v1/chat/completions", messages=ASK, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_every_document_is_valid(worker: RealWorker) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "ticket", "strict": True, "schema": SCHEMA}}
    body = chat(worker, response_format=format, n=12, seed=1, temperature=1, max_tokens=500)
    texts = {choice["message"]["content"] for choice in body["choices"]}
    assert len(texts) == 12
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}


def test_a_stream_is_the_whole_answer(worker: RealWorker) -> None:
    fields: dict[str, Any] = {"guided_regex": "[a-z]{3,9} (und|et) [a-z]{3,9}[.]", "seed": 3}
    whole = chat(worker, **fields)["choices"][0]["message"]["content"]
    response = worker.post("/v1/chat/completions", messages=ASK, stream=True, **fields)
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(item)["choices"][0] for item in data[:-1]]
    assert data[-1] == "[DONE]"
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole
    assert re.fullmatch(fields["guided_regex"], whole)
    assert chunks[-1]["finish_reason"] == "stop"


async def test_answers_without_a_form_are_what_they_are_alone(worker: RealWorker) -> None:
    """In one batch with answers of all kinds of forms."""
    grammar = 'root ::= number (" + " number){2,4}\nnumber ::= [1-9] [0-9]?'
    forms: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"choice": ["Köln", "Zürich", "São Paulo"]}}, "Köln|Zürich|São Paulo"),
        ({"structured_outputs": {"grammar": grammar}}, "[1-9][0-9]?( [+] [1-9][0-9]?){2,4}"),
        ({"structured_outputs": {"regex": "(ja|nein){2}"}}, "(ja|nein){2}"),
        ({}, r"(?s).*"),
        ({}, r"(?s).*"),
    ]
    bodies = [
        {"model": "tiny", "messages": ASK, "seed": seed, "temperature": 1, "max_tokens": 24, **fields}
        for seed, (fields, _) in enumerate(forms)
    ]
    async with worker.async_client() as client:
        client.timeout = httpx.Timeout(500)

        async def answer(body: dict[str, Any]) -> str:
            response = await client.post("/v1/chat/completions", json=body)
            return str(response.json()["choices"][0]["message"]["content"])

        alone = [await answer(body) for body in bodies]
        together = await asyncio.gather(*map(answer, bodies))
    assert together == alone
    for text, (_, pattern) in zip(together, forms):
        assert re.fullmatch(pattern, text), text


def test_any_object_and_a_client_that_leaves(worker: RealWorker) -> None:
    body = chat(worker, response_format={"type": "json_object"}, max_tokens=40)
    assert body["choices"][0]["message"]["content"].startswith("{")
    long = {"type": "array", "items": {"type": "integer"}, "minItems": 300}
    fields = {"model": "tiny", "messages": ASK, "stream": True, "max_tokens": 900, "guided_json": long}
    with worker.client.stream("POST", "/v1/chat/completions", json=fields) as response:
        assert next(response.iter_lines()).startswith("data: ")
    wait_until(lambda: not worker.busy())


def test_a_bad_schema_is_refused_and_the_checking_process_ends_with_the_worker(worker: RealWorker) -> None:
    response = worker.post("/v1/chat/completions", messages=ASK, guided_json={"type": "strnig"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "guided_json"
    children = worker.server.children(recursive=True)
    assert any("worker.grammar.checker" in child.cmdline() for child in children)
    worker.process.kill()
    wait_until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
