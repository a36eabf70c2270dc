"""From what every rank registered to the plans of both directions, or every reason why not; pure.

Every agent of a batch computes this alone from the same records. So it must depend on nothing else: no clock, no memory
of earlier batches, and one order of everything.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from etha.agent.protocol.effects import Member
from etha.agent.protocol.records import Described, Manifest, Record
from etha.bus.messages import Verify
from etha.errors import LayoutError, Violation
from etha.plan import (
    Layout,
    Plan,
    TensorSpec,
    build_agent_plan,
    infer_global_shape,
    merge_layouts,
    resolve_strided,
    shape_violations,
)
from etha.plan.layouts import dtypes
from etha.plan.layouts.region import part_name

Specs = dict[str, TensorSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result for a complete roster.

    ``plans`` and ``violations`` are keyed by the source side of a direction. A direction has a plan if and only if it
    has no violations. ``refused`` is not empty if the registration as a whole fails.
    """

    sides: tuple[str, str]
    plans: Mapping[str, Plan]
    digests: Mapping[str, str]
    violations: Mapping[str, tuple[Violation, ...]]
    refused: tuple[Violation, ...]
    atomic: bool
    bucket_size: int | None
    verify: Verify | None
    seq: int
    tensors: int
    sizes: Mapping[str, int]
    #: Source sides of the directions that some rank has asked for.
    asked: frozenset[str] = frozenset()
    #: Name of each part of a region -> its tensor's name, under which the source's ranks hold it.
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The digest of both directions, as in Redis; equal on every agent."""
        return "+".join(f"{side}:{self.digests.get(side, 'none')}" for side in self.sides)

    def but(self, more: Mapping[str, tuple[Violation, ...]]) -> Evaluation:
        """The same with more reasons why a direction (by source side) cannot work, found when agents exchanged
        verdicts."""
        violations = {side: (*found, *more.get(side, ())) for side, found in self.violations.items()}
        plans = {side: plan for side, plan in self.plans.items() if not violations[side]}
        return replace(
            self,
            plans=plans,
            violations=violations,
            digests={side: digest for side, digest in self.digests.items() if side in plans},
            sizes={side: nbytes for side, nbytes in self.sizes.items() if side in plans},
            refused=_refused(self.sides, self.asked, violations),
        )

    def uncarried(self) -> Evaluation:
        """The same with plans in which no agent carries for another, for a batch whose bytes go over NCCL. The digests
        stay those on which all agents agree."""
        return replace(self, plans={side: plan.uncarried() for side, plan in self.plans.items()})

    def nbytes(self, source: str) -> int:
        """Bytes of the whole batch at the wire dtypes, for all targets; 0 for an impossible direction."""
        return self.sizes.get(source, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Host and agent of each rank, by side."""

    agents: Mapping[str, Sequence[str]]
    hosts: Mapping[str, Sequence[str]]


def evaluate(records: Mapping[Member, Record], manifests: Mapping[str, Manifest], where: Where) -> Evaluation:
    """Describe both sides, list what is wrong in either direction, and plan what can work."""
    first, second = sides = tuple(sorted(where.agents))
    ordered = sorted(records.items())
    common, only_as_target = _refusals(ordered, manifests)
    specs: dict[str, Specs] = {}
    members = {side: {rank: manifests[record.manifest] for (s, rank), record in ordered if s == side} for side in sides}
    parts = {side: parts_of(members[side]) for side in sides}
    named = {**parts[first], **parts[second]}
    for side in sides:
        specs[side], wrong = describe_side(side, members[side])
        common += wrong + clashes(members[side], side, named)
    common += _forms(ordered) + _pairs(ordered, manifests)
    asked = _asked(ordered, sides)
    plans: dict[str, Plan] = {}
    violations: dict[str, tuple[Violation, ...]] = {}
    for source, target in ((first, second), (second, first)):
        names = {"source": source, "target": target}
        here, there = joined(specs[source], specs[target], parts[source], parts[target])
        plan = build_agent_plan(
            here,
            there,
            source_hosts=where.hosts[source],
            target_hosts=where.hosts[target],
            source_agents=where.agents[source],
            target_agents=where.agents[target],
        )
        wrong = common + [v for v in only_as_target if v.side == target]
        wrong += [
            replace(v, side=names[v.side], text=_labelled(v, (source, here), (target, there)))
            for v in plan.violations
            if not _follows(v, common, specs)
        ]
        wrong += double_writes((source, members[source], here), (target, members[target], there), parts[target])
        violations[source] = tuple(dict.fromkeys(wrong))
        if not wrong:
            plans[source] = plan
    sizes = [record.bucket_size for record in records.values() if record.bucket_size is not None]
    return Evaluation(
        sides=(first, second),
        plans=plans,
        digests={source: plan.digest() for source, plan in plans.items()},
        violations=violations,
        refused=_refused(sides, asked, violations),
        asked=asked,
        # Only a receiver's wish counts, because a rank that only sends has nothing to keep whole.
        atomic=any(record.atomic and record.direction != "send" for record in records.values()),
        bucket_size=min(sizes, default=None),
        verify=_strongest(records),
        seq=max((record.seq for record in records.values()), default=0),
        tensors=len((specs[first].keys() | specs[second].keys()) - named.keys()),
        parts=named,
        sizes={source: _target_bytes(plan) for source, plan in plans.items()},
    )


