"""Plain tensors between hosts: a worker that is blocked in its call sends and receives itself, and whoever ends, stops
or dies in it, nothing hangs and nothing is wrong."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate

import etha
from etha.errors import AgentLostError, EthaError, PeerLostError, TransferError, TransferTimeoutError
from etha.memory import worker_stream
from tests.flow.jobs import Job, tell, wait_for
from tests.flow.sites import Site
from tests.flow.transfers.test_pulls import ALL, COLUMNS, ROWS, Member
from tests.processes import send_signal

#: More than the buffers of four sockets hold: whoever sends it waits for who receives.
LARGE = (8192, 8192)


def count_streams(count: list[tuple[bool, int]]) -> None:
    """In a worker: note the direction and the bytes of each stream that it moved."""
    close = worker_stream.StreamRun.close

    def counted(self: worker_stream.StreamRun) -> None:
        count.append((bool(self._struct.sends), self.done))
        close(self)

    worker_stream.StreamRun.close = counted  # type: ignore[method-assign]


def in_python() -> None:
    """As without the compiled library."""
    worker_stream.load_worker_stream = lambda: None  # type: ignore[attr-defined]


def no_threads() -> None:
    """As where no thread can be had."""

    def refuse(self: worker_stream.StreamRun) -> None:
        raise OSError(11, "no thread")

    worker_stream.StreamRun.start = refuse  # type: ignore[method-assign]


How = Callable[[], None] | None


def trainer(pair: str, rank: int, ranks: int, placement: Placement, turns: int, how: How) -> Any:
    count: list[tuple[bool, int]] = []
    count_streams(count)
    if how is not None:
        how()
    with (member := Member(pair, "trainer", rank, ranks, placement)).client:
        for version in range(1, turns + 1):
            member.send(version)
    return count


def inference(
    pair: str, rank: int, ranks: int, placement: Placement, turns: int, how: Callable[[], None] | None
) -> Any:
    count: list[tuple[bool, int]] = []
    count_streams(count)
    if how is not None:
        how()
    with (member := Member(pair, "inference", rank, ranks, placement)).client:
        progress: list[tuple[int, int]] = []
        for version in range(1, turns + 1):
            result = member.batch.transfer("recv", progress=lambda *at: progress.append(at))
            assert result.version == version and member.holds(version), f"version {version} is not exact"
            assert progress == sorted(progress) and progress[-1] == (result.bytes, result.bytes)
            progress.clear()
    return count


@pytest.mark.ways("tcp", "three")
@pytest.mark.parametrize("how", [None, in_python], ids=["compiled", "python"])
@pytest.mark.parametrize(
    ("source", "target"),
    [(ALL, ALL), (ROWS, ROWS), (ROWS, COLUMNS), (COLUMNS, ROWS), (COLUMNS, ALL)],
    ids=lambda placement: str(placement),
)
def test_every_version_is_exact(site: Site, pair: str, source: Placement, target: Placement, how: How) -> None:
    with Job(site.env) as job:
        senders = [job.start(trainer, pair, rank, 2, source, 3, how, at=("trainer", rank)) for rank in range(2)]
        takers = [job.start(inference, pair, rank, 2, target, 3, how, at=("inference", rank)) for rank in range(2)]
        for worker in (*senders, *takers):
            worker.result()


@pytest.mark.ways("tcp")
@pytest.mark.parametrize("how", [None, in_python], ids=["compiled", "python"])
def test_no_byte_crosses_an_agent(site: Site, pair: str, how: How) -> None:
    with Job(site.env) as job:
        sender = job.start(trainer, pair, 0, 1, ALL, 3, how, at=("trainer", 0))
        taker = job.start(inference, pair, 0, 1, ALL, 3, how, at=("inference", 0))
        for worker, sends in ((sender, True), (taker, False)):
            moved = worker.result()
            assert sum(n for _, n in moved) == 3 * 2048 * 2048 * 4
            assert {way for way, _ in moved} == {sends}


@pytest.mark.ways("tcp")
def test_where_no_thread_can_be_had_the_agent_moves_the_bytes(site: Site, pair: str) -> None:
    with Job(site.env) as job:
        sender = job.start(trainer, pair, 0, 1, ALL, 3, no_threads, at=("trainer", 0))
        taker = job.start(inference, pair, 0, 1, ALL, 3, no_threads, at=("inference", 0))
        assert {n for _, n in sender.result() + taker.result()} == {0}


def short_of_descriptors(pair: str, turns: int) -> Any:
    """Receives with no descriptor to spare while it waits."""
    with (member := Member(pair, "inference", 0, 1, ALL)).client:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = [os.open("/dev/null", os.O_RDONLY)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, before[1]))
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        try:
            for version in range(1, turns + 1):
                member.batch.transfer("recv")
                assert member.holds(version)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in held:
                os.close(fd)


@pytest.mark.ways("tcp")
def test_a_worker_without_descriptors_keeps_its_session(site: Site, pair: str) -> None:
    with Job(site.env) as job:
        sender = job.start(trainer, pair, 0, 1, ALL, 3, None, at=("trainer", 0))
        taker = job.start(short_of_descriptors, pair, 3, at=("inference", 0))
        sender.result()
        taker.result()


# ---- what happens in the middle ------------------------------------------------------------------------------


def transfers(pair: str, side: str, timeout: float) -> Any:
    """One call, with ``tell("moving")`` once a stream has begun. (error or seq, whether memory changed afterwards)."""
    start = worker_stream.StreamRun.start

    def started(self: worker_stream.StreamRun) -> None:
        start(self)
        tell("moving")
        wait_for("go on")

    other = "inference" if side == "trainer" else "trainer"
    with etha.TensorBusClient(timeout=60) as client:
        client.init_pair(pair, side, other, 1, (1,), [Replicate()], rank=0)
        tensor = torch.full(LARGE, 1.0 if side == "trainer" else 0.0)
        batch = client.register_tensors("b", {"w": tensor}, pair_name=pair)
        worker_stream.StreamRun.start = started  # type: ignore[method-assign]
        ended: Any
        try:
            ended = batch.transfer("send" if side == "trainer" else "recv", timeout=timeout).seq
        except (EthaError, KeyboardInterrupt) as error:
            ended = error if isinstance(error, EthaError) else type(error).__name__
        after = tensor.clone()
        tell("ended", ended)
        wait_for("end")
        return ended, torch.equal(after, tensor)


SIDES = pytest.mark.parametrize("who", ["trainer", "inference"])


def other_of(who: str) -> str:
    return "inference" if who == "trainer" else "trainer"


@pytest.mark.ways("tcp")
@SIDES
def test_a_worker_that_is_killed_while_it_streams(site: Site, pair: str, who: str) -> None:
    with Job(site.env) as job:
        one = job.start(transfers, pair, who, 60, at=(who, 0))
        other = job.start(transfers, pair, other_of(who), 60, at=(other_of(who), 0))
        one.expect("moving")
        other.expect("moving")
        one.kill()
        release(other)
        ended = other.expect("ended")
        assert isinstance(ended, PeerLostError) and ended.outcome == "aborted", ended
        other.go("end")
        assert other.result()[1]


@pytest.mark.ways("tcp")
@SIDES
def test_the_other_rank_s_deadline_ends_a_stopped_stream(site: Site, pair: str, who: str) -> None:
    with Job(site.env) as job:
        one = job.start(transfers, pair, who, 60, at=(who, 0))
        other = job.start(transfers, pair, other_of(who), 4, at=(other_of(who), 0))
        one.expect("moving")
        other.expect("moving")
        one.kill(signal.SIGSTOP)
        release(other)
        ended = other.expect("ended")
        assert isinstance(ended, TransferTimeoutError) and ended.outcome == "aborted", ended
        one.kill(signal.SIGCONT)
        release(one)
        ended = one.expect("ended")
        assert isinstance(ended, TransferError) and ended.outcome == "aborted", ended
        for worker in (one, other):
            worker.go("end")
            assert worker.result()[1], "something was written after the call had returned"


@pytest.mark.ways("tcp")
@SIDES
def test_ctrl_c_while_it_streams(site: Site, pair: str, who: str) -> None:
    with Job(site.env) as job:
        one = job.start(transfers, pair, who, 60, at=(who, 0))
        other = job.start(transfers, pair, other_of(who), 60, at=(other_of(who), 0))
        one.expect("moving")
        other.expect("moving")
        one.kill(signal.SIGINT)
        release(one)
        assert one.expect("ended") == "KeyboardInterrupt"
        release(other)
        ended = other.expect("ended")
        assert isinstance(ended, TransferError) and ended.outcome == "aborted", ended
        for worker in (one, other):
            worker.go("end")
            assert worker.result()[1]


@pytest.mark.ways("tcp")
@SIDES
def test_an_agent_that_is_killed_while_its_worker_streams(rough: Site, pair: str, who: str) -> None:
    with Job(rough.env) as job:
        one = job.start(transfers, pair, who, 60, at=(who, 0))
        other = job.start(transfers, pair, other_of(who), 60, at=(other_of(who), 0))
        one.expect("moving")
        other.expect("moving")
        with rough.blocking(who, 0) as client:
            agent = int(client.status()["agent"]["pid"])
        send_signal(agent, signal.SIGKILL)
        release(one)
        release(other)
        ended = one.expect("ended")
        assert isinstance(ended, AgentLostError), ended
        ended = other.expect("ended")
        assert isinstance(ended, TransferError), ended
        for worker in (one, other):
            worker.go("end")
            assert worker.result()[1]


def release(worker: Any) -> None:
    """Let each of its four streams go on."""
    for _ in range(4):
        worker.go("go on")
