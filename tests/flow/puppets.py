"""Puppets: workers whose every step the test decides, for stories of processes that come, die and come again.

    trainer = stage.puppet("trainer", 0, world=1)
    trainer.do(init)                    # a function of the test's module: init(me, ...); its value
    trainer.begin(send)                 # ... that blocks for now
    assert trainer.fails().reason == "died"

``me`` is the puppet's own namespace: side, rank, world, pair, and what the functions put there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from etha.errors import EthaError
from tests.flow.jobs import Job, Worker, tell, wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An EthaError as a puppet saw it; ``at`` is its time on the clock that all processes share."""

    kind: str
    code: str
    text: str
    data: dict[str, Any]
    at: float

    @property
    def reason(self) -> Any:
        return self.data.get("reason")


def perform(seat: dict[str, Any]) -> None:
    """The puppet's process: one function after the other until it is told to go."""
    me = SimpleNamespace(**seat)
    while (step := wait_for("step")) is not None:
        function, args = step
        try:
            tell("step", function(me, *args))
        except EthaError as error:
            tell(
                "step",
                Failure(
                    kind=type(error).__name__,
                    code=error.code,
                    text=str(error),
                    data=error.data(),
                    at=time.monotonic(),
                ),
            )


class Puppet:
    """One worker of one side."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.pid = worker.pid

    def begin(self, function: Callable[..., Any], *args: Any) -> Puppet:
        """Start a step; ``ends`` or ``fails`` takes its end."""
        self.worker.go("step", (function, args))
        return self

    def ends(self, timeout: float = 60.0) -> Any:
        """The value of the step that began; an AssertionError when it failed."""
        value = self.worker.expect("step", timeout)
        assert not isinstance(value, Failure), value
        return value

    def fails(self, timeout: float = 60.0) -> Failure:
        """How the step that began failed."""
        value = self.worker.expect("step", timeout)
        assert isinstance(value, Failure), f"it has not failed: {value}"
        return value

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """One step from its beginning to its end."""
        return self.begin(function, *args).ends()

    def leave(self) -> None:
        """End the process as a program ends that has nothing more to do."""
        self.worker.go("step")
        self.worker.result()

    def kill(self) -> float:
        """SIGKILL; the time of it."""
        at = time.monotonic()
        self.worker.kill()
        return at


class Stage:
    """The puppets of one test: two sides that meet as ``pair``."""

    def __init__(self, job: Job, pair: str) -> None:
        self.job, self.pair = job, pair

    def puppet(self, side: str, rank: int, world: int, env: dict[str, str] | None = None) -> Puppet:
        """A new process that is ``rank`` of ``world`` in ``side``."""
        remote = {"trainer": "inference", "inference": "trainer"}[side]
        seat = {"side": side, "remote": remote, "rank": rank, "world": world, "pair": self.pair}
        return Puppet(self.job.start(perform, seat, at=(side, rank), env=env))

    def side(self, side: str, world: int, env: dict[str, str] | None = None) -> list[Puppet]:
        """All ranks of a side."""
        return [self.puppet(side, rank, world, env) for rank in range(world)]


def together(puppets: list[Puppet], function: Callable[..., Any], *args: Any) -> list[Any]:
    """The same step in all of them at once; their values."""
    for puppet in puppets:
        puppet.begin(function, *args)
    return [puppet.ends() for puppet in puppets]
