"""The long proof of transfers over tensors that share memory: `make proof`.

20,000 transfers by real agents, 5,000 on each way, in worlds of 40 whose seeds are "WAY-1000" to "WAY-1124";
ETHA_PROOF_TRANSFERS sets how many on each way. A failure names the seed of its batch.
"""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.flow.endurance.sharing import BATCHES, TURNS, play
from tests.flow.sites import open_site
from tests.flow.ways import Way

TRANSFERS = int(os.environ.get("ETHA_PROOF_TRANSFERS", "5000"))
FIRST, SLICE = 1000, 1000


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", list(Way), ids=str)
def test_whatever_shares_memory_arrives(way: Way, capsys: pytest.CaptureFixture[str]) -> None:
    done = 0
    with open_site(way) as site:
        while done < TRANSFERS:
            done += asyncio.run(play(site, FIRST + done // (BATCHES * TURNS), min(SLICE, TRANSFERS - done)))
            with capsys.disabled():
                print(f"\n{way}: {done} of {TRANSFERS} transfers, all exact", end="", flush=True)
    assert done == TRANSFERS
