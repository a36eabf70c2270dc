"""Three replicas of a `Members` with a real agent and Redis, each of which begins, calls and votes as the test says.

"before" a phase: the other two are in it, and the member that the event meets is not
"in" a phase: that member is in it alone; the other two come after the event
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.flow import nursery
from tests.flow.jobs import wait_gone
from tests.flow.sites import private_directory, started_in
from tests.groups.faults.calls import LARGE, SMALL, fault_call
from tests.groups.faults.crew import PATIENCE, SIZE, Sailor
from tests.groups.faults.seam import Seam
from tests.processes import CONTEXT, Strays, preload
from tests.unit.store.server import Server, served

preload("torch", "torch.utils.data", "etha.groups", "tests.groups.faults.managed")

#: Seconds for which a member that is stopped is waited for, in a call, a vote and a begin.
TIMEOUT = 2.0
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnd:
    """How begin, a call or commit ended: the name of its error, or "". ``value``: the size of the epoch, whether the
    call's outputs are the result, or the vote."""

    what: str
    name: str
    value: Any
    text: str
    at: float


class ManagedMember:
    """What a replica's process does."""

    def __init__(self, pipe: Connection, name: str) -> None:
        from etha import groups

        self._pipe, self._speaking = pipe, threading.Lock()
        self._orders: queue.Queue[Any] = queue.Queue()
        self.members = groups.Members("dp", replica=name, timeout=TIMEOUT)
        self.group = groups.ManagedProcessGroup(self.members)
        self._quorum: Any = None
        self._loader: Any = None
        self._number = 0
        ask = self.members._link.call

        def call(message: Any, timeout: float) -> Any:
            if type(message).__name__ == "EnterGroup":
                self.say("waiting", self._number)
            return ask(message, timeout)

        self.members._link.call = call  # type: ignore[method-assign]

    def serve(self) -> None:
        """Do what the test says until it closes the pipe."""
        threading.Thread(target=self._hear, daemon=True).start()
        while True:
            name, *args = self._orders.get()
            with contextlib.suppress(KeyboardInterrupt):
                getattr(self, name)(*args)

    def say(self, *words: Any) -> None:
        with self._speaking:
            self._pipe.send(words)

    def _hear(self) -> None:
        try:
            while True:
                order = self._pipe.recv()
                if order[0] == "abort":
                    self.group.abort()
                    self.say("aborted")
                else:
                    self._orders.put(order)
        except (EOFError, OSError):
            os._exit(0)

    def load_data(self) -> None:
        from torch.utils.data import DataLoader

        if self._loader is None:
            loader = DataLoader(range(64), num_workers=2, multiprocessing_context="fork", persistent_workers=True)
            self._loader = iter(loader)
            next(self._loader)
        self.say("loading", [worker.pid for worker in self._loader._workers])

    def do(self, what: str, number: int, kind: str, odd: bool) -> None:
        """``what``: begin, call or commit."""
        self._number = number
        name = text = ""
        value = None
        try:
            value = getattr(self, f"_{what}")(kind, odd)
        except BaseException as error:
            name, text = type(error).__name__, "".join(traceback.format_exception(error))
        self.say("ended", PhaseEnd(what=what, name=name, value=value, text=text, at=time.monotonic()))

    def _begin(self, kind: str, odd: bool) -> int:
        self._quorum = self.members.begin(timeout=PATIENCE)
        for group in (self.members._across, self.group._pg):
            engine = group._engine  # type: ignore[attr-defined]
            if not isinstance(engine._library, Seam):
                engine._library = engine._messages._library = Seam(engine._library)
        return int(self._quorum.size)

    def _call(self, kind: str, odd: bool) -> bool:
        self.group._pg._engine._library.arm(None, self._report())
        rank, size = min(self._quorum.rank, self._quorum.size - 1), self._quorum.size
        call = fault_call(kind, rank, size, (LARGE if kind == "send" else SMALL) + odd, 0, (rank + 1) % size)
        call.make(self.group).wait()
        return call.right()

    def _commit(self, kind: str, odd: bool) -> bool:
        self.members._across._engine._library.arm(None, self._report())  # type: ignore[attr-defined]
        return self.members.commit()

    def settle(self, size: int) -> None:
        """Train until a step of ``size`` replicas has counted: all of them hear the same."""
        import torch

        self._number = 0
        while True:
            quorum = self.members.begin(timeout=PATIENCE)
            self.group.allreduce([torch.ones(3)]).wait()
            if self.members.commit() and quorum.size == size:
                break
        self.say("settled")

    def _report(self) -> Any:
        number = self._number
        return lambda word: self.say(word, number)

    def exit(self) -> None:
        sys.exit(0)


def run_managed(pipe: Connection, name: str, env: dict[str, str], agents: str | None) -> None:
    """The process of a replica."""
    import torch

    for variable in [each for each in os.environ if each.startswith("ETHA_") or each in ("RANK", "WORLD_SIZE")]:
        del os.environ[variable]
    os.environ.update(env)
    nursery.use(agents)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    ManagedMember(pipe, name).serve()


class ManagedCrew:
    """The replicas, and all that they need."""

    def __init__(self, directory: Path, server: Server) -> None:
        self.directory, self.server = directory, server
        self._env = {"ETHA_RUNTIME_DIR": str(directory), "ETHA_IDLE": "300", "ETHA_REDIS_URL": server.url}
        self.members: list[Sailor] = []
        self.strays = Strays()
        for _ in range(SIZE):
            self.start()

    def start(self) -> Sailor:
        """A new replica."""
        here, there = CONTEXT.Pipe()
        args = (there, f"r{next(_numbers)}", self._env, nursery.address())
        process = CONTEXT.Process(target=run_managed, args=args)
        process.start()
        there.close()
        self.members.append(Sailor(process=process, pipe=here))
        return self.members[-1]

    def bury(self, sailor: Sailor) -> None:
        sailor.process.join(PATIENCE)
        assert sailor.process.exitcode is not None, "it does not end"
        sailor.pipe.close()
        self.members.remove(sailor)

    def begin(self, what: str, *sailors: Sailor, kind: str = "allreduce", odd: bool = False) -> int:
        """Have members do something; the number of the order."""
        number = next(_numbers)
        for sailor in sailors:
            sailor.order("do", what, number, kind, odd)
        return number

    def all(self, what: str, *sailors: Sailor, kind: str = "allreduce") -> list[PhaseEnd]:
        """What members do at once, to its end."""
        self.begin(what, *sailors, kind=kind)
        return [sailor.expect("ended") for sailor in sailors]

    def settle(self, *sailors: Sailor) -> None:
        """These, or all, train until a step of all of them has counted."""
        wanted = sailors or tuple(self.members)
        for sailor in wanted:
            sailor.order("settle", len(wanted))
        for sailor in wanted:
            sailor.expect("settled")
        for sailor in wanted:
            sailor.heard.clear()

    def kill_agents(self) -> float:
        """SIGKILL the agents; when."""
        at = time.monotonic()
        for pid, command in started_in(str(self.directory)).items():
            if "etha.agent" in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                wait_gone(pid)
        return at

    def close(self) -> None:
        for sailor in list(self.members):
            sailor.process.kill()
            self.bury(sailor)
        self.strays.end(PATIENCE)


@contextlib.contextmanager
def managed_crew() -> Iterator[ManagedCrew]:
    """Three replicas that are ended at the end, with an agent and a Redis of their own."""
    with private_directory() as directory, served(directory) as server:
        crew = ManagedCrew(directory, server)
        try:
            yield crew
        finally:
            crew.close()
