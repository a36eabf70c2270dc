"""torch 2.15 names members by handles (``reconfigure``). A stand-in plays its options, which torch 2.13 lacks."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from etha.errors import GroupError, GroupMismatchError
from etha.groups.host.etha_group import ProcessGroupEtha
from etha.groups.managed import ManagedProcessGroup
from tests.groups.team import Member, team
from tests.processes import preload

preload("etha.groups.host.etha_group", "etha.groups.managed")


def opts(uuid: int, handles: Any, seconds: float = 20.0) -> SimpleNamespace:
    return SimpleNamespace(uuid=uuid, handles=handles, timeout=timedelta(seconds=seconds), hints={})


def reduced(group: ProcessGroupEtha) -> float:
    tensor = torch.full((4,), group.rank() + 1.0)
    group.allreduce([tensor]).wait()
    return float(tensor[0])


def reconfigures(member: Member) -> list[tuple[int, int, float]]:
    """All three, then without rank 0, then all again in another order, and by a set."""
    group = ProcessGroupEtha(timeout=3.0)
    assert group.supports_reconfigure and group.get_reconfigure_handle() == group.get_reconfigure_handle()
    member.say(group.get_reconfigure_handle())
    handles = member.hear()
    found = []
    for uuid, names in enumerate((handles, handles[1:], handles[::-1], set(handles)), 100):
        if group.get_reconfigure_handle() in names:
            assert group.reconfigure(opts(uuid, names)).wait()
            found.append((group.rank(), group.size(), reduced(group)))
    assert group._timeout == timedelta(seconds=3), "the timeout of a reconfigure is that of this one"
    with pytest.raises(GroupMismatchError, match="was configured twice"):
        group.reconfigure(opts(100, handles))
    member.say("refused")
    member.hear()  # the store of the first member ends with it, and others may still ask there
    group.shutdown()
    return found


def test_groups_are_formed_by_handles_and_ranks_follow_their_order() -> None:
    with team(3, reconfigures) as running:
        handles = [running.heard(rank) for rank in range(3)]
        running.tell(handles)
        assert [running.heard(rank) for rank in range(3)] == ["refused"] * 3
        running.tell("end")
        found = running.results()
    assert found[0][:1] == [(0, 3, 6.0)] and found[1][:2] == [(1, 3, 6.0), (0, 2, 3.0)]
    assert [found[rank][-2][:2] for rank in range(3)] == [(2, 3), (1, 3), (0, 3)]
    order = [handles.index(handle) for handle in sorted(handles)]
    assert [found[rank][-1][0] for rank in order] == [0, 1, 2]


def test_a_reconfigure_without_the_own_handle_or_with_another_text_is_refused() -> None:
    group = ProcessGroupEtha()
    with pytest.raises(GroupError, match="without this member's own handle"):
        group.reconfigure(opts(1, ["a@127.0.0.1:1"]))
    with pytest.raises(GroupError, match="'gloo:0' is no handle of get_reconfigure_handle"):
        group.reconfigure(opts(1, ["gloo:0", group.get_reconfigure_handle()]))


def world_is_fixed(member: Member) -> None:
    import etha.groups  # noqa: F401 (registers the backend)

    host, port = member.address.split(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    dist.init_process_group("etha", store=store, rank=member.rank, world_size=member.size)
    group: Any = dist.group.WORLD
    assert not group.supports_reconfigure
    with pytest.raises(GroupError, match="the default group has a fixed size"):
        group.reconfigure(opts(1, [group.get_reconfigure_handle()]))
    dist.barrier()
    dist.destroy_process_group()


def test_groups_whose_size_others_decide_support_no_reconfigure() -> None:
    with team(1, world_is_fixed) as running:
        running.results()
    crew = SimpleNamespace(timeout=1.0, manage=lambda group: None)
    assert not ManagedProcessGroup(crew).supports_reconfigure
