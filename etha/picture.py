"""A picture of who sends how much to whom: what it shows, as plain data, and how it is drawn.

    Plan --plan/analysis/plot.py--> PlanPicture --draw--> out.svg, out.png or out.pdf

The data is small whatever the size of the plan, because an agent sends it to ``etha plot``. Reading it needs neither
torch nor numpy. matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from etha.decoders import made_alone
from etha.errors import ConfigError
from etha.printable import in_all_texts, printable
from etha.units import counted, size

#: What a picture's file may end in.
SUFFIXES = (".svg", ".png", ".pdf")

# Colours that colour-blind people tell apart (Okabe and Ito), dark on light.
_FAR, _NEAR, _OWN = "#0072B2", "#E69F00", "#6E6E6E"
_BUSIEST, _INK, _PALE, _EDGE = "#D55E00", "#1A1A1A", "#F4F4F1", "#B5B5AE"
_COLOURS = (_OWN, _NEAR, _FAR)
_DISTANCES = ("inside agents", "inside hosts", "between hosts")
#: Arrows are labelled one by one up to this many.
_LABELLED = 12
#: Width of the heaviest arrow and of the lightest, in points.
_WIDEST, _THINNEST = 6.0, 0.8
#: Most characters of a name beside or above something, and of a line of the title.
_LABEL, _TITLE = 28, 90
# Where things are across the chart, in hundredths of its width: host boxes, node boxes, and room for what one side
# passes on to itself.
_HOSTS, _NODES, _BULGE = (8.0, 92.0), (10.0, 29.0, 71.0, 90.0), 7.0
# Heights, in rows: a host's name, the gap below a host, what a node adds for each arrow.
_HEAD, _GAP, _PER_ARROW = 0.62, 0.38, 0.26


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureNode:
    """A rank, a host's ranks, or several hosts' on one side (0 sends, 1 receives). ``inside``: bytes between its
    ranks."""

    side: int
    host: int
    label: str
    inside: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureArrow:
    """Bytes from one node to another. ``distance``: 0 inside one agent, 1 inside one host, 2 between hosts."""

    start: int
    end: int
    nbytes: int
    distance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureNic:
    """Bytes between hosts of one agent, and the nodes in which its ranks are."""

    label: str
    sent: int
    received: int
    nodes: tuple[int, ...]

    @property
    def load(self) -> int:
        """Of the busier way."""
        return max(self.sent, self.received)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPicture:
    """All that a picture of a plan shows.

    ``nbytes`` are inside agents, inside hosts, between hosts. ``nics`` are the busiest, of ``nics_in_all``; ``alike``
    others carry as much as the first. ``map`` has (row, column, bytes) of the ``map_size`` cells that source ranks make
    with target ranks, and is empty if the arrows show every rank.
    """

    title: str
    sides: tuple[str, str]
    ranks: tuple[int, int]
    nbytes: tuple[int, int, int]
    hosts: tuple[str, ...]
    nodes: tuple[PictureNode, ...]
    arrows: tuple[PictureArrow, ...]
    nics: tuple[PictureNic, ...]
    nics_in_all: int
    nic_mean: float
    alike: int
    bound: float
    quality: float
    map: tuple[tuple[int, int, int], ...]
    map_size: tuple[int, int]

    def to_plain(self) -> dict[str, Any]:
        """As a message carries it."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> PlanPicture:
        """From ``to_plain``. msgspec.ValidationError for anything else."""
        return made_alone(lambda: msgspec.convert(plain, cls))

    def printable(self) -> PlanPicture:
        """With control characters of names written out: an SVG that held them would be no XML."""
        return self.from_plain(in_all_texts(printable, self.to_plain()))


