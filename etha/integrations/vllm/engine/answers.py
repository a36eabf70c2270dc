"""Read all answers of a failed call, which vLLM 0.32's multi-process executor does not do.

The executor asks all workers and reads their answers one after another. If the first is an error, it stops reading. The
others' answers stay in their queues, and each later call takes the previous answer for its own. After a weight update
that fails on all workers, every later update would be "confirmed" by the one before it. This file reads the remaining
answers, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class _Queue:
    """One worker's answers during one call. It records whether this call's answer was read."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.read = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)  # vLLM's monitor shuts queues down when a worker has died

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._queue.dequeue(*args, **kwargs)
        self.read = True
        return answer


def read_all_answers(executor: Any, wanted: Callable[[Any], bool]) -> None:
    """Repair ``collective_rpc`` of this class, for those executors for which ``wanted`` is true when they are called.

    Repairs once, and only a class with the known fault.
    """
    asked = executor.collective_rpc
    if hasattr(asked, "__wrapped__"):
        return

    @wraps(asked)
    def collective_rpc(self: Any, method: Any, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
        queues = getattr(self, "response_mqs", None)
        one = kwargs.get("non_block") or kwargs.get("unique_reply_rank") is not None
        # A worker that missed a timeout may answer later, so such a call cannot be repaired.
        if not wanted(self) or one or timeout is not None or not isinstance(queues, list) or len(args) > 2:
            return asked(self, method, timeout, *args, **kwargs)
        counted = [_Queue(queue) for queue in queues]
        self.response_mqs = counted
        try:
            return asked(self, method, timeout, *args, **kwargs)
        except Exception:
            if any(queue.read for queue in counted):
                for queue in counted:
                    if not queue.read:
                        queue.dequeue()
            raise
        finally:
            if self.response_mqs is counted:  # else the executor was shut down meanwhile
                self.response_mqs = queues

    executor.collective_rpc = collective_rpc
