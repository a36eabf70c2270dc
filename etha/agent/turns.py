"""Whose turn it is on this agent's lane: the shell around ``Bookings``, over all batches with several agents."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from etha.agent.bookings import Bookings, Granted, Recalled
from etha.agent.live import Live
from etha.agent.transfer import TransferEffect
from etha.peer.messages import Ticket


class Turns:
    """``perform`` takes what a batch's transfers make of a grant or a recall."""

    def __init__(self, perform: Callable[[Live, list[TransferEffect]], None]) -> None:
        self._perform = perform
        self._bookings = Bookings()
        self._booked: dict[Hashable, Live] = {}

    def want(self, live: Live, ticket: Ticket) -> None:
        """A batch's coordinator asks for this lane."""
        self._booked[live.key] = live
        self._tell(self._bookings.want(live.key, ticket))

    def hold(self, live: Live) -> bool:
        """A batch's calls are ready here: its lane, if it is free."""
        held = self._bookings.hold(live.key)
        if held:
            self._booked[live.key] = live
        return held

    def begin(self, live: Live) -> None:
        """GO: the lane is this batch's until it is freed."""
        self._bookings.begin(live.key)

    def free(self, live: Live) -> None:
        """The batch needs the lane no more."""
        self._booked.pop(live.key, None)
        self._tell(self._bookings.free(live.key))

    def _tell(self, changes: list[Granted | Recalled]) -> None:
        for change in changes:
            live = self._booked.get(change.key)
            if live is not None and live.transfers is not None:
                granted = isinstance(change, Granted)
                self._perform(live, live.transfers.granted() if granted else live.transfers.recalled())
