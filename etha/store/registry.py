"""The store: what agents read and write in Redis to find each other. Metadata only; no tensor passes through it.

async with await Store.open(url, namespace, timeout=30) as store:
    await store.agents.publish(record)
    view = await store.pairs.join("weights", "trainer", "inference", rank=0, world_size=2, member=me, launch=None)
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Self

from etha.addresses import redact
from etha.errors import EthaError, ProtocolError
from etha.store.batches import BatchRecords
from etha.store.connect import Client, RedisConnection
from etha.store.groups import GroupRecords
from etha.store.keys import HISTORY_LEASE, MAX_EVENTS, RedisKeys
from etha.store.lease import AgentRecords
from etha.store.pairs import PairRecords
from etha.store.publications import Publications
from etha.store.session import StoreSession
from etha.store.watch import Callback, Watches

log = logging.getLogger(__name__)


class Store:
    """One agent's view of one namespace in one Redis. The calls are in ``pairs``, ``batches``, ``groups``,
    ``publications`` and ``agents``.

    Every call takes ``timeout`` in seconds (default: that of ``open``; ``math.inf`` waits for ever). During an outage
    calls wait and try again; when the timeout is over, they raise RedisUnavailableError. What Redis holds is checked
    when it is read: ProtocolError names the key.
    """

    def __init__(self, session: StoreSession) -> None:
        self._session = session
        self.keys = session.keys
        self.pairs = PairRecords(session)
        self.batches = BatchRecords(session)
        self.groups = GroupRecords(session)
        self.publications = Publications(session)
        self.agents = AgentRecords(session, self.pairs, self.batches, self.groups, self.publications)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        namespace: str,
        *,
        timeout: float,
        revive: Callable[[], Awaitable[None]] | None = None,
        patient: bool = True,
        on_trouble: Callable[[EthaError], None] | None = None,
    ) -> Store:
        """Connect, and start the task that keeps leases and subscriptions. ``close`` ends it.

        ``revive`` is awaited between tries while the server does not answer; it starts the embedded server again.
        ``on_trouble`` is called with the cause of a failed try. Without ``patient``, a server that refuses connections
        or whose name is unknown is an error at once; after that, every call is patient. ConfigError: the URL, user or
        password is wrong. RedisUnavailableError: nobody answered in time.
        """
        keys = RedisKeys(namespace)
        connection = RedisConnection(url, keys.prefix, revive, patient=patient, on_trouble=on_trouble)
        keeper = RedisConnection(url, keys.prefix, revive)
        reporter = RedisConnection(url, keys.prefix)  # the others revive the server
        store = cls(StoreSession(connection, keeper, reporter, keys, Watches(url), timeout))
        try:
            store._session.identity = await _identify(connection, keys, timeout)
        except BaseException:
            await connection.close()
            raise
        connection.settle()
        store._task = asyncio.get_running_loop().create_task(store._run(), name=f"store {redact(url)}")
        return store

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def identity(self) -> str:
        """The id of the Redis that has this agent's record."""
        return self._session.identity

    @property
    def url(self) -> str:
        """The URL of the connection without its password."""
        return redact(self._session.connection.url)

    @property
    def trouble(self) -> str:
        """Why Redis could not be reached when it was last tried; "" if it could."""
        return self._session.connection.trouble

    async def close(self) -> None:
        """End the tasks and connections. What was published stays until it is withdrawn or its lease ends."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        try:
            await asyncio.wait([task])
        finally:
            await self._session.connection.close()
            await self._session.keeper.close()
            await self._session.reporter.close()

    def watch(
        self, key: str, callback: Callback, *, ticks: Callable[[], bool] = lambda: True
    ) -> AbstractContextManager[None]:
        """In this context, call ``callback()`` once subscribed, when ``key`` changes, and every 2 s if ``ticks()``."""
        return self._session.watches.watch(key, callback, ticks=ticks)

    def changes(self, key: str, *, ticks: bool = True) -> AbstractAsyncContextManager[Callable[[], Any]]:
        """``async with store.changes(key) as changed:`` read, decide, ``await changed()``, read again."""
        return self._session.watches.changes(key, ticks=ticks)

    async def event(self, kind: str, *, timeout: float | None = None, **fields: object) -> None:
        """Add an entry to the stream of events."""
        await self._add({"kind": kind, **fields}, self._session.connection, timeout)

    async def report_event(self, fields: Mapping[str, object], *, timeout: float) -> None:
        """Like ``event``, over the connection for reports, which nothing else waits for."""
        await self._add(fields, self._session.reporter, timeout)

    async def _add(self, fields: Mapping[str, object], connection: RedisConnection, timeout: float | None) -> None:
        key = self.keys.events
        line: dict[Any, Any] = {name: str(value) for name, value in fields.items()}

        async def write(client: Client) -> None:
            pipe = client.pipeline(transaction=False)
            pipe.xadd(key, line, maxlen=MAX_EVENTS, approximate=True)
            pipe.pexpire(key, int(HISTORY_LEASE * 1000))
            pipe.publish(key, "event")
            await pipe.execute()

        await connection.call(f"write {key}", write, self._session.limit(timeout))

    async def events(
        self, count: int = 100, *, after: str = "-", timeout: float | None = None
    ) -> list[tuple[str, dict[str, str]]]:
        """The last ``count`` events as (id, fields), oldest first. ``after`` an id: only later ones."""
        least = after if after == "-" else f"({after}"
        found = await self._session.connection.call(
            f"read {self.keys.events}",
            lambda client: client.xrevrange(self.keys.events, "+", least, count=count),
            self._session.limit(timeout),
        )
        return [(str(at), {str(k): str(v) for k, v in fields.items()}) for at, fields in reversed(found)]

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._session.watches.run())
                group.create_task(self.agents.keep())
        except BaseExceptionGroup:
            log.exception("the store's own tasks ended: leases are no longer kept")
            raise


async def _identify(connection: RedisConnection, keys: RedisKeys, timeout: float) -> str:
    async def read(client: Client) -> str | None:
        pipe = client.pipeline(transaction=True)
        pipe.hsetnx(keys.server, "id", uuid.uuid4().hex)
        pipe.pexpire(keys.server, int(HISTORY_LEASE * 1000))
        pipe.hget(keys.server, "id")
        found = (await pipe.execute())[-1]
        return None if found is None else str(found)

    identity = await connection.call(f"read {keys.server}", read, timeout)
    if identity is None or not 0 < len(identity) <= 100:
        raise ProtocolError(f"Redis key {keys.server!r}: field 'id' is {identity!r}, expected 1 to 100 characters")
    return identity


async def identify(url: str, namespace: str, *, timeout: float) -> str:
    """The ``identity`` of the Redis at ``url``, to compare with that of an open store."""
    keys = RedisKeys(namespace)
    connection = RedisConnection(url, keys.prefix)
    try:
        return await _identify(connection, keys, timeout)
    finally:
        await connection.close()


@asynccontextmanager
async def opened(
    url: str, namespace: str, *, timeout: float, revive: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[Store]:
    """``Store.open`` and ``close`` as a context."""
    store = await Store.open(url, namespace, timeout=timeout, revive=revive)
    try:
        yield store
    finally:
        await store.close()
