"""A trainer's connection to its agent, for the membership of its groups: requests from any thread, one pushed word.

Not for tensors and not for votes. If the agent ends, the connection is made again (another agent is started), and the
new agent hears which ranks this process holds. Groups go on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from etha.bus.handshake import WorkerHello
from etha.bus.link import AgentLink
from etha.bus.messages import AddValue, GetValues, PutValues, SwapValue
from etha.bus.process import start_time
from etha.client.agent_process import ensure_agent
from etha.client.loop_thread import LoopMembership, LoopThread
from etha.config import Settings, agent_path
from etha.errors import (
    AgentLostError,
    AgentUnavailableError,
    EthaError,
    GroupError,
    GroupLostError,
    GroupTimeoutError,
)
from etha.groups.store_client import SimpleStore, as_bytes
from etha.version import __version__

log = logging.getLogger(__name__)

#: Seconds between attempts to reach an agent again when nobody waits for it; at first and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
#: Seconds that one attempt may take: an agent may have to be started.
_CONNECT = 60.0


class GroupAgentLink:
    """``on_push(message)`` is called on the loop's thread. ``attend()`` returns the messages that tell a new agent what
    this process holds."""

    def __init__(
        self,
        settings: Settings,
        *,
        redis_url: str | None,
        agent: str | None,
        on_push: Callable[[Any], None],
        attend: Callable[[], list[Any]],
        heard: Callable[[Any], None],
    ) -> None:
        self._settings, self.redis_url, self._agent = settings, settings.redis_of(redis_url), agent
        self._on_push, self._attend, self._heard = on_push, attend, heard
        self._membership = LoopMembership(self)
        self._link: AgentLink | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        #: Open calls of ``exchange``, and their epochs; the last epoch that has ended.
        self._exchanges: dict[asyncio.Timeout, int] = {}
        self._ended_epoch = 0
        self._pid = os.getpid()

    @property
    def loop_thread(self) -> LoopThread:
        """The thread of this process's clients, while this link is open."""
        return self._membership.loop_thread

    @property
    def connected(self) -> bool:
        """Whether an agent is there now; on the loop's thread."""
        return self._link is not None and not self._link.lost.done()

    def call(self, message: Any, timeout: float) -> Any:
        """Ask the agent and wait for its answer; over several agents if one ends meanwhile.

        Raises what the agent answers, GroupTimeoutError, or AgentUnavailableError if no agent can be reached.
        """
        return self._membership.loop_thread.call(self._call(message, timeout))

    def exchange(self, message: Any, epoch: int, timeout: float) -> Any:
        """As ``call``, for values of an epoch. GroupLostError once the epoch has ended (``end_exchanges``)."""
        return self._membership.loop_thread.call(self._exchange(message, epoch, timeout))

    def end_exchanges(self, epoch: int) -> None:
        """Nobody needs to wait for values of this epoch and earlier ones; on the loop's thread."""
        self._ended_epoch = max(self._ended_epoch, epoch)
        now = asyncio.get_running_loop().time()
        for limit, at in self._exchanges.items():
            if at <= epoch:
                limit.reschedule(now)

    def say(self, message: Any) -> None:
        """Answer what the agent has asked by a push; on the loop's thread. If the agent ends meanwhile, nobody asks."""

        async def said() -> None:
            if self._link is not None and not self._closed:
                with contextlib.suppress(EthaError):
                    await self._link.request(message, timeout=_CONNECT)

        self._membership.loop_thread.spawn(said())

    async def ask(self, message: Any, timeout: float) -> Any:
        """``call``, on the loop's thread."""
        return await self._call(message, timeout)

    def close(self) -> None:
        """Say goodbye; the ranks of this process end. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._membership.loop_thread.call(self._close())
        self._membership.leave()

    async def _close(self) -> None:
        if self._link is not None:
            await self._link.close()

    async def _exchange(self, message: Any, epoch: int, timeout: float) -> Any:
        limit = asyncio.timeout(None)
        try:
            if epoch > self._ended_epoch:
                async with limit:
                    self._exchanges[limit] = epoch
                    return await self._call(message, timeout)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._exchanges.pop(limit, None)
        text = f"a member of epoch {epoch} of group {message.group} has ended, or could not reach another"
        raise GroupLostError(text, epoch=epoch)

    async def _call(self, message: Any, timeout: float) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            try:
                link = await self._open(max(0.0, deadline - loop.time()))
            except AgentLostError:  # a new one has ended before it had heard who is here
                if self._closed or loop.time() >= deadline:
                    raise
                continue
            try:
                return await link.request(
                    message, timeout=max(0.0, deadline - loop.time()), on_timeout=lambda: self._late(message)
                )
            except AgentLostError:
                if self._closed or loop.time() >= deadline:
                    raise
            except AgentUnavailableError:  # it is leaving
                if loop.time() >= deadline:
                    raise
                await asyncio.wait({link.lost}, timeout=deadline - loop.time())

    def _late(self, message: Any) -> EthaError:
        return GroupTimeoutError(f"the agent has not answered {type(message).__name__} in time: is it stopped?")

    async def _open(self, timeout: float) -> AgentLink:
        """The connection; made now if there is none."""
        async with self._opening:
            if self._link is not None and not self._link.lost.done():
                return self._link
            if self._closed:
                raise AgentLostError("this member has left its group")
            again = self._link is not None
            self._link = link = await self._connect(timeout, again=again)
            # Before anything is asked of it: an agent that ends meanwhile is replaced, too.
            link.lost.add_done_callback(lambda _: self._lost(link))
            for message in self._attend() if again else ():
                self._heard(await link.request(message, timeout=_CONNECT))
        return link

    def _lost(self, link: AgentLink) -> None:
        """When the agent ends, make the connection again, so that others hear of this process's end."""
        if not self._closed and self._membership.loop_thread.alive:
            self._membership.loop_thread.spawn(self._reopen(link))

    async def _connect(self, timeout: float, *, again: bool) -> AgentLink:
        settings = self._settings
        starts = self._agent is None
        hello = WorkerHello(
            version=__version__,
            namespace=settings.namespace,
            redis=self.redis_url,
            host=settings.host_id,
            pid=os.getpid(),
            start=start_time(),
            wants=settings.wishes,
            starts=starts,
        )
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + timeout, _FIRST_PAUSE
        if self._agent is not None:
            return await AgentLink.connect(agent_path(self._agent), hello, timeout=timeout, on_push=self._on_push)
        while True:
            settings.ensure_runtime_dir()
            try:
                path = await ensure_agent(
                    settings,
                    "cpu",
                    redis_url=self.redis_url,
                    namespace=settings.namespace,
                    timeout=max(0.0, deadline - loop.time()),
                    patient=again,
                )
            except AgentUnavailableError as error:
                if not again or loop.time() + pause >= deadline:
                    raise
                log.warning("an agent that was started has ended, another one is started: %s", error)
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
                continue
            try:
                link = await AgentLink.connect(
                    path, hello, timeout=max(0.0, deadline - loop.time()), on_push=self._on_push
                )
            except (AgentUnavailableError, AgentLostError):
                if loop.time() >= deadline:
                    raise
                continue
            if not link.welcome.leaving:
                return link
            await asyncio.wait({link.lost}, timeout=max(0.0, deadline - loop.time()))
            link.abort()

    async def _reopen(self, link: AgentLink) -> None:
        pause = _FIRST_PAUSE
        while not self._closed and self._link is link:
            try:
                await self._open(_CONNECT)
            except EthaError as error:
                log.warning("no agent for the groups of this process, which go on: %s", error)
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)


