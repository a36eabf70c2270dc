"""Workers that wait for the other side's offer to send: ``wait_offer``."""

from __future__ import annotations

from collections.abc import Sequence

from etha.agent.protocol.effects import CallKey, Member
from etha.agent.runtime.sessions import OpenCalls, WorkerSession
from etha.agent.services.batch_state import BatchState
from etha.bus.codec import Request
from etha.bus.messages import Offered
from etha.errors import PeerLostError, TransferTimeoutError


class Offers:
    """Answers ``wait_offer`` calls. ``live.offers`` has the waiting calls, each with the side that is to send."""

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls

    def wait(self, session: WorkerSession, request: Request, live: BatchState) -> None:
        """A worker calls ``wait_offer``; answered at once if there is an offer."""
        side = session.seats[live.pairs[0]].side
        key = self._calls.open(session.peer, request, lambda key, expired: self._ended(live, key, expired))
        live.offers[key] = live.other(side)
        self.tell(live)

    def tell(self, live: BatchState, going: str | None = None) -> None:
        """Answer the calls that wait for a present offer, or for the one that GO has just accepted (from ``going``)."""
        assert live.participant is not None and live.evaluation is not None
        standing = dict(live.participant.offers)
        if going is not None and live.participant.current is not None:
            standing[going] = live.participant.current.version
        for key, side in list(live.offers.items()):
            if side in standing:
                del live.offers[key]
                self._calls.answer(key, Offered(version=standing[side], nbytes=live.evaluation.nbytes(side)))

    def withdraw(self, live: BatchState, member: Member, error: PeerLostError) -> None:
        """A worker leaves the batch."""
        worker = live.tensors[member].session.key
        self.end(live, [key for key in live.offers if key[0] == worker], error)

    def end(self, live: BatchState, keys: Sequence[CallKey], error: PeerLostError) -> None:
        """End these calls with an error."""
        for key in keys:
            del live.offers[key]
            self._calls.fail(key, error)

    def _ended(self, live: BatchState, key: CallKey, expired: bool) -> None:
        if (side := live.offers.pop(key, None)) is not None:
            how = "ended at its deadline" if expired else "was cancelled"
            text = f"wait_offer on batch {live.name!r} {how}: {side} is not waiting to send"
            self._calls.fail(key, TransferTimeoutError(text, outcome="withdrawn"))
