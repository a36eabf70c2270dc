"""The trainer's end of one child: sends calls, hears of their ends and of the child's, and kills it.

Whatever goes wrong, the child is killed and gone before anybody hears of the error, so nothing writes into the
trainer's tensors afterwards.
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
from etha.memory.process import Beacon, start_time

log = logging.getLogger(__name__)

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
        self._outgoing: deque[tuple[MakeCall, tuple[int, ...]]] = deque()
        self._number = 0
        self._until = math.inf
        self._socket, self._childs = pair()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pidfd = -1
        self._nursery: Nursery | None = None
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
            beacon=self._beacon.address,
            token=self._beacon.token,
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
        self._wait_for_earlier(call)
        with self._lock:
            if self.error is None:
                self._number += 1
                self._pending[self._number] = work
                self._send(*self._message(self._number, work, seconds))
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
        if self.reach:
            places = [
                _place(stand_in, stand_in.data_ptr())
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
            tensors=tuple(places),
            inputs=tuple(index[id(tensor)] for tensor in call.inputs),
            outputs=tuple(index[id(tensor)] for tensor in call.outputs),
            mapped=not self.reach,
        )
        return message, fds

    def _send(self, message: MakeCall, fds: tuple[int, ...]) -> None:
        """At once, or by the thread when there is room: a child that is stopped must not block the caller."""
        self._outgoing.append((message, fds))
        if len(self._outgoing) == 1 and not self._send_first():
            os.eventfd_write(self._wake, 1)

    def _send_first(self) -> bool:
        """Whether the first message that waits could be sent; if the child is no more, its pidfd says so."""
        message, fds = self._outgoing[0]
        try:
            send(self._socket, message, fds, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            log.debug("child %d takes no messages any more", self.pid)
        self._outgoing.popleft()
        for fd in fds:
            os.close(fd)
        return True

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
            self.reach = message.reach
            if not message.reach:
                log.warning("a child may not reach this process's memory; tensors are copied through mapped memory")
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
            while self._outgoing and self._send_first():
                continue

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
            waiting = [fd for _, fds in self._outgoing for fd in fds]
            self._outgoing.clear()
            for fd in (self._wake, self._pidfd, *waiting):
                if fd >= 0:
                    os.close(fd)
            self._wake = self._pidfd = -1

    def forget(self) -> None:
        """In a forked process: close the descriptors."""
        self._lock = threading.Lock()
        self._childs.close()
        self._close()


def _place(tensor: Tensor, address: int) -> SharedTensor:
    return SharedTensor(address=address, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


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
