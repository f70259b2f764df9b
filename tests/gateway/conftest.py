"""Tests of the gateway's data plane run on uvloop, as the gateway does; the rest on asyncio's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

_ON_UVLOOP = ("upstream", "proxy", "streams", "retry", "disconnect", "app", "server", "auth")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.stem.removeprefix("test_") in _ON_UVLOOP:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
