"""Random transfers over tensors that share memory, by real agents; 20,000 of them by `make proof`."""

from __future__ import annotations

import pytest

from tests.flow.endurance.sharing import play
from tests.flow.sites import Site

#: On each way.
TRANSFERS = 100


@pytest.mark.ways("local", "host", "tcp", "three")
async def test_whatever_shares_memory_arrives(site: Site) -> None:
    assert await play(site, 0, TRANSFERS) == TRANSFERS
