"""Whose turn it is at this agent: the shell around ``Bookings``, over all batches with several agents."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from etha.agent.protocol.lane_queue import Bookings, Granted, Recalled
from etha.agent.protocol.participant import TransferEffect
from etha.agent.services.batch_state import Live
from etha.agent.services.needs import Needs
from etha.peer.messages import Ticket


class Turns:
    """``perform`` takes what a batch's transfers make of a grant or a recall; ``needs`` is asked once it is used."""

    def __init__(self, perform: Callable[[Live, list[TransferEffect]], None], needs: Callable[[], Needs]) -> None:
        self._perform, self._needs = perform, needs
        self._bookings = Bookings(lambda resource: needs().limit(resource))
        self._booked: dict[Hashable, Live] = {}

    def want(self, live: Live, ticket: Ticket, source: str) -> None:
        """A batch's coordinator books for a transfer from side ``source``."""
        self._booked[live.key] = live
        self._tell(self._bookings.want(live.key, ticket, self._needs().of(live, source)))

    def hold(self, live: Live, source: str) -> bool:
        """A batch's calls are ready here: what they need, if it is there."""
        held = self._bookings.hold(live.key, self._needs().of(live, source))
        if held:
            self._booked[live.key] = live
        return held

    def begin(self, live: Live) -> None:
        """GO: what it has booked is this batch's until it is freed."""
        self._tell(self._bookings.begin(live.key))

    def free(self, live: Live) -> None:
        """The batch needs it no more."""
        self._booked.pop(live.key, None)
        self._tell(self._bookings.free(live.key))

    def _tell(self, changes: list[Granted | Recalled]) -> None:
        for change in changes:
            live = self._booked.get(change.key)
            if live is not None and live.transfers is not None:
                granted = isinstance(change, Granted)
                self._perform(live, live.transfers.granted() if granted else live.transfers.recalled())
