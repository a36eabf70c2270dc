"""A plan as a picture: who sends how much to whom, and the load of every NIC against the bound. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from etha.errors import ConfigError
from etha.plan.analysis.bounds import Loads, PlanStats, Survey
from etha.plan.analysis.explain import size
from etha.plan.analysis.links import LinkTable
from etha.plan.planner.plan import BasePlan
from etha.plan.planner.rank_plan import CONTRIBUTE, inside_target

Ints = npt.NDArray[np.int64]
#: Most cells of the map along one side; more ranks are drawn in groups.
_MOST_CELLS = 256
_OUT, _IN, _BOUND = "#2a6fbb", "#d97706", "#b91c1c"


def plot(plan: BasePlan, seen: Survey, path: str | Path) -> None:
    """Write the picture to ``path``. ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plotting needs matplotlib: pip install 'sub-etha[plot]'") from None
    found, load, s = seen.flows, seen.loads, seen.stats
    figure = Figure(figsize=(12.5, 5.6), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    figure.suptitle(
        f"{len(plan.names)} tensors, {len(plan.topology.source_host)} → {len(plan.topology.target_host)} ranks: "
        f"{size(s.wire_bytes)} between hosts, {size(s.host_bytes)} inside hosts, {size(s.local_bytes)} inside agents"
    )
    _map(figure, left, plan, found)
    _bars(right, load, s)
    figure.savefig(path)


def _map(figure: Any, axes: Any, plan: BasePlan, found: LinkTable) -> None:
    """Source ranks down, target ranks across; on a logarithmic scale if links differ by orders of magnitude."""
    from matplotlib.colors import LogNorm

    m, n = (max(len(h), 1) for h in (plan.topology.source_host, plan.topology.target_host))
    rows, columns = min(m, _MOST_CELLS), min(n, _MOST_CELLS)
    keep = ~inside_target(found.kind) & (found.kind != CONTRIBUTE)
    moved = np.zeros((rows, columns))
    np.add.at(moved, (found.source[keep] * rows // m, found.target[keep] * columns // n), found.nbytes[keep] / 1e6)
    shown = np.ma.masked_less_equal(moved, 0)
    low, high = (float(shown.min()), float(shown.max())) if shown.count() else (0.1, 1.0)
    norm = LogNorm(min(low, high / 1.001), high) if high / low > 20 else None
    extent = (-0.5, n - 0.5, m - 0.5, -0.5)
    image = axes.imshow(shown, aspect="auto", cmap="viridis", interpolation="nearest", norm=norm, extent=extent)
    axes.set_facecolor("#eeeeee")
    passed = int(found.nbytes[inside_target(found.kind)].sum())
    besides = f"; targets pass on {size(passed)}" if passed else ""
    axes.set(xlabel="target rank", ylabel="source rank", title=f"source to target (grey: nothing){besides}")
    for axis, ranks in ((axes.xaxis, n), (axes.yaxis, m)):
        axis.get_major_locator().set_params(integer=True)
        if ranks <= 8:
            axis.set_ticks(range(ranks))
    grouped = " of a group of ranks" if max(m, n) > _MOST_CELLS else ""
    figure.colorbar(image, ax=axes, label=f"MB{grouped}", shrink=0.9)


def _bars(axes: Any, load: Loads, s: PlanStats) -> None:
    """NICs by load, the busiest first, which shows how even the loads are."""
    most = 0.0
    # If all loads are equal, the lines coincide: the bound is broad and pale, and "in" has gaps that show "out".
    for way, nics, colour, style in (("out", load.nic_out, _OUT, "-"), ("in", load.nic_in, _IN, (0, (5, 4)))):
        loaded = np.sort(nics[nics > 0])[::-1] / 1e9
        if not len(loaded):
            continue
        most = max(most, float(loaded[0]))
        edges = np.linspace(0, 100, len(loaded) + 1)
        text = f"{way}: {len(loaded)} NICs, busiest {loaded[0]:.4g} GB, mean {loaded.mean():.4g}"
        axes.stairs(loaded, edges, color=colour, linewidth=1.8, linestyle=style, label=text)
        axes.stairs(loaded, edges, color=colour, fill=True, alpha=0.10)
    bound = s.bound_nic / 1e9
    if bound:
        axes.axhline(bound, color=_BOUND, linewidth=6, alpha=0.3, zorder=1, label=f"bound {bound:.4g} GB")
    axes.set(
        xlim=(0, 100),
        ylim=(0, max(most, bound, 1e-9) * 1.3),
        xlabel="NICs with load, busiest first (%)",
        ylabel="GB between hosts",
        title=f"load of every NIC; quality {s.quality:.3f}" if s.wire_bytes else "nothing crosses hosts",
    )
    if most or bound:
        axes.legend(loc="upper right", frameon=False)
