"""build_plan, and the plan that users get from it: its rows, its proof and its figures.

``planner/plan.py`` makes the rows, ``proof/coverage.py`` the proof, ``analysis/`` the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from etha.errors import Violation
from etha.picture import PlanPicture, check_path, draw
from etha.plan.analysis.bounds import PlanStats, Survey, survey
from etha.plan.analysis.explain import explain
from etha.plan.analysis.plot import PictureNames, picture_of
from etha.plan.analysis.predict import Links
from etha.plan.layouts.arguments import check_bytes, check_choice, check_flag, check_places, check_specs
from etha.plan.layouts.tensor_spec import TensorSpec
from etha.plan.planner.fanout import RELAY_BYTES
from etha.plan.planner.m2m import Topology
from etha.plan.planner.plan import BasePlan, world_size
from etha.plan.proof.coverage import check


class Plan(BasePlan):
    """What moves from ``source`` to ``target``; made by ``build_plan``.

    ``names`` are the tensors of both sides, sorted; a tensor's number is its index there. Tensors with violations have
    no rows; ``check()`` names them.
    """

    _survey: Survey | None = None
    _uncarried: Plan | None = None

    def uncarried(self) -> Plan:
        """The plan of the same move without CARRY and DELIVER rows; made once. This plan itself if it has none."""
        if not self.carries:
            return self
        if self._uncarried is None:
            self._uncarried = Plan(self.source, self.target, self.topology, relay=self.relay, carry=False)
        return self._uncarried

    def check(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Prove that each target element of each holder is written exactly once. PlanError lists what is not so.

        ``progress(done, total)`` is called as the proof goes on: classes of equal tensors.
        """
        check(self, progress)

    def stats(self) -> PlanStats:
        """Bytes by distance, the busiest ranks and hosts, operations and rounds."""
        return self.survey().stats

    def survey(self) -> Survey:
        """The counts behind ``stats``, ``explain`` and ``plot``; computed once."""
        if self._survey is None:
            self._survey = survey(self)
        return self._survey

    def explain(self, links: Links | None = None) -> str:
        """The plan as readable text. Predicted seconds are those of ``links``."""
        return explain(self, self.survey(), links)

    def picture(self, names: PictureNames | None = None) -> PlanPicture:
        """What ``plot`` draws, as plain data."""
        return picture_of(self, self.survey(), names)

    def plot(self, path: str | Path) -> None:
        """Draw who sends how much to whom, the busiest NICs and the bound, to an .svg, .png or .pdf.

        Needs matplotlib. ConfigError without it, and for another suffix.
        """
        check_path(path)
        draw(self.picture(), path)


def build_plan(
    source: Mapping[str, TensorSpec],
    target: Mapping[str, TensorSpec],
    *,
    source_hosts: Sequence[str] | None = None,
    target_hosts: Sequence[str] | None = None,
    source_agents: Sequence[str] | None = None,
    target_agents: Sequence[str] | None = None,
    fan_out: str = "relay",
    relay_bytes: int = RELAY_BYTES,
    carry: bool = True,
) -> Plan:
    """Plan every tensor of ``source`` into ``target``, matched by name.

    ``source_hosts[r]`` and ``source_agents[r]`` name the host and the agent (device) of rank r; ranks of one agent copy
    locally. By default every rank is alone. With ``fan_out="relay"``, tensors of at least ``relay_bytes`` enter a host
    once, and target ranks forward them (FORWARD rows); with ``carry``, idle NICs of a host also receive for busy ones
    (CARRY rows). With "direct" the source sends every copy.

    ConfigError for an argument of a wrong kind, LayoutError for too few hosts or agents. What cannot work is in
    ``violations``, and ``check()`` raises it.
    """
    check_specs("source", source)
    check_specs("target", target)
    check_places("source_hosts", source_hosts)
    check_places("target_hosts", target_hosts)
    check_places("source_agents", source_agents)
    check_places("target_agents", target_agents)
    check_choice("fan_out", fan_out, "relay", "direct")
    check_bytes("relay_bytes", relay_bytes)
    check_flag("carry", carry)
    sizes = (
        world_size(source, source_hosts, source_agents),
        world_size(target, target_hosts, target_agents),
    )
    topology = Topology.of(sizes, (source_hosts, target_hosts), (source_agents, target_agents))
    return Plan(source, target, topology, relay=relay_bytes if fan_out == "relay" else None, carry=carry)


def build_agent_plan(
    source: Mapping[str, TensorSpec],
    target: Mapping[str, TensorSpec],
    *,
    source_hosts: Sequence[str] | None = None,
    target_hosts: Sequence[str] | None = None,
    source_agents: Sequence[str] | None = None,
    target_agents: Sequence[str] | None = None,
) -> Plan:
    """``build_plan`` with the options that agents use, for code that shows or measures what agents do.

    Agents whose bytes go over NCCL execute its ``uncarried()``.
    """
    return build_plan(
        source,
        target,
        source_hosts=source_hosts,
        target_hosts=target_hosts,
        source_agents=source_agents,
        target_agents=target_agents,
    )


def violations(source: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec]) -> list[Violation]:
    """Every reason why ``source`` cannot be moved to ``target``. Sides are called "source" and "target"."""
    return list(build_plan(source, target, fan_out="direct").violations)
