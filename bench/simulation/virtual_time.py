"""An event loop in simulated time, on which each actor has a processor of its own.

An actor is one agent, one worker, the server or the benchmark itself. A callback belongs to the actor that its context
names, and tasks and callbacks inherit contexts. It begins when it is due and its actor is free. If the actor is
``measured``, the seconds of processor time that the callback really takes keep the actor busy. The loop always runs the
callback that can begin first, so the order does not depend on how fast this machine is, except through these seconds.

Nothing else takes time. A thread of an executor is simulated by running its work at once, on the actor's processor.
"""

from __future__ import annotations

import asyncio
import contextvars
import cProfile
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Any

from simulation.accounts import Account


class Actor:
    """Who runs callbacks, one after the other. Those of an actor that is not ``measured`` take no time."""

    __slots__ = ("account", "busy_until", "context", "entry", "measured", "name", "queue")

    def __init__(self, name: str, *, measured: bool) -> None:
        self.name, self.measured = name, measured
        self.account = Account()
        self.busy_until = 0.0
        #: (when, number, callback), a heap; and this actor's valid entry in the loop's own heap.
        self.queue: list[tuple[float, int, asyncio.Handle]] = []
        self.entry: tuple[float, int, Actor] | None = None
        self.context = contextvars.copy_context()
        self.context.run(_actor.set, self)

    def __repr__(self) -> str:
        return f"<{self.name}>"


_actor: contextvars.ContextVar[Actor] = contextvars.ContextVar("actor")


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. ``connector(factory, actor)`` opens a connection to the one server that there is."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, Actor]] = []
        self._outside = Actor("benchmark", measured=False)
        self._current = self._outside
        self._running: Actor | None = None
        #: When the current callback began, in simulated seconds and in this thread's processor time, and what was
        #: charged to it.
        self._began = 0.0
        self._clock = 0.0
        self._charged = 0.0
        self.connector: Callable[[Callable[[], asyncio.BaseProtocol], Actor], Any] | None = None
        #: Whose callbacks are profiled, and by what.
        self.profiled: Actor | None = None
        self.profiler: cProfile.Profile | None = None
        self.callbacks = 0

    def time(self) -> float:
        """Simulated seconds. They go on inside a callback of a measured actor."""
        used = time.thread_time() - self._clock if self._current.measured else 0.0
        return self._began + used + self._charged

    @property
    def actor(self) -> Actor:
        """Whose callback runs."""
        return self._current

    def charge(self, seconds: float, beside: float = 0.0) -> None:
        """The current callback takes so much longer than it really does.

        ``beside``: processor time of other threads, which counts and keeps nobody waiting.
        """
        self._charged += seconds
        self._current.account.assumed += seconds + beside

    # ---- asyncio's interface ------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        actor = self._owner(context)
        # Within an actor, callbacks run in the order of the calls, after everything that had arrived before this one.
        self._enqueue(self._began if actor is self._current else self.time(), handle, actor)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._enqueue(max(when, self._began), handle, self._owner(context))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # passed on, as from a thread
            done.set_exception(error)
        return done

    async def create_connection(self, protocol_factory: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.connector is not None
        return await self.connector(protocol_factory, _actor.get())

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is skipped when it is due."""

    # ---- inside -------------------------------------------------------------------------------

    def _owner(self, context: contextvars.Context | None) -> Actor:
        return self._current if context is None else context.get(_actor, self._outside)

    def _enqueue(self, when: float, handle: asyncio.Handle, actor: Actor) -> None:
        entry = (when, next(self._numbers), handle)
        heapq.heappush(actor.queue, entry)
        if actor.queue[0] is entry and actor is not self._running:  # it is scheduled again when its callback ends
            self._schedule(actor)

    def _schedule(self, actor: Actor) -> None:
        """Enter the actor's next callback. An entry that is in the heap already is not valid any more."""
        when, number, _ = actor.queue[0]
        actor.entry = (max(when, actor.busy_until), number, actor)
        heapq.heappush(self._heap, actor.entry)

    def _run_once(self) -> None:
        while True:
            if not self._heap:
                raise RuntimeError("nobody has anything to do any more")
            entry = heapq.heappop(self._heap)
            actor = entry[2]
            if actor.entry is entry:
                break
        _, _, handle = heapq.heappop(actor.queue)
        actor.entry = None
        self._running = actor
        if not handle.cancelled():
            self._run(entry[0], actor, handle)
        self._running = None
        if actor.queue:
            self._schedule(actor)

    def _run(self, began: float, actor: Actor, handle: asyncio.Handle) -> None:
        self.callbacks += 1
        self._current, self._began, self._charged = actor, began, 0.0
        profiler = self.profiler if actor is self.profiled else None
        if profiler is not None:
            profiler.enable()
        self._clock = time.thread_time()
        handle._run()
        used = time.thread_time() - self._clock if actor.measured else 0.0
        if profiler is not None:
            profiler.disable()
        actor.busy_until = self._began = began + used + self._charged
        actor.account.cpu += used
        self._current, self._charged = self._outside, 0.0
