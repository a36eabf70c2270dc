"""How far a transfer is, told to the workers that asked and to the agents whose workers it copies from."""

from __future__ import annotations

from etha.agent.runtime.calls import Calls
from etha.agent.runtime.peers import Links
from etha.agent.services.batch_state import Current, Live
from etha.bus.messages import Progress
from etha.peer.introductions import Copied


class Pace:
    """Of all transfers of this agent; ``Gauge`` holds the numbers of one."""

    def __init__(self, links: Links, calls: Calls) -> None:
        self._links, self._calls = links, calls

    def went(self, live: Live, current: Current, done: int) -> None:
        """This agent's own part of ``current`` has done ``done`` bytes."""
        if live.current is not current or current.gauge is None:
            return
        share = current.gauge.own(done)
        for agent in live.read_from(current.source):
            self._links.tell(agent, live.scope, Copied(seq=current.seq, share=share))
        self._push(live, current, current.gauge.fraction)

    def heard(self, live: Live, agent: str, message: Copied) -> None:
        """An agent that copies from workers here says how far it is."""
        current = live.current
        if current is not None and current.seq == message.seq and current.gauge is not None:
            current.gauge.heard(agent, message.share)
            self._push(live, current, current.gauge.fraction)

    def _push(self, live: Live, current: Current, fraction: float) -> None:
        part = current.part
        assert part is not None
        for (side, rank), key in current.calls.items():
            ask = live.asks.get(key)
            if ask is not None and ask.progress:
                total = part.nbytes["source" if side == current.source else "target", rank]
                self._calls.push(key, Progress(done=int(total * fraction), total=total))
