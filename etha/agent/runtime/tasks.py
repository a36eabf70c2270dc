"""How the agent's own tasks are started, and how they log that Redis is away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from etha.errors import RedisUnavailableError

#: Runs a coroutine as a task of the agent, which logs what it raises.
Spawn = Callable[[Coroutine[Any, Any, None]], None]


def outage(to: logging.Logger, text: str, *args: object) -> None:
    """Log that a request to Redis failed. The last of ``args`` is the error.

    While Redis is away every request fails. The lease logs that once, so the others log at debug level.
    """
    to.log(logging.DEBUG if isinstance(args[-1], RedisUnavailableError) else logging.WARNING, text, *args)
