"""The same calls and the same faults between members that reach each other over TCP only."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from etha.errors import GroupError, GroupLostError, GroupMismatchError
from etha.groups import ProcessGroupEtha
from tests.groups import test_collectives as collectives
from tests.groups import test_group_faults as faults
from tests.groups import test_messages as messages
from tests.groups.team import Member, team, together

#: The number of each rank's host.
PLACES = [(0, 1), (0, 0, 1, 1), (0, 1, 0), (0, 1, 1, 2)]
CALLS = [
    *(collectives.reduces, collectives.moves, collectives.uneven, collectives.layouts, collectives.dtypes),
    *(messages.crosswise, messages.receives_first),
]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", PLACES, ids=str)
@pytest.mark.parametrize("body", CALLS, ids=lambda body: str(body.__name__))
def test_results(body: Any, hosts: tuple[int, ...]) -> None:
    together(len(hosts), body, hosts=hosts)


def test_other_reductions_and_the_order_of_calls() -> None:
    together(2, collectives.premultiplied, hosts=(0, 1))
    together(3, collectives.in_order, hosts=(0, 1, 1))


def test_tags_in_another_order() -> None:
    together(2, messages.tagged, hosts=(0, 1))


def test_a_receive_from_anybody() -> None:
    together(3, messages.from_anybody, hosts=(0, 1, 1))


def test_a_message_of_another_size_is_a_mismatch_for_both() -> None:
    with team(2, messages.wrong_size, hosts=(0, 1)) as running:
        running.heard(1)
        running.pipes[0].send("go")
        found = running.results()
    assert found[0] == found[1] and "rank 0 sent 16 bytes of float32 to rank 1" in found[0]


@pytest.mark.slow
@pytest.mark.parametrize("python", [(0, 1), (1,), (0,)], ids=str)
def test_python_in_place_of_the_library_takes_part(python: tuple[int, ...]) -> None:
    for body in (collectives.reduces, collectives.moves, collectives.uneven, messages.crosswise, messages.tagged):
        together(2, body, hosts=(0, 1), python=python)
    found = together(3, faults.mismatch, "op", hosts=(0, 1, 1), python=python)
    assert found[0] == found[1] == found[2]
    with team(2, faults.aborts, False, hosts=(0, 1), python=python) as running:
        assert running.heard(0) == "aborted"
        running.pipes[1].send("go")
        said = running.results()
    assert "rank 0" in said[0] and said[0] == said[1]


def test_replicas_are_bitwise_equal_and_rounded_once() -> None:
    found = together(4, collectives.rounding, hosts=(0, 1, 1, 2))
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize("what", faults.MISMATCHES)
def test_all_ranks_hear_who_called_what(what: str) -> None:
    found = together(3, faults.mismatch, what, hosts=(0, 1, 1))
    assert found[0] == found[1] == found[2]
    assert set(found[0][1]) == {0, 1, 2}


@pytest.mark.parametrize("numel", [3, faults.LONG])
@pytest.mark.parametrize("hosts", [(0, 1, 2), (0, 1, 1), (1, 1, 0)], ids=str)
def test_a_killed_member_ends_the_waits_of_the_others(numel: int, hosts: tuple[int, ...]) -> None:
    with team(3, faults.waits, numel, hosts=hosts) as running:
        for rank in range(3):
            running.heard(rank)
        running.signal(1, signal.SIGKILL)
        found = running.results()
    assert {text for text, _ in found.values()} == {found[0][0]}
    assert found[0][1][0] == 1 and "rank 1" in found[0][0]


def loads_data(member: Member) -> float:
    """Each member has forked workers of a DataLoader, which inherit its sockets, when rank 1 is killed."""
    group = faults.ready(member)
    loader = DataLoader(list(range(100)), num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    next(iter(loader))
    member.say(member.rank)
    if member.rank:
        member.hear()
    with pytest.raises(GroupLostError):
        group.allreduce([torch.ones(3)]).wait()
    seen = time.monotonic()
    group.shutdown()
    return seen


@pytest.mark.slow
def test_workers_of_a_data_loader_do_not_hold_the_connections_of_a_killed_member() -> None:
    with team(2, loads_data, hosts=(0, 1), daemon=False) as running:
        for rank in range(2):
            running.heard(rank)
        start = time.monotonic()
        running.signal(1, signal.SIGKILL)
        assert running.results()[0] - start < 1.0


def test_a_member_killed_while_bytes_move() -> None:
    with team(2, faults.killed_in_a_call, hosts=(0, 1)) as running:
        for rank in range(2):
            running.heard(rank)
        running.signal(1, signal.SIGKILL)
        assert "rank 1" in running.results()[0]


@pytest.mark.parametrize("from_thread", [False, True])
def test_abort_ends_the_call_here_and_elsewhere(from_thread: bool) -> None:
    with team(2, faults.aborts, from_thread, hosts=(0, 1)) as running:
        assert running.heard(0) == "aborted"
        running.pipes[1].send("go")
        found = running.results()
    assert "rank 0" in found[0] and found[0] == found[1]


def test_the_timeout_of_a_wait_ends_the_group() -> None:
    with team(2, faults.waits_shortly, hosts=(0, 1)) as running:
        running.heard(0)
        running.pipes[1].send("go")
        found = running.results()
    text = found[0].removeprefix("GroupTimeoutError ")
    assert text != found[0] and found[1] == f"GroupLostError {text}"


def test_a_member_that_shuts_down_is_lost_for_the_others() -> None:
    assert "shut" in together(2, faults.shuts_down, hosts=(0, 1))[0]


def test_nothing_of_many_configures_is_left() -> None:
    together(2, faults.again_and_again, hosts=(0, 1))
    together(2, faults.again_and_again, hosts=(0, 1), python=(1,))


def meets_among_strangers(member: Member) -> None:
    """Rank 0 listens; strangers call while it waits for rank 1."""
    from etha.groups.host import endpoints

    if member.rank == 0:
        seen: list[tuple[str, int]] = []
        listen = endpoints.listen

        def listen_and_say(*args: Any) -> Any:
            found = listen(*args)
            seen.append(found[1:])
            member.say(found[1:])
            return found

        endpoints.listen = listen_and_say
        group = member.configured()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(seen[0])
    else:
        member.hear()
        group = member.configured()
    mine = torch.ones(3)
    group.allreduce([mine]).wait()
    assert (mine == 2).all()
    group.shutdown()


def test_strangers_who_call_during_a_meeting_are_refused_and_do_not_disturb_it() -> None:
    with team(2, meets_among_strangers, hosts=(0, 1)) as running:
        # Rank 0 needs rank 1's record to know that there is another host, so the meeting goes as far as its port.
        running.pipes[1].send("go")
        place = running.heard(0)
        strangers = []
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"ETHAGRP1" + bytes(36), b"ETHAGRP1" + b"\1\0\0\0" + b"0" * 32):
            try:
                strangers.append(socket.create_connection(place, timeout=5))
                strangers[-1].sendall(said)
            except OSError:
                break  # the meeting is over, and so is its port
        running.results()
        for stranger in strangers:
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b"", "a stranger got an answer"
            stranger.close()


# ---- the order of a reduction -------------------------------------------------------------------


def sums(member: Member, order: str, hosts: tuple[int, ...]) -> None:
    """All reductions, small ones and ones of several rounds, against sums in the order that is promised, bit by bit."""
    group = member.configured(window=collectives.WINDOW, order=order)
    ranks = list(range(member.size))
    groups = [[rank] for rank in ranks]
    if order == "host":
        groups = [[rank for rank in ranks if hosts[rank] == host] for host in dict.fromkeys(hosts)]

    def total(pieces: list[torch.Tensor], op: str) -> torch.Tensor:
        def add(terms: list[torch.Tensor]) -> torch.Tensor:
            return functools.reduce(torch.maximum if op == "MAX" else torch.add, terms)

        found = add([add([pieces[rank].float() for rank in those]) for those in groups])
        return (found / member.size if op == "AVG" else found).to(pieces[0].dtype)

    for numel, dtype in itertools.product((7, 1000, 70_001), (torch.float32, torch.bfloat16, torch.float16)):
        everyone = (torch.randn(member.size**2, numel, generator=torch.Generator().manual_seed(numel)) * 100).to(dtype)
        mine = everyone[:: member.size]
        for op in ("SUM", "AVG", "MAX"):
            tensor = mine[member.rank].clone()
            group.allreduce([tensor], collectives.options(dist.AllreduceOptions, op)).wait()
            assert torch.equal(tensor, total(list(mine), op)), f"allreduce {op} of {numel} {dtype}"
        tensor = mine[member.rank].clone()
        group.reduce([tensor], collectives.options(dist.ReduceOptions, "SUM", 1)).wait()
        assert member.rank != 1 or torch.equal(tensor, total(list(mine), "SUM")), f"reduce of {numel} {dtype}"
        out = torch.empty(numel, dtype=dtype)
        n = member.size
        group.reduce_scatter([out], [list(everyone[member.rank * n : (member.rank + 1) * n])]).wait()
        assert torch.equal(out, total(list(everyone[member.rank :: n]), "SUM")), f"reduce_scatter of {numel} {dtype}"
    whole = torch.tensor([3, -4, 5], dtype=torch.int8).repeat(30_000) * (member.rank + 1)
    group.allreduce([whole], collectives.options(dist.AllreduceOptions, "AVG")).wait()
    exact = sum((torch.tensor([3, -4, 5]).repeat(30_000) * (rank + 1)).to(torch.int8).long() for rank in ranks)
    assert torch.equal(whole, torch.div(exact, member.size, rounding_mode="trunc").to(torch.int8))
    group.shutdown()


@pytest.mark.parametrize("python", [(), (1, 2)], ids=["compiled", "some in Python"])
@pytest.mark.parametrize(("hosts", "order"), [((0, 1, 0, 1), "host"), ((1, 0, 0, 2, 1), "host"), ((0, 1, 0), "rank")])
def test_the_order_of_sums(hosts: tuple[int, ...], order: str, python: tuple[int, ...]) -> None:
    together(len(hosts), sums, order, hosts, hosts=hosts, python=python)


def other_order(member: Member) -> str:
    with pytest.raises(GroupMismatchError) as caught:
        member.configured(order="host" if member.rank else "rank")
    return str(caught.value)


def test_another_order_is_named_when_the_group_is_formed() -> None:
    said = together(2, other_order)
    assert "the group of rank 1 has order='host', that of rank 0 'rank': all members must give the same" in said[0]
    assert "the group of rank 0 has order='rank', that of rank 1 'host': all members must give the same" in said[1]


def test_an_order_that_there_is_not() -> None:
    with pytest.raises(GroupError, match="order='size' is none of 'host', 'rank'"):
        ProcessGroupEtha(order="size")  # type: ignore[arg-type]
