"""The trainer's end of one child: sends calls, hears of their ends and of the child's, and kills it.

Whatever goes wrong, the child is killed and gone before anybody hears of the error, so nothing writes into the
trainer's tensors afterwards.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from datetime import timedelta

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
from etha.groups.baby.messages import (
    CallDone,
    ChildFormed,
    ConfigureChild,
    MakeCall,
    SharedTensor,
    pair,
    receive,
    send,
)
from etha.groups.baby.nursery import Nursery, fork_child, hold
from etha.groups.baby.remote_store import serve_store
from etha.groups.base import GroupConfig
from etha.groups.calls import GroupCall
from etha.groups.inprocess.formation import AGAIN
from etha.groups.inprocess.staging import writing
from etha.groups.work import GroupWork
from etha.memory.process import start_time

#: Seconds that a child may take beyond a call's deadline to say so.
_GRACE = 0.5
#: Seconds for a process that was killed to be gone.
_DEATH = 10.0


class BabyWork(GroupWork):
    """A call that a child carries out. ``copies``: contiguous stand-ins of outputs that are not contiguous."""

    def __init__(self, call: GroupCall, link: ChildLink, seconds: float) -> None:
        super().__init__(call)
        self._link = link
        self.deadline = time.monotonic() + seconds
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.kept: list[Tensor] = []

    def expire(self, timeout: timedelta) -> None:
        text = f"{self.call.describe()} timed out after {timeout.total_seconds():g} seconds of wait(); {AGAIN}"
        self._link.fail(GroupTimeoutError(text))
        self.finish(self._link.error)

    def interrupt(self) -> None:
        self._link.fail(GroupAbortedError(f"a wait for {self.call.describe()} was interrupted; {AGAIN}"))


class ChildLink:
    """See the module. ``group`` names the class in etha.groups whose backend the child uses."""

    def __init__(self, group: str, config: GroupConfig, timeout: timedelta, works: type[BabyWork] = BabyWork) -> None:
        self._group, self.config, self.timeout, self._works = group, config, timeout, works
        self.error: Exception | None = None
        self.pid = 0
        self._trainer = os.getpid()
        self._lock = threading.Lock()
        self._dead = threading.Event()
        self._formed = threading.Event()
        self._pending: dict[int, BabyWork] = {}
        self._outgoing: deque[MakeCall] = deque()
        self._number = 0
        self._until = math.inf
        self._socket, self._childs = pair()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pidfd = -1
        self._nursery: Nursery | None = None
        hold(self)

    def start(self) -> None:
        """Fork the child and form the group; returns when all members have come."""
        seconds = self.timeout.total_seconds()
        self._until = until = time.monotonic() + seconds
        try:
            self._fork(until)
            self._ask_to_configure(until)
            self._formed.wait(max(0.0, until - time.monotonic()) + _GRACE)
            if not self._formed.is_set():
                self.fail(GroupTimeoutError(f"configure timed out after {seconds:g} seconds"))
        except KeyboardInterrupt:
            self.fail(GroupAbortedError("configure was interrupted"))
            raise
        except GroupTimeoutError as error:
            self.fail(GroupTimeoutError(f"configure timed out after {seconds:g} seconds: {error}"))
        except EthaError as error:
            self.fail(error)
        if self.error is not None:
            raise self.error

    def _fork(self, until: float) -> None:
        try:
            self._nursery, self.pid = fork_child(self._childs, until)
            self._pidfd = os.pidfd_open(self.pid)
        finally:
            self._childs.close()
        threading.Thread(target=self._listen, name="etha-group-child", daemon=True).start()

    def _ask_to_configure(self, until: float) -> None:
        config, store, fds = self.config, self.config.store, ()
        theirs = None
        if not isinstance(store, str):
            ours, theirs = pair()
            threading.Thread(target=serve_store, args=(ours, store), name="etha-group-store", daemon=True).start()
        message = ConfigureChild(
            group=self._group,
            store=store if isinstance(store, str) else "",
            rank=config.rank,
            world_size=config.world_size,
            quorum_id=config.quorum_id,
            seconds=max(0.001, until - time.monotonic()),
            trainer=os.getpid(),
            started=start_time(os.getpid()),
        )
        try:
            send(self._socket, message, fds if theirs is None else (theirs.fileno(),))
        except OSError:
            self.fail(self._lost("ended before it was configured"))
        finally:
            if theirs is not None:
                theirs.close()

    # ---- calls -------------------------------------------------------------------------------

    def issue(self, call: GroupCall, seconds: float) -> BabyWork:
        """Send a call to the child. After an error it ends at once with that error, and the child is gone."""
        if os.getpid() != self._trainer:
            raise GroupError(f"the group was configured in process {self._trainer} and not in this fork of it")
        work = self._works(call, self, seconds)
        with self._lock:
            if self.error is None:
                self._number += 1
                self._pending[self._number] = work
                self._send(self._message(self._number, work, seconds))
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

    def _message(self, number: int, work: BabyWork, seconds: float) -> MakeCall:
        call = work.call
        places: list[SharedTensor] = []
        index: dict[int, int] = {}
        written = {id(tensor) for tensor in call.outputs}
        for tensor in [*call.inputs, *call.outputs]:
            if id(tensor) not in index:
                index[id(tensor)] = len(places)
                places.append(_place(_contiguous(tensor, work, written=id(tensor) in written)))
        return MakeCall(
            number=number,
            kind=call.kind,
            method=call.method,
            op=None if call.op is None else call.op.name,
            factor=None if call.factor is None else float(call.factor),
            root=call.root,
            tag=call.tag,
            seconds=seconds,
            tensors=tuple(places),
            inputs=tuple(index[id(tensor)] for tensor in call.inputs),
            outputs=tuple(index[id(tensor)] for tensor in call.outputs),
        )

    def _send(self, message: MakeCall) -> None:
        """At once, or by the thread when there is room: a child that is stopped must not block the caller."""
        if not self._outgoing:
            try:
                send(self._socket, message, flags=socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                os.eventfd_write(self._wake, 1)
            except OSError:
                return  # the child is gone; its pidfd says so
        self._outgoing.append(message)

    # ---- the thread that listens -------------------------------------------------------------

    def _listen(self) -> None:
        with select.epoll() as poll:
            for fd in (self._pidfd, self._wake):
                poll.register(fd, select.EPOLLIN)
            poll.register(self._socket, select.EPOLLIN)
            while self.error is None:
                poll.modify(self._socket, select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0))
                seconds = self._until + _GRACE - time.monotonic()
                ready = dict(poll.poll(None if seconds == math.inf else max(0.0, seconds)))
                self._handle(ready)
        self._dead.wait(_DEATH)
        self._close()

    def _handle(self, ready: dict[int, int]) -> None:
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        events = ready.get(self._socket.fileno(), 0)
        if events & select.EPOLLIN:
            self._hear()
        if events & select.EPOLLOUT:
            self._send_rest()
        if self._pidfd in ready:
            self._drain()
            self.fail(self._lost("died"))
        self._check_deadlines()

    def _drain(self) -> None:
        """What a child said before it died still counts."""
        while self.error is None and select.select([self._socket], [], [], 0)[0] and self._hear():
            continue

    def _hear(self) -> bool:
        try:
            got = receive(self._socket)
        except OSError:
            got = None
        if got is None:
            return False
        message = got[0]
        if isinstance(message, ChildFormed):
            self._hear_formed(message)
        elif isinstance(message, CallDone):
            self._hear_done(message)
        return True

    def _hear_formed(self, message: ChildFormed) -> None:
        if message.error is None:
            with self._lock:
                self._until = min((work.deadline for work in self._pending.values()), default=math.inf)
            self._formed.set()
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

    def _send_rest(self) -> None:
        with self._lock:
            while self._outgoing:
                try:
                    send(self._socket, self._outgoing[0], flags=socket.MSG_DONTWAIT)
                except OSError:
                    return
                self._outgoing.popleft()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if now < self._until + _GRACE:
            return
        if not self._formed.is_set():
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
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)
        self._dead.set()  # from here on the thread may close the descriptors
        for work in works:
            work.finish(error)
        self._formed.set()
        if not self.pid:
            self._close()

    def _kill(self) -> None:
        if self._pidfd < 0:
            return
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
        with self._lock:
            self._socket.close()
            for fd in (self._wake, self._pidfd):
                if fd >= 0:
                    os.close(fd)
            self._wake = self._pidfd = -1

    def forget(self) -> None:
        """In a forked process: close the descriptors."""
        self._lock = threading.Lock()
        self._childs.close()
        self._close()


def _place(tensor: Tensor) -> SharedTensor:
    return SharedTensor(
        address=tensor.data_ptr(), dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape)
    )


def _contiguous(tensor: Tensor, work: BabyWork, *, written: bool) -> Tensor:
    """The tensor, or a contiguous copy, which lives as long as the work."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    with torch.no_grad():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    if written:
        work.copies.append((tensor, copy))
    else:
        work.kept.append(copy)
    return copy
