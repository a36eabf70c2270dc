"""Schedules this agent's resources over all batches with several agents.

staging     bytes, for chunks of streams that pack, for reductions and for what is carried
to AGENT    one of the places on the way to each peer with which streams are exchanged
card        all of it for NCCL, because a GPU needs one order of NCCL groups; a share for other transfers
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from etha.agent.protocol.lane_queue import Granted, LaneQueue, Need, Recalled
from etha.agent.protocol.participant import TransferEffect
from etha.agent.services.batch_state import RegisteredBatch
from etha.agent.services.differences import batch_may_differ
from etha.peer.messages import Ticket
from etha.transport.copy.staging import rounded_up
from etha.transport.tcp.data_plane import DataPlane
from etha.transport.tcp.streams import difference_room
from etha.transport.verify.checksums import READER
from etha.transport.wire.carrying import RING, RING_SHARE
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

    def of(self, batch: RegisteredBatch, source: str) -> Need:
        """The need of the direction from side ``source``: its program's, or an upper bound while that is not
        compiled."""
        if batch.over_nccl:
            return {"card": _CARD}
        programs = self._programs(batch, source)
        if programs is None:
            peers, nbytes = batch.agents - {batch.me}, self._bound(batch, source)
        else:
            peers = frozenset(peer for p in programs for peer in (*p.sends, *p.receives))
            nbytes = max((self._plane.need(p) for p in programs), default=0)
        return {"card": 1, "staging": nbytes, **dict.fromkeys((f"to {peer}" for peer in peers), 1)}

    @staticmethod
    def _programs(batch: RegisteredBatch, source: str) -> list[WireProgram] | None:
        """The programs that may run; None until all are compiled. A sender may send its tensors or a snapshot of
        them."""
        sent = [tensors for (side, _), tensors in batch.tensors.items() if side == source]
        kinds = [(source, False), (source, True)]
        if sent and all(tensors.snapshot is None for tensors in sent):
            kinds.pop()
        found = [batch.programs[kind] for kind in kinds if kind in batch.programs]
        if not found or (sent and len(found) < len(kinds)):
            return None
        return [program.wire for program in found if program.wire is not None]

    def _bound(self, batch: RegisteredBatch, source: str) -> int:
        lane = CHUNK + (rounded_up(difference_room(CHUNK)) if batch_may_differ(batch, source) else 0)
        chunks = 2 * (len(batch.agents) - 1) * batch.terms.streams * lane
        reduces = any(klass.reduction is not None for klass in batch.evaluation.plans[source].classes)
        slabs = 2 * (batch.terms.staging // 8) if reduces else 0
        ring = max(CHUNK, min(RING, batch.terms.staging // RING_SHARE)) if batch.evaluation.plans[source].carries else 0
        both = all(batch.me in agents for agents in batch.registration.machine.agents.values())
        return chunks + slabs + ring + (batch.terms.staging // 4 if both else 0)


class LaneScheduler:
    """``perform`` performs the effects of a grant or a recall on a batch. ``needs`` is called when it is first used."""

    def __init__(
        self, perform: Callable[[RegisteredBatch, list[TransferEffect]], None], needs: Callable[[], Needs]
    ) -> None:
        self._perform, self._needs = perform, needs
        self._bookings = LaneQueue(lambda resource: needs().limit(resource))
        self._booked: dict[Hashable, RegisteredBatch] = {}

    def want(self, batch: RegisteredBatch, ticket: Ticket, source: str) -> None:
        """A batch's coordinator books for a transfer from side ``source``."""
        self._booked[batch.key] = batch
        self._tell(self._bookings.want(batch.key, ticket, self._needs().of(batch, source)))

    def can_hold(self, batch: RegisteredBatch, source: str) -> bool:
        """Whether the need of a transfer from side ``source`` is free."""
        return self._bookings.can_hold(batch.key, self._needs().of(batch, source))

    def hold(self, batch: RegisteredBatch, source: str) -> None:
        """A batch's calls are ready here: book their need, which is free."""
        held = self._bookings.hold(batch.key, self._needs().of(batch, source))
        assert held, f"{batch.name}: what was free is not"
        self._booked[batch.key] = batch

    def begin(self, batch: RegisteredBatch) -> None:
        """GO: the batch keeps what it has booked until it is freed."""
        self._tell(self._bookings.begin(batch.key))

    def free(self, batch: RegisteredBatch) -> None:
        """Free what the batch has booked."""
        self._booked.pop(batch.key, None)
        self._tell(self._bookings.free(batch.key))

    def _tell(self, changes: list[Granted | Recalled]) -> None:
        for change in changes:
            batch = self._booked.get(change.key)
            if batch is not None:
                granted = isinstance(change, Granted)
                self._perform(batch, batch.participant.granted() if granted else batch.participant.recalled())
