"""The fake NCCL fails a test that breaks one of the real one's contracts: each of them is broken here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from etha.cuda.nccl import IN_PROGRESS, OK
from tests.fakes.cuda import Broken, FakeDriver
from tests.fakes.nccl import FakeNccl, World

A, B = "GPU-0000000a-0000-4000-8000-000000000000", "GPU-0000000b-0000-4000-8000-000000000000"


class Two:
    """Two agents, and a communicator between them."""

    def __init__(self) -> None:
        self.world = World()
        self.drivers = [FakeDriver((A,)), FakeDriver((B,))]
        self.nccls = [self.world.join(name, driver) for name, driver in zip("ab", self.drivers, strict=True)]
        self.tensors = [d.empty(u, (256,)) for d, u in zip(self.drivers, (A, B), strict=True)]
        self.streams = [d.stream(u) for d, u in zip(self.drivers, (A, B), strict=True)]
        self.id = self.nccls[0].unique_id()
        self.comms: list[int] = []

    def connect(self) -> None:
        self.comms = [nccl.init(0, 2, rank, self.id) for rank, nccl in enumerate(self.nccls)]
        assert [n.state(c) for n, c in zip(self.nccls, self.comms, strict=True)] == [OK, OK]

    def issue(self, rank: int, *ops: tuple[str, int]) -> None:
        """A group of ("send" | "receive", bytes) with the other one."""
        nccl, comm = self.nccls[rank], self.comms[rank]
        nccl.group_start()
        for what, nbytes in ops:
            getattr(nccl, what)(comm, self.tensors[rank].data_ptr(), nbytes, 1 - rank, self.streams[rank])
        nccl.group_end(comm)

    def settle(self) -> None:
        """Ask both until what they have issued is queued."""
        for nccl, comm in 2 * list(zip(self.nccls, self.comms, strict=True)):
            nccl.state(comm)

    def end(self) -> None:
        for nccl, comm in zip(self.nccls, self.comms, strict=False):  # none, if they were not connected
            if not nccl._ranks[comm].freed:
                nccl.abort(comm)


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.end()
    made.world.close()
    for driver in made.drivers:
        driver.shut()


def test_a_group_goes_once_both_ends_have_issued_theirs(two: Two) -> None:
    two.connect()
    two.tensors[0].fill_(3)
    two.issue(0, ("send", 1024))
    assert two.nccls[0].state(two.comms[0]) == IN_PROGRESS, "the connection needs both"
    two.issue(1, ("receive", 1024))
    two.settle()
    for driver, stream in zip(two.drivers, two.streams, strict=True):
        driver.drain(stream)
    assert bool((two.tensors[1] == 3).all()) and two.world.moved == 1024
    two.issue(0, ("send", 512))
    two.settle()
    event = two.drivers[0].event(A)
    two.drivers[0].record(event, two.streams[0])
    assert not two.drivers[0].reached(event), "a send without its receive blocks the stream"


def test_messages_meet_in_the_order_of_issue_with_equal_sizes(two: Two) -> None:
    two.connect()
    two.issue(0, ("send", 64), ("send", 128))
    two.issue(1, ("receive", 128), ("receive", 64))
    two.settle()
    while not two.world.failures:
        with two.world.changed:
            two.world.changed.wait(0.01)
    with pytest.raises(AssertionError, match="64 bytes sent, 128 received"):
        two.world.check()


BREACHES: dict[str, Callable[[Two], Any]] = {
    "outside of a group": lambda t: t.nccls[0].send(t.comms[0], t.tensors[0].data_ptr(), 8, 1, t.streams[0]),
    "a group in a group": lambda t: [t.nccls[0].group_start(), t.nccls[0].group_start()],
    "a group of nothing": lambda t: t.issue(0),
    "operations": lambda t: t.issue(0, *[("send", 16)] * 257),
    "while the communicator is in progress": lambda t: [t.issue(0, ("send", 8)), t.issue(0, ("send", 8))],
    "is used already": lambda t: t.nccls[1].init(0, 2, 1, t.id),
    "nobody made this id": lambda t: t.nccls[1].init(0, 2, 1, bytes(128)),
    "freed": lambda t: [t.nccls[0].abort(t.comms[0]), t.nccls[0].state(t.comms[0])],
    "destroy before finalize": lambda t: t.nccls[0].destroy(t.comms[0]),
    "after finalize": lambda t: [t.nccls[0].finalize(t.comms[0]), t.issue(0, ("send", 8))],
    "with rank 0": lambda t: [t.nccls[0].group_start(), t.nccls[0].send(t.comms[0], 1, 8, 0, 1)],
    "no living device": lambda t: [t.nccls[0].group_start(), t.nccls[0].send(t.comms[0], 1, 8, 1, 1)],
}


@pytest.mark.parametrize("what", BREACHES)
def test_a_breach_is_told_at_once(two: Two, what: str) -> None:
    two.connect()
    with pytest.raises(Broken, match=what):
        BREACHES[what](two)


def test_nothing_is_queued_before_the_group_is(two: Two) -> None:
    two.connect()
    two.issue(0, ("send", 8))
    two.issue(1, ("receive", 8))
    two.drivers[0].record(two.drivers[0].event(A), two.streams[0])
    with pytest.raises(Broken, match="queued on the device before"):
        two.settle()


def test_one_thread_makes_all_calls(two: Two) -> None:
    two.connect()
    reported: list[str] = []

    def call() -> None:
        with pytest.raises(Broken, match="second thread") as caught:
            two.nccls[0].state(two.comms[0])
        reported.append(str(caught.value))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert reported


def test_nobody_is_inside_with_another(two: Two) -> None:
    nccl: FakeNccl = two.nccls[0]
    with nccl._call("state"), pytest.raises(Broken, match="another thread is inside"):
        nccl.unique_id()


def test_what_is_left_is_told_at_the_end(two: Two) -> None:
    two.connect()
    with pytest.raises(AssertionError, match="not destroyed or aborted"):
        two.world.check()
