"""Planning: what must move from one layout to another. Pure functions without process group or device.

A name's module is imported when the name is first used: a worker needs layouts only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etha.lazy_names import lazy_names

if TYPE_CHECKING:
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

#: Module -> its public names.
_NAMES = {
    "etha.plan.analysis.bounds": ("PlanStats",),
    "etha.plan.analysis.json": (
        "Side",
        "describe",
        "side_from_plain",
    ),
    "etha.plan.analysis.predict": ("Links",),
    "etha.plan.layouts.layout": ("Layout",),
    "etha.plan.layouts.merge": (
        "infer_global_shape",
        "merge_layouts",
        "resolve_strided",
        "shape_violations",
    ),
    "etha.plan.layouts.tensor_spec": ("TensorSpec",),
    "etha.plan.plan": (
        "Plan",
        "build_agent_plan",
        "build_plan",
        "violations",
    ),
    "etha.plan.planner.rank_plan": (
        "CARRY",
        "CONTRIBUTE",
        "DELIVER",
        "FORWARD",
        "LOCAL",
        "MOVE",
        "RECV",
        "RESULT",
        "SEND",
        "RankPlan",
        "Region",
        "Slot",
    ),
    "etha.plan.proof.simulate": ("simulate",),
}

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
