"""A batch as it lives on one agent: the registration, its transfers, its workers' tensors, its programs.

State only; ``batches`` is the shell that drives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etha.agent.batch import Batch
from etha.agent.effects import CallKey, Member
from etha.agent.evaluate import Evaluation
from etha.agent.lane import Running
from etha.agent.session import Session
from etha.agent.transfer import Transfers
from etha.errors import EthaError
from etha.memory.handles import TensorHandle
from etha.peer.messages import Version
from etha.store.records import PairView
from etha.transport.program import Program


@dataclass(slots=True)
class Tensors:
    """One local rank's tensors by name; ``shadows`` is where it receives instead, when atomic."""

    session: Session
    handles: Mapping[str, TensorHandle]
    order: tuple[str, ...]
    shadows: Mapping[str, TensorHandle] | None = None


#: A value as ``Store.set_batch`` takes it.
Field = int | float | str | None


@dataclass(slots=True)
class Ask:
    """A local rank's waiting transfer call: what the machines need not know."""

    session: Session
    slot: int
    progress: bool


@dataclass(slots=True, kw_only=True)
class Current:
    """The program of the transfer that moves now; ``running`` is None until it is compiled."""

    seq: int
    source: str
    calls: Mapping[Member, CallKey]
    started: float
    running: Running | None = None
    stopped: bool = False


@dataclass(slots=True, kw_only=True)
class Live:
    """``pairs`` are the batch's, primary (first by name) first; one ``generation`` of it, at these ``epochs``."""

    name: str
    pairs: tuple[str, ...]
    epochs: Mapping[str, int]
    generation: int
    view: PairView
    machine: Batch
    tensors: dict[Member, Tensors] = field(default_factory=dict)
    transfers: Transfers | None = None
    evaluation: Evaluation | None = None
    programs: dict[str, Program] = field(default_factory=dict)
    asks: dict[CallKey, Ask] = field(default_factory=dict)
    current: Current | None = None
    offers: dict[CallKey, str] = field(default_factory=dict)
    version: Version = None
    #: Highest number given before this registration, as Redis knows.
    seq: int = 0
    last_seconds: float | None = None
    last_error: EthaError | None = None

    @property
    def epoch(self) -> int:
        """The primary pair's, which messages carry."""
        return self.epochs[self.pairs[0]]

    @property
    def key(self) -> tuple[str, str, int]:
        """(primary pair, batch, generation)."""
        return (self.pairs[0], self.name, self.generation)

    def other(self, side: str) -> str:
        """The side opposite ``side``."""
        return next(name for name in self.view.sides if name != side)

    def records(self, fields: Mapping[str, Field]) -> dict[str, dict[str, Field]]:
        """What Redis is told of this batch under each of its pairs.

        The generation, which the primary pair alone counts, keeps what is written late from changing a
        registration that has begun since.
        """
        return {p: {**fields, **({"generation": self.generation} if p == self.pairs[0] else {})} for p in self.pairs}
