"""An executor like vLLM's: a failed call must not leave its answers to the next one."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from etha.integrations.vllm.engine.answers import read_all_answers


class Queue:
    def __init__(self) -> None:
        self.answers: deque[tuple[bool, Any]] = deque()

    def dequeue(self, timeout: float | None = None) -> tuple[bool, Any]:
        return self.answers.popleft()


def executor() -> Any:
    class Executor:
        """Asks three workers; stops reading at the first error, as vLLM's does."""

        def __init__(self) -> None:
            self.response_mqs = [Queue() for _ in range(3)]

        def collective_rpc(
            self, method: Any, timeout: Any = None, args: Any = (), unique_reply_rank: Any = None
        ) -> Any:
            for rank, queue in enumerate(self.response_mqs):
                if unique_reply_rank in (None, rank):
                    getattr(queue, "_queue", queue).answers.append(method(rank))
            mine = self.response_mqs if unique_reply_rank is None else [self.response_mqs[unique_reply_rank]]
            found = []
            for queue in mine:
                well, answer = queue.dequeue(timeout)
                if not well:
                    raise RuntimeError(answer)
                found.append(answer)
            return found

    return Executor


def failing(*ranks: int) -> Any:
    return lambda rank: (rank not in ranks, f"{'no' if rank in ranks else 'yes'} {rank}")


def fine(rank: int) -> tuple[bool, str]:
    return True, f"fine {rank}"


def test_without_the_mending_the_next_call_reads_old_answers() -> None:
    plain = executor()()
    with pytest.raises(RuntimeError, match="no 0"):
        plain.collective_rpc(failing(0, 1, 2))
    with pytest.raises(RuntimeError, match="no 1"):
        plain.collective_rpc(fine)


@pytest.mark.parametrize("ranks", [(0,), (1,), (2,), (0, 1, 2)])
def test_the_next_call_reads_its_own(ranks: tuple[int, ...]) -> None:
    kind = executor()
    read_all_answers(kind, lambda _: True)
    read_all_answers(kind, lambda _: True)  # plugins load more than once
    mended = kind()
    with pytest.raises(RuntimeError, match=f"no {ranks[0]}"):
        mended.collective_rpc(failing(*ranks))
    assert mended.collective_rpc(fine) == ["fine 0", "fine 1", "fine 2"]
    assert mended.collective_rpc(fine, unique_reply_rank=1) == ["fine 1"]
    assert all(isinstance(queue, Queue) for queue in mended.response_mqs)


def test_an_error_before_anything_was_asked_waits_for_nobody() -> None:
    kind = executor()
    read_all_answers(kind, lambda _: True)

    def broken(rank: int) -> Any:
        raise ValueError("cannot be asked")

    with pytest.raises(ValueError, match="cannot be asked"):
        kind().collective_rpc(broken)


def test_queues_that_are_shut_down_in_a_call_stay_so() -> None:
    """A worker's death ends the executor from another thread, by methods of its queues."""
    kind = executor()
    read_all_answers(kind, lambda _: True)
    mended = kind()

    def dies(rank: int) -> tuple[bool, str]:
        for queue in mended.response_mqs:
            queue.answers.clear()
        mended.response_mqs = []
        return False, "it died"

    assert mended.collective_rpc(dies) == []
    assert mended.response_mqs == []


def test_executors_that_do_not_use_the_backend_are_left_alone() -> None:
    kind = executor()
    read_all_answers(kind, lambda asked: asked.backend == "etha")
    other, ours = kind(), kind()
    other.backend, ours.backend = "nccl", "etha"
    for asked in (other, ours):
        with pytest.raises(RuntimeError, match="no 0"):
            asked.collective_rpc(failing(0, 1, 2))
    with pytest.raises(RuntimeError, match="no 1"):
        other.collective_rpc(fine)
    assert ours.collective_rpc(fine) == ["fine 0", "fine 1", "fine 2"]
