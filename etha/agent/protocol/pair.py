"""A pair as one agent sees it: which calls wait for it, which epoch is formed, why it was lost.

Pure. The truth is in Redis; ``viewed`` takes each newer view of it. The death of a worker of this agent breaks the pair
at once, without waiting for Redis. Workers are admitted once the agents of the epoch have met.

    FORMING --view formed--> FORMED --view lost, depart, lose--> LOST --view formed (next epoch)--> FORMED
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from etha.agent.protocol.effects import Answer, CallKey, Fail, Member, name_members, name_ranks
from etha.agent.protocol.machine import Machine, MachineState
from etha.bus.messages import PairFormed
from etha.errors import (
    AgentUnavailableError,
    ConfigError,
    EthaError,
    PeerLostError,
    RedisUnavailableError,
    RendezvousTimeoutError,
    with_again,
    withdrawn,
)
from etha.store.records import PairView, Reason
from etha.store.records import RankHolder as Holder


class PairPhase(MachineState):
    """The state of a pair."""

    FORMING = 1
    FORMED = 2
    LOST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A worker's ``init_pair`` that is waiting."""

    key: CallKey
    side: str
    rank: int
    remote: str
    world_size: int
    launch: str | None
    holder: Holder
    run: str | None = None
    takeover: bool = False
    give_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Ask the store to let this worker join. Its view comes back through ``joined``."""

    asked: JoinRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Tell the store that this holder has left its rank."""

    side: str
    rank: int
    holder: Holder
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Sever:
    """Tell the store that the agents of ``epoch`` have lost each other, or those of ``culprits``."""

    epoch: int
    text: str
    culprits: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """``epoch`` is complete: let its agents meet. ``met`` or ``unmet`` follows. ``view`` names every holder."""

    epoch: int
    view: PairView


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """``epoch`` was over before its agents had met: ask the store to join again after a pause. ``met`` ends these."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """``epoch`` is over for everybody who was in it."""

    epoch: int
    error: PeerLostError


PairEffect = Answer | Fail | Join | Leave | Sever | Formed | Missed | Broken


class PairMachine(Machine[PairPhase]):
    """The pair ``name`` on one agent. ``epoch`` is the last that formed.

    ``redis`` is a URL for messages. ``unmet`` is why the agents of an epoch before could not meet.
    """

    TABLE: ClassVar[Mapping[Any, frozenset[Any]]] = {
        PairPhase.FORMING: frozenset({PairPhase.FORMED}),
        PairPhase.FORMED: frozenset({PairPhase.LOST}),
        PairPhase.LOST: frozenset({PairPhase.FORMED}),
    }

    def __init__(self, name: str, redis: str = "", *, unmet: str = "") -> None:
        super().__init__(f"pair {name}", PairPhase.FORMING)
        self.pair, self.redis = name, redis
        self.epoch = 0
        self.view: PairView | None = None
        self.lost: PeerLostError | None = None
        self.waiting: dict[CallKey, JoinRequest] = {}
        self._met = 0
        #: The last epoch that was over before its agents had met, and why.
        self._missed = 0
        self.unmet_because = unmet
        self._inside: set[CallKey] = set()
        #: Calls whose epoch was over before they were admitted, and which have joined again.
        self._again: set[CallKey] = set()
        #: For calls that give up when the other side has left: the epoch before the one that it was seen to wait for.
        self._seen: dict[CallKey, int] = {}

    def ask(self, asked: JoinRequest) -> list[PairEffect]:
        """A worker calls ``init_pair``."""
        self.waiting[asked.key] = asked
        return [Join(asked=asked)]

    def joined(self, key: CallKey, view: PairView) -> list[PairEffect]:
        """The store has let the caller join."""
        if key in self.waiting:
            self._inside.add(key)
        return self.viewed(view)

    def refused(self, key: CallKey, error: EthaError) -> list[PairEffect]:
        """The store has refused the caller, or did not answer."""
        asked = self._forget(key)
        if asked is None:
            return []
        if isinstance(error, RedisUnavailableError):  # it says nothing about the pair
            error = RedisUnavailableError(f"{self._call(asked)}: {error.message}")
        return [Fail(call=key, error=error)]

    def viewed(self, view: PairView) -> list[PairEffect]:
        """What Redis says now. Views must come in order; older epochs are ignored."""
        if view.epoch < self.epoch:
            return []
        formed = view.state == "formed"
        restoring = formed and not view.lists_all()
        if restoring and view.epoch == self.epoch and self.state is PairPhase.FORMED and self.view is not None:
            view = self.view  # the members of an epoch never change
        before, self.view = self.members(), view
        out: list[PairEffect] = []
        if self.state is PairPhase.FORMED and (not formed or view.epoch > self.epoch):
            # The view's error belongs to the later epoch, whose members displaced this epoch's.
            passed = view.epoch > self.epoch
            reason = "relaunched" if passed else view.reason or "relaunched"
            text = f"the pair is at epoch {view.epoch} now" if passed else view.error
            # Who has left or died is no member any more, and who was launched again is another process.
            now = self.members()
            left = {m: not now[m].is_same(h) if m in now else not restoring for m, h in before.items()}
            missed = [m for m, h in before.items() if left[m] and h.epoch == self.epoch]
            missed += [m for m in view.culprits if m in before and m not in missed and not passed]
            out += self._break(reason, text or "the other side was launched again", missed)
        if formed and not restoring and view.epoch > self.epoch:
            self.epoch, self.lost = view.epoch, None
            self.move(PairPhase.FORMED)
            out.append(Formed(epoch=view.epoch, view=view))
        return out + self._admit(view)

    def met(self, epoch: int) -> list[PairEffect]:
        """All agents of ``epoch`` are linked and know the epoch."""
        if epoch != self.epoch or self.state is not PairPhase.FORMED or self.view is None:
            return []
        self._met, self.unmet_because = epoch, ""
        return self._admit(self.view)

    def unmet(self, epoch: int, error: EthaError) -> list[PairEffect]:
        """The agents of ``epoch`` could not meet: nobody is admitted, here or elsewhere.

        Usually one of them is dead, and Redis lists it until its lease ends, or out of reach. The calls wait for the
        next epoch. Settings that do not fit stay as they are, so calls for which this is the second time fail then.
        """
        if epoch != self.epoch or self.state is not PairPhase.FORMED:
            return []
        failed = sorted(self._inside & self._again) if isinstance(error, ConfigError) else []
        for key in failed:
            self._forget(key)
        return [*(Fail(call=key, error=error) for key in failed), *self._break("died", error.message, (), sever=True)]

    def on_agent_lost(self, agent: str, text: str) -> list[PairEffect]:
        """The link to an agent of this pair is lost."""
        theirs = [member for member, holder in self.members().items() if holder.agent == agent]
        if self.state is not PairPhase.FORMED or not theirs:
            return []
        return self._break("died", f"the agent of {name_members(theirs)} is gone ({text})", theirs, sever=True)

    def expire(
        self,
        key: CallKey,
        *,
        cancelled: bool,
        paused: bool = False,
        hint: str = "",
        already: Mapping[str, tuple[int, ...]] | None = None,
    ) -> list[PairEffect]:
        """The caller's deadline passed, or it cancelled: it leaves.

        ``paused``: the store has not been asked to let it join, because agents could not meet. ``hint`` is appended to
        the error. ``already``: who was missing a moment ago; who is missing only now has given up together with this
        call.
        """
        inside = key in self._inside
        asked = self._forget(key)
        if asked is None:
            return []
        what = "was cancelled" if cancelled else "ended at its deadline"
        text = f"{self._call(asked)} {what}"
        error: EthaError
        before = f"; the epoch before was over at once: {self.unmet_because}" if self.unmet_because else ""
        missing = self.missing(asked)
        if already is not None:
            both = {side: set(ranks) & set(already.get(side, ())) for side, ranks in missing.items()}
            missing = {side: tuple(sorted(ranks)) for side, ranks in both.items() if ranks} or missing
        if inside and self.state is PairPhase.FORMED:
            error = AgentUnavailableError(f"{text}: both sides have come, but their agents had not linked yet{before}")
        elif paused or (inside and self._all_tried(missing)):
            who = f"; missing now: {self._who(missing)}" if missing else ""
            why = self.unmet_because or "their agents could not meet"
            error = AgentUnavailableError(f"{text}: both sides had come, but the epoch was over at once: {why}{who}")
        elif inside:
            error = RendezvousTimeoutError(f"{text}; missing: {self._who(missing)}{before}{hint}", missing=missing)
        elif cancelled:  # which says nothing about Redis
            error = RendezvousTimeoutError(f"{text} before Redis had let it join")
        else:
            error = RedisUnavailableError(f"{text} before Redis at {self.redis} had answered")
        leave = Leave(side=asked.side, rank=asked.rank, holder=asked.holder, reason="closed")
        return [Fail(call=key, error=error), leave]

    def _all_tried(self, missing: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether all that are missing were in the epoch that was over at once, and have not left since."""
        members = self.members()
        return bool(self.unmet_because) and all((side, rank) in members for side in missing for rank in missing[side])

    def _call(self, asked: JoinRequest) -> str:
        """A worker's call, as messages name it."""
        return f"init_pair of {self.pair!r} by {asked.side} rank {asked.rank}"

    def depart(self, side: str, rank: int, holder: Holder, reason: Reason) -> list[PairEffect]:
        """A holder's process died, or its last client closed."""
        out: list[PairEffect] = [Leave(side=side, rank=rank, holder=holder, reason=reason)]
        for key in [k for k, a in self.waiting.items() if (a.side, a.rank, a.holder) == (side, rank, holder)]:
            self._forget(key)
        if self.state is PairPhase.FORMED and self._holds(side, rank, holder):
            how = "has closed its client" if reason == "closed" else f"died (pid {holder.pid} on {holder.shown_host})"
            out += self._break(reason, f"{side} rank {rank} {how}", [(side, rank)])
        return out

    def waits_for_others(self, key: CallKey) -> bool:
        """Whether this call has joined in Redis, and somebody else has not."""
        return key in self._inside and self.state is not PairPhase.FORMED

    def missing(self, asked: JoinRequest) -> dict[str, tuple[int, ...]]:
        """Ranks that have not come. Rank 0 stands for a side of which nobody has come."""
        if self.view is None:
            return {asked.side: tuple(range(asked.world_size)), asked.remote: (0,)}
        return self.view.missing()

    def error(self, epoch: int) -> PeerLostError | None:
        """Why a call of ``epoch`` cannot go on; None if it can."""
        if self.state is PairPhase.FORMED and epoch == self.epoch:
            return None
        if self.lost is not None and epoch == self.epoch:
            return withdrawn(self.lost)
        text = f"pair {self.pair!r} is at epoch {self.epoch}, this batch belongs to epoch {epoch}"
        return PeerLostError(with_again(text), reason="relaunched")

    def members(self) -> dict[Member, Holder]:
        """All holders in the view, by (side, rank)."""
        if self.view is None:
            return {}
        return {(s, r): h for s, side in self.view.sides.items() for r, h in side.members.items()}

    def absent(self, missing: Mapping[str, tuple[int, ...]]) -> set[str]:
        """Sides of which nobody has come."""
        sides = self.view.sides if self.view is not None else {}
        return {side for side in missing if side not in sides or sides[side].world_size is None}

    def launched_again(self, side: str, launch: str | None) -> bool:
        """Whether ``launch`` is another one than that of the side's ranks."""
        found = self.view.sides.get(side) if self.view is not None else None
        return found is not None and launch is not None and found.launch != launch

    def _who(self, missing: Mapping[str, tuple[int, ...]]) -> str:
        alone = self.absent(missing)
        known = {side: ranks for side, ranks in missing.items() if side not in alone}
        return "; ".join([*([name_ranks(known)] if known else []), *(f"everybody of {side}" for side in sorted(alone))])

    def _holds(self, side: str, rank: int, holder: Holder) -> bool:
        found = self.members().get((side, rank))
        return found is not None and found.is_same(holder)

    def _superseded(self, asked: JoinRequest, view: PairView) -> bool:
        """Whether the caller has lost its rank to another worker, or its launch is not the current one."""
        side = view.sides.get(asked.side)
        if side is None:
            return False
        newer = asked.launch is not None and side.launch is not None and side.launch != asked.launch
        return newer or asked.rank in side.members

    def _deserted(self, asked: JoinRequest, view: PairView) -> bool:
        """Whether workers of the other side waited for the next epoch, and none does any more."""
        side = view.sides.get(asked.remote)
        if side is not None and any(member.epoch == view.epoch + 1 for member in side.members.values()):
            self._seen[asked.key] = view.epoch
            return False
        return view.state != "formed" and self._seen.get(asked.key) == view.epoch

    def _admit(self, view: PairView) -> list[PairEffect]:
        out: list[PairEffect] = []
        for key in list(self._inside):
            asked = self.waiting[key]
            inside = self._holds(asked.side, asked.rank, asked.holder)
            if inside and view.state == "formed" and self.state is PairPhase.FORMED:
                if self._met != self.epoch:
                    continue
                self._forget(key)
                remote = view.sides[asked.remote].world_size
                assert remote is not None
                formed = PairFormed(epoch=self.epoch, local_world_size=asked.world_size, remote_world_size=remote)
                out.append(Answer(call=key, message=formed))
            elif inside and view.state == "formed" and view.epoch == self.epoch and self.lost is not None:
                # Redis took this for a repeated call, because it does not know that the epoch is over.
                out += [Sever(epoch=self.epoch, text=self.lost.message, culprits=self.lost.culprits), Join(asked=asked)]
            elif inside and view.state != "formed" and self.members()[asked.side, asked.rank].epoch <= view.epoch:
                # It completed an epoch, or was in one, that was over before this agent saw it formed.
                out += [*self._miss(view.epoch, view.error or "its agents could not meet"), self._rejoin(key)]
            elif not inside and not self._superseded(asked, view):
                # Redis lost its data, or took our agent for dead before it had put its record back.
                self._inside.discard(key)
                out.append(Join(asked=asked))
            elif not inside:
                self._forget(key)
                text = f"pair {self.pair!r}: {asked.side} rank {asked.rank} was evicted by a newer launch of its side"
                out.append(Fail(call=key, error=PeerLostError(text, reason="relaunched")))
            elif asked.give_up and self._deserted(asked, view):
                self._forget(key)
                text = f"pair {self.pair!r}: everybody of {asked.remote} has left before both sides were complete"
                error = PeerLostError(with_again(text), reason="died", outcome="withdrawn")
                leave = Leave(side=asked.side, rank=asked.rank, holder=asked.holder, reason="closed")
                out += [Fail(call=key, error=error), leave]
        return out

    def _break(self, reason: str, text: str, culprits: Sequence[Member], *, sever: bool = False) -> list[PairEffect]:
        """End this epoch, because of ``culprits``. ``sever``: Redis does not know yet.

        Calls that were not admitted yet join the next one.
        """
        self.move(PairPhase.LOST)
        over = with_again(f"pair {self.pair!r} epoch {self.epoch} is over: {text}")
        self.lost = error = PeerLostError(over, reason=reason, culprits=sorted(culprits))
        missed = self._miss(self.epoch, text) if self._met != self.epoch else []
        joins: list[PairEffect] = []
        for key in sorted(self._inside):
            asked = self.waiting[key]
            holder = self.members().get((asked.side, asked.rank))
            if holder is not None and holder.is_same(asked.holder) and holder.epoch == self.epoch:
                joins.append(self._rejoin(key))
        named = tuple(sorted(culprits))
        severs: list[PairEffect] = [Sever(epoch=self.epoch, text=text, culprits=named)] if sever else []
        return [Broken(epoch=self.epoch, error=error), *severs, *missed, *joins]

    def _miss(self, epoch: int, text: str) -> list[PairEffect]:
        """``epoch`` was over before its agents had met; told once an epoch."""
        if epoch <= self._missed:
            return []
        self._missed, self.unmet_because = epoch, text
        return [Missed(epoch=epoch)]

    def _rejoin(self, key: CallKey) -> Join:
        """Have a call whose epoch is over join the next one."""
        self._inside.discard(key)
        self._again.add(key)
        return Join(asked=self.waiting[key])

    def _forget(self, key: CallKey) -> JoinRequest | None:
        self._inside.discard(key)
        self._again.discard(key)
        self._seen.pop(key, None)
        return self.waiting.pop(key, None)
