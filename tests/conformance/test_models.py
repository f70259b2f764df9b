"""The list of models and the pages around it."""

from __future__ import annotations

import httpx
import openai
import pytest
from openai import OpenAI

from tests.conformance.conftest import MODEL

pytestmark = pytest.mark.model


def test_list(client: OpenAI) -> None:
    page = client.models.list()
    assert page.object == "list"
    assert [model.id for model in page] == [MODEL]
    (model,) = page.data
    assert model.object == "model"
    assert isinstance(model.created, int)
    assert model.owned_by


def test_retrieve(client: OpenAI) -> None:
    assert client.models.retrieve(MODEL) == client.models.list().data[0]


def test_retrieve_unknown(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("path", ["/health", "/ready", "/version"])
def test_state_of_the_process(http: httpx.Client, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 200
    response.json()


def test_metrics_have_the_project_s_prefix(http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    assert "\npagefleet_" in response.text