def _strongest(records: Mapping[Member, Record]) -> Verify | None:
    wishes = {record.verify for record in records.values()}
    return "full" if "full" in wishes else "sample" if "sample" in wishes else None


def _follows(found: Violation, reported: Sequence[Violation], specs: Mapping[str, Specs]) -> bool:
    """Whether a plan's violation only repeats a reported one: a refused tensor is not also unknown or uncovered."""
    about = [v for v in reported if v.name == found.name]
    return (found.code == "uncovered" and bool(about)) or any(v.name not in specs[v.side] for v in about)


def describe_side(side: str, manifests: Mapping[int, Manifest]) -> tuple[Specs, list[Violation]]:
    """One TensorSpec per name from what each rank of a side registered, and where the ranks disagree."""
    named: dict[str, dict[int, Described]] = {}
    for rank in sorted(manifests):
        for name, described in manifests[rank].tensors.items():
            named.setdefault(name, {})[rank] = described
    specs: Specs = {}
    wrong: list[Violation] = []
    known: dict[object, tuple[TensorSpec | None, list[Violation]]] = {}
    for name in sorted(named):
        ranks = named[name]
        # Tensors that every rank describes the same way share everything that follows.
        key = tuple((rank, d.dtype, id(d.layout), d.shape, d.local) for rank, d in ranks.items())
        if key not in known:
            known[key] = _describe(side, name, ranks)
        spec, found = known[key]
        wrong += [Violation(code=v.code, name=name, side=side, rank=v.rank, text=v.text) for v in found]
        if spec is not None:
            specs[name] = spec
    return specs, wrong


def _describe(side: str, name: str, ranks: Mapping[int, Described]) -> tuple[TensorSpec | None, list[Violation]]:
    def bad(code: str, text: str, rank: int | None = None) -> Violation:
        return Violation(code=code, name=name, side=side, rank=rank, text=text)

    found = {d.dtype for d in ranks.values()}
    if len(found) > 1:
        return None, [bad("dtype", f"the ranks of one side register it as {' and '.join(sorted(found))}")]
    shapes = {d.shape for d in ranks.values() if d.shape is not None}
    if len(shapes) > 1:
        return None, [bad("shape_mismatch", f"the ranks of one side give it the global shapes {sorted(shapes)}")]
    shape = next(iter(shapes), None)
    wrong = beyond(name, side, ranks)
    if wrong:
        return None, wrong
    layouts, wrong = merge_layouts(name, side, {rank: d.layout for rank, d in ranks.items()})
    if wrong:
        return None, wrong
    try:
        if shape is None:
            shape, why = _infer(layouts, {rank: d.local for rank, d in ranks.items() if d.local is not None})
            if shape is None:
                return None, [bad("shape_mismatch", f"its global shape cannot be told: {why}")]
        locals_ = {rank: _real(d, shape, rank) for rank, d in ranks.items()}
        layouts = tuple(
            resolve_strided(part, shape, {r: s for r, s in locals_.items() if r in part}) for part in layouts
        )
        spec = TensorSpec(shape, dtypes.from_name(next(iter(found))), layouts, frozenset(ranks))
    except LayoutError as error:
        return None, [bad("layout", error.message)]
    return spec, shape_violations(name, side, spec, locals_)


