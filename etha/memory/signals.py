"""The order of work between a worker's streams and its agent, by interprocess CUDA events.

worker: Signals  stream -> event, its handle --(with each call)--> agent: Waits  handle -> done, or the worker died
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from etha.cuda.driver import DeviceError, Driver
from etha.errors import RegistrationError

log = logging.getLogger(__name__)

HANDLE_BYTES = 64
#: Most events of one worker: one for each of its calls in flight.
MOST_EVENTS = 1024
#: Seconds between two queries of an event: the first pause, and the longest.
_SOON, _LATE = 20e-6, 1e-3

#: A worker's process: pid and start time.
Process = tuple[int, int]


class Signals:
    """In a worker: for each call, an interprocess event of GPU ``uuid`` behind what its stream has queued so far."""

    def __init__(self, driver: Driver, uuid: str) -> None:
        self._driver, self._uuid = driver, uuid
        self._lock = threading.RLock()  # a finalizer may release while its own thread holds it
        self._handles: dict[int, bytes] = {}
        # Last in, first out, because an agent opens each event that it sees, and keeps it open.
        self._free: list[int] = []
        self._closed = self._kept = False

    def record(self) -> tuple[int, bytes]:
        """(event, its handle), recorded on the caller's current stream. Nobody else uses the event until
        ``release``."""
        stream = self._driver.current_stream(self._uuid)
        with self._lock:
            event = self._free.pop() if self._free else self._made()
            handle = self._handles[event]
        try:
            self._driver.record(event, stream)
        except DeviceError:
            self.release(event)
            raise
        return event, handle

    def release(self, event: int) -> None:
        """The event's call has ended, so the next call may record it again."""
        with self._lock:
            self._free.append(event)
            self._drop()

    def wait(self, event: int, stop: threading.Event) -> bool:
        """Block until the recording is done. False if ``stop`` is set first."""
        pause = _SOON
        # Not cudaEventSynchronize, because nothing ends that when the call is cancelled or its deadline comes.
        while not self._driver.reached(event):
            if stop.wait(pause):
                return False
            pause = min(2 * pause, _LATE)
        return True

    def close(self, *, keep: bool = False) -> None:
        """Destroy the events; those of running calls with their ``release``. ``keep``: an agent may still query
        them."""
        with self._lock:
            if not self._closed:
                self._closed, self._kept = True, keep
            self._drop()

    def _made(self) -> int:
        event = self._driver.event(self._uuid, interprocess=True)
        try:
            self._handles[event] = self._driver.export_event(event)
        except DeviceError:
            self._driver.drop_event(event)
            raise
        return event

    def _drop(self) -> None:
        while self._closed and not self._kept and self._free:
            event = self._free.pop()
            del self._handles[event]
            try:
                self._driver.drop_event(event)
            except DeviceError as error:  # a lost context: the event goes with the process
                log.warning("destroying an event: %s", error)


@dataclass(slots=True)
class _Worker:
    """The open events of one process by handle; ``waiting`` counts the threads that query them."""

    events: dict[bytes, int] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    waiting: int = 0


class Waits:
    """In an agent: workers' events, each opened once. Events that a dead worker recorded never complete."""

    def __init__(
        self, driver: Driver, uuid: str, on_sticky: Callable[[DeviceError], None] = lambda error: None
    ) -> None:
        self._driver, self._uuid, self._on_sticky = driver, uuid, on_sticky
        self._lock = threading.Lock()
        self._workers: dict[Process, _Worker] = {}

    def open(self, pid: int, started: int, handle: bytes) -> int:
        """The event in this process. RegistrationError if the handle is invalid."""
        with self._lock:
            return self._event(pid, started, handle)[1]

    def reached(self, pid: int, started: int, handle: bytes) -> bool:
        """Whether the worker's newest recording is done. RegistrationError as for ``open``."""
        with self._lock:
            return self._look(self._event(pid, started, handle)[1])

    def wait(self, pid: int, started: int, handle: bytes) -> None:
        """Block until the recording is done. DeviceError as soon as ``release`` says that the worker is gone."""
        with self._lock:
            worker, event = self._event(pid, started, handle)
            worker.waiting += 1
        try:
            pause = _SOON
            # Not cudaEventSynchronize, because nothing ends that when the worker's process dies with its work.
            while not self._look(event):
                if worker.ended.wait(pause):
                    raise DeviceError("cudaErrorNotReady", f"process {pid} went before the work on its GPU was done")
                pause = min(2 * pause, _LATE)
        finally:
            with self._lock:
                worker.waiting -= 1
                if worker.ended.is_set() and not worker.waiting:
                    self._drop(worker)

    def release(self, pid: int, started: int) -> None:
        """Forget a worker's events, because its session has ended. Threads that wait for one get an error."""
        with self._lock:
            worker = self._workers.pop((pid, started), None)
            if worker is not None:
                worker.ended.set()
                if not worker.waiting:
                    self._drop(worker)

    def close(self) -> None:
        for pid, started in list(self._workers):
            self.release(pid, started)

    def __len__(self) -> int:
        return sum(len(worker.events) for worker in self._workers.values())

    def _event(self, pid: int, started: int, handle: bytes) -> tuple[_Worker, int]:
        if type(handle) is not bytes or len(handle) != HANDLE_BYTES:
            raise RegistrationError(f"the handle of an event from process {pid} is not {HANDLE_BYTES} bytes")
        worker = self._workers.setdefault((pid, started), _Worker())
        event = worker.events.get(handle)
        if event is None:
            if len(worker.events) >= MOST_EVENTS:
                raise RegistrationError(f"process {pid} has shown more than {MOST_EVENTS} events")
            try:
                event = worker.events[handle] = self._driver.open_event(self._uuid, handle)
            except DeviceError as error:
                self._tell(error)
                raise RegistrationError(f"an event of process {pid} cannot be opened: {error}") from error
        return worker, event

    def _look(self, event: int) -> bool:
        try:
            return self._driver.reached(event)
        except DeviceError as error:
            self._tell(error)
            raise

    def _drop(self, worker: _Worker) -> None:
        while worker.events:
            try:
                self._driver.drop_event(worker.events.popitem()[1])
            except DeviceError as error:
                log.warning("closing a worker's event: %s", error)
                self._tell(error)

    def _tell(self, error: DeviceError) -> None:
        if error.sticky:
            self._on_sticky(error)
