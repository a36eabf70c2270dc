"""When an engine that follows a publication receives a version and brings it in; pure.

    RECEIVING   each worker waits for a version, and receives it beside the engine's steps
    PAUSING     all workers hold one version; it comes in once the engine has paused
    RETRYING    a worker has failed; all of them begin again in a while

A version comes in only if every worker holds the same one, so the ranks of an engine never differ within a step. The
shell (``following.py``) performs what the methods return, and says what has become of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from etha.errors import EthaError

#: Seconds until workers begin again after a failure: doubled with each failure, up to the last.
FIRST_DELAY, LAST_DELAY = 1.0, 30.0
#: Moves that an error tells of.
_REMEMBERED = 16


class FollowerState(Enum):
    """What the engine waits for."""

    NEW = "new"
    RECEIVING = "receiving"
    PAUSING = "pausing"
    RETRYING = "retrying"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOutcome:
    """What has become of one worker's part in a version: ``seq`` and its label, or ``error``.

    ``lost``: it has to enter the publication again. ``refused``: seq of the newest version, if no version of its
    description fits the model.
    """

    seq: int = 0
    version: str = ""
    error: str = ""
    lost: bool = False
    refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """All workers begin to receive a version newer than ``newer_than``. ``renew``: they enter the publication again."""

    turn: int
    newer_than: int
    renew: bool


@dataclass(frozen=True, slots=True)
class Collect:
    """Ask all workers for their outcome."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause the engine, so that the version that all workers hold can come in."""


@dataclass(frozen=True, slots=True)
class InstallVersion:
    """All workers bring the version into the model; then the engine goes on, with this version's name."""

    version: str


@dataclass(frozen=True, slots=True)
class Retry:
    """Say ``why``, and come back with ``due(turn)`` in ``seconds``."""

    turn: int
    seconds: float
    why: str


FollowerEffect = Receive | Collect | Pause | InstallVersion | Retry


@dataclass(slots=True)
class EngineFollower:
    """One engine's way through the versions of a publication."""

    state: FollowerState = FollowerState.NEW
    #: Number of the receive that runs, or that was the last one. Words of an earlier one are late.
    turn: int = 0
    #: The version that the model holds, and the one that comes in next.
    seq: int = 0
    coming: WorkerOutcome | None = None
    _since: int = 0
    _delay: float = FIRST_DELAY
    _renew: bool = False
    _history: list[FollowerState] = field(default_factory=list)

    def start(self, held: Sequence[WorkerOutcome]) -> list[FollowerEffect]:
        """The engine is up; ``held``: what each worker has loaded."""
        self._expect("start", FollowerState.NEW)
        (one,) = set(held)
        self.seq = self._since = one.seq
        return self._receive()

    def reported(self, turn: int) -> list[FollowerEffect]:
        """A worker's receive number ``turn`` has ended, well or not."""
        if turn != self.turn or self.state is not FollowerState.RECEIVING:
            return []
        return [Collect()]

    def collected(self, outcomes: Sequence[WorkerOutcome]) -> list[FollowerEffect]:
        """What all workers have said."""
        self._expect("collected", FollowerState.RECEIVING)
        failed = [(rank, one) for rank, one in enumerate(outcomes) if one.error]
        if not failed and len(set(outcomes)) == 1:
            self.coming, self._delay = outcomes[0], FIRST_DELAY
            self._move(FollowerState.PAUSING)
            return [Pause()]
        if failed:
            rank, first = failed[0]
            why = f"worker {rank} of the engine: {first.error}"
        else:
            why = f"the workers hold versions {sorted({one.seq for one in outcomes})}"
        # What no description of now fits is not asked for again before another version is announced.
        self._since = max(self.seq, *(one.refused for one in outcomes))
        self._renew = not failed or any(one.lost for _, one in failed)
        self._move(FollowerState.RETRYING)
        seconds, self._delay = self._delay, min(2 * self._delay, LAST_DELAY)
        return [Retry(self.turn, seconds, why)]

    def paused(self, *, ours: bool) -> list[FollowerEffect]:
        """The engine has paused. ``ours``: nobody has let it go on since it was told to."""
        if self.state is not FollowerState.PAUSING or self.coming is None:
            return []
        return [InstallVersion(self.coming.version)] if ours else [Pause()]

    def brought_in(self) -> list[FollowerEffect]:
        """The model holds the version, on all workers."""
        self._expect("brought_in", FollowerState.PAUSING)
        assert self.coming is not None
        self.seq = self._since = self.coming.seq
        self.coming = None
        return self._receive()

    def due(self, turn: int) -> list[FollowerEffect]:
        """The time of a ``Retry`` is over."""
        if turn != self.turn or self.state is not FollowerState.RETRYING:
            return []
        return self._receive()

    def _receive(self) -> list[FollowerEffect]:
        self._move(FollowerState.RECEIVING)
        self.turn += 1
        renew, self._renew = self._renew, False
        return [Receive(turn=self.turn, newer_than=self._since, renew=renew)]

    def _expect(self, event: str, state: FollowerState) -> None:
        if self.state is not state:
            past = ", ".join(one.value for one in (*self._history, self.state))
            raise EthaError(
                f"follower of seq {self.seq}: {event} is impossible while {self.state.value}; so far: {past}"
            )

    def _move(self, state: FollowerState) -> None:
        self._history = [*self._history, self.state][-_REMEMBERED:]
        self.state = state
