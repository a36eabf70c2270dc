"""A blocking ``recv`` of plain tensors copies them itself: exact, and right whoever ends, stops or dies in it.

Each case by the client's event loop, which a first call goes over, and by the caller's own thread, as later calls go.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

import etha
from etha.errors import AgentLostError, EthaError, PeerLostError, TransferError, TransferTimeoutError
from etha.memory import pull
from etha.memory.process import ProcessMemory
from etha.memory.reach import AccessError
from tests.flow.clients.direct import ask_directly, count_direct
from tests.flow.jobs import Job, tell, wait_for, wait_gone
from tests.flow.sites import Site
from tests.flow.truth import cut, stale, whole
from tests.processes import send_signal
from tests.seconds import within

#: 16 MiB in float32: a pull of it has many chunks, and one of half of it, too.
SHAPE = (2048, 2048)
ROWS, COLUMNS, ALL = Shard(0), Shard(1), Replicate()
#: The version of a first transfer that no test looks at.
WARM = 99


@pytest.fixture(params=[False, True], ids=["by the loop", "by its thread"])
def direct(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def part(version: int, placement: Placement, ranks: int, rank: int) -> torch.Tensor:
    full = whole(SHAPE, version)
    return cut(full, placement.dim, ranks, rank) if isinstance(placement, Shard) else full


class Member:
    """A rank with a blocking client and one registered tensor."""

    def __init__(self, pair: str, side: str, rank: int, ranks: int, placement: Placement, **options: Any) -> None:
        self.version = 0
        self._place = (placement, ranks, rank)
        self.tensor = stale(part(0, *self._place))
        self.client = etha.TensorBusClient(timeout=60)
        other = "inference" if side == "trainer" else "trainer"
        self.client.init_pair(pair, side, other, ranks, (ranks,), [placement], rank=rank)
        self.batch = self.client.register_tensors(
            "b", {"w": self.tensor}, pair_name=pair, shapes={"w": SHAPE}, **options
        )

    def send(self, version: int, **options: Any) -> Any:
        self.tensor.copy_(part(version, *self._place))
        return self.batch.transfer("send", version=version, **options)

    def holds(self, version: int) -> bool:
        return torch.equal(self.tensor, part(version, *self._place))

    def warm_up(self, verb: Literal["send", "recv"]) -> None:
        """After this, blocking calls are made by their own threads."""
        if verb == "send":
            self.send(WARM)
        else:
            self.batch.transfer("recv")
        ask_directly(self.client, self.batch)


def count_pulls(count: list[int]) -> None:
    """In a worker: note the bytes of each pull."""
    finish = pull.PullRun.finish

    def counted(self: pull.PullRun) -> None:
        finish(self)
        count.append(self.done)

    pull.PullRun.finish = counted  # type: ignore[method-assign]


def hold_a_pull() -> None:
    """In a worker: of the first pull, tell "pulling" after a chunk, and go on when the test says "go on"."""
    pull.load_pull = lambda: None  # type: ignore[attr-defined]
    copy, first, go_on = pull.PullRun._copy, threading.Lock(), threading.Event()

    def held(self: pull.PullRun, memories: list[ProcessMemory], chunk: int) -> int:
        if not first.acquire(blocking=False):
            go_on.wait()
            return copy(self, memories, chunk)
        moved = copy(self, memories, chunk)
        tell("pulling")
        wait_for("go on")
        go_on.set()
        return moved

    pull.PullRun._copy = held  # type: ignore[method-assign]


# ---- who takes part ---------------------------------------------------------------------------------------


def trainer(pair: str, rank: int, ranks: int, placement: Placement, turns: int) -> list[int]:
    with (member := Member(pair, "trainer", rank, ranks, placement)).client:
        member.warm_up("send")
        return [member.send(version).seq for version in range(1, turns + 1)]


def inference(
    pair: str, rank: int, ranks: int, placement: Placement, turns: int, how: Callable[[], None] | None = None
) -> tuple[list[int], list[int]]:
    """(versions that it held after each transfer, bytes of its pulls)."""
    count: list[int] = []
    count_pulls(count)
    if how is not None:
        how()
    with (member := Member(pair, "inference", rank, ranks, placement)).client:
        seen: list[int] = []
        progress: list[tuple[int, int]] = []
        member.warm_up("recv")
        count.clear()
        directly = count_direct()
        for version in range(1, turns + 1):
            if version % 2:
                result = member.batch.transfer("recv", progress=lambda *at: progress.append(at))
                assert progress == sorted(progress) and progress[-1] == (result.bytes, result.bytes)
                progress.clear()
            else:
                result = member.batch.transfer("recv")
            assert result.version == version and member.holds(version), f"version {version} is not exact"
            assert len(directly) == version // 2
            seen.append(version)
        return seen, count


def no_reach() -> None:
    """As where the kernel, or another PID namespace, keeps workers apart."""

    def refuse(processes: object) -> list[ProcessMemory]:
        raise AccessError("not from here")

    pull._open = refuse


@pytest.mark.ways("local", "host")
@pytest.mark.parametrize(
    ("source", "target"),
    [(ALL, ALL), (ROWS, ROWS), (ROWS, COLUMNS), (COLUMNS, ROWS), (COLUMNS, ALL), (ALL, COLUMNS)],
    ids=lambda placement: str(placement),
)
def test_every_version_is_exact_and_copied_by_its_receivers(
    site: Site, pair: str, source: Placement, target: Placement
) -> None:
    with Job(site.env) as job:
        senders = [job.start(trainer, pair, rank, 2, source, 4, at=("trainer", rank)) for rank in range(2)]
        takers = [job.start(inference, pair, rank, 2, target, 4, at=("inference", rank)) for rank in range(2)]
        for sender in senders:
            assert sender.result() == [2, 3, 4, 5]
        nbytes = part(0, target, 2, 0).numel() * 4
        for taker in takers:
            assert taker.result() == ([1, 2, 3, 4], [nbytes] * 4)


@pytest.mark.ways("local")
def test_where_workers_do_not_reach_each_other_the_agent_copies(site: Site, pair: str) -> None:
    with Job(site.env) as job:
        sender = job.start(trainer, pair, 0, 1, ALL, 3, at=("trainer", 0))
        taker = job.start(inference, pair, 0, 1, ALL, 3, no_reach, at=("inference", 0))
        assert sender.result() == [2, 3, 4]
        assert taker.result() == ([1, 2, 3], [])


# ---- what happens in the middle ------------------------------------------------------------------------------


def sends(pair: str, timeout: float, direct: bool) -> Any:
    """Sends version 1; "sent", or the error and the seconds that it took. Then overwrites its tensor if asked to."""
    with (member := Member(pair, "trainer", 0, 1, ALL)).client:
        if direct:
            member.warm_up("send")
        begun = time.monotonic()
        try:
            member.send(1, timeout=timeout)
            return "sent"
        except EthaError as error:
            tell("returned", (error, time.monotonic() - begun))
            if wait_for("end") == "overwrite":
                member.tensor.fill_(-1)
                tell("overwritten")
                wait_for("end")
            return error


def takes(pair: str, timeout: float, direct: bool) -> Any:
    """Receives, held after the first chunk. (error or result, whether something was written after the call)."""
    with (member := Member(pair, "inference", 0, 1, ALL)).client:
        if direct:
            member.warm_up("recv")
        hold_a_pull()
        directly = count_direct()
        ended: Any
        try:
            ended = member.batch.transfer("recv", timeout=timeout).seq
        except (EthaError, KeyboardInterrupt) as error:
            ended = error if isinstance(error, EthaError) else type(error).__name__
        assert len(directly) == direct
        after = member.tensor.clone()
        tell("ended", ended)
        wait_for("end")
        return ended, torch.equal(after, member.tensor), member.holds(1)


@pytest.mark.ways("local", "host")
def test_a_receiver_that_is_killed_in_its_copy(site: Site, pair: str, direct: bool) -> None:
    with Job(site.env) as job:
        sender = job.start(sends, pair, 60, direct, at=("trainer", 0))
        taker = job.start(takes, pair, 60, direct, at=("inference", 0))
        taker.expect("pulling")
        begun = time.monotonic()
        taker.kill()
        error, _ = sender.expect("returned")
        assert isinstance(error, PeerLostError) and error.reason == "died" and error.outcome == "aborted", error
        assert time.monotonic() - begun < within(2)
        sender.go("end")
        sender.result()


@pytest.mark.ways("local", "host")
def test_a_receiver_that_is_stopped_in_its_copy_keeps_nobody(site: Site, pair: str, direct: bool) -> None:
    with Job(site.env) as job:
        sender = job.start(sends, pair, 3, direct, at=("trainer", 0))
        taker = job.start(takes, pair, 60, direct, at=("inference", 0))
        taker.expect("pulling")
        taker.kill(signal.SIGSTOP)
        error, seconds = sender.expect("returned")
        assert isinstance(error, TransferTimeoutError) and error.outcome == "aborted", error
        assert seconds < within(4)
        taker.kill(signal.SIGCONT)
        taker.go("go on")
        ended = taker.expect("ended")
        assert isinstance(ended, TransferError) and ended.outcome == "aborted" and ended.torn, ended
        for worker in (sender, taker):
            worker.go("end")
        assert taker.result()[1], "something was written after the call had returned"


@pytest.mark.ways("local", "host")
def test_a_sender_that_is_killed_in_the_copy(site: Site, pair: str, direct: bool) -> None:
    with Job(site.env) as job:
        sender = job.start(sends, pair, 60, direct, at=("trainer", 0))
        taker = job.start(takes, pair, 60, direct, at=("inference", 0))
        taker.expect("pulling")
        sender.kill()
        wait_gone(sender.pid)  # else all may be copied before it ends
        taker.go("go on")
        ended = taker.expect("ended")
        assert isinstance(ended, PeerLostError) and ended.outcome == "aborted" and ended.torn, ended
        taker.go("end")
        _, untouched, holds = taker.result()
        assert untouched and not holds


@pytest.mark.ways("local", "host")
def test_ctrl_c_in_the_copy(site: Site, pair: str, direct: bool) -> None:
    with Job(site.env) as job:
        sender = job.start(sends, pair, 60, direct, at=("trainer", 0))
        taker = job.start(takes, pair, 60, direct, at=("inference", 0))
        taker.expect("pulling")
        taker.kill(signal.SIGINT)
        error, _ = sender.expect("returned")
        assert isinstance(error, TransferError) and error.outcome == "aborted", error
        assert not taker.has_told("ended"), "the call has returned although its thread still copies"
        taker.go("go on")
        assert taker.expect("ended") == "KeyboardInterrupt"
        for worker in (sender, taker):
            worker.go("end")
        assert taker.result()[1]


@pytest.mark.ways("local", "host")
def test_the_deadline_of_the_receiver_in_its_copy(site: Site, pair: str, direct: bool) -> None:
    with Job(site.env) as job:
        sender = job.start(sends, pair, 60, direct, at=("trainer", 0))
        taker = job.start(takes, pair, 2, direct, at=("inference", 0))
        taker.expect("pulling")
        error, _ = sender.expect("returned")
        assert isinstance(error, TransferError) and error.outcome == "aborted", error
        taker.go("go on")
        ended = taker.expect("ended")
        assert isinstance(ended, TransferTimeoutError) and ended.outcome == "aborted", ended
        for worker in (sender, taker):
            worker.go("end")
        assert taker.result()[1]


def agent_of(site: Site) -> int:
    with site.blocking("trainer", 0) as client:
        return int(client.status()["agent"]["pid"])


@pytest.mark.ways("local")
def test_an_agent_that_is_killed_in_the_copy(rough: Site, pair: str, direct: bool) -> None:
    with Job(rough.env) as job:
        sender = job.start(sends, pair, 60, direct, at=("trainer", 0))
        taker = job.start(takes, pair, 60, direct, at=("inference", 0))
        taker.expect("pulling")
        os.kill(agent_of(rough), signal.SIGKILL)
        error, _ = sender.expect("returned")
        assert isinstance(error, AgentLostError), error
        taker.go("go on")
        ended = taker.expect("ended")
        assert isinstance(ended, AgentLostError) and ended.outcome == "unknown" and ended.torn, ended
        for worker in (sender, taker):
            worker.go("end")
        assert taker.result()[1]


@pytest.mark.ways("local", "host")
def test_a_sender_that_has_taken_its_memory_back_is_not_committed(rough: Site, pair: str, direct: bool) -> None:
    """The agent is frozen, so the sender's call ends without it. What the receiver copies then is not the version."""
    with Job(rough.env) as job:
        sender = job.start(sends, pair, 2, direct, at=("trainer", 0))
        taker = job.start(takes, pair, 60, direct, at=("inference", 0))
        taker.expect("pulling")
        agent = agent_of(rough)
        send_signal(agent, signal.SIGSTOP)
        try:
            error, _ = sender.expect("returned")
            assert isinstance(error, TransferTimeoutError) and error.outcome == "unknown" and error.quiesced, error
            sender.go("end", "overwrite")
            sender.expect("overwritten")
            taker.go("go on")
        finally:
            os.kill(agent, signal.SIGCONT)
        ended = taker.expect("ended")
        assert isinstance(ended, TransferError) and ended.outcome == "aborted", ended
        for worker in (sender, taker):
            worker.go("end")
        assert taker.result()[1:] == (True, False)
