"""What a call returns: it ends once, wakes everybody who waits, and its future is an error that DDP survives."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from etha.errors import GroupLostError, GroupTimeoutError
from etha.groups.calls import normalize
from etha.groups.work import DummyWork, GroupWork, JoinedWork

LOST = GroupLostError("rank 1 was killed", ranks=(1,), reason="was killed")


def work() -> GroupWork:
    return GroupWork(normalize("allreduce", ([torch.ones(2)],), rank=0, size=2))


def test_it_ends_once_and_wakes_all_who_wait() -> None:
    it, woken = work(), []
    threads = [threading.Thread(target=lambda: woken.append(it.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    it.finish()
    it.finish(LOST)
    for thread in threads:
        thread.join()
    assert woken == [True] * 3
    assert it.is_success() and it.exception() is None
    assert it.result()[0].tolist() == [1, 1]


def test_wait_raises_the_error_itself() -> None:
    it = work()
    it.finish(LOST)
    for timeout in (None, timedelta(0), timedelta(seconds=1)):
        with pytest.raises(GroupLostError) as caught:
            it.wait(timeout)
        assert caught.value is LOST
    assert it.is_completed() and not it.is_success()


@pytest.mark.parametrize("early", [True, False])
def test_the_future_has_the_tensors(early: bool) -> None:
    it = work()
    future = it.get_future() if early else None
    it.finish()
    future = future or it.get_future()
    assert future.wait()[0].tolist() == [1, 1]
    assert it.get_future() is future


@pytest.mark.parametrize("early", [True, False])
def test_the_future_of_an_error_raises(early: bool) -> None:
    it = work()
    future = it.get_future() if early else None
    it.finish(LOST)
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        (future or it.get_future()).wait()


def test_a_wait_that_times_out_ends_the_call() -> None:
    it = work()
    with pytest.raises(GroupTimeoutError, match=r"allreduce SUM of float32\[2\] timed out after 0.001 seconds"):
        it.wait(timedelta(milliseconds=1))
    assert isinstance(it.exception(), GroupTimeoutError)


def test_a_timeout_is_pythons_too_and_a_group_error_is_a_runtime_error() -> None:
    assert isinstance(GroupTimeoutError("late"), TimeoutError | RuntimeError)
    assert isinstance(LOST, RuntimeError)


def test_the_thread_that_waits_may_carry_out_the_call() -> None:
    begun: list[timedelta | None] = []

    def run(timeout: timedelta | None) -> None:
        begun.append(timeout)
        it.finish()

    it = GroupWork(work().call, run)
    assert it.wait() and it.wait()
    assert begun == [None]


def test_callbacks_run_at_the_end_or_at_once() -> None:
    it, heard = work(), []
    it.on_finished(lambda: heard.append("first"))
    it.finish()
    it.on_finished(lambda: heard.append("second"))
    assert heard == ["first", "second"]


def test_several_works_are_one() -> None:
    joined = JoinedWork([DummyWork([torch.ones(1)]), DummyWork([torch.zeros(1)])])
    assert joined.wait() and joined.is_completed()
    assert [tensor.item() for tensor in joined.get_future().wait()] == [1, 0]
