"""What other agents say of registrations, until it can be heard: an agent may be ahead of this one, or behind."""

from __future__ import annotations

import logging
from collections import OrderedDict

from etha.agent.services.batch_state import Key, Live
from etha.errors import PeerLostError
from etha.peer.wire import Said

log = logging.getLogger(__name__)

#: Registrations of which something is kept before they are known here, and after they were closed.
MAX_KEPT = 256
#: Messages kept of each.
MAX_MESSAGES = 1000


class Mailbox:
    """Bounded memory at both ends of a registration's life."""

    def __init__(self) -> None:
        self._early: OrderedDict[Key, list[tuple[str, Said]]] = OrderedDict()
        self._ended: OrderedDict[Key, Live] = OrderedDict()
        self._lost: OrderedDict[Key, PeerLostError] = OrderedDict()

    def lose(self, key: Key, error: PeerLostError) -> None:
        """A registration is over for all, whether or not this agent has taken it in; ranks of it may still come."""
        self._lost.setdefault(key, error)
        while len(self._lost) > MAX_KEPT:
            self._lost.popitem(last=False)

    def lost(self, key: Key) -> PeerLostError | None:
        """Why a rank that comes now has come too late."""
        return self._lost.get(key)

    def hold(self, key: Key, agent: str, message: Said) -> None:
        """Keep a message about a registration that this agent has not taken in yet; the oldest are dropped."""
        held = self._early.setdefault(key, [])
        if len(held) < MAX_MESSAGES:
            held.append((agent, message))
        while len(self._early) > MAX_KEPT:
            lost, _ = self._early.popitem(last=False)
            log.debug("what was said of batch %s generation %d is dropped", lost[1], lost[2])

    def held(self, key: Key) -> list[tuple[str, Said]]:
        """What was kept of a registration that is taken in now, in order."""
        return self._early.pop(key, [])

    def keep(self, live: Live) -> None:
        """A registration over several agents was closed here: others may still ask how its last transfer ended."""
        self._ended[live.key] = live
        while len(self._ended) > MAX_KEPT:
            self._ended.popitem(last=False)

    def ended(self, key: Key) -> Live | None:
        """A closed registration, if it is remembered."""
        return self._ended.get(key)

    def ended_with(self, agent: str) -> list[Live]:
        """The closed registrations in which ``agent`` had part."""
        return [live for live in self._ended.values() if agent in live.agents]