def check_path(path: str | Path) -> Path:
    """``path`` itself, before time is spent on a picture. ConfigError if no picture can be written there."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"no picture can be written to {path}: its name must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("plotting needs matplotlib: pip install 'sub-etha[plot]'") from None
    return path


def draw(picture: PlanPicture, path: str | Path) -> None:
    """Write the picture to ``path``, as SVG, PNG or PDF by its suffix. ConfigError as ``check_path`` raises it."""
    path = check_path(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = picture.printable()
    chart = _Chart(picture)
    # Text stays text, so that it can be searched and read aloud; two runs write the same bytes.
    fixed: Any = {"svg.fonttype": "none", "svg.hashsalt": "etha", "pdf.fonttype": 42, "font.size": 10.0}
    fixed["text.parse_math"] = False  # a host's name may have dollar signs
    with matplotlib.rc_context(fixed), warnings.catch_warnings():
        # A host's name may have characters that the font lacks: an SVG's reader has others, and boxes do elsewhere.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(
            figsize=(13.0 if picture.nics else 9.0, chart.inches), layout="constrained", dpi=120, facecolor="white"
        )
        FigureCanvasAgg(figure)
        left, *right = _panels(figure, picture)
        _heading(figure, picture)
        chart.draw(left)
        if picture.nics:
            _nics(right.pop(0), picture)
        if picture.map:
            _map(figure, right.pop(0), picture)
        _legend(figure, picture)
        dated = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix.lower())
        figure.savefig(path, metadata={dated: None} if dated else None)


def _panels(figure: Any, picture: PlanPicture) -> list[Any]:
    """The arrows on the left; NICs and, if there is one, the map of ranks on the right."""
    beside = [bool(picture.nics), bool(picture.map)].count(True)
    if not beside:
        return [figure.add_subplot()]
    heights = (1, 1.25) if beside == 2 else (1,)
    grid = figure.add_gridspec(beside, 2, width_ratios=(1.6, 1), height_ratios=heights)
    return [figure.add_subplot(grid[:, 0]), *(figure.add_subplot(grid[row, 1]) for row in range(beside))]


def _heading(figure: Any, picture: PlanPicture) -> None:
    parts = [f"{size(n)} {what}" for n, what in zip(picture.nbytes, _DISTANCES, strict=True) if n]
    where = ", ".join(reversed(parts)) or "nothing moves"
    lines = [_shortened(line, _TITLE) for line in (*picture.title.splitlines(), where)]
    figure.suptitle("\n".join(lines), fontsize=13, color=_INK)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """Where something is drawn, in hundredths of the width and in rows from the top."""

    left: float
    right: float
    top: float
    bottom: float

    @property
    def middle(self) -> float:
        return (self.top + self.bottom) / 2


class _Chart:
    """Sources on the left, targets on the right, hosts as boxes around them; a host with both spans the chart."""

    def __init__(self, picture: PlanPicture) -> None:
        self.picture = picture
        #: For each node its arrows out and in, in the order in which they are drawn down its edge.
        self.ports: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for number, arrow in enumerate(picture.arrows):
            self.ports[arrow.start, True].append(number)
            self.ports[arrow.end, False].append(number)
        self.nodes: dict[int, _Box] = {}
        self.hosts: dict[tuple[int, int], _Box] = {}
        self.rows = self._place()
        # Arrows leave and arrive in the order of their other ends, so that few of them cross.
        for (_, out), numbers in self.ports.items():
            ends = {n: picture.arrows[n].end if out else picture.arrows[n].start for n in numbers}
            numbers.sort(key=lambda n, ends=ends: self.nodes[ends[n]].middle)  # type: ignore[misc]

    @property
    def inches(self) -> float:
        """Height of the figure."""
        least = 7.0 if self.picture.map else 4.4 if self.picture.nics else 3.4
        return min(max(2.2 + self.rows * 0.62, least), 12.0)

    def _place(self) -> float:
        """Place every host and node; returns the rows that they take."""
        members: dict[int, tuple[list[int], list[int]]] = {}
        for number, node in enumerate(self.picture.nodes):
            members.setdefault(node.host, ([], []))[node.side].append(number)
        top = [0.0, 0.0]
        # Hosts with both sides come first and take the whole width; below them each side has its own column.
        for host, sides in sorted(members.items(), key=lambda item: not all(item[1])):
            both = all(sides)
            start = max(top) if both else top[0 if sides[0] else 1]
            ends = [self._column(side, sides[side], start + self._head(host)) for side in (0, 1) if sides[side]]
            bottom = max(ends) + 0.14
            for side in (0, 1):
                if both or sides[side]:
                    top[side] = bottom + _GAP
            left = _HOSTS[0] if both or sides[0] else _NODES[2] - 2
            right = _HOSTS[1] if both or sides[1] else _NODES[1] + 2
            self.hosts[host, 2 if both else 0 if sides[0] else 1] = _Box(
                left=left, right=right, top=start, bottom=bottom
            )
        return max(*top, 1.0)

    def _head(self, host: int) -> float:
        return _HEAD if self.picture.hosts[host] else 0.14

    def _column(self, side: int, nodes: Sequence[int], top: float) -> float:
        left, right = _NODES[2 * side : 2 * side + 2]
        for node in nodes:
            most = max(len(self.ports[node, True]), len(self.ports[node, False]))
            bottom = top + max(0.3 + 0.26 * len(self._label(node).splitlines()), _PER_ARROW * most)
            self.nodes[node] = _Box(left=left, right=right, top=top, bottom=bottom)
            top = bottom + 0.14
        return top

    def draw(self, axes: Any) -> None:
        """Draw all of it."""
        axes.set(xlim=(0, 100), ylim=(self.rows, -0.75))
        axes.axis("off")
        for side, (name, what) in enumerate(zip(self.picture.sides, ("sends", "receives"), strict=True)):
            name = _shortened(name, 20)
            text = f"{name} {what}" if name not in ("source", "target") else name
            axes.text(
                (_NODES[2 * side] + _NODES[2 * side + 1]) / 2,
                -0.3,
                f"{text}\n{counted(self.picture.ranks[side], 'rank')}",
                ha="center",
                va="bottom",
                fontsize=11,
                color=_INK,
                weight="bold",
            )
        self._draw_hosts(axes)
        self._draw_arrows(axes)
        self._draw_nodes(axes)
        if not self.picture.arrows and not any(node.inside for node in self.picture.nodes):
            axes.text(50, self.rows / 2, "nothing moves", ha="center", va="center", color=_INK)

    def _draw_hosts(self, axes: Any) -> None:
        for (host, _), box in self.hosts.items():
            axes.add_patch(_rectangle(box, facecolor=_PALE, edgecolor=_EDGE, linewidth=1.0, zorder=0))
            name = _shortened(self.picture.hosts[host], int((box.right - box.left) * 0.85))
            axes.text(box.left + 1, box.top + 0.12, name, ha="left", va="top", fontsize=9.5, color=_INK, zorder=6)

    def _draw_nodes(self, axes: Any) -> None:
        busiest = set(self.picture.nics[0].nodes) if self.picture.nics else set()
        for number, box in self.nodes.items():
            edge, width = (_BUSIEST, 2.6) if number in busiest else (_INK, 0.9)
            axes.add_patch(_rectangle(box, facecolor="white", edgecolor=edge, linewidth=width, zorder=4))
            middle = (box.left + box.right) / 2
            text = self._label(number)
            axes.text(middle, box.middle, text, ha="center", va="center", fontsize=9, color=_INK, zorder=5)

    def _label(self, number: int) -> str:
        """A node's text: its ranks, what they give each other, and at one node what the busiest NIC carries."""
        node, busiest = self.picture.nodes[number], self.picture.nics[0] if self.picture.nics else None
        lines = [node.label]
        if node.inside:
            lines.append(f"{size(node.inside)} among them")
        if busiest is not None and number == busiest.nodes[0]:
            lines += [
                "busiest NIC",
                f"{'sends' if busiest.sent >= busiest.received else 'receives'} {size(busiest.load)}",
            ]
        return "\n".join(lines)

    def _draw_arrows(self, axes: Any) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Curve

        most = max((arrow.nbytes for arrow in self.picture.arrows), default=1)
        labelled = len(self.picture.arrows) <= _LABELLED
        # The heaviest lie below, so that none hides a lighter one.
        for number in sorted(range(len(self.picture.arrows)), key=lambda n: -self.picture.arrows[n].nbytes):
            arrow = self.picture.arrows[number]
            points, heading = self._curve(number)
            width, colour = max(_THINNEST, _WIDEST * arrow.nbytes / most), _COLOURS[arrow.distance]
            curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
            axes.add_patch(
                PathPatch(
                    curve, facecolor="none", edgecolor=colour, linewidth=width, alpha=0.8, capstyle="butt", zorder=2
                )
            )
            axes.plot(
                [points[-1][0]],
                [points[-1][1]],
                marker=(3, 0, -90 * heading),
                markersize=max(6.5, width * 2.0),
                color=colour,
                markeredgewidth=0,
                zorder=3,
                clip_on=False,
            )
            if labelled:
                at = _along(points, 0.16 if heading > 0 and self._crosses(arrow) else 0.5)
                axes.text(
                    *at,
                    size(arrow.nbytes),
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color=_INK,
                    zorder=5,
                    bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.9},
                )

    def _crosses(self, arrow: PictureArrow) -> bool:
        return self.picture.nodes[arrow.start].side != self.picture.nodes[arrow.end].side

    def _curve(self, number: int) -> tuple[list[tuple[float, float]], int]:
        """Its four points, and whether it arrives towards the right (1) or the left (-1)."""
        arrow = self.picture.arrows[number]
        y0, y1 = self._port(arrow.start, True, number), self._port(arrow.end, False, number)
        here, there = self.nodes[arrow.start], self.nodes[arrow.end]
        if self._crosses(arrow):
            x0, x1 = here.right, there.left
            bend = (x1 - x0) * 0.45
            return [(x0, y0), (x0 + bend, y0), (x1 - bend, y1), (x1 - 0.9, y1)], 1
        bulge = _BULGE * min(0.7 + 0.35 * abs(y1 - y0), 1.8)
        if self.picture.nodes[arrow.start].side:  # targets pass on to targets, on the right
            x = here.right
            return [(x, y0), (x + bulge, y0), (x + bulge, y1), (x + 0.9, y1)], -1
        x = here.left
        return [(x, y0), (x - bulge, y0), (x - bulge, y1), (x - 0.9, y1)], 1

    def _port(self, node: int, out: bool, number: int) -> float:
        box, numbers = self.nodes[node], self.ports[node, out]
        return box.top + (box.bottom - box.top) * (numbers.index(number) + 0.5) / len(numbers)


