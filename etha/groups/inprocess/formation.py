"""One forming of a group over a backend of torch: the backend, and the threads that alone touch it.

The caller's thread never enters the backend, because a backend may block there longer than any deadline. A formation
that ends while its threads are inside finishes in the background: its threads write no tensor of the caller any more,
drop the backend and end.

    caller --issue--> queue --> thread "calls": collectives in order -+
                  +-> channel -> thread per peer, tag and direction --+-> backend (its own staging only)
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from etha.errors import (
    EthaError,
    GroupAbortedError,
    GroupError,
    GroupLostError,
    GroupMismatchError,
    GroupTimeoutError,
)
from etha.groups.base import GroupConfig
from etha.groups.calls import GroupCall
from etha.groups.schedule import POINT_TO_POINT, Kind
from etha.groups.store_client import create_store_client, ended_by
from etha.groups.work import GroupWork
from etha.interruptible import Latch

#: Seconds that a forming may take beyond its timeout to say who is missing, and an idle thread to end.
_GRACE = 0.25
#: What every error ends with.
AGAIN = "the group is aborted until the next configure"


class Carrier(Protocol):
    """A backend of torch and how it carries out calls. All methods run on threads of the formation.

    ``owned``: whether it may work in the tensors of calls, because they are staging.
    """

    owned: bool

    def carry(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        """Carry out a call with buffers of its own; returns what writes the call's outputs."""


class FormationWork(GroupWork):
    """A call of a formation. Who stops to wait for it ends the formation."""

    def __init__(self, call: GroupCall, formation: Formation) -> None:
        super().__init__(call)
        self._formation = formation
        self.deadline = time.monotonic() + (call.timeout or formation.timeout).total_seconds()

    def expire(self, timeout: timedelta) -> None:
        text = f"{self.call.describe()} timed out after {timeout.total_seconds():g} seconds of wait(); {AGAIN}"
        self._formation.fail(GroupTimeoutError(text))
        self.finish(self._formation.error)

    def interrupt(self) -> None:
        self._formation.fail(GroupAbortedError(f"a wait for {self.call.describe()} was interrupted; {AGAIN}"))


