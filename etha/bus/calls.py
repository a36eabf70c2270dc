"""One request that waits for its answer, and survives the cancellation of who awaits it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from etha.bus.codec import Failure, Reply

Answer = Reply | Failure


class PendingCall:
    """The answer is kept beside the future: a cancelled wait loses nothing and may be followed by another."""

    __slots__ = ("_loop", "_waiter", "answer", "id", "on_push", "tag", "withdrawn")

    def __init__(
        self, id: int, on_push: Callable[[Any], None] | None, loop: asyncio.AbstractEventLoop, tag: object = None
    ) -> None:
        self.id = id
        self.tag, self.withdrawn = tag, False
        self.on_push = on_push
        self.answer: Answer | None = None
        self._loop = loop
        self._waiter: asyncio.Future[None] = loop.create_future()

    async def wait(self) -> Answer | None:
        """The answer, or None when ``expire`` came first. Again after a cancelled wait: waits anew."""
        if self.answer is None:
            if self._waiter.done():
                self._waiter = self._loop.create_future()
            await self._waiter
        return self.answer

    def deliver(self, answer: Answer) -> None:
        """Give the answer; a second one is ignored."""
        if self.answer is None:
            self.answer = answer
            self.expire()

    def expire(self) -> None:
        """End the wait."""
        if not self._waiter.done():
            self._waiter.set_result(None)
