"""Planning: what must move from one layout to another. Pure functions, no process group, no device."""

from __future__ import annotations

from etha.plan.layout import Layout, TensorSpec
from etha.plan.plan import Plan, build_plan, violations
from etha.plan.program import CONTRIBUTE, LOCAL, MOVE, RECV, RESULT, SEND, RankPlan, Region, Slot
from etha.plan.simulate import simulate

__all__ = [
    "CONTRIBUTE",
    "LOCAL",
    "MOVE",
    "RECV",
    "RESULT",
    "SEND",
    "Layout",
    "Plan",
    "RankPlan",
    "Region",
    "Slot",
    "TensorSpec",
    "build_plan",
    "simulate",
    "violations",
]
