"""The libraries that every test of this folder runs with. The compiled one is built once for the session, elsewhere."""

from __future__ import annotations

import pytest

from etha.native import NativeLibrary
from tests.unit.native import libraries


@pytest.fixture(params=libraries.NAMES)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    """Each implementation in turn; skipped where there is no compiler."""
    found = libraries.get(request.param)
    if found is None:
        pytest.skip("no C compiler (cc) on the path")
    return found
