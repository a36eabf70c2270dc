"""Three members of a process group, as processes that do what the test says and say what became of it.

One thread of a member makes the calls; a second one hears what the test says meanwhile, so that it can abort a call.
Members live on from cell to cell; who was killed is replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch._C._distributed_c10d import TCPStore

from tests.groups.faults.calls import LARGE, SMALL, FaultCall, fault_call
from tests.groups.faults.seam import Seam
from tests.processes import CONTEXT, Strays, preload, send_signal

preload("torch", "torch.utils.data", "etha.groups", "etha.groups.host.etha_group", "tests.groups.faults.crew")

SIZE = 3
#: Seconds that nothing of a cell takes, unless something hangs.
PATIENCE = 60.0
#: Bytes that a child has to have sent before its call counts as running.
_MOVED = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOrder:
    """A call that a member makes. ``hold``: see `Seam`. ``wait``: the timeout of its wait, in seconds. ``aside``: it is
    not waited for, so another thread carries it out. ``odd``: with one element more than the others'."""

    kind: str
    number: int = 0
    large: bool = False
    root: int = 0
    peer: int = 0
    hold: float | None = None
    wait: float | None = None
    aside: bool = False
    odd: bool = False
    watched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """How a call ended: "result", or the name of its error, and when. ``right``: its outputs are the result.
    ``sticks``: the group reports an error and refuses another call with one."""

    name: str
    text: str = ""
    reason: str = ""
    ranks: tuple[int, ...] = ()
    at: float
    right: bool
    sticks: bool


# ---- in a member --------------------------------------------------------------------------------


