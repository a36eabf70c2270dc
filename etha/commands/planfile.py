"""Reads the two JSON files of ``etha plan``, one per side (see etha/plan/analysis/json.py). Starts nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from etha.errors import ConfigError, LayoutError
from etha.plan import Plan, Side, build_agent_plan, side_from_plain


def read_sides(source: Path, target: Path) -> tuple[Side, Side]:
    """Both sides. ConfigError says which file and tensor is malformed.

    A target without "tensors" takes the source's names, shapes and dtypes.
    """
    sent, received = _read(source), _read(target)
    return _side(source, sent, {}), _side(target, received, _bare(sent))


def read_plan(source: Path, target: Path) -> Plan:
    """The plan that agents would execute from the source's file to the target's."""
    return plan_of(*read_sides(source, target))


def plan_of(a: Side, b: Side) -> Plan:
    """The plan that agents would execute from side ``a`` to side ``b``."""
    return build_agent_plan(
        a.specs,
        b.specs,
        source_hosts=a.hosts,
        target_hosts=b.hosts,
        source_agents=a.agents,
        target_agents=b.agents,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        side = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON, or too deep: {error}") from None
    if not isinstance(side, dict) or not isinstance(side.get("tensors", {}), dict):
        raise ConfigError(f'{path} must hold an object with "mesh", "placements" and "tensors"')
    return side


def _bare(side: dict[str, Any]) -> dict[str, Any]:
    """The tensors of ``side`` without their layouts."""
    return {name: {k: t[k] for k in ("shape", "dtype")} for name, t in side.get("tensors", {}).items()}


def _side(path: Path, side: dict[str, Any], tensors: dict[str, Any]) -> Side:
    try:
        return side_from_plain(side, tensors)
    except LayoutError as error:
        raise ConfigError(f"{path}: {error.message}") from None