def _shortened(text: str, most: int) -> str:
    """A long name without its middle, because both ends of a host's name tell it apart."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[3 - most + most // 2 :]}"


def _rectangle(box: _Box, **style: Any) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(
        (box.left, box.top),
        box.right - box.left,
        box.bottom - box.top,
        boxstyle="round,pad=0,rounding_size=0.12",
        mutation_aspect=1,
        clip_on=False,
        **style,
    )


def _along(points: Sequence[tuple[float, float]], t: float) -> tuple[float, float]:
    """The point of a cubic curve at ``t``."""
    weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
    x, y = (sum(w * p[axis] for w, p in zip(weights, points, strict=True)) for axis in (0, 1))
    return x, y


def _nics(axes: Any, picture: PlanPicture) -> None:
    """A pair of bars for each of the busiest NICs, and the bound."""
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)
    for place, nic in enumerate(picture.nics):
        colour = _BUSIEST if not place else "#7A9CB8"
        for offset, value, hatch in ((-0.19, nic.sent, ""), (0.19, nic.received, "////")):
            axes.barh(
                place + offset, value, 0.36, facecolor=colour if not hatch else "white", edgecolor=colour, hatch=hatch
            )
            if value and len(picture.nics) <= 8:
                axes.annotate(
                    f" {size(value)}", (value, place + offset), va="center", ha="left", fontsize=8, color=_INK
                )
    axes.set_yticks(range(len(picture.nics)), [_shortened(nic.label, _LABEL) for nic in picture.nics], fontsize=9)
    axes.set_ylim(len(picture.nics) - 0.4, -0.6)
    axes.set_xlim(0, max(picture.nics[0].load, picture.bound) * 1.28)
    axes.xaxis.set_major_formatter(lambda value, _: size(value))
    axes.xaxis.get_major_locator().set_params(nbins=5)
    if picture.bound:
        axes.axvline(picture.bound, color=_INK, linestyle=(0, (4, 3)), linewidth=1.3)
    more = picture.nics_in_all - len(picture.nics)
    rest = f"the {len(picture.nics)} busiest of {picture.nics_in_all:,}, mean {size(picture.nic_mean)}"
    text = f"bytes through NICs, {rest if more else 'one for each agent'}"
    axes.set_title(text, fontsize=10.5, color=_INK)


def _map(figure: Any, axes: Any, picture: PlanPicture) -> None:
    """Every source rank down, every target rank across, on a logarithmic scale where bytes differ by far."""
    from matplotlib.colors import LogNorm

    (rows, columns), (m, n) = picture.map_size, picture.ranks
    values = [[float("nan")] * columns for _ in range(rows)]
    for row, column, nbytes in picture.map:
        values[row][column] = float(nbytes)
    low, high = min(b for *_, b in picture.map), max(b for *_, b in picture.map)
    norm = LogNorm(low, high) if high > 20 * low else None
    limits = {} if norm is not None else {"vmin": 0, "vmax": high}
    extent = (-0.5, n - 0.5, m - 0.5, -0.5)
    image = axes.imshow(
        values, aspect="auto", cmap="YlGnBu", interpolation="nearest", norm=norm, extent=extent, **limits
    )
    axes.set_facecolor("#EDEDED")
    axes.set_xlabel(f"{_shortened(picture.sides[1], _LABEL)} rank")
    axes.set_ylabel(f"{_shortened(picture.sides[0], _LABEL)} rank")
    grouped = (rows, columns) != (m, n)
    axes.set_title(
        f"bytes from source ranks to target ranks{', several to a cell' if grouped else ''}"
        f"{' (grey: none)' if len(picture.map) < rows * columns else ''}",
        fontsize=10.5,
        color=_INK,
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, shrink=0.9, format=lambda value, _: size(value))


def _legend(figure: Any, picture: PlanPicture) -> None:
    figure.legend(
        handles=list(_handles(picture)),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
        handlelength=2.4,
    )


def _handles(picture: PlanPicture) -> Iterator[Any]:
    """What each colour, width and line means; only what is in the picture."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    for distance in (2, 1, 0):
        if any(arrow.distance == distance for arrow in picture.arrows):
            yield Line2D([], [], color=_COLOURS[distance], linewidth=4, label=f"bytes {_DISTANCES[distance]}")
    if picture.arrows:
        most = max(arrow.nbytes for arrow in picture.arrows)
        yield Line2D([], [], color=_INK, linewidth=_WIDEST, alpha=0.5, label=f"arrow of {size(most)}")
    if not picture.nics:
        return
    alike = f", the first of {picture.alike + 1:,} as busy" if picture.alike else ""
    yield Patch(facecolor="white", edgecolor=_BUSIEST, linewidth=2.4, label=f"ranks on the busiest NIC{alike}")
    yield Patch(facecolor="#7A9CB8", edgecolor="#7A9CB8", label="bar: bytes sent")
    yield Patch(facecolor="white", edgecolor="#7A9CB8", hatch="////", label="bar: bytes received")
    if picture.bound:
        text = (
            f"bound: in any plan some NIC carries {size(picture.bound)} or more (here {picture.quality:.2f} times that)"
        )
        yield Line2D([], [], color=_INK, linestyle=(0, (4, 3)), linewidth=1.3, label=text)
