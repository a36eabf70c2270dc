"""One registration of a batch on one agent: who has come, what all of it results in, who has closed.

Pure. Its transfers are another machine (``participant``), made once the batch is registered.

    ENROLLING --all there--> EVALUATING --planned--> AGREEING --same digests--> REGISTERED --> CLOSED
         \\                       \\--refused-----------\\--they differ--> REFUSED
          \\--pair lost, any state--> LOST
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from etha.agent.protocol.capabilities import Capabilities, Terms, torn_apart
from etha.agent.protocol.effects import Answer, CallKey, Fail, Member, name_ranks
from etha.agent.protocol.evaluation import Evaluation
from etha.agent.protocol.machine import Machine, MachineState
from etha.bus.messages import Registered
from etha.errors import EthaError, PeerLostError, ProtocolError, RegistrationError, RendezvousTimeoutError, Violation
from etha.units import counted


class RegistrationState(MachineState):
    """The state of a registration."""

    ENROLLING = 1
    EVALUATING = 2
    AGREEING = 3
    REGISTERED = 4
    REFUSED = 5
    LOST = 6
    CLOSED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateRoster:
    """Plan both directions from these entries (JSON records by rank). ``evaluated`` takes the result."""

    entries: Mapping[Member, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declare:
    """Publish this agent's verdict (text), so that the agents see that they have the same plans."""

    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """The batch is registered: its transfers can begin, on these terms."""

    evaluation: Evaluation
    terms: Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Unenroll:
    """Remove this rank's entry, because it gave up, was refused, or has closed."""

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolAgain:
    """Enter this call's rank anew, in whatever generation the others wait by now: Redis has lost its entry."""

    call: CallKey


BatchEffect = Answer | Fail | EvaluateRoster | Declare | Stand | Unenroll | EnrolAgain


#: The states that any unfinished registration may change to.
_OVER = frozenset({RegistrationState.LOST, RegistrationState.CLOSED})