def _infer(
    layouts: Sequence[Layout], locals_: Mapping[int, tuple[int, ...]]
) -> tuple[tuple[int, ...] | None, str | None]:
    """The global shape that follows from every layout of a name and its own ranks. They must agree."""
    shapes = set()
    for part in layouts:
        shape, why = infer_global_shape(part, {r: s for r, s in locals_.items() if r in part})
        if shape is None:
            return None, why
        shapes.add(shape)
    if len(shapes) > 1:
        return None, f"its replicas have the different shapes {sorted(shapes)}"
    return shapes.pop(), None


def _target_bytes(plan: Plan) -> int:
    """Bytes that all target ranks receive together, at the wire dtypes."""
    known: dict[int, int] = {}
    total = 0
    for tensor, name in enumerate(plan.names):
        spec = plan.target[name]
        if id(spec) not in known:
            shapes = [spec.local_shape(rank) for rank in spec.holders()]
            known[id(spec)] = sum(prod(shape) for shape in shapes if shape is not None)
        total += known[id(spec)] * dtypes.itemsize(plan.wire_dtype(tensor))
    return total


def _real(described: Described, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return described.local if described.local is not None else described.layout.local_shape(shape, rank)


def _refusals(
    records: Sequence[tuple[Member, Record]], manifests: Mapping[str, Manifest]
) -> tuple[list[Violation], list[Violation]]:
    common: list[Violation] = []
    only_as_target: list[Violation] = []
    for (side, rank), record in records:
        for refusal in manifests[record.manifest].refusals:
            violation = Violation(code=refusal.code, name=refusal.name, side=side, rank=rank, text=refusal.text)
            (only_as_target if refusal.target_only else common).append(violation)
    return common, only_as_target


def _forms(records: Sequence[tuple[Member, Record]]) -> list[Violation]:
    """The list form is matched by position, so every rank must use it, with a list of the same length."""
    forms = {record.form for _, record in records}
    if len(forms) < 2:
        return []
    return [
        Violation(
            code="form",
            name="",
            side=side,
            rank=rank,
            text="registered a list; others a mapping: use the same form on both sides",
        )
        for (side, rank), record in records
        if record.form == "list"
    ]


def _pairs(records: Sequence[tuple[Member, Record]], manifests: Mapping[str, Manifest]) -> list[Violation]:
    """A name must belong to the same pair on all ranks."""
    first: dict[str, str] = {}
    wrong = []
    seen: set[tuple[str, str]] = set()
    for (side, rank), record in records:
        if (side, record.manifest) in seen:
            continue
        seen.add((side, record.manifest))
        for name, described in manifests[record.manifest].tensors.items():
            pair = first.setdefault(name, described.pair)
            if pair != described.pair:
                text = f"it belongs to pair {pair!r} on another rank, to {described.pair!r} here"
                wrong.append(Violation(code="pair", name=name, side=side, rank=rank, text=text))
    return wrong


def _asked(records: Sequence[tuple[Member, Record]], sides: tuple[str, ...]) -> frozenset[str]:
    """Source sides of the directions that some rank has asked for."""
    asked = set()
    for (side, _), record in records:
        if record.direction in ("send", "both"):
            asked.add(side)
        if record.direction in ("recv", "both"):
            asked.update(other for other in sides if other != side)
    return frozenset(asked)


def _labelled(
    violation: Violation, sending: tuple[str, Mapping[str, TensorSpec]], receiving: tuple[str, Mapping[str, TensorSpec]]
) -> str:
    """A violation's text with the sides' names. If a side lacks a name, that depends on who sends, so it names the
    direction. That shapes differ does not, so both directions have one text."""
    (source, here), (target, there) = sending, receiving
    if violation.code == "shape_mismatch" and violation.name in here and violation.name in there:
        shapes = sorted([(source, here[violation.name].shape), (target, there[violation.name].shape)])
        return " and ".join(f"shape {shape} on {side}" for side, shape in shapes)
    if violation.code not in ("unknown_name", "missing_name"):
        return violation.text
    has, lacks = (source, target) if violation.code == "unknown_name" else (target, source)
    return f"from {source} to {target}: {has} has it, {lacks} does not: register it on both sides under one name"


def _refused(
    sides: tuple[str, ...], asked: frozenset[str], violations: Mapping[str, tuple[Violation, ...]]
) -> tuple[Violation, ...]:
    """Violations of every direction that a rank asked for; of both if no rank asked and neither works."""
    wanted = asked or (sides if all(violations.values()) else ())
    found: dict[object, Violation] = {}
    for v in (v for source in sides if source in wanted for v in violations[source]):
        # Shapes that differ are wrong for either direction, and each has blamed its target.
        found.setdefault((v.code, v.name, v.text) if v.code == "shape_mismatch" and v.rank is None else v, v)
    return tuple(found.values())


# ---- regions that are lists of products: on a target each part is planned as a tensor of its own, with its tensor as
# source; on a source all parts are one tensor, of which a rank holds several products ----


def parts_of(manifests: Mapping[int, Manifest]) -> dict[str, str]:
    """Name of each part that a rank of a side registered -> its tensor's name."""
    return {name: d.of for m in manifests.values() for name, d in m.tensors.items() if d.of is not None}


def _number(name: str, of: str) -> int:
    """Which product of ``of`` a part of this name is; 0 if it is none."""
    number = name.removeprefix(f"{of} [product ").removesuffix("]")
    return int(number) if number.isdecimal() and len(number) < 9 and part_name(of, int(number)) == name else 0


def clashes(manifests: Mapping[int, Manifest], side: str, parts: Mapping[str, str]) -> list[Violation]:
    """Names of ``side`` that are also names of ``parts`` of either side, but of other tensors.

    Also parts that differ from their tensor in more than what they hold, which no client registers.
    """
    found = []
    for rank, manifest in manifests.items() if parts else ():
        for name in manifest.tensors.keys() & parts.keys():
            if manifest.tensors[name].of != parts[name]:
                text = f"it has the name of a part of {parts[name]!r} on another rank: rename it"
                found.append(Violation(code="layout", name=name, side=side, rank=rank, text=text))
        for name, d in manifest.tensors.items():
            if d.of is None:
                continue
            before = part_name(d.of, _number(name, d.of) - 1)
            whole = manifest.tensors.get(before)
            if whole is None or (d.dtype, d.shape) != (whole.dtype, whole.shape):
                text = f"it is no part of {d.of!r}: register a list of products under the tensor's name"
                found.append(Violation(code="layout", name=name, side=side, rank=rank, text=text))
    return sorted(found, key=lambda v: (v.name, v.rank or 0))


def with_products(specs: Mapping[str, TensorSpec], parts: Mapping[str, str]) -> Specs:
    """The tensors of a source, each with its parts as further products."""
    found: Specs = {}
    known: dict[tuple[int, ...], TensorSpec] = {}
    for name, spec in specs.items():
        if name in parts:
            continue
        more: list[TensorSpec] = []
        while parts.get(one := part_name(name, len(more) + 1)) == name and (part := specs.get(one)) is not None:
            if (part.shape, part.dtype) != (spec.shape, spec.dtype):
                break  # ``clashes`` refuses it
            more.append(part)
        # Equal tensors share one object, because they are planned together.
        key = tuple(id(one) for one in (spec, *more))
        found[name] = known.setdefault(key, replace(spec, products=tuple(more)) if more else spec)
    return found


def joined(
    source: Mapping[str, TensorSpec],
    target: Mapping[str, TensorSpec],
    source_parts: Mapping[str, str],
    target_parts: Mapping[str, str],
) -> tuple[Mapping[str, TensorSpec], Mapping[str, TensorSpec]]:
    """What is planned: for each part of a target, the source's tensor under the part's name.

    A source's parts are further products of their tensor. A target's parts whose tensor the source lacks are left out.
    """
    if source_parts:
        source = with_products(source, source_parts)
    if target_parts:
        target = {n: spec for n, spec in target.items() if n not in target_parts or target_parts[n] in source}
        source = {**source, **{n: source[of] for n, of in target_parts.items() if n in target}}
    return source, target


def beyond(name: str, side: str, ranks: Mapping[int, Described]) -> list[Violation]:
    """A violation for each rank whose region does not lie in the global shape."""
    found = []
    for rank, d in ranks.items():
        if d.layout.kept is None:
            continue
        try:
            if d.shape is None:
                raise LayoutError("it registers a region without the global shape: give shapes=")
            d.layout.check(d.shape)
        except LayoutError as error:
            found.append(Violation(code="layout", name=name, side=side, rank=rank, text=error.message))
    return found


# ---- names that are one memory on a target: allowed if they are one memory on the source, too ----
# Otherwise every rank would hold what came last, whichever that is. Memory counts and not values, because equal values
# in two places may differ at the next transfer.

#: A side's name, what its ranks registered, and its specs for the plan.
Side = tuple[str, Mapping[int, Manifest], Mapping[str, TensorSpec]]


def double_writes(source: Side, target: Side, parts: Mapping[str, str]) -> list[Violation]:
    """Every rank of ``target`` and every name of it that would be written twice, with different elements.

    ``parts``: names of parts of regions -> the tensor that is their source.
    """
    found = []
    known: dict[tuple[str, str], str | None] = {}
    for rank, manifest in sorted(target[1].items()):
        for name, first in sorted(manifest.ties.items()):
            held = parts.get(first, first), parts.get(name, name)
            if any(one not in source[2] for one in held) or any(one not in target[2] for one in (first, name)):
                continue  # another violation reports it
            if held not in known:
                known[held] = _apart(source, *held)
            why = known[held]
            if why is None and _owned(target[2][first], rank) != _owned(target[2][name], rank):
                why = f"here it holds other elements of {name!r} than of {first!r}"
            if why is not None:
                text = (
                    f"it is one memory with {first!r}, but {why}: tie them on the source as well, or register one of "
                    "them"
                )
                found.append(Violation(code="double_write", name=name, side=target[0], rank=rank, text=text))
    return found


def _apart(source: Side, first: str, name: str) -> str | None:
    """Why two names are not one memory on the source; None if they are."""
    side, members, specs = source
    for rank, manifest in sorted(members.items()):
        here = [one for one in (first, name) if one in manifest.tensors]
        if all(_empty(part, rank) for one in here for _, part in _products(specs, one)):
            continue
        mine, theirs = ([p for p in _products(specs, one) if p[0] in manifest.tensors] for one in (first, name))
        if (
            len(here) < 2
            or len(mine) != len(theirs)
            or any(manifest.region(a) != manifest.region(b) for (a, _), (b, _) in zip(mine, theirs, strict=True))
        ):
            return f"{side} rank {rank} holds them in different memory"
        if any(_owned(a, rank) != _owned(b, rank) for (_, a), (_, b) in zip(mine, theirs, strict=True)):
            return f"{side} rank {rank} gives different elements of them"
    return None


def _products(specs: Mapping[str, TensorSpec], name: str) -> Iterator[tuple[str, TensorSpec]]:
    """A source's tensor, and the further products of it."""
    for number, spec in enumerate((specs[name], *specs[name].products)):
        yield part_name(name, number), spec


def _empty(spec: TensorSpec, rank: int) -> bool:
    shape = spec.local_shape(rank)
    return shape is None or prod(shape) == 0


def _owned(spec: TensorSpec, rank: int) -> object:
    """The global shape and the runs of it that a rank owns; for a contribution, also which one it is."""
    for part in spec.layouts:
        if rank in part:
            return spec.shape, part.owned(spec.shape, rank), str(part) if any(a.partial for a in part.axes) else ""
    return None


# ---- evaluations of equal registrations are kept ----

#: Number of evaluations kept, least recently used dropped first. Plans of large models take some MB per rank.
_KEPT = 8

_Key = tuple[object, ...]


class EvaluationCache:
    """A bounded cache of ``evaluate``, one per agent.

    ``evaluate`` depends only on records, manifests and places, except for ``seq``. So equal ones get the same
    evaluation, with all plan rows that were computed before. Thread-safe: two threads that ask for the same at once may
    both evaluate it.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._most = kept
        self._found: OrderedDict[_Key, Evaluation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def of(self, records: Mapping[Member, Record], manifests: Mapping[str, Manifest], where: Where) -> Evaluation:
        """``evaluate`` of the same arguments. Its plans are shared with every equal registration."""
        key = _key(records, where)
        found = self._found.pop(key, None)
        if found is None:
            found = evaluate(records, manifests, where)
        self._found[key] = found
        while len(self._found) > self._most:
            self._found.popitem(last=False)
        seq = max((record.seq for record in records.values()), default=0)
        return found if found.seq == seq else dataclasses.replace(found, seq=seq)


def _key(records: Mapping[Member, Record], where: Where) -> _Key:
    """Everything that an evaluation depends on, except ``seq``."""
    reported = tuple((member, dataclasses.replace(record, seq=0)) for member, record in sorted(records.items()))
    places = tuple(
        tuple((side, tuple(names)) for side, names in sorted(some.items())) for some in (where.agents, where.hosts)
    )
    return (reported, places)