class EpochStore(SimpleStore):
    """A torch Store in which the members of one epoch meet, kept by their agents in Redis for an hour.

    ``prefix`` keeps several groups of one epoch apart. Once a member of the epoch has ended, nobody needs to wait for
    it: calls raise GroupLostError then.
    """

    def __init__(
        self,
        link: GroupAgentLink,
        group: str,
        epoch: int,
        prefix: str,
        timeout: float,
    ) -> None:
        super().__init__(timeout)
        self._link, self._group, self._epoch, self._prefix = link, group, epoch, prefix

    @property
    def redis_url(self) -> str | None:
        """Where the members' Redis is; None for the embedded one, which serves this host only."""
        return self._link.redis_url

    def _ask(self, message: Any, seconds: float) -> Any:
        return self._link.exchange(message, self._epoch, seconds)

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: Any) -> None:
        values = {self._name(key): as_bytes(value)}
        self._ask(PutValues(group=self._group, epoch=self._epoch, values=values), self._seconds)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        found = {self._name(key): as_bytes(value) for key, value in zip(keys, values, strict=True)}
        self._ask(PutValues(group=self._group, epoch=self._epoch, values=found), self._seconds)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._read(keys, self._seconds)

    def _read(self, keys: list[str], seconds: float) -> list[bytes]:
        names = tuple(self._name(key) for key in keys)
        found = self._ask(GetValues(group=self._group, epoch=self._epoch, names=names), seconds)
        return [found.values[name] for name in names]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._read(keys, self._seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return len(self.present(keys)) == len(set(keys))

    def present(self, keys: list[str]) -> dict[str, bytes]:
        names = {self._name(key): key for key in keys}
        message = GetValues(group=self._group, epoch=self._epoch, names=tuple(names), wait=False)
        found = self._ask(message, self._seconds).values
        return {key: found[name] for name, key in names.items() if name in found}

    def add(self, key: str, amount: int) -> int:
        name = self._name(key)
        message = AddValue(group=self._group, epoch=self._epoch, name=name, amount=amount)
        return int(self._ask(message, self._seconds).values[name])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        name = self._name(key)
        message = SwapValue(
            group=self._group, epoch=self._epoch, name=name, expected=as_bytes(expected), desired=as_bytes(desired)
        )
        value: bytes = self._ask(message, self._seconds).values[name]
        return value

    async def heard(self, key: str) -> bytes:
        """``get``, on the loop's thread."""
        name = self._name(key)
        message = GetValues(group=self._group, epoch=self._epoch, names=(name,))
        values: dict[str, bytes] = (await self._link.ask(message, self._seconds)).values
        return values[name]

    async def peek(self, key: str, timeout: float) -> bytes:
        """A value, or nothing if it is not there or no agent is; on the loop's thread, and of an epoch that has ended,
        too."""
        if not self._link.connected:  # a new agent must not be waited for, and its start not be cut short
            return b""
        name = self._name(key)
        message = GetValues(group=self._group, epoch=self._epoch, names=(name,), wait=False)
        values: dict[str, bytes] = (await self._link.ask(message, timeout)).values
        return values.get(name, b"")

    async def say(self, key: str, value: bytes) -> None:
        """``set`` what nobody has set before, on the loop's thread."""
        name = self._name(key)
        message = SwapValue(group=self._group, epoch=self._epoch, name=name, expected=b"", desired=value)
        await self._link.ask(message, self._seconds)

    def delete_key(self, key: str) -> bool:
        return False

    def append(self, key: str, value: Any) -> None:
        raise GroupError(f"{key}: the store of an epoch does not append; use set, add or compare_set")

    def num_keys(self) -> int:
        raise GroupError("the store of an epoch does not count its keys; use check")
