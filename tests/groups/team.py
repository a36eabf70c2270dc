"""Members of a group as real processes, forked from a server that has torch and etha.groups."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch._C._distributed_c10d import TCPStore

from tests.processes import CONTEXT, preload, send_signal

preload("torch", "etha.groups.host.etha_group")


@dataclass(slots=True, kw_only=True)
class Member:
    """What the body of a member gets: who it is, where the store is, and a pipe to the test."""

    rank: int
    size: int
    address: str
    pipe: Connection
    #: The number of its host. Members with another number are reached over TCP, as if they were elsewhere.
    host: int = 0
    #: Whether Python does what the compiled library would do.
    python: bool = False

    def configured(self, prefix: str = "first", **options: Any) -> Any:
        """A ProcessGroupEtha of all members."""
        from etha.groups.host.etha_group import ProcessGroupEtha

        group = ProcessGroupEtha(**{"timeout": 30.0, **options})
        group.configure(f"{self.address}/{prefix}", f"replica-{self.rank}", self.rank, self.size)
        return group

    def say(self, word: Any) -> None:
        """Send ``word`` to the test."""
        self.pipe.send(("said", word))

    def hear(self) -> Any:
        """The next word of the test."""
        return self.pipe.recv()


def _run(body: Callable[..., Any], member: Member, args: tuple[Any, ...]) -> None:
    import torch

    # A shell that starts the tests in the background has them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)  # the members are more than the cores
    if member.python:
        from etha import native

        os.environ["ETHA_NATIVE"] = "0"
        native.load.cache_clear()
    if member.host:
        from etha.groups.host import meeting

        real = meeting.host_identity()
        meeting.host_identity = lambda: f"{real}-{member.host}"
    try:
        member.pipe.send(("done", body(member, *args)))
    except BaseException:
        member.pipe.send(("failed", traceback.format_exc()))


@dataclass(slots=True, kw_only=True)
class Team:
    """Running members. ``results()`` waits for all that were not killed."""

    size: int
    address: str
    pipes: list[Connection] = field(default_factory=list)
    processes: list[BaseProcess] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)

    def heard(self, rank: int, timeout: float = 60.0) -> Any:
        """The next word that a member says."""
        assert self.pipes[rank].poll(timeout), f"member {rank} says nothing"
        kind, value = self.pipes[rank].recv()
        assert kind == "said", value
        return value

    def tell(self, word: Any) -> None:
        """Send ``word`` to all members that live."""
        for rank, pipe in enumerate(self.pipes):
            if rank not in self.killed:
                pipe.send(word)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a member; one that is killed is not waited for."""
        if number is signal.SIGKILL:
            self.killed.add(rank)
        pid = self.processes[rank].pid
        assert pid is not None
        send_signal(pid, number)

    def results(self, timeout: float = 90.0) -> dict[int, Any]:
        """What the bodies returned, by rank."""
        found = {}
        for rank, pipe in enumerate(self.pipes):
            if rank in self.killed:
                continue
            kind = "said"
            while kind == "said":
                assert pipe.poll(timeout), f"member {rank} does not end"
                kind, value = pipe.recv()
            assert kind == "done", f"member {rank}:\n{value}"
            found[rank] = value
        return found


@contextlib.contextmanager
def team(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    hosts: tuple[int, ...] = (),
    python: tuple[int, ...] = (),
    daemon: bool = True,
) -> Iterator[Team]:
    """Start ``size`` members that run ``body(member, *args)``; what is left of them is killed at the end.

    ``hosts``: the number of each member's host; one if it is empty. ``python``: who has no compiled library.
    ``daemon``: False for members that start processes of their own.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    running = Team(size=size, address=f"127.0.0.1:{store.port}")
    try:
        for rank in range(size):
            here, there = CONTEXT.Pipe()
            host = hosts[rank] if hosts else 0
            member = Member(rank=rank, size=size, address=running.address, pipe=there, host=host, python=rank in python)
            process = CONTEXT.Process(target=_run, args=(body, member, args), daemon=daemon)
            process.start()
            there.close()
            running.pipes.append(here)
            running.processes.append(process)
        yield running
        for process in running.processes:
            process.join(30)
    finally:
        for process in running.processes:
            process.kill()
            process.join()
        for pipe in running.pipes:
            pipe.close()


def together(
    size: int, body: Callable[..., Any], *args: Any, hosts: tuple[int, ...] = (), python: tuple[int, ...] = ()
) -> dict[int, Any]:
    """Run ``body(member, *args)`` in ``size`` processes; what each returned, by rank."""
    with team(size, body, *args, hosts=hosts, python=python) as running:
        return running.results()
