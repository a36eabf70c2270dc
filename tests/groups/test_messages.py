"""Point-to-point calls of ProcessGroupEtha between real processes."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from etha.errors import GroupError, GroupLostError, GroupMismatchError, GroupTimeoutError
from tests.groups.team import Member, team, together


def crosswise(member: Member) -> None:
    """Everybody sends to everybody, and only then receives, more than any ring holds; in the order of sending."""
    group = member.configured()
    n, me = member.size, member.rank
    others = [r for r in range(n) if r != me]
    for numel in (0, 1, 1000, 300_001):
        works = [group.send([torch.full((numel,), float(me * 100 + k))], r, 7) for r in others for k in range(3)]
        for r in others:
            for k in range(3):
                out = torch.full((numel,), -1.0)
                group.recv([out], r, 7).wait()
                assert (out == r * 100 + k).all()
        for work in works:
            work.wait()
    group.barrier().wait()  # whoever leaves ends the group for all
    group.shutdown()


def receives_first(member: Member) -> None:
    """Receives that were asked for first do not stop sends, nor do messages stop collectives."""
    group = member.configured()
    n, me = member.size, member.rank
    peer = (me + 1) % n
    before = (me - 1) % n
    out = torch.zeros(500_000)
    receiving = group.recv([out], before, 0)
    total = torch.ones(3)
    group.allreduce([total]).wait()
    sending = group.send([torch.full((500_000,), float(me))], peer, 0)
    receiving.wait()
    sending.wait()
    assert (out == before).all() and (total == n).all()
    group.barrier().wait()
    group.shutdown()


def tagged(member: Member) -> None:
    group = member.configured()
    if member.rank == 0:
        works = [group.send([torch.full((50,), float(tag))], 1, tag) for tag in range(20)]
        for work in works:
            work.wait()
    else:
        for tag in reversed(range(20)):
            out = torch.zeros(50)
            group.recv([out], 0, tag).wait()
            assert (out == tag).all()
    group.barrier().wait()
    group.shutdown()


def from_anybody(member: Member) -> None:
    group = member.configured()
    if member.rank == 0:
        seen = set()
        for _ in range(member.size - 1):
            out = torch.zeros(2, 3).t()
            work = group.recv_anysource([out], 0)
            work.wait()
            assert (out == work._source_rank()).all()
            seen.add(work._source_rank())
        assert seen == set(range(1, member.size))
    else:
        group.send([torch.full((2, 3), float(member.rank)).t()], 0, 0).wait()
    group.barrier().wait()
    group.shutdown()


@pytest.mark.parametrize("size", [2, 4])
def test_everybody_sends_to_everybody(size: int) -> None:
    together(size, crosswise)


def test_receives_that_wait_stop_nothing_else() -> None:
    together(3, receives_first)


def test_tags_in_another_order() -> None:
    together(2, tagged)


def test_receive_from_anybody() -> None:
    together(4, from_anybody)


def wrong_size(member: Member) -> str:
    group = member.configured()
    if member.rank == 0:
        group.send([torch.ones(4)], 1, 0).wait()
        member.hear()
        with pytest.raises(GroupError) as raised:
            group.barrier().wait()
    else:
        with pytest.raises(GroupMismatchError) as raised:
            group.recv([torch.ones(5)], 0, 0).wait()
        member.say("seen")
    group.shutdown()
    return str(raised.value)


def test_a_message_of_another_size_is_a_mismatch_for_both() -> None:
    with team(2, wrong_size) as running:
        running.heard(1)
        running.pipes[0].send("go")
        found = running.results()
    assert found[0] == found[1] and "rank 0 sent 16 bytes of float32 to rank 1" in found[0]


def waits_for_rank_1(member: Member) -> str:
    group = member.configured(timeout=60.0)
    group.barrier().wait()
    member.say("ready")
    if member.rank == 1:
        member.hear()
    with pytest.raises(GroupLostError) as raised:
        group.recv([torch.ones(3)], 1, 0).wait()
    group.shutdown()
    return str(raised.value)


def test_a_killed_sender_ends_the_receive() -> None:
    with team(2, waits_for_rank_1) as running:
        for rank in range(2):
            running.heard(rank)
        running.signal(1, signal.SIGKILL)
        assert "rank 1" in running.results()[0]


def hears_an_abort(member: Member) -> str:
    group = member.configured()
    for _ in range(3):
        group.barrier().wait()
    if member.rank == 1:
        member.hear()
        group.abort()
        member.hear()  # its process lives on, so only the abort can be heard
        return ""
    work = group.recv([torch.ones(3)], 1, 0)
    member.say("waits")
    with pytest.raises(GroupLostError) as raised:
        work.wait()
    member.say("ended")
    group.shutdown()
    return str(raised.value)


def test_a_receive_ends_when_its_sender_aborts_after_some_calls() -> None:
    with team(2, hears_an_abort) as running:
        running.heard(0)
        running.pipes[1].send("abort")
        running.heard(0, timeout=20.0)  # before the call's own deadline
        running.pipes[1].send("end")
        assert "rank 1" in running.results()[0]


def too_late(member: Member) -> str:
    group = member.configured()
    group.barrier().wait()
    if member.rank:
        member.hear()
        return ""
    group.set_timeout(0.3)
    with pytest.raises(GroupTimeoutError) as raised:
        group.recv([torch.ones(3)], 1, 0).wait()
    assert raised.value.waiting_for == (1,)
    member.say("late")
    return str(raised.value)


def test_a_receive_that_times_out_names_the_sender() -> None:
    with team(2, too_late) as running:
        running.heard(0)
        running.pipes[1].send("go")
        assert "rank 1" in running.results()[0]


def by_torch(member: Member) -> None:
    """torch's own functions: isend and irecv in one batch, objects."""
    host, port = member.address.split(":")
    import etha.groups  # noqa: F401 (registers the backend)

    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    dist.init_process_group("etha", store=store, rank=member.rank, world_size=member.size)
    n, me = member.size, member.rank
    out = torch.zeros(200_000)
    ops = [
        dist.P2POp(dist.irecv, out, (me - 1) % n),
        dist.P2POp(dist.isend, torch.full((200_000,), float(me)), (me + 1) % n),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (out == (me - 1) % n).all()
    if me == 0:
        dist.send_object_list([{"a": 1}], dst=1)
    elif me == 1:
        box = [None]
        dist.recv_object_list(box, src=0)
        assert box == [{"a": 1}]
    dist.barrier()
    dist.destroy_process_group()


def test_torchs_functions() -> None:
    together(3, by_torch)


def over_replicas(member: Member) -> None:
    """Each member is a world of its own, as a replica is; the group between them is registered."""
    import etha.groups  # noqa: F401 (registers the backend)

    dist.init_process_group("etha", store=HashStore(), rank=0, world_size=1)
    group = member.configured()
    group.register("replicas")
    other, got = 1 - member.rank, torch.zeros(300_000)
    works = [
        dist.isend(torch.full((300_000,), float(member.rank)), group=group, group_dst=other),
        dist.irecv(got, group=group, group_src=other),
    ]
    for work in works:
        assert work is not None
        work.wait()
    assert (got == other).all()
    with pytest.raises(ValueError, match="rank"):
        dist.P2POp(dist.irecv, got, group=group, group_peer=other)
    group.unregister()
    dist.destroy_process_group()


def test_a_group_of_replicas_takes_messages_by_its_own_ranks_and_no_p2pop() -> None:
    together(2, over_replicas)
