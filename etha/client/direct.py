"""A blocking transfer whose own thread asks the agent, over a direct connection.

    lend memory -> ask --Moved--> take the memory back, record the version -> result
                     |
                     +--a signal, a deadline, an error, a push, the end of the connection, ``close``-->
                        the event loop goes on with the call (``client.transfer``), and the thread waits for that

So the event loop decides all that is not usual, and the usual call passes no other thread of this process.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from etha.bus.codec import Push, Reply, Request
from etha.bus.link import DirectRequest
from etha.bus.messages import Moved, Pull, Transfer
from etha.bus.process import check_not_forked
from etha.client.own_moves import PROGRESS_EVERY, CallPull
from etha.client.registration import Registration
from etha.client.results import TransferResult, Version

if TYPE_CHECKING:
    from etha.bus.direct import DirectConnection


class DirectTransfer:
    """One call. ``begun`` and ``asked``: when it began and when the agent was asked, on the monotonic clock. ``why``:
    why it has to end; None if it need not."""

    def __init__(
        self, registration: Registration, verb: Literal["send", "recv"], version: Version, seconds: float
    ) -> None:
        self.registration, self.verb, self.version = registration, verb, version
        self.begun = self.asked = time.monotonic()
        self.seconds, self._until = seconds, self.begun + seconds
        self.word = 0
        self.why: str | None = None
        #: Whether the event loop goes on with the call, and whether an exception has interrupted it at any place;
        #: whether it has ended and nothing of it is under way.
        self.handed = self.interrupted = self.over = False
        self.request: DirectRequest | None = None
        #: What this call copies from other workers now: nothing, or one pull.
        self._pulls: list[CallPull] = []

    @property
    def left(self) -> float:
        """Seconds to the deadline, 0 or more; ``math.inf`` without one."""
        return max(0.0, self._until - time.monotonic())

    def interrupt(self, why: str) -> None:
        """Have the event loop end the call. On the loop's thread; the call's thread hears of it at once."""
        self.why = self.why or why
        if self.request is not None and not self.over:
            self.request.connection.wake()

    def run(
        self,
        connection: DirectConnection,
        finish: Callable[[Moved], TransferResult],
        hand_over: Callable[[BaseException | None], TransferResult],
    ) -> TransferResult | None:
        """Make the call. None if it cannot be made in this way, and nothing was asked.

        ``finish`` records what was moved. ``hand_over`` has the event loop go on with the call, which an exception may
        have interrupted, which it raises then.
        """
        lock, mine, pid = connection.lock, False, os.getpid()
        try:
            if not lock.acquire(blocking=False) or connection.busy:
                return None
            mine = connection.busy = True
            return self._run(connection, finish, hand_over, pid)
        finally:
            # No call before these stores, because a signal could raise an exception there.
            self.over = True
            if mine:
                connection.busy = False
            try:  # noqa: SIM105 - contextlib.suppress would be called first
                lock.release()
            except RuntimeError:
                pass  # another thread holds it
            if connection.retired and os.getpid() == pid:
                connection.retire()

    def _run(
        self,
        connection: DirectConnection,
        finish: Callable[[Moved], TransferResult],
        hand_over: Callable[[BaseException | None], TransferResult],
        pid: int,
    ) -> TransferResult | None:
        link, page, asked, answered = self.registration.connection.link, self.registration.connection.page, False, False
        try:
            if connection.retired or connection.closed or self.why is not None:
                return None
            self.request = link.begin_direct(connection)
            self.word = page.open()
            connection.begin(self._message(self.request.id))
            asked = True
            moved = self._answer(connection, pid)
            if moved is not None:
                page.revoke(self.word)
                result = finish(moved)
                answered = True
                return result
            return hand_over(None) if connection.begun else None
        except BaseException as error:
            if asked and connection.begun and not self.handed and os.getpid() == pid:
                return hand_over(error)
            raise
        finally:
            if os.getpid() == pid:  # a child must not end what is its parent's
                self._leave(connection, unanswered=asked and connection.begun and not answered and not self.handed)

    def _leave(self, connection: DirectConnection, *, unanswered: bool) -> None:
        """Give everything back. ``unanswered``: a second exception has come before the event loop could take over."""
        link, request = self.registration.connection.link, self.request
        if self.word:
            self.registration.connection.page.revoke(self.word)
        if unanswered and request is not None:
            link.abandon(request.id)
            connection.retire()
        if not self.handed and (pull := self.take_pull()) is not None:
            pull.stop()
            pull.finish()
        if request is not None:
            link.end_direct(request)

    def take_pull(self) -> CallPull | None:
        """What is copied now, for whoever ends it: it is given once."""
        try:
            return self._pulls.pop()
        except IndexError:
            return None

    def _message(self, id: int) -> Request:
        message = Transfer(
            batch=self.registration.batch,
            epoch=self.registration.pair.epoch,
            verb=self.verb,
            version=self.version,
            slot=self.word,
            progress=False,
            blocks=True,
        )
        left = self.left
        return Request(id, None if left == math.inf else left, message)

    def _answer(self, connection: DirectConnection, pid: int) -> Moved | None:
        """The usual answer; None if something else has happened."""
        from etha.native.direct import Exchanged  # here, because importing etha loads nothing compiled

        request, pulls = self.request, self._pulls
        assert request is not None
        self.asked = time.monotonic()
        while self.why is None and not request.kept and (left := self.left) > 0:
            check_not_forked(pid)  # a handler of a signal may fork, and the child return from it to here
            exchanged = connection.exchange(min(left, PROGRESS_EVERY), pulls[0].end_fd if pulls else -1)
            if exchanged is Exchanged.ENDED:
                return None
            check_not_forked(pid)
            if pulls and (pulls[0].over or exchanged is Exchanged.SLICE_OVER):
                self._report(connection)
            answer = connection.peek()
            if isinstance(answer, Push) and answer.id == request.id and isinstance(answer.message, Pull):
                connection.take()
                pulls.append(CallPull(self.registration, answer.message))
                pulls[0].start()  # once it can be found, because it must be ended after an interrupt, too
                if pulls[0].over:
                    self._report(connection)
            elif isinstance(answer, Reply) and answer.id == request.id and isinstance(answer.message, Moved):
                return answer.message
            elif answer is not None:
                self.registration.direct = not isinstance(answer, Push)
                return None
        self.registration.direct = not request.kept
        return None

    def _report(self, connection: DirectConnection) -> None:
        if not self._pulls[0].over:
            return connection.say(self._pulls[0].report())
        if (pull := self.take_pull()) is not None:
            connection.say(pull.finish())
