"""A team: the workers of both sides of pair "weights", formed once for all tests that only need batches.

A process costs a second, a batch a few milliseconds: each test runs functions of its own in the
same workers and registers batches of its own.

    def swap(me: Seat) -> ...: ...              # a module-level function of the test's module
    returned = team.run(swap)                   # {"trainer": [rank 0's, rank 1's], "inference": [...]}
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import etha
from etha.errors import EthaError, PeerLostError
from tests.flow.jobs import Job, Worker, WorkerFailed, tell, wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a function of a test runs: one worker of one side, its client, its pair "weights"."""

    client: etha.TensorBusClient
    side: str
    remote: str
    rank: int
    world: int

    @property
    def sends(self) -> bool:
        """Whether this is the trainer."""
        return self.side == "trainer"

    def move(self, batch: str, tensors: Any, *, version: int | str | None = None, **options: Any) -> Any:
        """Register, send as the trainer or receive as the other, close; the transfer's result."""
        if isinstance(tensors, Mapping):
            options = {"pair_name": "weights", **options}
        with self.client.register_tensors(batch, tensors, **options) as handle:
            if self.sends:
                return handle.transfer("send", version=version)
            return handle.transfer("recv")


def _member(rank: int, world: int, side: str, remote: str) -> None:
    with etha.TensorBusClient(timeout=15) as client:
        client.init_pair("weights", side, remote, world, device_mesh=(world,), rank=rank)
        me = Seat(client=client, side=side, remote=remote, rank=rank, world=world)
        tell("ready")
        while (work := wait_for("work")) is not None:
            function, args = work
            try:
                tell("worked", ("returned", function(me, *args), ""))
            except BaseException as error:
                tell("worked", ("raised", error, traceback.format_exc()))


class Team:
    """``sides``: the two sides and their numbers of workers."""

    def __init__(self, job: Job, **sides: int) -> None:
        (a, n), (b, m) = sides.items()
        self.job = job
        #: Whether a test has failed: some workers may still be in the midst of it.
        self.spoilt = False
        self.workers: dict[str, list[Worker]] = {a: job.side(a, _member, n, a, b), b: job.side(b, _member, m, b, a)}
        for worker in self._all():
            worker.expect("ready")

    def _all(self) -> list[Worker]:
        return [worker for workers in self.workers.values() for worker in workers]

    def run(self, function: Callable[..., Any], *args: Any) -> dict[str, list[Any]]:
        """``function(seat, *args)`` in every worker; what they returned, or an error, rather a cause than an effect."""
        self.spoilt = True
        for worker in self._all():
            worker.go("work", (function, args))
        errors: list[BaseException] = []
        returned: dict[str, list[Any]] = {}
        for side, workers in self.workers.items():
            returned[side] = []
            for rank, worker in enumerate(workers):
                how, value, text = worker.expect("worked")
                if how == "raised":
                    errors.append(
                        value if isinstance(value, EthaError) else WorkerFailed(f"{side} rank {rank}: {text}")
                    )
                returned[side].append(value)
        if errors:
            raise min(errors, key=lambda error: isinstance(error, EthaError) + isinstance(error, PeerLostError))
        self.spoilt = False
        return returned

    def end(self) -> None:
        """Close the clients; an error of that is a failure of the last test."""
        if self.spoilt:
            return
        for worker in self._all():
            worker.go("work")
        for worker in self._all():
            worker.result()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaNs and signs of zero compare too."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
