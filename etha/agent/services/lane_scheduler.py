"""Schedules this agent's resources over all batches with several agents.

staging     bytes, for chunks of streams that pack and for reductions
to AGENT    one of the places on the way to each peer with which streams are exchanged
card        all of it for NCCL, because a GPU needs one order of NCCL groups; a share for other transfers
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from etha.agent.protocol.lane_queue import Granted, LaneQueue, Need, Recalled
from etha.agent.protocol.participant import TransferEffect
from etha.agent.services.batch_state import BatchState
from etha.peer.messages import Ticket
from etha.transport.tcp.data_plane import DataPlane
from etha.transport.verify.checksums import READER
from etha.transport.wire.flows import CHUNK, WireProgram

#: Transfers that exchange streams with one peer at once. Others wait, as they do for staging.
PLACES = 8
_CARD = 1 << 30


class Needs:
    """The needs of transfers at one agent. Its streams are ``plane``'s, and its lane has ``threads``."""

    def __init__(self, plane: DataPlane, threads: int) -> None:
        self._plane = plane
        # Staging for checksums on lane threads is set aside and not booked, because transfers of a single agent use it,
        # too.
        self._staging = max(plane.budget.limit // 2, plane.room - threads * READER)

    def limit(self, resource: str) -> int:
        """How much of a resource there is."""
        return {"staging": self._staging, "card": _CARD}.get(resource, PLACES)

    def of(self, live: BatchState, source: str) -> Need:
        """The need of the direction from side ``source``: its program's, or an upper bound while that is not
        compiled."""
        if live.over_nccl:
            return {"card": _CARD}
        programs = self._programs(live, source)
        if programs is None:
            peers, nbytes = live.agents - {live.machine.me}, self._bound(live, source)
        else:
            peers = frozenset(peer for p in programs for peer in (*p.sends, *p.receives))
            nbytes = max((self._plane.need(p) for p in programs), default=0)
        return {"card": 1, "staging": nbytes, **dict.fromkeys((f"to {peer}" for peer in peers), 1)}

    @staticmethod
    def _programs(live: BatchState, source: str) -> list[WireProgram] | None:
        """The programs that may run; None until all are compiled. A sender may send its tensors or a snapshot of
        them."""
        sent = [tensors for (side, _), tensors in live.tensors.items() if side == source]
        kinds = [(source, False), (source, True)]
        if sent and all(tensors.snapshot is None for tensors in sent):
            kinds.pop()
        found = [live.programs[kind] for kind in kinds if kind in live.programs]
        if not found or (sent and len(found) < len(kinds)):
            return None
        return [program.wire for program in found if program.wire is not None]

    def _bound(self, live: BatchState, source: str) -> int:
        assert live.evaluation is not None
        chunks = 2 * (len(live.agents) - 1) * live.terms.streams * CHUNK
        reduces = any(klass.reduction is not None for klass in live.evaluation.plans[source].classes)
        slabs = 2 * (live.terms.staging // 8) if reduces else 0
        both = all(live.machine.me in agents for agents in live.machine.agents.values())
        return chunks + slabs + (live.terms.staging // 4 if both else 0)


class LaneScheduler:
    """``perform`` performs the effects of a grant or a recall on a batch. ``needs`` is called when it is first used."""

    def __init__(self, perform: Callable[[BatchState, list[TransferEffect]], None], needs: Callable[[], Needs]) -> None:
        self._perform, self._needs = perform, needs
        self._bookings = LaneQueue(lambda resource: needs().limit(resource))
        self._booked: dict[Hashable, BatchState] = {}

    def want(self, live: BatchState, ticket: Ticket, source: str) -> None:
        """A batch's coordinator books for a transfer from side ``source``."""
        self._booked[live.key] = live
        self._tell(self._bookings.want(live.key, ticket, self._needs().of(live, source)))

    def can_hold(self, live: BatchState, source: str) -> bool:
        """Whether the need of a transfer from side ``source`` is free."""
        return self._bookings.can_hold(live.key, self._needs().of(live, source))

    def hold(self, live: BatchState, source: str) -> None:
        """A batch's calls are ready here: book their need, which is free."""
        held = self._bookings.hold(live.key, self._needs().of(live, source))
        assert held, f"{live.name}: what was free is not"
        self._booked[live.key] = live

    def begin(self, live: BatchState) -> None:
        """GO: the batch keeps what it has booked until it is freed."""
        self._tell(self._bookings.begin(live.key))

    def free(self, live: BatchState) -> None:
        """Free what the batch has booked."""
        self._booked.pop(live.key, None)
        self._tell(self._bookings.free(live.key))

    def _tell(self, changes: list[Granted | Recalled]) -> None:
        for change in changes:
            live = self._booked.get(change.key)
            if live is not None and live.participant is not None:
                granted = isinstance(change, Granted)
                self._perform(live, live.participant.granted() if granted else live.participant.recalled())
