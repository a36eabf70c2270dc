"""A plan as a person reads it: what moves how far, who is busiest, which links carry it; and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from etha.errors import ConfigError
from etha.plan import dtypes
from etha.plan.bounds import stats
from etha.plan.flows import Flows, flows
from etha.plan.layout import TensorSpec
from etha.plan.program import CONTRIBUTE

if TYPE_CHECKING:
    from etha.plan.plan import Plan

_DISTANCE = ("local", "host", "wire")
_LINKS = 10


def size(nbytes: int) -> str:
    """1610612736 -> "1.61 GB" (powers of ten)."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"


def explain(plan: Plan) -> str:
    """Text of some 20 to 40 lines; violations first when there are any."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    found, s = flows(plan), stats(plan)
    m, n = len(plan.topology.source_host), len(plan.topology.target_host)
    yield f"plan {plan.digest()[:16]}: {len(plan.names)} tensors in {len(plan.classes)} classes, {m} -> {n} ranks"
    for violation in plan.violations:
        yield f"  ! {violation}"
    far = f"local {size(s.local_bytes)}, host {size(s.host_bytes)}, wire {size(s.wire_bytes)}"
    yield f"  bytes      {size(s.total_bytes)}: {far}"
    yield f"  operations {s.ops} in {s.rounds} rounds"
    ranks = f"rank out {size(s.max_rank_egress)}, in {size(s.max_rank_ingress)}"
    yield f"  busiest    {ranks}; host out {size(s.max_host_egress)}, in {size(s.max_host_ingress)}"
    yield "classes"
    for at, klass in enumerate(plan.classes):
        members = np.flatnonzero(plan.class_of == at)
        name = plan.names[int(members[0])]
        a, b = plan.source[name], plan.target[name]
        kinds = f"{dtypes.name_of(a.dtype)} -> {dtypes.name_of(b.dtype)}"
        yield f"  {len(members)} x {list(klass.shape)} {kinds}, such as {name!r}"
        yield f"      {_layouts(a)} -> {_layouts(b)}"
    yield from _links(plan, found)


def _layouts(spec: TensorSpec) -> str:
    def one(mesh: tuple[int, ...], axes: str) -> str:
        return f"{'x'.join(map(str, mesh))} [{axes}]"

    return " and ".join(one(part.mesh_shape, ", ".join(str(a) for a in part.axes)) for part in spec.layouts)


def _links(plan: Plan, found: Flows) -> Iterator[str]:
    carried = found.nbytes
    order = np.argsort(-carried, kind="stable")
    yield f"links ({len(carried)}, heaviest first)"
    for i in order[:_LINKS].tolist():
        a, b, far = (int(c[i]) for c in (found.source, found.target, found.distance))
        to = "source" if found.kind[i] == CONTRIBUTE else "target"
        yield f"  source {a} -> {to} {b}  {size(int(carried[i]))}  {_DISTANCE[far]}"


def plot(plan: Plan, path: str | Path) -> None:
    """Heat map of bytes from each source rank to each target rank; ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plotting needs matplotlib: pip install 'sub-etha[plot]'") from None
    found = flows(plan)
    m, n = len(plan.topology.source_host), len(plan.topology.target_host)
    moved = np.zeros((max(m, 1), max(n, 1)))
    keep = found.kind != CONTRIBUTE
    np.add.at(moved, (found.source[keep], found.target[keep]), found.nbytes[keep] / 1e6)
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(moved, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set(xlabel="target rank", ylabel="source rank", title=f"{len(plan.names)} tensors, {moved.sum():.4g} MB")
    figure.colorbar(image, label="MB")
    figure.savefig(path)
