"""Tensors of etha.empty, which the members of a group read where they lie."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import etha
from tests.groups.team import Member, together
from tests.groups.test_collectives import options, reduced, rooted, tensor_of
from tests.processes import preload

preload("etha")
WINDOW = 1 << 16
NUMEL = 120_003


def shared(rank: int, numel: int = NUMEL) -> torch.Tensor:
    found = etha.empty((numel,))
    found.copy_(tensor_of(rank, numel))
    return found


def ways(group: Any) -> list[str]:
    """The variants of the calls from now on."""
    engine: Any = importlib.import_module("etha.groups.host.engine")
    seen: list[str] = []
    real = engine.program

    def program(*args: Any, **options: Any) -> Any:
        seen.append(options["variant"].value)
        return real(*args, **options)

    engine.program = program
    return seen


def all_calls(member: Member) -> None:
    group = member.configured(window=WINDOW)
    seen = ways(group)
    n, me = member.size, member.rank
    mine = shared(me)
    for _ in range(3):
        mine.copy_(tensor_of(me, NUMEL))
        group.allreduce([mine]).wait()
        assert torch.equal(mine, reduced("SUM", NUMEL, n))
    several = [shared(me), shared(me + 0, 7), shared(me, 40_001)]
    group.allreduce_coalesced(several).wait()
    assert all(torch.equal(each, reduced("SUM", each.numel(), n)) for each in several)
    mine.copy_(tensor_of(me, NUMEL))
    group.reduce([mine], options(dist.ReduceOptions, "MAX", 1 % n)).wait()
    assert torch.equal(mine, reduced("MAX", NUMEL, n) if me == 1 % n else tensor_of(me, NUMEL))
    group.broadcast([mine], rooted(dist.BroadcastOptions, 1 % n)).wait()
    assert torch.equal(mine, reduced("MAX", NUMEL, n))
    mine.copy_(tensor_of(me, NUMEL))
    outs = [torch.zeros(NUMEL) for _ in range(n)]
    group.allgather([outs], [mine]).wait()
    assert all(torch.equal(out, tensor_of(s, NUMEL)) for s, out in enumerate(outs))
    pieces = [shared(me * n + d) for d in range(n)]
    group.alltoall(outs, pieces).wait()
    assert all(torch.equal(out, tensor_of(s * n + me, NUMEL)) for s, out in enumerate(outs))
    out = torch.zeros(NUMEL)
    group.reduce_scatter([out], [pieces]).wait()
    assert torch.equal(out, sum((tensor_of(s * n + me, NUMEL) for s in range(n)), torch.zeros(NUMEL)))
    assert set(seen) == ({"in_place"} if n > 1 else {"windows"})
    group.shutdown()


def mixed(member: Member) -> list[str]:
    """One member's tensor is plain: all go through the windows. New segments are mapped when they come."""
    group = member.configured(window=WINDOW)
    seen = ways(group)
    for turn in range(4):
        plain = turn == 1 and member.rank == 1
        mine = tensor_of(member.rank, NUMEL) if plain else shared(member.rank)
        group.allreduce([mine]).wait()
        assert torch.equal(mine, reduced("SUM", NUMEL, member.size))
    group.configure(f"{member.address}/again", "r", member.rank, member.size)
    group.allreduce([mine]).wait()
    group.shutdown()
    return seen


def unreadable(member: Member) -> list[str]:
    """A member that cannot open the others' memory, as in a container: all go through the windows from then on."""
    group = member.configured(window=WINDOW)
    if member.rank == 1:
        for each in group._engine._places.values():
            each._pid = 0
    seen = ways(group)
    for _ in range(3):
        mine = shared(member.rank)
        group.allreduce([mine]).wait()
        assert torch.equal(mine, reduced("SUM", NUMEL, member.size))
    group.shutdown()
    return seen


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_call_reads_in_place(size: int) -> None:
    together(size, all_calls)


def test_one_plain_tensor_sends_all_through_the_windows() -> None:
    assert set(map(tuple, together(2, mixed).values())) == {("in_place", "windows", "in_place", "in_place", "in_place")}


def test_a_member_that_cannot_map_sends_all_through_the_windows() -> None:
    assert set(map(tuple, together(3, unreadable).values())) == {("windows", "windows", "windows")}