class FaultMember:
    def __init__(self, pipe: Connection, group: str) -> None:
        self._pipe, self._kind = pipe, group
        self._speaking = threading.Lock()
        self._orders: queue.Queue[Any] = queue.Queue()
        self._group: Any = None
        self._seam: Seam | None = None
        self._rank = self._size = 0
        self._loader: Any = None
        #: The number of the call that is made now, until "waiting" was said of it; else 0.
        self._unsaid = 0
        #: The last call that failed, and what its outputs held then.
        self._failed: tuple[FaultCall, list[Any]] | None = None
        self._work: Any = None

    def serve(self) -> None:
        """Do what the test says until it closes the pipe."""
        if self._kind != "ProcessGroupEtha":
            self._tell_of_waits()
            signal.signal(signal.SIGINT, _interrupt)
        threading.Thread(target=self._hear, daemon=True).start()
        while True:
            name, *args = self._orders.get()
            with contextlib.suppress(KeyboardInterrupt):  # one that came after the call it was meant for
                getattr(self, name)(*args)

    def say(self, *words: Any) -> None:
        with self._speaking:
            self._pipe.send(words)

    def _hear(self) -> None:
        try:
            while True:
                order = self._pipe.recv()
                match order[0]:
                    case "abort":
                        self._group.abort()
                        self.say("aborted")
                    case "resume":
                        if self._seam is not None:
                            self._seam.resume.set()
                    case _:
                        self._orders.put(order)
        except (EOFError, OSError):
            os._exit(0)

    def limit(self, timeout: float) -> None:
        """The timeout of further calls."""
        self._group.set_timeout(timeout)

    def configure(self, address: str, rank: int, size: int) -> None:
        from etha import groups

        if self._group is None:
            self._group = getattr(groups, self._kind)(timeout=PATIENCE)
        self._group.set_timeout(PATIENCE)
        self._group.configure(address, f"replica-{rank}", rank, size)
        self._rank, self._size = rank, size
        child = 0
        if self._kind == "ProcessGroupEtha":
            engine = self._group._engine
            self._seam = engine._library = engine._messages._library = Seam(engine._library)
        else:
            child = self._group.child_pid()
        self.say("configured", child)

    def load_data(self) -> None:
        """Have two workers of a DataLoader, forked while the group is configured."""
        from torch.utils.data import DataLoader

        if self._loader is None:
            loader = DataLoader(range(64), num_workers=2, multiprocessing_context="fork", persistent_workers=True)
            self._loader = iter(loader)
            next(self._loader)
        self.say("loading", [worker.pid for worker in self._loader._workers])

    def make(self, order: CallOrder) -> None:
        """Make one call, wait for it, say how it ended."""
        self._unsaid = order.number if self._seam is None else 0
        numel = (LARGE if order.large else SMALL) + order.odd
        kind = "allreduce" if order.odd and order.kind == "barrier" else order.kind
        call = fault_call(kind, self._rank, self._size, numel, order.root, order.peer)
        if self._seam is not None:
            self._seam.arm(order.hold, lambda word: self.say(word, order.number))
        try:
            if order.watched:
                threading.Thread(target=self._watch, args=(order.number, self._sent()), daemon=True).start()
            work = call.make(self._group)
            if order.aside:
                self._say_that_it_waits()
                self._work = work
                return
            work.wait() if order.wait is None else work.wait(timedelta(seconds=order.wait))
        except BaseException as error:
            self._say_end(call, error)
        else:
            self._say_end(call, None)

    def _tell_of_waits(self) -> None:
        """Have the wait of a call say "waiting" from inside, because a Ctrl-C before it concerns no call."""
        from etha.groups.work import GroupWork

        wait = GroupWork._wait_for_end

        def wait_for_end(work: GroupWork, timeout: timedelta | None) -> None:
            self._say_that_it_waits()
            wait(work, timeout)

        GroupWork._wait_for_end = wait_for_end  # type: ignore[method-assign]

    def _say_that_it_waits(self) -> None:
        number, self._unsaid = self._unsaid, 0
        if number:
            self.say("waiting", number)

    def _say_end(self, call: FaultCall, error: BaseException | None) -> None:
        at = time.monotonic()
        self._say_that_it_waits()  # it had ended before its wait began
        sticks = self._group.errored() is not None
        if error is not None:
            self._failed = call, call.keep()
            # It fails at once, whatever it is.
            begun = time.monotonic()
            with contextlib.suppress(RuntimeError):
                self._group.barrier().wait()
                sticks = False
            sticks = sticks and time.monotonic() - begun < 5
        self.say(
            "ended",
            CallEnd(
                name="result" if error is None else type(error).__name__,
                text="" if error is None else "".join(traceback.format_exception(error)),
                reason=getattr(error, "reason", "") or "",
                ranks=tuple(getattr(error, "ranks", ())),
                at=at,
                right=call.right(),
                sticks=sticks,
            ),
        )

    def _sent(self) -> int:
        """Bytes that the own child has sent."""
        lines = Path(f"/proc/{self._group.child_pid()}/io").read_text(encoding="ascii").splitlines()
        return int(lines[1].removeprefix("wchar: "))

    def _watch(self, number: int, before: int) -> None:
        with contextlib.suppress(OSError):  # a child that has ended
            while self._sent() < before + _MOVED:
                os.sched_yield()
        self.say("held", number)

    def untouched(self) -> None:
        """Whether the outputs of the call that failed are as they were when it failed."""
        import torch

        same = True
        if self._failed is not None:
            call, kept = self._failed
            same = all(torch.equal(a, b) for a, b in zip(call.outputs, kept, strict=True))
        self._failed = None
        self.say("untouched", same)

    def exit(self) -> None:
        sys.exit(0)


def run_member(pipe: Connection, group: str) -> None:
    """The process of a member."""
    import torch

    # A shell that starts the tests in the background has them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    FaultMember(pipe, group).serve()


# ---- in the test --------------------------------------------------------------------------------


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: a call over children may have ended a moment before, and then it concerns nobody."""
    from etha.groups.work import GroupWork

    if GroupWork._wait_for_end.__code__ in _codes(frame):
        raise KeyboardInterrupt


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    """The functions in which a thread is, from the inside out."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