class Formation:
    """See the module. ``make`` makes the carrier from a store."""

    #: Formations that have ended while a thread was inside the backend, and are not finished.
    abandoned: set[Formation] = set()  # noqa: RUF012

    def __init__(self, config: GroupConfig, timeout: timedelta, make: Callable[[Any, GroupConfig], Carrier]) -> None:
        self.config, self.timeout, self.pid = config, timeout, os.getpid()
        self.error: Exception | None = None
        self._make = make
        self._lock = threading.Lock()
        self._pending: dict[FormationWork, None] = {}
        self._calls: SimpleQueue[FormationWork | None] = SimpleQueue()
        self._channels: dict[tuple[Kind, int, int], deque[FormationWork]] = {}
        self._threads = 0
        self._carrier: Carrier | None = None
        self._formed = Latch()
        self._ended = threading.Event()

    def start(self) -> None:
        """Form the group; returns when all members have come. Raises `GroupTimeoutError`, or what the store said."""
        self._threads = 1
        threading.Thread(target=self._main, name="etha-group", daemon=True).start()
        try:
            in_time = self._formed.wait(time.monotonic() + self.timeout.total_seconds() + _GRACE)
        except KeyboardInterrupt:
            self.fail(GroupAbortedError("configure was interrupted"))
            raise
        if not in_time:
            self.fail(self._late(()))
        if self.error is not None:
            raise self.error

    def issue(self, call: GroupCall) -> FormationWork:
        """Queue a call. After an error it ends at once with that error."""
        if os.getpid() != self.pid:
            raise GroupError(
                f"the group was configured in process {self.pid}, not in this fork of it: configure it here"
            )
        work = FormationWork(call, self)
        with self._lock:
            if self.error is None:
                self._pending[work] = None
                self._enqueue(work)
        if self.error is not None:
            work.finish(self.error)
        return work

    def fail(self, error: Exception) -> None:
        """End the formation: all calls that have not ended, and all further ones, end with the first error."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            works = list(self._pending)
            self._pending.clear()
            self._calls.put(None)
            if self._threads:
                Formation.abandoned.add(self)
        for work in works:
            work.finish(error)
        self._formed.open()

    def settle(self) -> None:
        """Wait a moment for the end of the threads of a formation that has failed."""
        self._ended.wait(_GRACE)

    # ---- threads -----------------------------------------------------------------------------

    def _main(self) -> None:
        """The thread that forms the group and carries out its collectives in order."""
        try:
            self._form()
            while self.error is None:
                work = self._next()
                if work is not None:
                    self._carry(work)
        finally:
            self._thread_ended()

    def _next(self) -> FormationWork | None:
        """The next collective, when it has been made; None if there may be none any more."""
        return self._calls.get()

    def _form(self) -> None:
        config, seconds = self.config, self.timeout.total_seconds()
        until = time.monotonic() + seconds
        store = None
        try:
            store = config.store
            if isinstance(store, str):
                store = create_store_client(store, self.timeout)
            else:
                store = ended_by(store, seconds, self._check_end)
            self._compare_sizes(store, until)
            carrier = self._make(store, config)
            with self._lock:
                self._carrier = carrier if self.error is None else None
        except EthaError as error:
            self.fail(error)
        except Exception as error:
            late = time.monotonic() >= until or "imeout" in str(error) or "imed out" in str(error)
            self.fail(self._late(self._missing(store)) if late else self._translated(error, "configure"))
        self._formed.open()

    def _check_end(self) -> None:
        if self.error is not None:
            raise self.error

    def _compare_sizes(self, store: Any, until: float) -> None:
        """Find out in the order of ranks who was configured otherwise: a backend would wait for ranks that are none.

        Raises `GroupMismatchError` on all of them, and on a second process of one rank.
        """
        rank, size = self.config.rank, self.config.world_size
        process = f"{os.getpid()}@{os.uname().nodename}"
        mine = f"{size} {process}"
        found = bytes(store.compare_set(f"member/{rank}", "", mine)).decode()
        if found.partition(" ")[2] != process:
            raise GroupMismatchError(
                f"rank {rank} was configured by process {found.partition(' ')[2]}, too: every member needs a rank of "
                "its own, and every configure a store address of its own",
                calls={rank: f"configure(rank={rank}, world_size={size})"},
            )
        if found != mine:
            store.set(f"member/{rank}", mine)
        for other in range(size):
            if other == rank:
                continue
            store.wait([f"member/{other}"], remaining(until))
            theirs = int(bytes(store.get(f"member/{other}")).decode().partition(" ")[0])
            if theirs != size:
                sizes = {rank: size, other: theirs}
                raise GroupMismatchError(
                    f"rank {other} was configured with world size {theirs}, rank {rank} with {size}",
                    calls={one: f"configure(rank={one}, world_size={number})" for one, number in sizes.items()},
                )

    def _late(self, missing: tuple[int, ...]) -> GroupTimeoutError:
        milliseconds = self.timeout.total_seconds() * 1000
        who = ", ".join(str(rank) for rank in missing)
        store = self.config.store
        place = f" at {store.partition('/')[0]}" if isinstance(store, str) else ""
        text = f"not all members have come, or the store{place} does not answer: is the process that serves it alive?"
        text = f"rank {who} has not come" if missing else text
        size = self.config.world_size
        return GroupTimeoutError(
            f"configure of a group with {size} members: timeout after {milliseconds:g}ms; {text}", waiting_for=missing
        )

    def _missing(self, store: Any) -> tuple[int, ...]:
        """Members that have not come, as far as the store says so."""
        try:
            ranks = range(self.config.world_size)
            return () if store is None else tuple(r for r in ranks if not store.check([f"member/{r}"]))
        except RuntimeError:
            return ()

    def _enqueue(self, work: FormationWork) -> None:
        """Collectives go in order; messages in that of their peer, tag and direction, or they would block others."""
        call = work.call
        if call.kind not in POINT_TO_POINT:
            self._calls.put(work)
            return
        key = (call.kind, call.root, call.tag)
        waiting = self._channels.get(key)
        if waiting is not None:
            waiting.append(work)
            return
        self._channels[key] = deque([work])
        self._threads += 1
        threading.Thread(target=self._run_channel, args=(key,), name="etha-group-message", daemon=True).start()

    def _run_channel(self, key: tuple[Kind, int, int]) -> None:
        try:
            while True:
                with self._lock:
                    waiting = self._channels[key]
                    if not waiting or self.error is not None:
                        del self._channels[key]
                        return
                    work = waiting.popleft()
                self._carry(work)
        finally:
            self._thread_ended()

    def _carry(self, work: FormationWork) -> None:
        carrier = self._carrier
        if carrier is None:
            return
        try:
            self._write(work, carrier.carry(work.call, work.deadline))
        except EthaError as error:
            self.fail(error)
        except Exception as error:
            self.fail(self._translated(error, work.call.describe(), work))
        else:
            work.finish(self.error)

    def _write(self, work: FormationWork, write: Callable[[], None]) -> None:
        """Write the outputs, unless the formation has ended: then nobody may touch them any more."""
        with self._lock:
            if self.error is None:
                write()
                del self._pending[work]

    def _translated(self, error: Exception, what: str, work: FormationWork | None = None) -> GroupError:
        reason = _first_words(error)
        if work is not None and time.monotonic() >= work.deadline - 0.005:
            seconds = (work.call.timeout or self.timeout).total_seconds()
            return GroupTimeoutError(f"{what} timed out after {seconds:g} seconds ({reason}); {AGAIN}")
        text = f"{what} failed because a member was lost: {reason}; {AGAIN}"
        return GroupLostError(text, reason=reason, epoch=self.config.quorum_id)

    def _thread_ended(self) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads:
                return
            # The last thread drops the backend, because its destructor may block.
            carrier, self._carrier = self._carrier, None
        del carrier
        with self._lock:
            Formation.abandoned.discard(self)
        self._ended.set()


def _first_words(error: Exception) -> str:
    """What a backend says, without the place in its source and without general advice."""
    line = re.sub(r"^\[\S+\.(?:cc|cpp|h):\d+\] ", "", str(error).split("\n", maxsplit=1)[0])
    return " ".join(line.partition(". This is typically")[0].split())


def remaining(deadline: float) -> timedelta:
    """Time until a deadline, at least a millisecond: zero would mean no timeout to torch."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def tensor_of(data: bytes) -> torch.Tensor:
    """Bytes as a tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def options_of(kind: Any, deadline: float, **fields: Any) -> Any:
    """torch's options object of a kind, with these fields and the time until the deadline."""
    options = kind()
    for name, value in {"timeout": remaining(deadline), **fields}.items():
        setattr(options, name, value)
    return options
