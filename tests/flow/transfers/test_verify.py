"""verify="sample" | "full": what is right passes, a bit that flips on the wire or in memory aborts for all.

Bits flip inside agents: processes of the test that are agents, with one function of theirs replaced. Each does
its harm in the first transfer only, so that the next one shows that nothing else is wrong.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import etha
from etha.errors import EthaError, TransferError
from tests.flow.jobs import Job, tell
from tests.flow.sides import Sides
from tests.flow.sites import Site, open_site
from tests.flow.team import bits
from tests.flow.truth import cut, stale, whole
from tests.flow.ways import Way

SHAPE = (1024, 770)

# ---- what is right ------------------------------------------------------------------------------


def special(shape: tuple[int, ...]) -> torch.Tensor:
    """Values that casts treat each in a way of its own: NaNs of several kinds, infinities, zeros, tiny ones."""
    some = torch.tensor([float("nan"), -float("nan"), float("inf"), -0.0, 1e-42, 65504.0, 1e30, -3.14159])
    odd = torch.tensor([0x7FC12345, -0x3FFFF1], dtype=torch.int32).view(torch.float32)
    every = torch.cat([some, odd])
    return every.repeat(-(-torch.Size(shape).numel() // len(every)))[: torch.Size(shape).numel()].reshape(shape)


#: name -> (global shape, the trainer's dtype and placement, the other side's)
GOOD: dict[str, tuple[tuple[int, ...], torch.dtype, Any, torch.dtype, Any]] = {
    "uneven": ((1031, 517), torch.float32, Shard(0), torch.float32, Shard(1)),
    "empty": ((1, 6), torch.float32, Shard(0), torch.float32, Shard(0)),
    "nothing": ((0, 4), torch.float32, Shard(0), torch.float32, Shard(1)),
    "a number": ((), torch.float64, Replicate(), torch.float64, Replicate()),
    "narrower": ((301, 70), torch.float32, Shard(0), torch.bfloat16, Shard(1)),
    "wider": ((301, 70), torch.float16, Shard(1), torch.float32, Replicate()),
    "sideways": ((301, 70), torch.float16, Replicate(), torch.bfloat16, Shard(0)),
    "tiny": ((33, 7), torch.float32, Shard(0), torch.float8_e4m3fn, Shard(0)),
    "sums": ((640, 300), torch.float32, Partial("sum"), torch.float32, Shard(0)),
    "averages": ((200, 77), torch.bfloat16, Partial("avg"), torch.float32, Replicate()),
    "int8": ((301, 70), torch.int8, Shard(0), torch.int8, Shard(1)),
    "float8": ((301, 70), torch.float8_e4m3fn, Shard(1), torch.float8_e4m3fn, Shard(0)),
    "exponents": ((33, 7), torch.float8_e8m0fnu, Shard(0), torch.float8_e8m0fnu, Shard(1)),
    "integers": ((64, 64), torch.int16, Shard(0), torch.int64, Shard(1)),
}


def given(name: str, side: str, rank: int) -> torch.Tensor:
    """What a rank of two registers: a sender's contributions are halves, so that their sum is what it seems."""
    shape, source, here, target, there = GOOD[name]
    dtype, placement = (source, here) if side == "trainer" else (target, there)
    full = special(shape) if source.is_floating_point and not isinstance(here, Partial) else whole(shape) % 1000
    mine = cut(full, placement.dim, 2, rank) if isinstance(placement, Shard) else full.clone()
    return mine.to(source).to(dtype)


def expected(name: str, rank: int) -> torch.Tensor:
    """What an inference rank receives."""
    _, source, here, target, _ = GOOD[name]
    if not isinstance(here, Partial):
        return given(name, "inference", rank)
    both = given(name, "inference", rank).to(torch.float32)
    return (both * 2 if here.reduce_op == "sum" else both).to(source).to(target)


