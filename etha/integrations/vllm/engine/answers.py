"""After a call that failed, no answers are left over: what vLLM 0.32's multi-process executor gets wrong.

The executor asks all workers and reads their answers one after another. When the first is an error it stops reading:
the others' answers stay in their queues, and each later call takes the one before for its own. A weight update that
fails on all workers would so be "confirmed" by the update before it ever after. Here the rest is read, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class _Queue:
    """One worker's answers during one call; knows whether this call's was read."""

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
    """Mend ``collective_rpc`` of those executors of a class that ``wanted`` says so of, when they are called.

    Once, and only what has the shape that is known to need it.
    """
    asked = executor.collective_rpc
    if hasattr(asked, "__wrapped__"):
        return

    @wraps(asked)
    def collective_rpc(self: Any, method: Any, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
        queues = getattr(self, "response_mqs", None)
        one = kwargs.get("non_block") or kwargs.get("unique_reply_rank") is not None
        # A worker that has not answered in time may do so later: nothing can be said of such a call.
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
