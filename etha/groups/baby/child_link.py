"""The trainer's end of one child: sends calls, hears of their ends and of the child's, and kills it.

    control: the group's forming, point-to-point calls     trainer, thread "child" <---> child's main thread
    calls: collectives                                     trainer, who waits       <---> child's thread "calls"

Who waits for a collective reads its answer, and the thread "child" reads what nobody waits for. Whatever goes wrong,
the child is killed and gone before anybody hears of the error, so nothing writes into the trainer's tensors afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from etha.errors import (
    EthaError,
    GroupAbortedError,
    GroupError,
    GroupLostError,
    GroupTimeoutError,
    from_wire,
)
from etha.groups.baby import mapped
from etha.groups.baby.device_memory import OfferedMemory
from etha.groups.baby.messages import (
    CallDone,
    ChildFormed,
    ConfigureChild,
    MakeCall,
    Message,
    SharedTensor,
    pair,
    receive,
    send,
)
from etha.groups.baby.nursery import Nursery, fork_child, hold
from etha.groups.baby.remote_store import serve_store
from etha.groups.base import GroupConfig
from etha.groups.calls import GroupCall, writing
from etha.groups.host.places import MOST_TENSORS, OwnPlaces
from etha.groups.inprocess.formation import AGAIN
from etha.groups.schedule import POINT_TO_POINT
from etha.groups.store_client import ended_by
from etha.groups.work import GroupWork
from etha.interruptible import Latch, readable
from etha.memory.process import Beacon, start_time

log = logging.getLogger(__name__)

#: Seconds that a child may take beyond a call's deadline to say so.
_GRACE = 0.5
#: Seconds for a process that was killed to be gone.
_DEATH = 10.0


class BabyWork(GroupWork):
    """A call that a child carries out. ``copies``: contiguous stand-ins of outputs that are not contiguous.

    ``answered``: its answer has been read, and whoever read it is about to end the call.
    """

    def __init__(self, call: GroupCall, link: ChildLink, seconds: float) -> None:
        alone = call.kind in POINT_TO_POINT
        super().__init__(call, None if alone else lambda timeout: link.read_until_done(self, timeout))
        self._link = link
        self.deadline = time.monotonic() + seconds
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.kept: list[Tensor] = []
        self.answered = False

    def expire(self, timeout: timedelta) -> None:
        text = f"{self.call.describe()} timed out after {timeout.total_seconds():g} seconds of wait(); {AGAIN}"
        self._link.fail(GroupTimeoutError(text))
        self.finish(self._link.error)

    def interrupt(self) -> None:
        self._link.fail(GroupAbortedError(f"a wait for {self.call.describe()} was interrupted; {AGAIN}"))


class _Lane:
    """One socket to the child, and the messages that wait for room in it."""

    def __init__(self) -> None:
        self.ours, self.theirs = pair()
        self.waiting: deque[tuple[Message, tuple[int, ...]]] = deque()

    def put(self, message: Message, fds: tuple[int, ...] = ()) -> bool:
        """Send a message, or keep it until there is room: a child that is stopped must not block the caller.

        Returns whether it was sent. ``fds`` are closed when it is.
        """
        self.waiting.append((message, fds))
        return len(self.waiting) == 1 and self.flush()

    def flush(self) -> bool:
        """Send what waits as long as there is room; whether all is sent. If the child is no more, its pidfd says so."""
        while self.waiting:
            message, fds = self.waiting[0]
            try:
                send(self.ours, message, fds, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                log.debug("a child takes no messages any more")
            self.waiting.popleft()
            _close_all(fds)
        return True

    def shutdown(self) -> None:
        """End all reads, also where a forked process holds the other end."""
        with contextlib.suppress(OSError):
            self.ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self.ours.close()
        self.theirs.close()
        while self.waiting:
            _close_all(self.waiting.popleft()[1])


class ChildLink:
    """See the module. ``group`` names the class in etha.groups whose backend the child uses."""

    def __init__(
        self,
        group: str,
        config: GroupConfig,
        timeout: timedelta,
        works: type[BabyWork] = BabyWork,
        offered: OfferedMemory | None = None,
    ) -> None:
        self._group, self.config, self.timeout, self._works = group, config, timeout, works
        self.error: Exception | None = None
        self.pid = 0
        self._trainer = os.getpid()
        self._lock = threading.Lock()
        self._dead = threading.Event()
        self._formed = Latch()
        self._pending: dict[int, BabyWork] = {}
        self._number = 0
        self._until = math.inf
        self._control, self._calls = _Lane(), _Lane()
        #: Who holds this reads the lane of collectives; nobody keeps it while a call's callbacks run.
        self._reading = threading.Lock()
        self._listens, self._watching = True, threading.Lock()
        self._poll = select.epoll()
        self._places, self._offered = OwnPlaces(), offered
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pidfd = -1
        self._nursery: Nursery | None = None
        self._killed = False
        self._beacon = Beacon()
        self.reach = True
        hold(self)

    def start(self) -> None:
        """Fork the child and form the group; returns when all members have come."""
        seconds = self.timeout.total_seconds()
        self._until = until = time.monotonic() + seconds
        try:
            self._fork(until)
            self._ask_to_configure(until)
            if not self._formed.wait(until + _GRACE):
                self.fail(GroupTimeoutError(f"configure timed out after {seconds:g} seconds"))
        except KeyboardInterrupt:
            self.fail(GroupAbortedError("configure was interrupted"))
            raise
        except GroupTimeoutError as error:
            self.fail(GroupTimeoutError(f"configure timed out after {seconds:g} seconds: {error}"))
        except EthaError as error:
            self.fail(error)
        finally:
            if self.error is not None and not self.pid:
                self._close()
        if self.error is not None:
            raise self.error

    def _fork(self, until: float) -> None:
        try:
            nursery, pid = fork_child(self._control.theirs, until, self._dead)
            with self._lock:
                self._nursery, self.pid, self._pidfd = nursery, pid, os.pidfd_open(pid)
            if self.error is not None:
                self._kill()
        finally:
            self._control.theirs.close()
        threading.Thread(target=self._listen, name="etha-group-child", daemon=True).start()

    def _ask_to_configure(self, until: float) -> None:
        config, store = self.config, self.config.store
        fds = [self._calls.theirs]
        if not isinstance(store, str):
            ours, theirs = pair()
            fds.append(theirs)
            ending = ended_by(store, self.timeout.total_seconds(), self._check_end)
            threading.Thread(target=serve_store, args=(ours, ending), name="etha-group-store", daemon=True).start()
        message = ConfigureChild(
            group=self._group,
            store=store if isinstance(store, str) else "",
            rank=config.rank,
            world_size=config.world_size,
            quorum_id=config.quorum_id,
            seconds=max(0.001, until - time.monotonic()),
            trainer=os.getpid(),
            started=start_time(os.getpid()),
            beacon=self._beacon.address,
            token=self._beacon.token,
            device="" if self._offered is None else self._offered.uuid,
        )
        try:
            send(self._control.ours, message, tuple(each.fileno() for each in fds))
        except OSError:
            self.fail(self._lost("ended before it was configured"))
        finally:
            for each in fds:
                each.close()

    def _check_end(self) -> None:
        if self.error is not None:
            raise self.error

    # ---- calls -------------------------------------------------------------------------------

    def issue(self, call: GroupCall, seconds: float) -> BabyWork:
        """Send a call to the child. After an error it ends at once with that error, and the child is gone."""
        if os.getpid() != self._trainer:
            raise GroupError(f"the group was configured in process {self._trainer} and not in this fork of it")
        work = self._works(call, self, seconds)
        self._wait_for_earlier(call)
        with self._lock:
            if self.error is None:
                message, fds = self._message(self._number + 1, work, seconds)
                self._number += 1
                self._pending[self._number] = work
                lane = self._control if call.kind in POINT_TO_POINT else self._calls
                if not lane.put(message, fds):
                    os.eventfd_write(self._wake, 1)
                if work.deadline < self._until:
                    self._until = work.deadline
                    os.eventfd_write(self._wake, 1)
        if self.error is not None:
            self._dead.wait(_DEATH)
            work.finish(self.error)
        return work

    def num_active_work(self) -> int:
        """Calls that have not ended."""
        return len(self._pending)

    def _wait_for_earlier(self, call: GroupCall) -> None:
        """Wait for calls over the same storage, where this process copies tensors for this call or for them.

        The child keeps the order of the calls, but copies are made when a call is issued and when it has ended.
        """
        if self._offered is not None:
            return  # such tensors are never copied
        copies = not (self.reach and all(map(_is_plain, (*call.inputs, *call.outputs))))
        with self._lock:
            earlier = [work for work in self._pending.values() if copies or work.copies]
        if earlier:
            own = _storages(call)
            for work in earlier:
                if own & _storages(work.call):
                    with contextlib.suppress(EthaError):
                        work.wait()

    def _message(self, number: int, work: BabyWork, seconds: float) -> tuple[MakeCall, tuple[int, ...]]:
        call = work.call
        tensors = {id(tensor): tensor for tensor in (*call.inputs, *call.outputs)}
        index = {key: i for i, key in enumerate(tensors)}
        changed = {id(tensor) for tensor in call.outputs} if mapped.changes_outputs(call, self.config.rank) else set()
        fds: tuple[int, ...] = ()
        headers: list[dict[str, Any]] = []
        event = b""
        if self._offered is not None:
            places, headers = self._offered.offer(call.describe(), list(tensors.values()))
            if places:
                recorded, event = self._offered.record()
                work.on_finished(partial(self._offered.release, recorded))
        elif self.reach:
            maps = call.kind not in POINT_TO_POINT and len(tensors) <= MOST_TENSORS
            places = [
                _place(stand_in, stand_in.data_ptr(), (self._places.find([stand_in]) if maps else None) or (b"",))
                for key, tensor in tensors.items()
                for stand_in in [_contiguous(tensor, work, written=key in changed)]
            ]
        else:
            fd, offsets, views = mapped.make(list(tensors.values()))
            fds = (fd,)
            places = [_place(tensor, offset) for tensor, offset in zip(tensors.values(), offsets, strict=True)]
            for (key, tensor), view in zip(tensors.items(), views, strict=True):
                with torch.no_grad():
                    view.copy_(tensor)
                if key in changed:
                    work.copies.append((tensor, view))
        message = MakeCall(
            number=number,
            kind=call.kind,
            method=call.method,
            op=None if call.op is None else call.op.name,
            factor=None if call.factor is None else float(call.factor),
            root=call.root,
            tag=call.tag,
            seconds=seconds,
            until=work.deadline,
            tensors=tuple(places),
            inputs=tuple(index[id(tensor)] for tensor in call.inputs),
            outputs=tuple(index[id(tensor)] for tensor in call.outputs),
            mapped=self._offered is None and not self.reach,
            headers=tuple(headers),
            event=event,
        )
        return message, fds

    def read_until_done(self, work: BabyWork, timeout: timedelta | None) -> None:
        """Read answers on the waiting thread until the call has ended, its timeout has passed, or another one reads."""
        until = time.monotonic() + timeout.total_seconds() if timeout else None
        while not work.is_completed() and self.error is None and self._reading.acquire(blocking=False):
            try:
                if work.answered:
                    return
                self._watch_calls(listens=False)
                message = self._read_answer(until)
            finally:
                self._watch_calls(listens=True)
                self._reading.release()
            if message is None:
                return
            self._heard(message)

    def _read_answer(self, until: float | None) -> Message | None:
        try:
            return self._receive(self._calls) if readable(self._calls.ours, until) else None
        except OSError:
            return None  # the link has ended: whoever ends it ends the calls

    def _receive(self, lane: _Lane, flags: int = 0) -> Message | None:
        """The next message. Whoever reads collectives' answers holds ``_reading``."""
        got = receive(lane.ours, flags)
        if got is None:
            return None
        message = got[0]
        if isinstance(message, CallDone):
            work = self._pending.get(message.number)
            if work is not None:
                work.answered = True
        return message

    def _watch_calls(self, *, listens: bool) -> None:
        """Whether the thread that listens reads the lane of collectives."""
        with self._watching:
            self._listens = listens
            if not self._poll.closed:
                with contextlib.suppress(OSError):
                    self._poll.modify(self._calls.ours, _events(self._calls, listens))

    # ---- the thread that listens -------------------------------------------------------------

    def _listen(self) -> None:
        poll, control = self._poll, self._control.ours
        for fd in (self._pidfd, self._wake, control, self._calls.ours):
            poll.register(fd, select.EPOLLIN)
        while self.error is None:
            poll.modify(control, _events(self._control, True))
            self._watch_calls(listens=self._listens)
            seconds = self._until + _GRACE - time.monotonic()
            self._handle(dict(poll.poll(None if seconds == math.inf else max(0.0, seconds))))
        self._dead.wait(_DEATH)
        self._close()

    def _handle(self, ready: dict[int, int]) -> None:
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        for lane in (self._control, self._calls):
            events = ready.get(lane.ours.fileno(), 0)
            if events & select.EPOLLIN:
                self._hear(lane)
            if events & select.EPOLLOUT:
                with self._lock:
                    lane.flush()
        if self._pidfd in ready:
            # What a child said before it died still counts.
            while self.error is None and (self._hear(self._control) or self._hear(self._calls, seconds=1.0)):
                continue
            self.fail(self._lost("died"))
        self._check_deadlines()

    def _hear(self, lane: _Lane, seconds: float = 0.0) -> bool:
        """Whether a message was read, if nobody else reads the lane for so long."""
        if lane is self._calls and not self._reading.acquire(timeout=seconds):
            return False
        try:
            message = self._receive(lane, socket.MSG_DONTWAIT)
        except OSError:
            message = None
        finally:
            if lane is self._calls:
                self._reading.release()
        if message is None:
            return False
        self._heard(message)
        return True

    def _heard(self, message: Message) -> None:
        if isinstance(message, ChildFormed):
            self._hear_formed(message)
        elif isinstance(message, CallDone):
            self._hear_done(message)

    def _hear_formed(self, message: ChildFormed) -> None:
        if message.error is None:
            self.reach = message.reach
            if not message.reach and self._offered is None:
                log.warning("a child may not reach this process's memory; tensors are copied through mapped memory")
            with self._lock:
                self._until = min((work.deadline for work in self._pending.values()), default=math.inf)
            self._formed.open()
            return
        error = from_wire(message.error)
        if isinstance(error, GroupTimeoutError):
            text = f"configure timed out after {self.timeout.total_seconds():g} seconds: {error}"
            error = GroupTimeoutError(text, waiting_for=error.waiting_for)
        self.fail(error)

    def _hear_done(self, message: CallDone) -> None:
        if message.error is not None:
            self.fail(from_wire(message.error))
            return
        with self._lock:
            work = self._pending.pop(message.number, None)
            if work is None:
                return
            with writing(work.call.outputs):
                for tensor, copy in work.copies:
                    tensor.copy_(copy)
        work.call.root = message.root
        work.finish()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if now < self._until + _GRACE:
            return
        if not self._formed.is_open:
            self._until = math.inf  # start() says so
            return
        with self._lock:
            self._until = min((work.deadline for work in self._pending.values()), default=math.inf)
            late = next((w for w in self._pending.values() if w.deadline + _GRACE <= now), None)
        if late is not None:
            self.fail(self._lost(f"does not answer: {late.call.describe()} is late"))

    # ---- the end -----------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Kill the child, wait until it is gone, and end all calls with the first error."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            works = list(self._pending.values())
            self._pending.clear()
        self._kill()
        self._calls.shutdown()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)
        self._dead.set()  # from here on the thread may close the descriptors
        for work in works:
            work.finish(error)
        self._formed.open()

    def _kill(self) -> None:
        with self._lock:
            if self._pidfd < 0 or self._killed:
                return
            self._killed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        watch = select.poll()
        watch.register(self._pidfd, select.POLLIN)
        if watch.poll(_DEATH * 1000) and self._nursery is not None:
            self._nursery.reap(self.pid)

    def _lost(self, how: str) -> GroupLostError:
        reason = f"the child process {self.pid} of rank {self.config.rank} {how}"
        text = f"{reason}; it was killed; {AGAIN}"
        return GroupLostError(text, ranks=(self.config.rank,), reason=reason, epoch=self.config.quorum_id)

    def _close(self) -> None:
        # Who still reads has been woken by the end of the socket.
        with self._reading, self._lock, self._watching:
            self._control.close()
            self._calls.close()
            self._poll.close()
            if self._offered is not None and os.getpid() == self._trainer:
                self._offered.close()
            self._places.close()
            _close_all((self._wake, self._pidfd))
            self._wake = self._pidfd = -1

    def forget(self) -> None:
        """In a forked process: close the descriptors."""
        self._lock, self._reading, self._watching = threading.Lock(), threading.Lock(), threading.Lock()
        self._close()


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _events(lane: _Lane, listens: bool) -> int:
    return (select.EPOLLIN if listens else 0) | (select.EPOLLOUT if lane.waiting else 0)


def _place(tensor: Tensor, address: int, found: tuple[Any, ...] = (b"",)) -> SharedTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return SharedTensor(address=address, dtype=dtype, shape=tuple(tensor.shape), segment=found[0])


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in its memory as they are, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _storages(call: GroupCall) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in (*call.inputs, *call.outputs)}


def _contiguous(tensor: Tensor, work: BabyWork, *, written: bool) -> Tensor:
    """The tensor, or a contiguous copy, which lives as long as the work."""
    if _is_plain(tensor):
        return tensor
    with torch.no_grad():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    if written:
        work.copies.append((tensor, copy))
    else:
        work.kept.append(copy)
    return copy
