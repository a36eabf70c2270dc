"""Workers that wait for the other side's offer to send: ``wait_offer``."""

from __future__ import annotations

from collections.abc import Sequence

from etha.agent.protocol.effects import CallKey, Member
from etha.agent.runtime.sessions import OpenCalls, WorkerSession
from etha.agent.services.batch_state import RegisteredBatch
from etha.bus.codec import Request
from etha.bus.messages import Offered
from etha.errors import PeerLostError, TransferTimeoutError


class Offers:
    """Answers ``wait_offer`` calls. ``batch.offers`` has the waiting calls, each with the side that is to send."""

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls

    def wait(self, session: WorkerSession, request: Request, batch: RegisteredBatch) -> None:
        """A worker calls ``wait_offer``; answered at once if there is an offer."""
        side = session.seats[batch.pairs[0]].side
        key = self._calls.open(session.peer, request, lambda key, expired: self._ended(batch, key, expired))
        batch.offers[key] = batch.other(side)
        self.tell(batch)

    def tell(self, batch: RegisteredBatch, going: str | None = None) -> None:
        """Answer the calls that wait for a present offer, or for the one that GO has just accepted (from ``going``)."""
        standing = dict(batch.participant.offers)
        if going is not None and batch.participant.current is not None:
            standing[going] = batch.participant.current.version
        for key, side in list(batch.offers.items()):
            if side in standing:
                del batch.offers[key]
                self._calls.answer(key, Offered(version=standing[side], nbytes=batch.evaluation.nbytes(side)))

    def withdraw(self, batch: RegisteredBatch, member: Member, error: PeerLostError) -> None:
        """A worker leaves the batch."""
        worker = batch.tensors[member].session.key
        self.end(batch, [key for key in batch.offers if key[0] == worker], error)

    def end(self, batch: RegisteredBatch, keys: Sequence[CallKey], error: PeerLostError) -> None:
        """End these calls with an error."""
        for key in keys:
            del batch.offers[key]
            self._calls.fail(key, error)

    def _ended(self, batch: RegisteredBatch, key: CallKey, expired: bool) -> None:
        if (side := batch.offers.pop(key, None)) is not None:
            how = "ended at its deadline" if expired else "was cancelled"
            text = f"wait_offer on batch {batch.name!r} {how}: {side} is not waiting to send"
            self._calls.fail(key, TransferTimeoutError(text, outcome="withdrawn"))
