"""Two agents in one Redis: the pair forms, and a batch that would need a link between them is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.errors import RegistrationError

from .conftest import private_directory


async def test_a_batch_over_two_agents_is_refused_by_name(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with private_directory() as first, private_directory() as second:
        async with etha.AsyncTensorBusClient() as one:
            redis = (await one.status(timeout=60))["agent"]["redis"]
        monkeypatch.setenv("ETHA_REDIS_URL", redis)
        clients = {}
        for side, directory in (("trainer", first), ("inference", second)):
            monkeypatch.setenv("ETHA_RUNTIME_DIR", str(directory))
            clients[side] = etha.AsyncTensorBusClient()
            await clients[side].status(timeout=60)
        try:
            sides = {"trainer": "inference", "inference": "trainer"}
            pairs = await asyncio.gather(
                *(c.init_pair("w", s, sides[s], 1, (1,), [Replicate()], rank=0) for s, c in clients.items())
            )
            assert {pair.epoch for pair in pairs} == {1}
            found = await asyncio.gather(
                *(c.register_tensors("b", {"w": torch.zeros(3)}, pair_name="w") for c in clients.values()),
                return_exceptions=True,
            )
            for error in found:
                assert isinstance(error, RegistrationError)
                (violation,) = error.violations
                assert violation.code == "unsupported" and "2 agents" in violation.text
        finally:
            for client in clients.values():
                await client.close()