@pytest.mark.ways("tcp", "local", "host", "three")
@pytest.mark.parametrize("verify", ["full", "sample"])
async def test_what_is_right_passes(site: Site, pair: str, verify: str) -> None:
    """Casts, NaNs, uneven and empty shards, reductions; several transfers, so that a sample sees several chunks."""
    async with Sides(site, pair, trainer=2, inference=2) as sides:
        await sides.meet(device_mesh=(2,))
        tensors = {
            m: {name: given(name, *m) if m[0] == "trainer" else stale(given(name, *m)) for name in GOOD}
            for m in sides.members
        }
        lay = {"trainer": {n: [case[2]] for n, case in GOOD.items()}, "inference": {n: [c[4]] for n, c in GOOD.items()}}
        shapes = {name: case[0] for name, case in GOOD.items()}
        handles = await sides.register(
            "b",
            lambda side, rank: (
                tensors[side, rank],
                {
                    "placements": lay[side],
                    "shapes": shapes,
                    # The strongest of any rank counts.
                    "verify": verify if (side, rank) == ("trainer", 1) else None,
                },
            ),
        )
        assert all(handle.plan["verify"] == verify for handle in handles.values())
        for _ in range(3):
            found = await sides.move(handles)
            assert not [error for error in found.values() if isinstance(error, EthaError)], found
            for rank in range(2):
                for name in GOOD:
                    got, right = tensors["inference", rank][name], expected(name, rank)
                    nans = torch.isnan(right.double())
                    assert torch.equal(torch.isnan(got.double()), nans), name
                    assert torch.equal(bits(got.double()[~nans]), bits(right.double()[~nans])), name
                    got.fill_(7)


@pytest.mark.ways("local")
async def test_in_place_is_verified_although_the_source_is_gone(site: Site, pair: str) -> None:
    """One memory is source and target: its sums are taken before it is overwritten."""
    full = whole(SHAPE)
    async with Sides(site, pair, trainer=1, inference=1) as sides:
        await sides.meet(device_mesh=(1,), placements=[Shard(0)])
        memory = full.clone()
        views = {"trainer": {"a": memory[:512], "b": memory[512:]}, "inference": {"a": memory[512:], "b": memory[:512]}}
        handles = await sides.register("b", lambda side, rank: (views[side], {"verify": "full", "direction": None}))
        found = await sides.move(handles)
        assert not [error for error in found.values() if isinstance(error, EthaError)], found
        assert torch.equal(memory, torch.cat([full[512:], full[:512]]))


# ---- what is not --------------------------------------------------------------------------------


