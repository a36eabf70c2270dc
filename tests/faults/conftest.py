"""The casts of the fault matrix, one a way; a test that fails gets the next one a new cast."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.flow.conftest import agents
from tests.flow.sites import environment
from tests.flow.ways import Way

from .cast import Cast

__all__ = ["agents"]


class Theatre:
    """The cast of each way."""

    def __init__(self) -> None:
        self._casts: dict[str, Cast] = {}

    def cast(self, way: str) -> Cast:
        """Made when first asked for."""
        if way not in self._casts:
            self._casts[way] = Cast(Way(way))
        return self._casts[way]

    def dismiss(self, way: str) -> None:
        """Nobody knows in what state this cast is."""
        if way in self._casts:
            self._casts.pop(way).close()

    def close(self) -> None:
        for way in list(self._casts):
            self.dismiss(way)


@pytest.fixture(scope="session")
def theatre() -> Iterator[Theatre]:
    with environment({}):
        found = Theatre()
        try:
            yield found
        finally:
            found.close()
