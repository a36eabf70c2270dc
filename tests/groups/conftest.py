"""What tests of elastic groups share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.flow import nursery


@pytest.fixture(scope="module")
def agents() -> Iterator[None]:
    """Agents are forked from a process that has torch."""
    if nursery.address() is not None:
        yield
        return
    nursery.open_nursery()
    yield
    nursery.close_nursery()
