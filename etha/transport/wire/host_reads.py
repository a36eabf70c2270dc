"""compile_host: one copy between workers of different agents on one host, made by the receiving agent. Pure.

Rows of the sources that this agent reads are local copies, and the sender does nothing. ``copy/host.py`` opens the
memory that they are read from.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from etha.plan import Plan
from etha.plan.planner.rank_plan import CONTRIBUTE, LOCAL, MOVE, RECV, RESULT, RankPlan
from etha.transport.copy.local import Views, compile_local
from etha.transport.copy.program import Program
from etha.transport.wire.routing import Routing, SlotPeers

#: Marks a row that this agent has nothing to do with; the plan has no such kind.
_NOTHING = -1


def compile_host(plan: Plan, routing: Routing, sources: Views, targets: Views) -> Program:
    """Compile everything that this agent copies itself: between its own ranks, and from the ranks that it reads.

    ``sources`` holds the ranks of this agent and of the agents that it reads, ``targets`` its own. A slot of which it
    reads every contribution is reduced here for the targets here, unless this agent is the owner's and reduces it for
    others, too (``compile_wire``). Raises as ``compile_local`` does.
    """
    return compile_local(_Seen(plan, routing), sources, targets)


class _Seen(Plan):
    """A plan as one agent sees it: LOCAL rows are what it does alone, and other agents' rows of its slots are left
    out."""

    def __init__(self, plan: Plan, routing: Routing) -> None:
        # Plan.__init__ is not called, because this has only what compile_local asks for.
        self._whole, self._routing = plan, routing
        self.names = plan.names
        self._slots = SlotPeers(plan)

    def wire_dtype(self, tensor: int) -> torch.dtype:
        return self._whole.wire_dtype(tensor)

    def for_rank(self, side: str, rank: int) -> RankPlan:
        rp = self._whole.for_rank(side, rank)
        routing = self._routing
        role, kind = np.full_like(rp.role, RECV), rp.kind.copy()
        near = np.array([routing.reach(routing.me, agent) for agent in routing.source], bool)
        own = np.array([agent == routing.me for agent in routing.target], bool)
        moves = np.flatnonzero(rp.kind == MOVE)
        moves = moves[near[rp.source[moves]] & own[rp.target[moves]]]
        role[moves] = LOCAL
        done: dict[tuple[int, int, int], bool] = {}
        for row in np.flatnonzero((rp.kind == CONTRIBUTE) | (rp.kind == RESULT)).tolist():
            slot = rp.slots[int(rp.slot[row])]
            key = (slot.owner, slot.tensor, slot.number)
            if key not in done:
                done[key] = self._alone(*key)
            if done[key] and (rp.kind[row] == CONTRIBUTE or own[int(rp.target[row])]):
                role[row] = LOCAL
            else:
                kind[row] = _NOTHING
        return replace(rp, role=role, kind=kind)

    def _alone(self, owner: int, tensor: int, number: int) -> bool:
        """Whether this agent reduces a slot for itself."""
        routing = self._routing
        gives, takes = self._slots.of(owner)[tensor, number]
        givers, takers = {routing.source[r] for r in gives}, {routing.target[r] for r in takes}
        return routing.me in takers and routing.me not in routing.served(routing.source[owner], givers, takers)
