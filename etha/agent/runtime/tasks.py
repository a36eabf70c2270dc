"""How the agent's own tasks are started, how long some are waited for, and how they log that Redis is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from etha.errors import RedisUnavailableError

#: Runs a coroutine as a task of the agent, which logs what it raises.
Spawn = Callable[[Coroutine[Any, Any, None]], None]


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
