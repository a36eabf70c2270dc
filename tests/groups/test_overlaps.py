"""Outputs that share memory with inputs: the results are those of separate tensors, on all members."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import etha
from tests.groups.team import Member, together
from tests.groups.test_collectives import rooted, tensor_of
from tests.processes import preload

preload("etha")


def overlapping(member: Member, mapped: bool, numel: int) -> list[str]:
    """The calls whose results are wrong."""
    group = member.configured()
    n, me = member.size, member.rank

    def new(count: int) -> torch.Tensor:
        return etha.empty((count,)).zero_() if mapped else torch.zeros(count)

    def pieces() -> list[torch.Tensor]:
        """What this member gives each rank."""
        found = [new(numel) for _ in range(n)]
        for d, piece in enumerate(found):
            piece.copy_(tensor_of(me * n + d, numel))
        return found

    def of_each(rank: int) -> list[torch.Tensor]:
        return [tensor_of(s * n + rank, numel) for s in range(n)]

    wrong: list[str] = []

    def check(name: str, got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        if not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)):
            wrong.append(name)

    everybody = [tensor_of(s, numel) for s in range(n)]
    # The own tensor is another rank's slot.
    outs = [new(numel) for _ in range(n)]
    mine = outs[(me + 1) % n].copy_(tensor_of(me, numel))
    group.allgather([outs], [mine]).wait()
    check("allgather", outs, everybody)

    # Input and output are shifted against each other in one block.
    block = new((n + 2) * numel)
    mine = block[numel // 2 : numel // 2 + numel].copy_(tensor_of(me, numel))
    out = block[1 : 1 + n * numel]
    group.all_gather_single(out, mine).wait()
    check("all_gather_single", [out], [torch.cat(everybody)])

    block = new(n * numel + 7)
    block[: n * numel] = torch.cat([tensor_of(me * n + d, numel) for d in range(n)])
    out = block[me * numel + 5 : me * numel + 5 + numel]
    group.reduce_scatter_single(out, block[: n * numel]).wait()
    check("reduce_scatter_single", [out], [torch.stack(of_each(me)).sum(0)])

    given = pieces()
    out = given[(me + 1) % n]
    group.reduce_scatter([out], [given]).wait()
    check("reduce_scatter", [out], [torch.stack(of_each(me)).sum(0)])

    given = pieces()
    group.alltoall(given[::-1], given).wait()
    check("alltoall", given[::-1], of_each(me))

    outs = [new(numel) for _ in range(n)] if me == 0 else []
    mine = (outs[-1] if me == 0 else new(numel)).copy_(tensor_of(me, numel))
    group.gather([outs] if me == 0 else [], [mine], rooted(dist.GatherOptions, 0)).wait()
    check("gather", outs, everybody if me == 0 else [])

    given = pieces() if me == 0 else []
    out = given[-1] if me == 0 else new(numel)
    group.scatter([out], [given] if me == 0 else [], rooted(dist.ScatterOptions, 0)).wait()
    check("scatter", [out], [tensor_of(me, numel)])

    # The own piece of the other tensor, exactly: nothing needs to be copied.
    block = new(n * numel)
    mine = block[me * numel : (me + 1) * numel].copy_(tensor_of(me, numel))
    group.all_gather_single(block, mine).wait()
    check("all_gather_single in place", [block], [torch.cat(everybody)])
    block.copy_(torch.cat([tensor_of(me * n + d, numel) for d in range(n)]))
    out = block[me * numel : (me + 1) * numel]
    group.reduce_scatter_single(out, block).wait()
    check("reduce_scatter_single in place", [out], [torch.stack(of_each(me)).sum(0)])
    group.shutdown()
    return wrong


@pytest.mark.parametrize("mapped", [False, True], ids=["private", "etha.empty"])
@pytest.mark.parametrize("numel", [1_000, 150_000, 1_000_001])
@pytest.mark.parametrize("size", [2, 3])
def test_outputs_that_overlap_inputs(size: int, numel: int, mapped: bool) -> None:
    assert together(size, overlapping, mapped, numel) == {rank: [] for rank in range(size)}


def test_outputs_that_overlap_inputs_between_hosts() -> None:
    assert together(2, overlapping, False, 150_000, hosts=(0, 1)) == {0: [], 1: []}
