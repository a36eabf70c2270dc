"""Which agents of a pair's epoch are linked with each other; pure, and the same on all of them.

Up to MESH agents are all linked with each other. A link costs both ends some milliseconds of CPU, five descriptors and
a beat a second, so with more agents each is linked with those of its own host, with the *hubs*, and, once a batch is
registered, with those that it exchanges data with. What it says to others goes through a hub, and the hubs, who are
linked with everybody, tell everybody whom they have lost.

    agent --Relay--> hub --Relay--> agent          hub --LostPeer--> everybody that may have no link to the lost one

The agents of rank 0 are hubs, because each coordinates a direction and hears from everybody anyway. An agent of another
host is one, too, if those two are of one host: when that host is down, the others must be able to ask each other how
the last transfer ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Up to so many agents are all linked with each other.
MESH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLinks:
    """The links of agent ``me``: ``near`` are the agents that it links with in any case.

    ``agents`` are all of the epoch. ``hubs`` is empty if everybody is linked with everybody.
    """

    me: str
    agents: frozenset[str]
    hubs: tuple[str, ...]
    near: frozenset[str]

    @classmethod
    def of(cls, me: str, sides: Mapping[str, Sequence[tuple[str, str]]]) -> EpochLinks:
        """From (agent, host) of each rank of both sides."""
        ranks = [rank for side in sorted(sides) for rank in sides[side]]
        hosts = dict(ranks)
        everybody = frozenset(hosts)
        if len(everybody) <= MESH:
            return cls(me=me, agents=everybody, hubs=(), near=everybody - {me})
        hubs = list(dict.fromkeys(sides[side][0][0] for side in sorted(sides)))
        if len({hosts[hub] for hub in hubs}) == 1:
            elsewhere = (agent for agent, host in ranks if host != hosts[hubs[0]])
            another = next(elsewhere, None) or next((agent for agent, _ in ranks if agent not in hubs), None)
            hubs += [another] if another is not None else []
        near = everybody if me in hubs else {*hubs, *(agent for agent, host in hosts.items() if host == hosts[me])}
        return cls(me=me, agents=everybody, hubs=tuple(hubs), near=frozenset(near - {me}))

    @property
    def far(self) -> frozenset[str]:
        """Agents to which there may be no link."""
        return self.agents - self.near - {self.me}

    def is_far(self, agent: str) -> bool:
        """Whether an agent is one of ``far``, which is asked for each message."""
        return agent in self.agents and agent not in self.near and agent != self.me

    def relays(self, sender: str, origin: str, to: str) -> bool:
        """Whether this agent passes on what ``sender`` says in the name of ``origin`` to ``to``."""
        return self.me in self.hubs and sender == origin and {origin, to} <= self.agents

    def accepts(self, sender: str, origin: str) -> bool:
        """Whether this agent believes ``sender`` what it says of ``origin``, or in its name."""
        return sender in self.hubs and self.is_far(origin)
