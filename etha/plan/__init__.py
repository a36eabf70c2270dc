"""Planning: what must move from one layout to another. Pure functions without process group or device."""

from __future__ import annotations

from etha.plan.analysis.bounds import PlanStats
from etha.plan.analysis.json import Side, describe, side_from_plain
from etha.plan.analysis.predict import Links
from etha.plan.layouts.layout import Layout
from etha.plan.layouts.merge import infer_global_shape, merge_layouts, resolve_strided, shape_violations
from etha.plan.layouts.tensor_spec import TensorSpec
from etha.plan.plan import Plan, build_agent_plan, build_plan, violations
from etha.plan.planner.rank_plan import (
    CARRY,
    CONTRIBUTE,
    DELIVER,
    FORWARD,
    LOCAL,
    MOVE,
    RECV,
    RESULT,
    SEND,
    RankPlan,
    Region,
    Slot,
)
from etha.plan.proof.simulate import simulate

__all__ = [
    "CARRY",
    "CONTRIBUTE",
    "DELIVER",
    "FORWARD",
    "LOCAL",
    "MOVE",
    "RECV",
    "RESULT",
    "SEND",
    "Layout",
    "Links",
    "Plan",
    "PlanStats",
    "RankPlan",
    "Region",
    "Side",
    "Slot",
    "TensorSpec",
    "build_agent_plan",
    "build_plan",
    "describe",
    "infer_global_shape",
    "merge_layouts",
    "resolve_strided",
    "shape_violations",
    "side_from_plain",
    "simulate",
    "violations",
]
