"""Where the jobs of these tests run: fresh processes with an environment of their own, agents that they start.

    with World(directory, played=False) as world:
        trainer = world.puppet("trainer", 0, 1)
        trainer.do(acts.enter)

Fresh ones (spawn), for CUDA does not survive a fork, and torch reads allocator settings when it is loaded. ``played``:
the card is memory of the CPU (tests/fakes), processes are forked, as of other flow tests, and agents are started by
the test, each with such a driver.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.flow.jobs import Worker, _main, wait_gone
from tests.flow.puppets import Puppet, perform
from tests.flow.sites import environment

from .played import serve

SPAWN = multiprocessing.get_context("spawn")
OTHER = {"trainer": "inference", "inference": "trainer"}


class Spawned(Worker):
    """A worker in a fresh process; ``daemon`` ones may have no children."""

    def __init__(
        self, env: Mapping[str, str], function: Callable[..., Any], *args: Any, daemon: bool = True, **kwargs: Any
    ) -> None:
        self.name = f"{function.__name__}{args}{kwargs}"
        self._link, child = SPAWN.Pipe()
        work = (child, dict(env), None, function, args, kwargs)
        self._process: Any = SPAWN.Process(target=_main, args=work, daemon=daemon)
        with environment(env):
            self._process.start()
        child.close()
        self.pid = self._process.pid
        self._told, self._end = [], None


class World:
    """``env``: of everybody; ``places``: of those at each place, "" where there is one; see the module's head."""

    def __init__(
        self,
        directory: Path,
        *,
        played: bool,
        pair: str = "weights",
        env: Mapping[str, str] | None = None,
        places: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.played, self.pair = played, pair
        common = {"ETHA_RUNTIME_DIR": str(directory), "ETHA_IDLE": "300", **(env or {})}
        self.places = {name: {**common, **own} for name, own in (places or {"": {}}).items()}
        self._workers: list[Worker] = []
        self._agents: dict[tuple[str, str], Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        try:
            broken = [line for key in list(self._agents) for line in self._stop(key)] if kind is None else []
            assert not broken, "\n".join(broken)
        finally:
            while self._workers:
                self._workers.pop().end()

    def start(self, function: Callable[..., Any], *args: Any, place: str = "", **kwargs: Any) -> Worker:
        """``function(*args)`` in a process of its own that may have children; ``env``: what is set besides."""
        env = kwargs.pop("env", {})
        worker = Spawned({**self.places[place], **env}, function, *args, daemon=False, **kwargs)
        self._workers.append(worker)
        return worker

    def puppet(
        self,
        side: str,
        rank: int,
        world: int,
        *,
        place: str = "",
        device: str = "cuda:0",
        env: Mapping[str, str] | None = None,
        exportable: bool = True,
    ) -> Puppet:
        """A worker whose steps the test decides; ``exportable``: that a played card's memory has IPC handles."""
        self.agent(place, device)
        seat = {
            "side": side, "remote": OTHER[side], "rank": rank, "world": world, "pair": self.pair,
            "played": self.played, "device": device, "exportable": exportable,
        }  # fmt: skip
        return Puppet(self._made({**self.places[place], **(env or {})}, perform, seat))

    def agent(self, place: str, device: str) -> None:
        """Have one listen: a played card's is started here, a real one's by the first client."""
        if not self.played or (place, device) in self._agents:
            return
        worker = self._made(self.places[place], serve, device)
        assert worker.expect("ready") == "ready\n"
        self._agents[place, device] = worker

    def stop_copies(self, after: int, place: str = "", device: str = "cuda:0") -> None:
        """A played card's copies stop after so many bytes, until ``go_on``; a real card takes no notice."""
        if self.played:
            agent = self._agents[place, device]
            agent.go("stop copies", after)
            agent.expect("copies will stop")

    def go_on(self, place: str = "", device: str = "cuda:0") -> None:
        """The played card's copies go on."""
        if self.played:
            self._agents[place, device].go("go on")

    def kill_agent(self, pid: int, place: str = "", device: str = "cuda:0") -> None:
        """SIGKILL, awaited; a played card gets another agent."""
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        if self.played:
            del self._agents[place, device]
            self.agent(place, device)

    def _made(self, env: Mapping[str, str], function: Callable[..., Any], *args: Any) -> Worker:
        worker = Worker(dict(env), function, args, {}) if self.played else Spawned(env, function, *args)
        self._workers.append(worker)
        return worker

    def _stop(self, key: tuple[str, str]) -> list[str]:
        worker = self._agents.pop(key)
        os.kill(worker.pid, signal.SIGTERM)
        found: list[str] = worker.result()
        return found


def everybody(puppets: Sequence[Puppet], function: Callable[..., Any], *args: Any) -> list[Any]:
    """The same step in all of them at once; what each returned, after all have ended; a failure is raised."""
    for puppet in puppets:
        puppet.begin(function, *args)
    found, errors = [], []
    for puppet in puppets:
        try:
            found.append(puppet.ends())
        except AssertionError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found
