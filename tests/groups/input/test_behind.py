"""Steps in which a member is behind: the others' results are those of the others alone, in every kind of call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from etha.groups.managed import ManagedProcessGroup
from tests.groups.team import Member, together
from tests.processes import preload

preload("etha.groups.host.etha_group", "etha.groups.managed")


class Crew:
    """What a managed group asks of its Members."""

    timeout = 30.0

    def manage(self, group: Any) -> None:
        self.group = group


def options(kind: type[Any], **fields: Any) -> Any:
    found = kind()
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def every_call(member: Member) -> None:
    """Rank 2 is behind: what it gives (1000) is in no result."""
    group = ManagedProcessGroup(Crew())
    group.enter_epoch(f"{member.address}/x", f"r{member.rank}", member.rank, 3, 1)
    group.set_participants(2)
    behind, me = member.rank == 2, group.rank()
    assert (group.size(), me) == (2, min(member.rank, 1))
    base = 1000.0 if behind else 10.0 * (member.rank + 1)  # 10 and 20 count

    def given(more: float = 0.0) -> torch.Tensor:
        return torch.full((3,), base + more)

    for op, expected in ((dist.ReduceOp.SUM, 30.0), (dist.ReduceOp.AVG, 15.0), (dist.ReduceOp.MAX, 20.0)):
        out = torch.zeros(3)
        opts = options(dist.ReduceScatterOptions, reduceOp=op)
        group.reduce_scatter([out], [[given(), given()]], opts).wait()
        assert out.tolist() == [expected] * 3, (op, out)
        single = torch.zeros(3)
        group.reduce_scatter_single(single, torch.cat([given(), given()]), opts).get_future().wait()
        assert single.tolist() == [expected] * 3
    for dtype, expected in ((torch.float8_e4m3fn, 15.0), (torch.float16, 15.0), (torch.int32, 15)):
        mine = given().clamp(max=400.0).to(dtype)
        group.allreduce([mine], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.AVG)).wait()
        assert mine.double().tolist() == [expected] * 3, (dtype, mine)
    pieces = [torch.zeros(3), torch.zeros(3)]
    for root in (0, 1):
        outputs = [pieces] if me == root else []
        group.gather(outputs, [given()], options(dist.GatherOptions, rootRank=root)).wait()
        if me == root:
            assert [piece[0].item() for piece in pieces] == [10.0, 20.0]
        out = torch.zeros(3)
        inputs = [[given(1), given(2)]] if me == root else []
        group.scatter([out], inputs, options(dist.ScatterOptions, rootRank=root)).wait()
        assert out.tolist() == [10.0 * (root + 1) + 1 + me] * 3
    received = [torch.zeros(3), torch.zeros(3)]
    group.alltoall(received, [given(), given(5)], dist.AllToAllOptions()).wait()
    if behind:
        assert received[me].tolist() == [1005.0] * 3, "it keeps its own piece"
    else:
        assert [each[0].item() for each in received] == [10.0 + 5 * me, 20.0 + 5 * me]
    message = torch.full((2,), 7.0) if me == 0 else torch.zeros(2)
    if not behind:
        (group.send([message], 1) if me == 0 else group.recv([message], 0)).wait()
        assert message.tolist() == [7.0, 7.0]
    group.barrier().wait()
    assert group.step_error() is None
    group.shutdown()


def test_results_are_those_of_the_members_that_count() -> None:
    together(3, every_call)