def in_memory() -> None:
    """This agent flips a bit of the first target that it has written, before that is looked at."""
    from etha.agent.runtime.verification import TransferVerification

    after = TransferVerification.after
    harmed: list[TransferVerification] = []

    async def harm(self: TransferVerification) -> None:
        if not harmed and (targets := self._checks._reads._views["target"]):
            harmed.append(self)
            view = targets[min(targets)][0]
            assert view.raw is not None, "the target of this test is in shared memory"
            raw = view.raw.view(torch.uint8)
            raw[raw.numel() // 3] ^= 4
        await after(self)

    TransferVerification.after = harm  # type: ignore[method-assign]


def on_the_wire() -> None:
    """This agent sends one bit wrong."""
    from etha.transport.tcp.streams import SendStream

    straight = SendStream._straight
    harmed: list[SendStream] = []

    def harm(memory: memoryview, outlet: SendStream) -> memoryview:
        if not harmed:
            harmed.append(outlet)
            memory = memoryview(bytearray(memory))
            memory[len(memory) // 3] ^= 4
        return memory

    def from_memory(self: SendStream, exchange: Any, span: Any, memory: memoryview) -> None:
        straight(self, exchange, span, harm(memory, self))

    def from_chunk(self: SendStream, exchange: Any, span: Any) -> None:
        memory, ops = self._pack(exchange, span)
        with self.owner.copy_slots.one() as copy_slot, copy_slot.inside(exchange.guards, span.owners):
            copy_slot.run(ops)
        self.sock.sendall(harm(memory, self))

    SendStream._straight, SendStream._packed = from_memory, from_chunk  # type: ignore[method-assign]


def forbidden() -> None:
    """This agent fails where it verifies anything."""
    from etha.agent.runtime.verification import TransferVerification
    from etha.transport.verify import checksums, reduction_sums

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("nobody has asked for checksums")

    TransferVerification.__init__ = never  # type: ignore[method-assign]
    checksums.checksum = reduction_sums.checksum = never  # type: ignore[assignment, attr-defined]


def agent(harm: Callable[[], None]) -> int:
    """An agent as autostart runs it, with ``harm`` done to it; tells when it can be connected to."""
    from etha.agent.__main__ import main

    harm()
    ready, ours = os.pipe()

    def wait() -> None:
        tell("ready", os.read(ready, 100))
        os.close(ready)

    threading.Thread(target=wait).start()
    return main(["--ready-fd", str(ours)])


@contextmanager
def harmed(way: Way, place: str, harm: Callable[[], None]) -> Iterator[Site]:
    """A site whose agent at ``place`` is such a one; the others are started by who needs them."""
    with open_site(way) as site, Job(site.at(place)) as job:
        worker = job.start(agent, harm)
        assert worker.expect("ready") == b"ready\n"
        yield site
        worker.kill(signal.SIGTERM)
        assert worker.result() == 0


@asynccontextmanager
async def batch(site: Site, *, atomic: bool, verify: str | None) -> AsyncIterator[tuple[Sides, Any, Any, Any]]:
    """Rows to columns, two ranks each; targets in shared memory. (sides, handles, tensors, what is right)."""
    async with Sides(site, "weights", trainer=2, inference=2) as sides:
        await sides.meet(device_mesh=(2,), trainer={"placements": [Shard(0)]}, inference={"placements": [Shard(1)]})
        right = {m: cut(whole(SHAPE), 0 if m[0] == "trainer" else 1, 2, m[1]) for m in sides.members}
        tensors = {}
        for m, mine in right.items():
            tensors[m] = mine.clone() if m[0] == "trainer" else etha.empty(tuple(mine.shape)).fill_(77)
        options = {"shapes": {"w": SHAPE}, "atomic": atomic, "verify": verify}
        handles = await sides.register("b", lambda side, rank: ({"w": tensors[side, rank]}, options))
        assert not [error for error in handles.values() if isinstance(error, EthaError)], handles
        yield sides, handles, tensors, right


async def caught(site: Site, atomic: bool, rank: str) -> None:
    """One transfer that is aborted for all with the place of the harm, and a next one that is right."""
    async with batch(site, atomic=atomic, verify="full") as (sides, handles, tensors, right):
        found = await sides.move(handles)
        for (side, _), error in found.items():
            assert isinstance(error, TransferError), found
            assert error.outcome == "aborted"
            assert error.torn == (side == "inference" and not atomic)
        [text] = {str(error).partition("verify: ")[2] for error in found.values()}
        assert text.startswith("tensor 'w' chunk ["), text
        assert f"] of inference rank {rank}" in text and "is not what trainer rank " in text
        if atomic:
            assert all(bool((tensors["inference", r] == 77).all()) for r in range(2))
        found = await sides.move(handles)
        assert not [error for error in found.values() if isinstance(error, EthaError)], found
        for m, mine in right.items():
            assert torch.equal(tensors[m], mine), m


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
async def test_a_bit_that_flips_in_shared_memory_aborts_for_all(way: Way, atomic: bool) -> None:
    with harmed(way, way.place("inference", 0), in_memory) as site:
        await caught(site, atomic, "0")


@pytest.mark.ways("tcp", "three")
@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
async def test_a_bit_that_flips_on_the_wire_aborts_for_all(way: Way, atomic: bool) -> None:
    with harmed(way, way.place("trainer", 1), on_the_wire) as site:
        await caught(site, atomic, "")


async def test_what_is_not_verified_costs_nothing(way: Way) -> None:
    """No checksum is made and no inspection begins; with verify= this very agent fails."""
    with harmed(way, way.place("inference", 0), forbidden) as site:
        async with batch(site, atomic=False, verify=None) as (sides, handles, tensors, right):
            found = await sides.move(handles)
            assert not [error for error in found.values() if isinstance(error, EthaError)], found
            assert torch.equal(tensors["inference", 1], right["inference", 1])
