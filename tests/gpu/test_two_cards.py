"""Two cards of one host: the receiving agent reads the other card's memory itself, where there is peer access."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from etha.cuda.select import driver

from . import ON_A_CARD, acts
from .company import Company
from .world import World

pytestmark = [*ON_A_CARD, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this takes two GPUs")]


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"verify": "full"}], ids=["plain", "atomic", "verified"])
def test_every_kind_arrives(directory: Path, options: dict[str, Any]) -> None:
    one, two = (device.uuid for device in driver().devices()[:2])
    reached = driver().peers(two, one)
    with World(directory, played=False) as world:
        company = Company(world, trainer="cuda:0", inference="cuda:1")
        company.all(acts.register, "b", 24, "trainer", options)
        for version in (1, 2):
            company.all(acts.move, "b", version)
        ways = {b["transport"] for s in company.all(acts.status) for b in s["batches"]}
        print(f"\npeer access {reached}: {ways}")
        assert ways == {"host"} or not reached
        company.end()
