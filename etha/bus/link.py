"""The worker's end of the bus: one session with one agent, with a future for each request id.

It lives on one event loop of the user's process, asyncio's or uvloop's. The agent's pidfd and the end of the descriptor
connection report the agent's death, never a timeout. Then all pending requests fail.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from etha.bus.channel import Channel
from etha.bus.codec import Cancel, Envelope, Failure, Malformed, Push, Reply, Request
from etha.bus.handshake import Attach, Descriptors, Goodbye, WorkerHello, WorkerWelcome
from etha.bus.packets import MAX_DESCRIPTORS, close_all
from etha.bus.process import check_not_forked
from etha.errors import AgentLostError, AgentUnavailableError, EthaError, ProtocolError, note_of_log, noted, with_note
from etha.observe.logs import log_of

if TYPE_CHECKING:
    from etha.bus.direct import DirectConnection

log = logging.getLogger(__name__)

#: Seconds that an agent has beyond a call's deadline, and to confirm a cancellation or a goodbye.
GRACE = 1.0
#: Direct connections that may fail one after the other until no other one is tried.
_DIRECT_FAILURES = 8
#: A timeout of this many seconds or more counts as no timeout.
_FOREVER = 1e9
#: Seconds to wait until an exiting process is gone, because it unmaps its memory first.
DEATH = 2.0
_CLOSED = "this client is closed"

Answer = Reply | Failure


@dataclass(frozen=True, slots=True)
class Handed:
    """A message that came with descriptors, which whoever gets it owns."""

    message: Any
    fds: tuple[int, ...]


class DirectRequest:
    """A request that a blocked thread makes over a direct connection, until it has its answer or hands it over.

    ``kept``: pushes about it that the event loop got meanwhile, with their descriptors.
    """

    def __init__(self, id: int, connection: DirectConnection) -> None:
        self.id, self.connection = id, connection
        self.kept: deque[Any] = deque()

    def drop(self) -> None:
        """Close the descriptors of what was kept, because the request has its answer."""
        while self.kept:
            message = self.kept.popleft()
            close_all(message.fds if isinstance(message, Handed) else ())


class AgentRefusedError(AgentUnavailableError):
    """An agent is there, but it does not accept this client, or ended the session while it was opened."""


class PendingCall:
    """One request that waits for its answer. The answer is kept here and not in the future.

    So a cancelled wait loses nothing, and another wait can follow.
    """

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
        """The answer, or None if ``expire`` came first. Can be called again after a cancelled wait."""
        if self.answer is None:
            if self._waiter.done():
                self._waiter = self._loop.create_future()
            await self._waiter
        return self.answer

    def deliver(self, answer: Answer) -> None:
        """Store the answer and end the wait. A second answer is ignored."""
        if self.answer is None:
            self.answer = answer
            self.expire()

    def expire(self) -> None:
        """End the wait."""
        if not self._waiter.done():
            self._waiter.set_result(None)


class AgentLink:
    """One session; made by ``connect``, ended by ``close`` or ``abort``.

    ``welcome`` is the agent's answer to Hello. ``agent_pid`` is from the kernel (0: not visible from this pid
    namespace). ``lost`` is a future whose *result* is an AgentLostError once the session is over for any reason. Use it
    on the loop thread only. In a forked child every call raises ConfigError.
    """

    welcome: WorkerWelcome
    agent_pid = 0
    #: Where the agent logs, as it says; "" until its Welcome.
    _log = ""

    def __init__(self, path: Path, on_push: Callable[[Any], None] | None = None) -> None:
        """A link without a session; use ``connect``."""
        self._loop = asyncio.get_running_loop()
        self._owner = os.getpid()
        self._ids = itertools.count(1)
        self._calls: dict[int, PendingCall] = {}
        #: Threads add and remove their own.
        self._direct_requests: dict[int, DirectRequest] = {}
        #: None until there is one, and if there cannot be one.
        self.direct: DirectConnection | None = None
        self._opening_direct, self._direct_failures = False, 0
        self._path, self._closing = path, False
        self.on_push = on_push
        self.lost: asyncio.Future[AgentLostError] = self._loop.create_future()
        self._channel = Channel(path, self._received, self._lose)
        self.agent_pid = self._channel.pid

    @classmethod
    async def connect(
        cls, path: Path, hello: WorkerHello, *, timeout: float, on_push: Callable[[Any], None] | None = None
    ) -> AgentLink:
        """A session with the agent that serves ``path``. ``on_push`` gets pushes that belong to no request.

        Raises AgentUnavailableError if nobody listens there or the agent does not answer in time, and the error with
        which the agent refuses ``hello`` (ConfigError, ProtocolError).
        """
        try:
            link = cls(path, on_push)
        except AgentUnavailableError as error:  # nobody is there
            raise noted(error, _left_log(path)) from error.__cause__
        except (zmq.ZMQError, OSError) as error:  # no descriptors or no memory
            raise AgentUnavailableError(f"this process cannot connect to the agent at {path}: {error}") from error
        try:
            async with asyncio.timeout(timeout if timeout < _FOREVER else None):
                await link._open(hello)
        except TimeoutError:
            text = f"{link._channel.agent} at {path} did not answer within {timeout:g} s: is it stopped or overloaded?"
            text = with_note(text, link.log_note)
            link.abort()
            raise AgentUnavailableError(text) from None
        except AgentLostError as error:
            link.abort()
            text = f"no session with the agent at {path}: {error}"
            raise AgentRefusedError(with_note(text, link.log_note or _left_log(path))) from error
        except AgentUnavailableError as error:
            text = with_note(f"the agent at {path}: {error}", link.log_note)
            link.abort()
            raise AgentRefusedError(text) from error
        except BaseException:
            link.abort()
            raise
        return link

    async def request(
        self,
        message: Any,
        *,
        timeout: float = math.inf,
        on_push: Callable[[Any], None] | None = None,
        on_timeout: Callable[[], EthaError] | None = None,
        on_cancel: Callable[[Answer | None], None] | None = None,
        patient: bool = False,
        tag: object = None,
    ) -> Any:
        """The agent's answer to ``message``; raises the error with which it failed.

        ``on_push`` gets the pushes under this request. If the agent has not answered a second after the deadline, it
        gets a Cancel, and ``on_timeout()`` is raised (default: AgentLostError, because the agent hangs).

        If the awaiting task is cancelled, the agent gets a Cancel and up to a second to answer. Then ``on_cancel`` is
        called with that answer (Reply, Failure, or None if there is none), and CancelledError is raised. A second
        cancellation ends that wait, unless ``patient``.

        Raises AgentLostError as soon as the agent is lost. ``withdraw`` finds requests by ``tag``.
        """

        def post(request: Request) -> None:
            self._channel.post(request)

        return await self._call(message, timeout, post, on_push, on_timeout, on_cancel, patient, tag)

    @property
    def wants_direct(self) -> bool:
        """Whether there is no direct connection, but can be one."""
        possible = self._direct_failures < _DIRECT_FAILURES and self.agent_pid != 0 and not self.lost.done()
        return possible and self.direct is None and not self._opening_direct

    async def open_direct(self) -> None:
        """Open the direct connection. It is no error if there can be none."""
        from etha.bus.direct import DirectConnection  # here, because it loads NumPy, and few sessions ask so

        if not self.wants_direct:
            return  # several calls have asked for it
        self._opening_direct = True
        opening = asyncio.ensure_future(DirectConnection.connect(self._path, self.welcome.session, self.agent_pid))
        try:
            # A frozen agent does not answer, and the end of the session must not wait for it.
            waits: list[asyncio.Future[Any]] = [opening, self.lost]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            opened = opening.result() if opening.done() else None
        except (AgentLostError, OSError) as error:  # it, or this process, has no descriptors left, perhaps for now
            self._direct_failures += 1
            return log.debug("no direct connection to %s: %s", self._channel.agent, error)
        except asyncio.CancelledError:
            done = opening.done() and not opening.cancelled() and opening.exception() is None
            if done and (made := opening.result()) is not None:
                made.retire()
            raise
        finally:
            opening.cancel()
            self._opening_direct = False
        if opened is None:
            self._direct_failures = _DIRECT_FAILURES
        elif self.lost.done():
            opened.retire()
        else:
            self.direct, self._direct_failures = opened, 0

    def begin_direct(self, connection: DirectConnection) -> DirectRequest:
        """A request that the calling thread is about to make over ``connection``. ``end_direct`` ends it."""
        request = DirectRequest(next(self._ids), connection)
        self._direct_requests[request.id] = request
        return request

    def abandon(self, id: int) -> None:
        """Cancel a request of another thread, which waits for it no more. From any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel_direct, id)

    def _cancel_direct(self, id: int) -> None:
        if id not in self._calls and not self.lost.done():  # else it was handed over after all
            with suppress(AgentLostError):
                self._channel.post(Cancel(id))

    def end_direct(self, request: DirectRequest) -> None:
        """The request has its answer, was handed over, or was never sent. Idempotent."""
        self._direct_requests.pop(request.id, None)
        request.drop()

    async def adopt(
        self,
        direct: DirectRequest,
        *,
        timeout: float,
        on_push: Callable[[Any], None],
        on_timeout: Callable[[], EthaError],
        on_cancel: Callable[[Answer | None], None],
        tag: object,
    ) -> Any:
        """``request`` for one that a thread has sent, patient. What is pushed from now on comes over the loop; the
        connection is closed in the end, because an answer may still come over it."""
        connection = direct.connection
        if self.direct is connection:
            self.direct = None

        def post(request: Request) -> None:
            self._direct_requests.pop(direct.id, None)
            while direct.kept:
                self._told(direct.kept.popleft(), on_push)
            connection.follow(self._received)

        try:
            return await self._call(None, timeout, post, on_push, on_timeout, on_cancel, True, tag, direct.id)
        finally:
            connection.close()

    def tell(self, message: Any) -> None:
        """Say something that needs no answer. Nothing is said to an agent that is lost, or that takes no messages."""
        if not self.lost.done():
            with suppress(AgentLostError):
                self._channel.post(Push(0, message))

    async def send_descriptors(
        self,
        header: dict[str, Any],
        fds: Sequence[int],
        *,
        timeout: float,
        on_timeout: Callable[[], EthaError] | None = None,
    ) -> None:
        """Send duplicates of at most MAX_DESCRIPTORS ``fds`` to the agent; returns when it has taken them."""
        if len(fds) > MAX_DESCRIPTORS:
            raise ProtocolError(f"{len(fds)} descriptors in one packet, at most {MAX_DESCRIPTORS} travel: send several")

        async def pack(request: Request) -> None:
            try:
                async with asyncio.timeout(timeout + GRACE if timeout < _FOREVER else None):
                    await self._channel.pack(request, fds)
            except TimeoutError:
                raise on_timeout() if on_timeout else self._hangs(request.message, timeout) from None

        await self._call(Descriptors(header=header), timeout, pack, on_timeout=on_timeout)

    @property
    def agent_lost(self) -> bool:
        """Whether the session is over and this end did not close it."""
        return self.lost.done() and self.lost.result().message != _CLOSED

    async def hear_of_death(self, within: float) -> None:
        """If the agent has died, wait until ``lost`` is set: the loop has the end of the connection still to read."""
        if not self.lost.done() and os.getpid() == self._owner and self._channel.agent_died:
            await asyncio.wait({self.lost}, timeout=min(within, DEATH))

    async def agent_ended(self) -> bool:
        """Whether the agent of a lost link has ended, so that nothing of it runs. Waits for one that is exiting."""
        return await self._channel.ended(DEATH)

    def withdraw(self, tag: object) -> None:
        """Ask the agent to end the requests of ``tag``. Each gets its answer, or expires after a second.

        Unlike a cancelled request, one that the agent has carried out meanwhile succeeds.
        """
        for call in self._calls.values():
            if call.tag is tag and not call.withdrawn:
                call.withdrawn = True
                self._cancel(call)
                self._loop.call_later(GRACE, call.expire)

    async def close(self) -> None:
        """Say goodbye, wait up to a second for the agent's confirmation, and end the session. Idempotent."""
        if os.getpid() != self._owner or self.lost.done():
            return
        self._closing = True
        self._fail_calls(_CLOSED)
        try:
            with suppress(EthaError):  # the session ends even if the agent does not answer
                await self.request(Goodbye(text="closed"), timeout=0)
        finally:
            self.abort()

    def abort(self) -> None:
        """End the session at once; pending requests fail. Idempotent. Does nothing in a forked child.

        It sends no goodbye, so the agent treats it as the worker's death. It works after the link's loop is closed,
        too.
        """
        self._lose(_CLOSED)

    async def __aenter__(self) -> AgentLink:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def log_note(self) -> str:
        """Where the agent logs, for the end of a message: what it says, or, before it has, what can be seen of it."""
        if not self._log and not self.lost.done() and self.agent_pid:
            self._log = log_of(self.agent_pid)
        return note_of_log(self._log.encode(errors="backslashreplace").decode())

    async def _open(self, hello: WorkerHello) -> None:
        await self._channel.ready()
        welcome = await self.request(hello)
        if not isinstance(welcome, WorkerWelcome):
            raise ProtocolError(f"the agent answered Hello with {type(welcome).__name__}")
        self.welcome = welcome
        self._log = welcome.log
        await self._call(Attach(session=welcome.session), math.inf, self._channel.pack)

    async def _call(
        self,
        message: Any,
        timeout: float,
        post: Callable[[Request], Awaitable[None] | None],
        on_push: Callable[[Any], None] | None = None,
        on_timeout: Callable[[], EthaError] | None = None,
        on_cancel: Callable[[Answer | None], None] | None = None,
        patient: bool = False,
        tag: object = None,
        id: int | None = None,
    ) -> Any:
        self._check()
        endless = not timeout < _FOREVER
        call = PendingCall(next(self._ids) if id is None else id, on_push, self._loop, tag)
        request = Request(call.id, None if endless else max(0.0, timeout), message)
        timer = None if endless else self._loop.call_later(max(0.0, timeout) + GRACE, call.expire)
        self._calls[call.id] = call
        posted = False
        try:
            posting = post(request)
            if posting is not None:
                await posting
            posted = True
            answer = await call.wait()
        except AgentLostError as error:  # it takes no message
            raise self._with_log(error) from error.__cause__
        except asyncio.CancelledError:
            if timer is not None:
                timer.cancel()
            try:
                if posted:
                    await self._confirm_cancel(call, patient)
            finally:
                if on_cancel is not None:
                    on_cancel(call.answer)
            raise
        finally:
            del self._calls[call.id]
            if timer is not None:
                timer.cancel()
        if answer is None:
            self._cancel(call)
            raise on_timeout() if on_timeout is not None else self._hangs(message, timeout)
        if isinstance(answer, Reply):
            return answer.message
        raise self._with_log(answer.error)

    async def _confirm_cancel(self, call: PendingCall, patient: bool) -> None:
        if call.answer is None:
            self._cancel(call)
            late: list[bool] = []

            def give_up() -> None:
                late.append(True)
                call.expire()

            timer = self._loop.call_later(GRACE, give_up)
            try:
                while call.answer is None and not late:
                    try:
                        await call.wait()
                    except asyncio.CancelledError:
                        if not patient:
                            raise
            finally:
                timer.cancel()

    def _cancel(self, call: PendingCall) -> None:
        if not self.lost.done():
            with suppress(AgentLostError):  # an agent that takes no messages cannot confirm either
                self._channel.post(Cancel(call.id))

    def _hangs(self, message: Any, timeout: float) -> AgentLostError:
        text = (
            f"{self._channel.agent} did not answer {type(message).__name__} within {timeout:g} s "
            f"and {GRACE:g} s of grace: is it stopped?"
        )
        return AgentLostError(with_note(text, self.log_note))

    def _with_log(self, error: EthaError) -> EthaError:
        """``error`` with the agent's log, if it is the agent that has failed."""
        failed = isinstance(error, AgentLostError | AgentUnavailableError) or type(error) is EthaError
        return noted(error, self.log_note) if failed and error.message != _CLOSED else error

    def _check(self) -> None:
        check_not_forked(self._owner)
        if self.lost.done():
            raise AgentLostError(self.lost.result().message)

    def _fail_calls(self, text: str) -> None:
        for call in list(self._calls.values()):
            call.deliver(Failure(call.id, AgentLostError(text)))

    def _lose(self, text: str) -> None:
        """End the session, whatever the reason."""
        if os.getpid() != self._owner or self.lost.done():
            return
        text = _CLOSED if self._closing or text == _CLOSED else with_note(text, self.log_note)
        log.debug("the session is over: %s", text)
        with suppress(RuntimeError):  # its loop is closed: nobody waits
            self.lost.set_result(AgentLostError(text))
            self._fail_calls(text)
        if self.direct is not None:
            self.direct.retire()
        self._channel.close()

    def _received(self, envelope: Envelope | Malformed) -> None:
        match envelope:
            case Reply(id) | Failure(id):
                if id in self._calls:  # else: the caller gave up after the grace period
                    self._calls[id].deliver(envelope)
            case Push(0, Goodbye(text=text)):
                self._lose(f"{self._channel.agent} said goodbye: {text}")
            case Push(0, message, fds):
                close_all(fds)  # none belong to the session
                self._told(message, self.on_push)
            case Push(id, message, fds):
                call = self._calls.get(id)
                if call is None and (direct := self._direct_requests.get(id)) is not None:
                    self._keep(direct, Handed(message, fds) if fds else message)
                elif call is None or call.on_push is None:
                    close_all(fds)
                else:
                    self._told(Handed(message, fds) if fds else message, call.on_push)
            case Malformed(id=int(id)) if id in self._calls:
                self._calls[id].deliver(Failure(id, ProtocolError(envelope.message)))
            case _:
                self._lose(f"{self._channel.agent} broke the protocol: {envelope}")

    def _keep(self, direct: DirectRequest, message: Any) -> None:
        """Keep a push for the thread that waits for its request's answer, and wake the thread."""
        direct.kept.append(message)
        direct.connection.wake()
        if direct.id not in self._direct_requests:  # it has ended at this moment
            direct.drop()

    def _told(self, message: Any, on_push: Callable[[Any], None] | None) -> None:
        if on_push is None:
            return
        try:
            on_push(message)
        except Exception:
            log.exception("the callback for %s failed", type(message).__name__)


def _left_log(path: Path) -> str:
    """The log of the agent that a client once started at ``path``, if it is there, for the end of a message."""
    log = path.with_suffix(".log")
    return note_of_log(str(log)) if log.exists() else ""
