"""One connection of a client: the link to its agent, and the memory that is shared over it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from etha.bus.handshake import WorkerHello
from etha.bus.link import AgentLink, AgentRefusedError
from etha.bus.messages import LetGo, Probe, Probed
from etha.bus.process import start_time
from etha.client.agent_process import ensure_agent
from etha.client.loop_end import LoopEnd
from etha.client.memory.base import TensorMemory
from etha.client.memory.segments import SharedSegments
from etha.client.memory.select import home_of
from etha.client.tasks import Deadline
from etha.config import Settings, agent_path
from etha.errors import AgentLostError, AgentUnavailableError, EthaError, with_again
from etha.memory.huge import Collapser
from etha.memory.process import Beacon, allow_reading
from etha.memory.revocation import RevocationPage
from etha.version import __version__

log = logging.getLogger(__name__)

#: Seconds that an agent has to close memory: at least, and at most if a client's calls have no deadline. It may be
#: copying for others, and memory that it has not closed is never freed.
_LET_GO, _LET_GO_AT_MOST = 5.0, 30.0
#: How many agents may die or leave, one after the other, while a client connects.
_ATTEMPTS = 3


class AgentConnection:
    """``reaches``: the agent reads and writes this process's own memory; otherwise tensors are staged.

    ``home``: the memory that the agent serves.
    """

    def __init__(self, link: AgentLink, page: RevocationPage, gpu: str = "") -> None:
        self.link, self.page = link, page
        self.home: TensorMemory = home_of(link.welcome.device, gpu)
        self.reaches = False
        #: Why the agent does not reach this process's own memory; "" if it does.
        self.why_not = ""
        self._warned = False
        #: Asks the kernel for huge pages under registered tensors; data and addresses stay the same.
        self.collapser = Collapser()
        self._tasks: set[asyncio.Task[None]] = set()
        #: The memory of this process that the agent has mapped.
        self.segments = SharedSegments(link, self.home)
        self._pid, self._loop = os.getpid(), asyncio.get_running_loop()
        # Closes a client whose loop has ended.
        self._loop_end = LoopEnd(self._loop, self.abort)

    @classmethod
    async def open(
        cls,
        settings: Settings,
        *,
        agent: str | None,
        device: str,
        redis_url: str | None,
        autostart: bool,
        timeout: float,
        on_push: Callable[[Any], None],
        again: bool = False,
        gpu: str = "",
    ) -> AgentConnection:
        """Connect, and start an agent if that is allowed; AgentUnavailableError, ConfigError.

        If an agent dies or leaves meanwhile, another one is started if that is allowed. ``again``: this client had an
        agent before, so its Redis is known to be right, and a new agent waits for it. ``gpu``: see ``home_of``.
        """
        deadline = Deadline(timeout)
        hello = WorkerHello(
            version=__version__,
            namespace=settings.namespace,
            redis=redis_url,
            host=settings.host_id,
            pid=os.getpid(),
            start=start_time(),
            wants=settings.wishes,
            starts=agent is None and autostart,
        )
        starts = agent is None and autostart
        for _ in range(_ATTEMPTS if starts else 1):
            if starts:
                settings.ensure_runtime_dir()
                path = await ensure_agent(
                    settings,
                    device,
                    redis_url=redis_url,
                    namespace=settings.namespace,
                    timeout=deadline.left,
                    patient=again,
                )
            else:
                path = settings.socket_path(device) if agent is None else agent_path(agent)
            try:
                return await cls._meet(path, hello, deadline, on_push, gpu, patient=starts)
            except (AgentUnavailableError, AgentLostError) as error:
                failed = error
                if deadline.left == 0:
                    break
        if isinstance(failed, AgentRefusedError):  # an agent is there, so starting one does not help
            raise failed
        ways = [f"start one by `etha agent{f' --device {device}' if device else ''}`"]
        if not starts:
            ways.insert(0, "check agent= and ETHA_AGENT" if agent is not None else "give autostart=True")
        raise AgentUnavailableError(f"{failed.message}; {', or '.join(ways)}") from failed

    @classmethod
    async def _meet(
        cls,
        path: Path,
        hello: WorkerHello,
        deadline: Deadline,
        on_push: Callable[[Any], None],
        gpu: str = "",
        *,
        patient: bool,
    ) -> AgentConnection:
        """Open one session. ``patient``: if the agent is leaving, return only once it has left."""
        link = await AgentLink.connect(path, hello, timeout=deadline.left, on_push=on_push)
        page = RevocationPage()
        connection: AgentConnection | None = None
        try:
            if link.welcome.leaving:
                raise AgentUnavailableError(link.welcome.leaving)
            if link.welcome.differs:
                log.warning("%s", link.welcome.differs)
            connection = cls(link, page, gpu)
            await link.send_descriptors({"revocation": True}, [page.fd], timeout=deadline.left)
            if connection.home.name == "cpu":
                await connection._probe(deadline.left)
        except BaseException as error:
            try:
                if patient and isinstance(error, AgentUnavailableError):
                    await asyncio.wait({link.lost}, timeout=None if deadline.left == math.inf else deadline.left)
            finally:
                link.abort()
                page.close()
                if connection is not None:
                    connection.abort()
            raise
        return connection

    def warn_staged(self, batch: str) -> None:
        """Log once why tensors are copied through shared memory: it works, but costs a copy and their size."""
        if self.why_not and not self._warned:
            self._warned = True
            log.warning("batch %s: its tensors are copied through shared memory, because %s", batch, self.why_not)

    @property
    def lost(self) -> bool:
        """Whether the agent is gone."""
        return self.link.lost.done()

    @contextlib.contextmanager
    def advice(self) -> Iterator[None]:
        """Enter while a call of the user asks the agent: if it is lost, the error says what to call again.

        An agent that hangs, and a client that was closed, need something else.
        """
        try:
            yield
        except AgentLostError as error:
            if not self.link.agent_lost:
                raise
            raise AgentLostError(with_again(error.message), **error.data()) from error.__cause__

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that no caller waits for. It ends with the connection at the latest, because its requests fail
        then."""
        if self._loop.is_closed():
            work.close()
            return
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, timeout: float) -> None:
        """Say goodbye and release the memory. ``timeout``: the deadline of the client's calls."""
        self.collapser.cancel()
        self._loop_end.cancel()
        released = False
        try:
            if self.home.lends:
                with contextlib.suppress(EthaError):
                    await self.link.request(LetGo(all=True), timeout=_let_go(timeout))
                    released = True
            with contextlib.suppress(AgentLostError):
                await self.link.close()
            if self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self.page.close()
            self.home.close(released=released or self.lost)

    def abort(self) -> None:
        """Close without a goodbye, even if the event loop has ended. Idempotent. The agent treats it as the worker's
        death."""
        self.collapser.cancel()
        self._loop_end.cancel()
        released = self.lost
        self.link.abort()
        self.page.close()
        self.home.close(released=released)

    def drop(self) -> None:
        """``abort`` from any thread, at any moment, because the client was collected."""
        if os.getpid() != self._pid or self.lost:
            return
        try:
            self._loop.call_soon_threadsafe(self.abort)
        except RuntimeError:  # the loop is closed
            self.abort()

    async def _probe(self, timeout: float) -> None:
        allow_reading()
        beacon = Beacon()
        probed = await self.link.request(Probe(address=beacon.address, token=beacon.token), timeout=timeout)
        assert isinstance(probed, Probed)
        self.reaches = probed.reaches and beacon.echoed
        self.why_not = probed.text or ("" if beacon.echoed else "what the agent wrote did not arrive here")


def _let_go(timeout: float) -> float:
    return max(_LET_GO, _LET_GO_AT_MOST if timeout == math.inf else timeout)
