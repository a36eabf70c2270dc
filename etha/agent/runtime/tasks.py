"""How the agent's own tasks are started, how long some are waited for, and how they log that Redis is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from etha.errors import RedisUnavailableError

T = TypeVar("T")

#: Runs a coroutine as a task of the agent, which logs what it raises.
Spawn = Callable[[Coroutine[Any, Any, None]], None]


class EndableTask(Generic[T]):
    """Work of the agent that can be ended early. ``then(self)`` is called once it is over, in whatever way.

    ``value`` or ``error`` is what it has returned or raised; ``ended`` whether ``end`` came first.
    """

    def __init__(
        self, spawn: Spawn, work: Coroutine[Any, Any, T], then: Callable[[EndableTask[T]], None] = lambda _: None
    ) -> None:
        self._work, self._then = work, then
        self._task: asyncio.Task[Any] | None = None
        self._ending = self.ended = False
        self.value: T | None = None
        self.error: Exception | None = None
        self.over = asyncio.Event()
        spawn(self._run())

    def end(self) -> None:
        """Cancel it. Idempotent."""
        if not self._ending:
            self._ending = True
            if self._task is not None:
                self._task.cancel()

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        try:
            if self._ending:
                self._work.close()
                self.ended = True
            else:
                self.value = await self._work
        except asyncio.CancelledError:
            self.ended = True
            if not self._ending:  # the agent ends
                raise
        except Exception as error:
            self.error = error
        finally:
            self.over.set()
            self._then(self)


#: Seconds that a leaving agent spends on what it still has to write to Redis.
LAST_WORDS = 2.0
#: Most seconds that a call which has ended early waits until its entry in Redis is taken back. Looking for hints comes
#: before that, and the worker waits one second in all.
TAKEN_BACK = 0.25


async def ends_within(seconds: float, work: Awaitable[object]) -> bool:
    """Await ``work`` for at most so long; returns whether it has ended. Redis may be away."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True


def outage(to: logging.Logger, text: str, *args: object) -> None:
    """Log that a request to Redis failed. The last of ``args`` is the error.

    While Redis is away every request fails. The lease logs that once, so the others log at debug level.
    """
    to.log(logging.DEBUG if isinstance(args[-1], RedisUnavailableError) else logging.WARNING, text, *args)
