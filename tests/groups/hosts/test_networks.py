"""Members in network namespaces: right results over a real link, and what they hear if it is cut, lossy or slow."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from etha.errors import GroupLostError
from tests.flow.networks import filters, namespaces, tun
from tests.flow.networks.filters import DEAF, LOSSY, arriving
from tests.flow.networks.namespaces import Hosts
from tests.flow.networks.tun import End, delayed, enter
from tests.groups import test_collectives as collectives
from tests.groups import test_messages as messages
from tests.groups.team import Member, team

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), *namespaces.MARKS, *filters.MARKS, *tun.MARKS]

#: What a busy machine may add to a time, in seconds.
SLACK = 3.0
#: Seconds without a word after which a member of another host is lost.
SILENCE = 3.0


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Hosts]:
    with namespaces.hosts(tmp_path) as found:
        yield found


def inside(member: Member, net: Hosts, body: Callable[..., Any], *args: Any) -> Any:
    """Run ``body`` in the namespace of the member's host. The store stays in reach when the direct link is cut."""
    enter((net.one, net.two)[member.host])
    os.environ["ETHA_LISTEN"] = f"10.211.1.{1 + member.host}:0"
    store = None
    if member.rank == 0:
        store = TCPStore("10.211.2.1", 0, is_master=True, wait_for_workers=False)
        member.say(store.port)
    member.address = f"10.211.2.1:{store.port if store else member.hear()}"
    result = body(member, *args)
    if member.rank == 0:
        member.say("done")
        member.hear()  # the others may still need the store
    del store
    return result


class Company:
    """A running team whose members are in the namespaces of ``hosts``."""

    def __init__(self, running: Any) -> None:
        self.running = running
        port = running.heard(0)
        for pipe in running.pipes[1:]:
            pipe.send(port)

    def results(self) -> dict[int, Any]:
        assert self.running.heard(0, 180) == "done"
        self.running.pipes[0].send("end")
        return dict(self.running.results())


def together(net: Hosts, hosts: tuple[int, ...], body: Callable[..., Any], *args: Any) -> dict[int, Any]:
    with team(len(hosts), inside, net, body, *args, hosts=hosts) as running:
        return Company(running).results()


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1)], ids=str)
def test_all_calls_between_namespaces(net: Hosts, hosts: tuple[int, ...]) -> None:
    for body in (collectives.reduces, collectives.moves, collectives.uneven, messages.crosswise):
        together(net, hosts, body)


def some_calls(member: Member) -> float:
    """Calls of all lengths and a message each way; the seconds that they took."""
    start = time.monotonic()
    group = member.configured(timeout=120.0)
    n, me = member.size, member.rank
    for numel in (1, 5_000, 700_000):
        mine = collectives.tensor_of(me, numel)
        group.allreduce([mine]).wait()
        assert torch.equal(mine, collectives.reduced("SUM", numel, n))
        outs = [torch.zeros(numel) for _ in range(n)]
        group.allgather([outs], [collectives.tensor_of(me, numel)]).wait()
        assert all(torch.equal(out, collectives.tensor_of(s, numel)) for s, out in enumerate(outs))
    out = torch.zeros(100_000)
    works = [group.send([collectives.tensor_of(me, 100_000)], (me + 1) % n, 0), group.recv([out], (me - 1) % n, 0)]
    for work in works:
        work.wait()
    assert torch.equal(out, collectives.tensor_of((me - 1) % n, 100_000))
    group.barrier().wait()
    group.shutdown()
    return time.monotonic() - start


def test_lost_packets_only_slow_things(net: Hosts) -> None:
    with arriving(net, LOSSY.format(percent=5)) as drops:
        together(net, (0, 1), some_calls)
        assert drops()


def test_a_delay_of_200_ms_only_slows_things(net: Hosts) -> None:
    with delayed(End(net.one, "10.211.1.1"), End(net.two, "10.211.1.2"), 0.2):
        found = together(net, (0, 1), some_calls)
    assert min(found.values()) > 0.4, "nothing was delayed"


def calls_until_an_error(member: Member) -> tuple[str, str, float]:
    """Call until somebody is lost; the error, and when it came."""
    group = member.configured(timeout=60.0)
    group.allreduce([torch.ones(3)]).wait()
    member.say("ready")
    with pytest.raises(GroupLostError) as raised:
        while True:
            group.allreduce([torch.ones(100_000)]).wait()
    end = time.monotonic()
    group.shutdown()
    return "lost", str(raised.value), end


def lost(net: Hosts, hosts: tuple[int, ...], act: Callable[[Any], Any]) -> tuple[float, dict[int, Any]]:
    """When ``act`` has happened to a team that calls all the time, and what its members say."""
    with team(len(hosts), inside, net, calls_until_an_error, hosts=hosts) as running:
        company = Company(running)
        for rank in range(len(hosts)):
            assert running.heard(rank) == "ready"
        start = time.monotonic()
        act(running)
        return start, company.results()


def test_a_cut_link_is_noticed_by_both_sides_after_three_beats(net: Hosts) -> None:
    start, found = lost(net, (0, 1), lambda _: net.cut())
    for _, text, end in found.values():
        assert "nothing has come from it for 3 s" in text
        assert end - start < SILENCE + SLACK


def test_a_link_that_is_cut_one_way_is_noticed_by_both_sides(net: Hosts) -> None:
    with ExitStack() as stack:
        start, found = lost(net, (0, 1), lambda _: stack.enter_context(arriving(net, DEAF, at=(net.one,))))
    assert all(end - start < 2 * SILENCE + SLACK for _, _, end in found.values())
    assert "rank 1" in found[0][1]


def test_a_killed_member_of_another_host_is_noticed_within_a_second(net: Hosts) -> None:
    start, found = lost(net, (0, 0, 1), lambda running: running.signal(2, signal.SIGKILL))
    assert found[0][1] == found[1][1] and "rank 2" in found[0][1]
    assert all(end - start < 1.0 + SLACK for _, _, end in found.values())


def test_a_stopped_member_is_lost_after_three_beats_and_hears_it_when_it_goes_on(net: Hosts) -> None:
    with team(2, inside, net, calls_until_an_error, hosts=(0, 1)) as running:
        Company(running)
        for rank in range(2):
            running.heard(rank)
        start = time.monotonic()
        running.signal(1, signal.SIGSTOP)
        assert running.heard(0) == "done"  # rank 0 has its error, and has shut down
        assert time.monotonic() - start < SILENCE + SLACK
        running.signal(1, signal.SIGCONT)
        running.pipes[0].send("end")
        found = running.results()
    assert "nothing has come from it for 3 s" in found[0][1]
    assert "rank 0" in found[1][1] or "rank 1" in found[1][1]
