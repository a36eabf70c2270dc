"""Wake-ups: somebody changed a key, the subscription was renewed, or two seconds have passed.

One connection serves all watched keys of a store. The truth is in the keys, so whoever is woken reads them. A callback
is first called after the server has acknowledged the subscription, so a reader that reads then misses nothing. A frozen
server is noticed because it must answer a ping; then everything is subscribed again on a new connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from etha.addresses import redact
from etha.errors import EthaError
from etha.store.connect import Unreachable, make_pool, translated

log = logging.getLogger(__name__)

#: Seconds between ticks, which are also pings, and until a silent server counts as gone.
TICK = 2.0
PONG_TIMEOUT = 5.0
MAX_PAUSE = 1.0

Callback = Callable[[], None]


def _always() -> bool:
    return True


class Watches:
    """Callbacks by key, served by ``run`` over one pub/sub connection."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._callbacks: dict[str, list[tuple[Callback, Callable[[], bool]]]] = {}
        self._wanted = asyncio.Event()  # set when the set of keys has changed
        self._acknowledged: set[str] = set()
        self._connected = False

    @contextmanager
    def watch(self, key: str, callback: Callback, *, ticks: Callable[[], bool] = _always) -> Iterator[None]:
        """Call ``callback`` (plain, quick) when subscribed (again), at every change, and at ticks if ``ticks()``."""
        entry = (callback, ticks)
        self._callbacks.setdefault(key, []).append(entry)
        self._wanted.set()
        if key in self._acknowledged:
            callback()
        try:
            yield
        finally:
            self._callbacks[key].remove(entry)
            if not self._callbacks[key]:
                del self._callbacks[key]
                self._wanted.set()

    @asynccontextmanager
    async def changes(self, key: str, *, ticks: bool = True) -> AsyncIterator[Callable[[], Any]]:
        """``async with changes(key) as changed:`` read, decide, ``await changed()``, read again.

        The first ``await changed()`` returns when the subscription is acknowledged. Without ``ticks``, the next ones
        return at changes only.
        """
        event = asyncio.Event()

        async def changed() -> None:
            await event.wait()
            event.clear()

        with self.watch(key, event.set, ticks=lambda: ticks):
            yield changed

    async def run(self) -> None:
        """Serve until cancelled, over as many connections as it takes."""
        pause = 0.02
        while True:
            try:
                with translated(self._url, "subscribe"):
                    await self._session()
            except (Unreachable, EthaError) as error:
                if self._connected:
                    log.warning("Redis at %s has closed its connection, connecting again: %s", redact(self._url), error)
                    pause = 0.02
                self._connected = False
            await asyncio.sleep(pause)
            pause = min(MAX_PAUSE, pause * 2)
            self._call_all()

    async def _session(self) -> None:
        # One writer and one reader share the connection; the first that fails ends both. If there is no answer within
        # PONG_TIMEOUT, the reader fails, because the writer pings at every tick.
        pool = make_pool(self._url, retry=Retry(NoBackoff(), 0))
        connection = pool.make_connection()
        try:
            async with asyncio.timeout(PONG_TIMEOUT):
                await connection.connect()
            self._connected = True
            self._wanted.set()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(connection))
                group.create_task(self._write(connection))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._acknowledged.clear()
            await connection.disconnect(nowait=True)
            await pool.disconnect()

    async def _write(self, connection: Any) -> None:
        loop = asyncio.get_running_loop()
        subscribed: set[str] = set()
        tick = loop.time() + TICK
        while True:
            try:
                async with asyncio.timeout_at(tick):
                    await self._wanted.wait()
            except TimeoutError:
                tick = loop.time() + TICK
                await connection.send_command("PING", check_health=False)
                self._call_all(tick=True)
            self._wanted.clear()
            wanted = set(self._callbacks)
            if new := wanted - subscribed:
                await connection.send_command("SUBSCRIBE", *sorted(new), check_health=False)
            if old := subscribed - wanted:
                self._acknowledged -= old
                await connection.send_command("UNSUBSCRIBE", *sorted(old), check_health=False)
            subscribed = wanted

    async def _read(self, connection: Any) -> None:
        while True:
            async with asyncio.timeout(PONG_TIMEOUT):
                answer = await connection.read_response()
            # ["subscribe", key, count] is the acknowledgement, ["message", key, text] a change.
            if isinstance(answer, list) and len(answer) >= 2 and answer[0] in ("subscribe", "message"):
                if answer[0] == "subscribe":
                    self._acknowledged.add(str(answer[1]))
                self._call(str(answer[1]))

    def _call_all(self, *, tick: bool = False) -> None:
        for key in list(self._callbacks):
            self._call(key, tick=tick)

    def _call(self, key: str, *, tick: bool = False) -> None:
        for callback, ticks in list(self._callbacks.get(key, ())):
            if tick and not ticks():
                continue
            try:
                callback()
            except Exception:
                log.exception("a callback of %s failed", key)
