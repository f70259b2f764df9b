"""One nursery for all tests that need it: it takes a second to load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.nursery import Nursery, nursery


@pytest.fixture(scope="session")
def made() -> Iterator[Nursery]:
    with nursery() as made:
        yield made
