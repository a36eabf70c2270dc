"""Every outcome is said as it is, whatever happens to a transfer at whatever moment; the long run is in tests/proof."""

from __future__ import annotations

import pytest

from tests.flow.endurance.chaos import Chaos
from tests.flow.sides import Sides
from tests.flow.sites import Site


@pytest.mark.ways("tcp", "local", reason="host shares all that is disturbed here with tcp; tests/proof runs it")
@pytest.mark.parametrize("atomic", [True, pytest.param(False, marks=pytest.mark.proof)])
async def test_disturbed_transfers_end_alike_for_all(rough: Site, pair: str, atomic: bool) -> None:
    async with Sides(rough, pair, trainer=2, inference=2, timeout=20) as sides:
        chaos = Chaos(sides, atomic=atomic, seed=7, share=0.5)
        await chaos.run(20)
        assert chaos.counts["result"] > 4 * 10