class BatchRegistration(Machine[RegistrationState]):
    """``agents``: side -> agent of each rank. ``me`` is this agent. ``name`` is used in messages."""

    TABLE: ClassVar[Mapping[Any, frozenset[Any]]] = {
        RegistrationState.ENROLLING: _OVER | {RegistrationState.EVALUATING},
        RegistrationState.EVALUATING: _OVER | {RegistrationState.AGREEING, RegistrationState.REFUSED},
        RegistrationState.AGREEING: _OVER | {RegistrationState.REGISTERED, RegistrationState.REFUSED},
        RegistrationState.REGISTERED: _OVER,
        RegistrationState.REFUSED: frozenset({RegistrationState.CLOSED}),
        RegistrationState.LOST: frozenset({RegistrationState.CLOSED}),
        RegistrationState.CLOSED: frozenset(),
    }

    def __init__(self, name: str, *, me: str, agents: Mapping[str, tuple[str, ...]], generation: int = 0) -> None:
        super().__init__(f"batch {name}", RegistrationState.ENROLLING)
        self.batch, self.me, self.agents, self.generation = name, me, agents, generation
        #: All agents of the batch.
        self.everybody = frozenset(agent for ranks in agents.values() for agent in ranks)
        self.waiting: dict[CallKey, Member] = {}
        self.open: set[Member] = set()
        self.absent: set[Member] = {(side, rank) for side, ranks in agents.items() for rank in range(len(ranks))}
        self.evaluation: Evaluation | None = None
        self.lost: PeerLostError | None = None
        self._verdicts: Mapping[str, str] = {}

    @property
    def alone(self) -> bool:
        """Whether all ranks of both sides are this agent's."""
        return self.everybody == {self.me}

    def enrolled(self, key: CallKey, member: Member) -> list[BatchEffect]:
        """A local rank's entry is in the roster."""
        if self.lost is not None:
            return [Fail(call=key, error=self.lost), Unenroll(member=member)]
        self.waiting[key] = member
        self.open.add(member)
        return self._answer_all() if self.state is RegistrationState.REGISTERED else []

    def rostered(
        self, entries: Mapping[Member, str], verdicts: Mapping[str, str], newest: int, asking: Collection[CallKey]
    ) -> list[BatchEffect]:
        """The roster's current content: all entries while it is enrolling, then at least those of the ranks that wait
        here. ``newest`` is the batch's latest generation; 0 if Redis has lost it. ``asking``: the calls that waited
        when Redis was asked, because the entry of a later one need not be there.
        """
        if lost := self._lost(entries, newest, asking):
            for key in lost:
                self.open.discard(self.waiting.pop(key))
            if not self.open:
                self.move(RegistrationState.CLOSED)
            return [EnrolAgain(call=key) for key in lost]
        self._verdicts = verdicts
        if self.state is RegistrationState.ENROLLING:
            self.absent = {(s, r) for s, ranks in self.agents.items() for r in range(len(ranks))} - set(entries)
            if not self.absent:
                self.move(RegistrationState.EVALUATING)
                return [EvaluateRoster(entries=entries)]
        return self._agree()

    def _lost(self, entries: Mapping[Member, str], newest: int, asking: Collection[CallKey]) -> list[CallKey]:
        """The calls whose ranks must enter again, because Redis has lost entries of this generation.

        Once all entries were read, only verdicts are missing, which agents put back. But an agent that had not read
        all of them enters anew, in a later generation, and then all go there.
        """
        missing = [key for key, member in self.waiting.items() if key in asking and member not in entries]
        if self.state is RegistrationState.ENROLLING:
            whole = len(entries) == sum(len(ranks) for ranks in self.agents.values())
            return list(self.waiting) if newest > self.generation and not whole else missing
        between = (RegistrationState.EVALUATING, RegistrationState.AGREEING)
        return list(self.waiting) if missing and newest > self.generation and self.state in between else []

    def evaluated(self, evaluation: Evaluation, verdict: Capabilities | None = None) -> list[BatchEffect]:
        """The plans of both directions, or why there are none. ``verdict`` is given if several agents must agree."""
        if self.state is not RegistrationState.EVALUATING:
            return []
        self.evaluation = evaluation
        if evaluation.refused:
            return self._refuse(evaluation.refused)
        self.move(RegistrationState.AGREEING)
        if self.alone:
            return self._stand(Terms())
        assert verdict is not None
        return [Declare(verdict=verdict.to_text()), *self._agree()]

    def failed(self, error: EthaError) -> list[BatchEffect]:
        """The shell could not read the roster or plan: every call that waits here fails."""
        out: list[BatchEffect] = [Fail(call=key, error=error) for key in self.waiting]
        out += [Unenroll(member=member) for member in self.waiting.values()]
        self.open -= set(self.waiting.values())
        self.waiting.clear()
        if not self.open and self.state is not RegistrationState.CLOSED:
            self.move(RegistrationState.CLOSED)
        return out

    def expire(
        self, key: CallKey, *, cancelled: bool, hint: str = "", already: frozenset[Member] = frozenset()
    ) -> list[BatchEffect]:
        """A caller's deadline passed, or it cancelled. ``hint`` is appended to the error.

        ``already``: who was missing a moment ago. Who is missing only now has given up together with this call.
        """
        member = self.waiting.pop(key, None)
        if member is None:
            return []
        missing: dict[str, tuple[int, ...]] = {}
        for side, rank in sorted((self.absent & already or self.absent) - self.open):
            missing[side] = (*missing.get(side, ()), rank)
        what = "was cancelled" if cancelled else "ended at its deadline"
        text = f"register_tensors of batch {self.batch} by {member[0]} rank {member[1]} {what}"
        text += f"; missing: {name_ranks(missing)}{hint}" if missing else "; all have come, planning had not ended"
        out: list[BatchEffect] = [Fail(call=key, error=RendezvousTimeoutError(text, missing=missing))]
        return out + self._leave(member)

    def close(self, member: Member) -> list[BatchEffect]:
        """A local rank closed the batch, or its client."""
        self.waiting = {key: m for key, m in self.waiting.items() if m != member}
        return self._leave(member)

    def break_up(self, error: PeerLostError) -> list[BatchEffect]:
        """The pair's epoch is over, or a rank cannot take part. Waiting calls fail, and their ranks leave the
        registration."""
        if self.state in (RegistrationState.LOST, RegistrationState.CLOSED, RegistrationState.REFUSED):
            return []
        self.lost = error
        self.move(RegistrationState.LOST)
        return self.failed(error)

    def forget(self) -> None:
        """Closed, and nothing of it runs any more: the plans and what others said of them may be large."""
        self.evaluation, self._verdicts = None, {}

    @property
    def holders(self) -> frozenset[Member]:
        """Local ranks that know that the batch is registered, and have not left it."""
        return frozenset(self.open.difference(self.waiting.values()))

    def _leave(self, member: Member) -> list[BatchEffect]:
        if member not in self.open:
            return []
        self.open.discard(member)
        if not self.open and self.state is not RegistrationState.CLOSED:
            self.move(RegistrationState.CLOSED)
        return [Unenroll(member=member)]

    def _agree(self) -> list[BatchEffect]:
        if self.state is not RegistrationState.AGREEING or self.evaluation is None:
            return []
        wanted = self.everybody
        if not wanted <= self._verdicts.keys():
            return []
        try:
            verdicts = {agent: Capabilities.from_text(agent, self._verdicts[agent]) for agent in wanted}
        except ProtocolError as error:
            return self.failed(error)
        differ = sorted(agent for agent in wanted if verdicts[agent].digest != self.evaluation.digest)
        if differ:
            who = ", ".join(differ)
            text = f"agents {self.me} and {who} computed different plans; run the same version of Etha on all"
            side = self.evaluation.sides[0]
            return self._refuse((Violation(code="plan_mismatch", name="", side=side, rank=None, text=text),))
        if not self.evaluation.atomic and (more := torn_apart(self.agents, verdicts)):
            self.evaluation = self.evaluation.but(more)
            if self.evaluation.refused:
                return self._refuse(self.evaluation.refused)
        terms = Terms.of(verdicts)
        if terms.nccl:
            self.evaluation = self.evaluation.uncarried()
        return self._stand(terms)

    def _stand(self, terms: Terms) -> list[BatchEffect]:
        assert self.evaluation is not None
        self.move(RegistrationState.REGISTERED)
        return [Stand(evaluation=self.evaluation, terms=terms), *self._answer_all()]

    def _refuse(self, violations: tuple[Violation, ...]) -> list[BatchEffect]:
        self.move(RegistrationState.REFUSED)
        listed = "\n  ".join(str(v) for v in violations[:20])
        more = f"\n  and {len(violations) - 20} more, see .violations" if len(violations) > 20 else ""
        text = f"batch {self.batch} cannot be registered, {counted(len(violations), 'reason')}:\n  {listed}{more}"
        return self.failed(RegistrationError(text, violations=violations))

    def _answer_all(self) -> list[BatchEffect]:
        out: list[BatchEffect] = [
            Answer(call=key, message=registered(self.evaluation, member, self.generation))
            for key, member in self.waiting.items()
            if self.evaluation is not None
        ]
        self.waiting.clear()
        return out


def registered(evaluation: Evaluation, member: Member, generation: int) -> Registered:
    """The answer to a rank of a registered batch."""
    side = member[0]
    other = next(s for s in evaluation.sides if s != side)
    send, recv = side in evaluation.plans, other in evaluation.plans
    directions = {f"{source}->{target}": source for source, target in ((side, other), (other, side))}
    summary = {
        "tensors": evaluation.tensors,
        "bucket_size": evaluation.bucket_size,
        "verify": evaluation.verify,
        "directions": {
            name: {"bytes": evaluation.nbytes(source), "digest": evaluation.digests[source]}
            for name, source in directions.items()
            if source in evaluation.plans
        },
    }
    return Registered(
        generation=generation,
        seq=evaluation.seq,
        atomic=evaluation.atomic,
        shadows=evaluation.atomic and recv,
        send=send,
        recv=recv,
        receives=recv and other in evaluation.asked,
        summary=summary,
    )
