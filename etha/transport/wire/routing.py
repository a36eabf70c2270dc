"""Which agent has each rank, and who reads whose workers' memory; the same on every agent of a batch. Pure.

    same agent                              local      one copy by that agent
    receiver may read the sender's memory   host       one copy by the receiving agent; the sender does nothing
    otherwise                               tcp        streams

Every agent that can read all contributions of a Partial source's slot reduces it for its own targets. The owner's agent
reduces it for the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from etha.plan import Plan
from etha.plan.planner.rank_plan import CARRY, CONTRIBUTE, DELIVER, FORWARD, MOVE, RESULT, inside_target
from etha.transport.copy.program import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """``source[r]`` and ``target[r]`` are the agents of the ranks of a direction; ``me`` is this agent.

    ``reads`` are the pairs (reader, agent) of different agents such that the reader has proven that it reads the memory
    of the agent's workers, and both have agreed to use it.
    """

    me: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    reads: frozenset[tuple[str, str]] = frozenset()

    def reach(self, reader: str, agent: str) -> bool:
        """Whether ``reader`` copies from the workers of ``agent`` itself."""
        return reader == agent or (reader, agent) in self.reads

    def ranks(self, side: str, agent: str) -> list[int]:
        """The ranks of a side ("source" or "target") that ``agent`` serves, ascending."""
        return [r for r, a in enumerate(self.source if side == "source" else self.target) if a == agent]

    def served(self, owner: str, givers: Collection[str], takers: Collection[str]) -> frozenset[str]:
        """Of the agents that want a slot, those for which the owner's agent reduces it, itself included.

        ``givers`` are the agents of its contributions. An agent that is not in the answer reduces for itself. An owner
        that reduces for others takes the result for its own targets, too.
        """
        far = {t for t in takers if not all(self.reach(t, g) for g in givers)}
        return frozenset(far | ({owner} & set(takers) if far else set()))


class SlotPeers:
    """Who gives to and who takes from each slot, according to the owners' plans; computed once per owner asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._found: dict[int, dict[tuple[int, int], tuple[set[int], set[int]]]] = {}

    def of(self, owner: int) -> Mapping[tuple[int, int], tuple[set[int], set[int]]]:
        """(tensor, slot number) -> (source ranks that contribute, target ranks that receive)."""
        found = self._found.get(owner)
        if found is None:
            found = self._found[owner] = defaultdict(lambda: (set(), set()))
            rp = self._plan.for_rank("source", owner)
            given = (rp.kind == CONTRIBUTE) & (rp.target == owner)
            for row in np.flatnonzero(given | ((rp.kind == RESULT) & (rp.source == owner))).tolist():
                slot = rp.slots[int(rp.slot[row])]
                gives, takes = found[slot.tensor, slot.number]
                if rp.kind[row] == CONTRIBUTE:
                    gives.add(int(rp.source[row]))
                else:
                    takes.add(int(rp.target[row]))
        return found


def account(plan: Plan, routing: Routing) -> tuple[dict[Member, int], dict[Member, tuple[Member, ...]]]:
    """(bytes, other ends) of each rank of this agent, however they travel, from the plan alone.

    Bytes are at the wire dtype: what a source rank gives and a target rank takes for itself, copies within one agent
    included. What a target rank forwards or carries is not counted; the rank that gets it has that rank as its other
    end, and so has a source rank whose rows are carried.
    """
    slots = SlotPeers(plan)
    nbytes: dict[Member, int] = {}
    peers: dict[Member, tuple[Member, ...]] = {}
    for side, kinds, other in (
        ("source", (MOVE, CONTRIBUTE, CARRY), "target"),
        ("target", (MOVE, RESULT, FORWARD, DELIVER), "source"),
    ):
        for rank in routing.ranks(side, routing.me):
            rp = plan.for_rank(side, rank)
            mine = np.isin(rp.kind, kinds) & ((rp.source if side == "source" else rp.target) == rank)
            nbytes[side, rank] = int(rp.nbytes[mine].sum())
            moves = mine & ((rp.kind == MOVE) | (rp.kind == CARRY))
            met = set(np.unique((rp.target if side == "source" else rp.source)[moves]).tolist())
            passed = np.unique(rp.source[mine & inside_target(rp.kind)]).tolist()
            for row in np.flatnonzero(mine & ((rp.kind == CONTRIBUTE) | (rp.kind == RESULT))).tolist():
                slot = rp.slots[int(rp.slot[row])]
                met |= slots.of(slot.owner)[slot.tensor, slot.number][1 if side == "source" else 0]
            peers[side, rank] = (*((other, r) for r in sorted(met)), *(("target", r) for r in passed))
    return nbytes, peers


def exchanging(plan: Plan, routing: Routing) -> set[str]:
    """The other agents of all rows of this agent's ranks. Each of them finds this agent in its rows, too."""
    found: set[str] = set()
    for side in ("source", "target"):
        for rank in routing.ranks(side, routing.me):
            rp = plan.for_rank(side, rank)
            passed, given = inside_target(rp.kind), rp.kind == CONTRIBUTE
            for agents, ranks in (
                (routing.source, rp.source[~passed]),
                (routing.target, rp.source[passed]),
                (routing.source, rp.target[given]),
                (routing.target, rp.target[~given]),
            ):
                found |= {agents[number] for number in np.unique(ranks).tolist()}
    return found - {routing.me}
