"""The rows of a plan: from what both sides hold to what each rank does. Pure, no communication.

Equal tensors are one class and planned once. A rank's part of a class is a template, and a rank's plan is its templates
in a row, tensor by tensor in the order of names. Nothing depends on hash seeds, on the order of the mappings, or on the
rank that asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from etha.errors import Violation
from etha.plan.layouts import dtypes
from etha.plan.layouts.arguments import check_choice
from etha.plan.layouts.layout import Layout
from etha.plan.layouts.tensor_spec import TensorSpec
from etha.plan.planner.assemble import RankRows
from etha.plan.planner.chunks import TensorClass
from etha.plan.planner.digest import digest_of
from etha.plan.planner.fanout import decide
from etha.plan.planner.ingress_balance import carriers
from etha.plan.planner.m2m import M2M, Holding, Topology, all_holdings, holdings
from etha.plan.planner.rank_plan import CONTRIBUTE, RankPlan, Region, Template, inside_target
from etha.plan.planner.reduction import Reduction, reduce_op
from etha.plan.planner.violations import Problem, coverage_problems, name_violations, spec_problems

Ints = npt.NDArray[np.int64]
#: Ranks whose rows are cached.
_SHEETS = 64
_ClassKey = tuple[tuple[int, ...], torch.dtype, torch.dtype, object, object, object, object, object]


class BasePlan:
    """What moves from ``source`` to ``target``: the rows of every rank. ``etha.plan.Plan`` adds proof and figures.

    ``names`` are the tensors of both sides, sorted; a tensor's number is its index there. Tensors with violations have
    no rows.
    """

    def __init__(
        self,
        source: Mapping[str, TensorSpec],
        target: Mapping[str, TensorSpec],
        topology: Topology,
        *,
        relay: int | None = None,
        carry: bool = True,
    ) -> None:
        self.source: Mapping[str, TensorSpec] = MappingProxyType(dict(source))
        self.target: Mapping[str, TensorSpec] = MappingProxyType(dict(target))
        self.names: tuple[str, ...] = tuple(sorted(source.keys() & target.keys()))
        self.topology = topology
        #: From this many bytes on, tensors enter a host once and are forwarded; None if none are.
        self.relay = relay
        #: Whether idle NICs of a host receive for busy ones.
        self.carry = carry
        self.classes: list[TensorClass] = []
        #: For each tensor its class (-1 without one), and its turn in the rotation of that class.
        self.class_of: Ints
        self.turn_of: Ints
        self._name_violations = tuple(name_violations(source, target))
        self._problems: list[list[Problem]] = []
        self._maps: dict[object, tuple[M2M, Holding | None]] = {}
        self._templates: dict[tuple[str, int, int], tuple[Template | None, dict[int, Region]]] = {}
        self._sheets: dict[tuple[str, int], tuple[RankRows, tuple[Ints, Ints, Ints]]] = {}
        self._digest: str | None = None
        self._classify()

    def _classify(self) -> None:
        by_id: dict[object, int] = {}
        by_value: dict[_ClassKey, int] = {}
        entries: list[TensorClass | None] = []
        numbers, turns, members = [], [], []
        for name in self.names:
            a, b = self.source[name], self.target[name]
            # By identity first, because a model's tensors share a few layouts, and hashing a rank table costs time.
            quick = (
                a.shape, b.shape, a.dtype, b.dtype, id(a.layout), id(b.layout), a.present, b.present, id(a.products),
            )  # fmt: skip
            at = by_id.get(quick)
            if at is None:
                key = (
                    (*a.shape, -1, *b.shape), a.dtype, b.dtype, a.layouts, b.layouts, a.present, b.present, a.products,
                )  # fmt: skip
                at = by_value.get(key)
                if at is None:
                    at = by_value[key] = len(entries)
                    entries.append(self._make_class(a, b))
                    members.append(0)
                by_id[quick] = at
            numbers.append(at)
            turns.append(members[at])
            members[at] += 1
        # Classes with problems keep their entry number, but are not planned.
        planned = [-1] * len(entries)
        for at, entry in enumerate(entries):
            if entry is not None:
                planned[at] = len(self.classes)
                entry.members = members[at]
                self.classes.append(entry)
        if self.relay is not None:
            decide(self.classes, self.topology, self.relay)
            through = carriers(self.classes, self.topology) if self.carry else None
            for klass in self.classes:
                klass.carriers = through if klass.nbytes >= self.relay and klass.reduction is None else None
        self._entry_of = np.array(numbers, dtype=np.int64)
        self.class_of = np.array([planned[at] for at in numbers], dtype=np.int64)
        turn = np.array(turns, dtype=np.int64)
        periods = np.array([entry.turns if entry is not None else 1 for entry in entries], dtype=np.int64)
        self.turn_of = turn % periods[self._entry_of] if len(turn) else turn

    def passed_on(self, tensor: int) -> bool:
        """Whether targets may pass a tensor on to others."""
        return self.classes[self.class_of[tensor]].chains is not None

    def _make_class(self, source: TensorSpec, target: TensorSpec) -> TensorClass | None:
        problems = spec_problems(source, target)
        self._problems.append(problems)
        if problems:
            return None
        m2m, partial = self._map(source, target)
        reduction = None
        if partial is not None:
            how = reduce_op(partial.partial)
            assert not isinstance(how, str)  # spec_problems has refused strings
            reduction = Reduction(source.shape, source.dtype, partial, how)
        klass = TensorClass(source.shape, source.dtype, target.dtype, m2m, reduction)
        problems += coverage_problems(klass)
        return None if problems else klass

    def _map(self, source: TensorSpec, target: TensorSpec) -> tuple[M2M, Holding | None]:
        """The M2M map of a pair of layouts, and the holding to be reduced first, if any."""
        ndim = len(source.shape)
        key = (source.layouts, source.present, source.products, target.layouts, target.present, ndim)
        found = self._maps.get(key)
        if found is None:
            here = all_holdings(source, self.topology.source_order)
            there = holdings(target.layouts, target.present, ndim, self.topology.target_order)
            # One contribution is the value itself, except for norms, which take the root of a power.
            whole = [h for h in here if h.ranks.shape[1] == 1 and all(axis.kind != "NP" for axis, _ in h.partial)]
            chosen = tuple(whole) or (here[0],)
            m2m = M2M(source=chosen, target=tuple(there), topology=self.topology)
            found = self._maps[key] = (m2m, None if whole else here[0])
        return found

    @property
    def carries(self) -> bool:
        """Whether any NIC of a host receives for another one."""
        return any(klass.carriers is not None for klass in self.classes)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """What the layouts alone show to be impossible; empty for a plan that can run."""
        found = list(self._name_violations)
        for name, at in zip(self.names, self._entry_of.tolist(), strict=True):
            found += [problem.of(name) for problem in self._problems[at]]
        return tuple(found)

    def wire_dtype(self, tensor: int) -> torch.dtype:
        """The dtype in which tensor number ``tensor`` travels."""
        name = self.names[tensor]
        return dtypes.wire_dtype(self.source[name].dtype, self.target[name].dtype)

    def local_number(self, tensor: int, product: int) -> int:
        """The number of a local tensor of a source rank, where executors are given all of them: that of its tensor, and
        for each further product one beyond the numbers of all tensors."""
        return tensor + product * len(self.names)

    def for_rank(self, side: str, rank: int) -> RankPlan:
        """The rows of ``rank`` on ``side`` ("source" or "target"); empty for a rank that holds nothing.

        ConfigError for another side.
        """
        check_choice("side", side, "source", "target")
        found = self._sheets.get((side, rank))
        if found is None:
            found = self._sheet(side, rank)
            # An agent asks for its own ranks again and again; a proof asks for every rank once. Threads of an agent may
            # share a plan, which is safe because each step below is one operation of the dict.
            if len(self._sheets) >= _SHEETS:
                oldest, *_ = list(self._sheets)
                self._sheets.pop(oldest, None)
            self._sheets[side, rank] = found
        return found[0].rows(*found[1])

    def _sheet(self, side: str, rank: int) -> tuple[RankRows, tuple[Ints, Ints, Ints]]:
        """The rows of one rank, and for each of its tensors: template, turn and number."""
        templates: list[Template] = []
        caches: list[dict[int, Region]] = []
        place = np.full(len(self.classes) + 1, -1, dtype=np.int64)
        for at in range(len(self.classes)):
            template, cache = self.template(at, side, rank)
            if template is not None and len(template.kind):
                place[at] = len(templates)
                templates.append(template)
                caches.append(cache)
        where = place[self.class_of]
        mine = np.flatnonzero(where >= 0)
        sheet = RankRows(side, rank, templates, caches, self.is_local, self.rounds)
        return sheet, (where[mine], self.turn_of[mine], mine)

    def template(self, klass: int, side: str, rank: int) -> tuple[Template | None, dict[int, Region]]:
        """The rows of one rank in one class; made once."""
        key = (side, rank, klass)
        found = self._templates.get(key)
        if found is None:
            found = self._templates[key] = (self.classes[klass].template(side, rank), {})
        return found

    def is_local(self, kind: Ints, source: Ints, target: Ints) -> npt.NDArray[np.bool_]:
        """Which rows stay on one agent."""
        t = self.topology
        agents = np.concatenate([t.source_agent, t.target_agent])
        here, there = self.ends(kind, source, target)
        same: npt.NDArray[np.bool_] = agents[here] == agents[there]
        return same

    def ends(self, kind: Ints, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """(sender, receiver) of rows, numbered over both sides: source ranks first, then target ranks."""
        m = len(self.topology.source_host)
        return source + m * inside_target(kind), target + m * (kind != CONTRIBUTE)

    def rounds(self, kind: Ints, source: Ints, target: Ints) -> Ints:
        """(target - source) mod ranks: in a round each rank has at most one partner per direction."""
        m, n = len(self.topology.source_host), len(self.topology.target_host)
        ranks = np.where(kind == CONTRIBUTE, max(m, 1), np.where(inside_target(kind), max(n, 1), max(m, n, 1)))
        return (target - source) % ranks

    def digest(self) -> str:
        """Hex digest of everything that decides rows: equal on both sides if and only if the plans are equal."""
        if self._digest is None:
            sides = self.source, self.target
            self._digest = digest_of(*sides, self.topology, relay=self.relay, carry=self.carry)
        return self._digest


def world_size(specs: Mapping[str, TensorSpec], *names: Sequence[str] | None) -> int:
    """Number of ranks of a side: those of its layouts, or as many as any of ``names`` names."""
    layouts: dict[int, Layout] = {}
    for spec in specs.values():
        for part in (spec, *spec.products):
            for layout in part.layouts:
                layouts[id(layout)] = layout
    top = max((int(layout.ranks.max()) + 1 for layout in layouts.values()), default=0)
    return max(top, *(0 if n is None or isinstance(n, str) else len(n) for n in names))