@dataclass(slots=True, kw_only=True)
class Sailor:
    """One member as the test sees it."""

    process: BaseProcess
    pipe: Connection
    child: int = 0
    heard: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def order(self, *words: Any) -> None:
        self.pipe.send(words)

    def expect(self, word: str, number: int | None = None) -> Any:
        """The next time that it says ``word``, of its call ``number`` if there is one; what else it said then."""
        until = time.monotonic() + PATIENCE
        while True:
            for said in self.heard:
                if said[0] == word and (number is None or said[1] == number):
                    self.heard.remove(said)
                    return said[1] if len(said) > 1 else None
            assert self.pipe.poll(max(0.0, until - time.monotonic())), f"process {self.pid} does not say {word!r}"
            try:
                self.heard.append(self.pipe.recv())
            except EOFError:
                raise AssertionError(f"process {self.pid} has ended and did not say {word!r}: {self.heard}") from None

    def end(self) -> CallEnd:
        """How its call ended."""
        found = self.expect("ended")
        assert isinstance(found, CallEnd)
        return found

    def strike(self, number: signal.Signals, pid: int = 0) -> float:
        """Send a signal to it or to its child; when."""
        at = time.monotonic()
        send_signal(pid or self.pid, number)
        return at


class Crew:
    """The members of the cells of one kind of group."""

    def __init__(self, group: str) -> None:
        self.group = group
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._prefixes = itertools.count(1)
        self.members: list[Sailor | None] = [None] * SIZE
        self._strays = Strays()

    def configure(self, ranks: list[int], timeout: float) -> list[Sailor]:
        """A group of these members, in this order; each has made a call in it. ``timeout``: of their next calls."""
        address = f"127.0.0.1:{self._store.port}/{next(self._prefixes)}"
        sailors = [self._member(rank) for rank in ranks]
        for number, sailor in enumerate(sailors):
            sailor.order("configure", address, number, len(ranks))
        for sailor in sailors:
            sailor.child = sailor.expect("configured")
            sailor.heard.clear()
        self.all_make(sailors, CallOrder(kind="allreduce"))
        for sailor in sailors:
            sailor.order("limit", timeout)
        return sailors

    def all_make(self, sailors: list[Sailor], order: CallOrder) -> None:
        """One call of all, which succeeds."""
        for sailor in sailors:
            sailor.order("make", order)
        for sailor in sailors:
            end = sailor.end()
            assert end.name == "result" and end.right, end.text

    def load_data(self, sailors: list[Sailor]) -> None:
        """All have a DataLoader with two workers."""
        for sailor in sailors:
            sailor.order("load_data")
        for sailor in sailors:
            self._strays.hold(sailor.expect("loading"))

    def _member(self, rank: int) -> Sailor:
        found = self.members[rank]
        if found is None:
            here, there = CONTEXT.Pipe()
            # Not a daemon, because it starts workers of a DataLoader.
            process = CONTEXT.Process(target=run_member, args=(there, self.group))
            process.start()
            there.close()
            found = self.members[rank] = Sailor(process=process, pipe=here)
        return found

    def bury(self, rank: int) -> None:
        """A member has ended, or does so now."""
        sailor = self.members[rank]
        assert sailor is not None
        sailor.process.join(PATIENCE)
        assert sailor.process.exitcode is not None, f"member {rank} does not end"
        sailor.pipe.close()
        self.members[rank] = None

    def close(self) -> None:
        for rank, sailor in enumerate(self.members):
            if sailor is not None:
                sailor.process.kill()
                self.bury(rank)
        # Workers of a DataLoader look every five seconds whether their trainer lives.
        self._strays.end(PATIENCE)


@contextlib.contextmanager
def crew(group: str) -> Iterator[Crew]:
    """A crew that is ended at the end."""
    found = Crew(group)
    try:
        yield found
    finally:
        found.close()
