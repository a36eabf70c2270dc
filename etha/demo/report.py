"""The launcher's judgement of the events: pairs each version of one job with the other's, and compares them.

Pure except for the table, which is data for rich. Nothing is printed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from etha.demo.events import Event
from etha.demo.options import GOAL, GOAL_STEPS, TOLERANCE, Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One version as both jobs saw it. ``problems`` is empty if every element and the loss agree."""

    number: int
    nbytes: int
    seconds: float
    sent_loss: float | None
    received_loss: float | None
    sample: str
    tensors: int
    problems: tuple[str, ...]

    @property
    def gb_per_s(self) -> float:
        """Decimal gigabytes per second over the slowest rank's transfer."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class DemoReport:
    """Collects events. ``rows`` are the versions that both jobs have reported."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rows: list[Row] = []
        self._waiting: dict[int, dict[str, dict[str, Any]]] = {}

    def take(self, event: Event) -> Row | None:
        """Take ``event``. Returns the row that it completes, if any."""
        if event.kind != "version":
            return None
        number = int(event.fields["number"])
        reported = self._waiting.setdefault(number, {})
        reported[event.job] = event.fields
        if len(reported) < 2:
            return None
        row = compare(number, reported["trainer"], reported["inference"])
        self.rows.append(row)
        return row

    def verdict(self) -> list[str]:
        """Every reason why the run as a whole failed, after both jobs have ended."""
        problems = [f"version {row.number}: {problem}" for row in self.rows for problem in row.problems]
        missing = sorted(set(self.options.versions) - {row.number for row in self.rows})
        if missing:
            problems.append(f"versions {missing} were not told by both jobs")
        losses = [row.received_loss for row in self.rows if row.received_loss is not None]
        if self.options.synthetic is None and len(losses) > 1:
            if losses[-1] >= losses[0]:
                problems.append(f"the loss did not fall: {losses[0]:.4f} to {losses[-1]:.4f}")
            if self.options.steps >= GOAL_STEPS and losses[-1] >= GOAL:
                problems.append(f"the loss after {self.options.steps} steps is {losses[-1]:.4f}, not below {GOAL}")
        return problems


def compare(number: int, sent: dict[str, Any], received: dict[str, Any]) -> Row:
    """The row of one version from the two jobs' reports."""
    problems = compare_hashes(sent["hashes"], received["hashes"])
    a, b = sent.get("loss"), received.get("loss")
    # Written so that a NaN is a disagreement.
    if (a is None) != (b is None) or (a is not None and not abs(a - b) <= TOLERANCE):
        problems.append(f"loss {a} at the trainer, {b} at the inference job")
    return Row(
        number=number,
        nbytes=int(received["bytes"]),
        seconds=float(received["seconds"]),
        sent_loss=a,
        received_loss=b,
        sample=str(received.get("sample", "")),
        tensors=len(sent["hashes"]),
        problems=tuple(problems),
    )


def compare_hashes(sent: dict[str, str], received: dict[str, str]) -> list[str]:
    """One line for each tensor that is missing on a side or differs. No tensors at all is a problem, too."""
    if not sent:
        return ["the trainer told no hashes"]
    names = sorted(sent.keys() | received.keys())
    return [f"{name} differs" for name in names if sent.get(name) != received.get(name)]


def table(rows: list[Row], *, synthetic: bool) -> Table:
    shown = Table(expand=False)
    for heading in ("version", "bytes", "GB/s"):
        shown.add_column(heading, justify="right")
    shown.add_column("elements")
    if not synthetic:
        shown.add_column("trainer loss", justify="right")
        shown.add_column("inference loss", justify="right")
        shown.add_column("sample", no_wrap=True, overflow="ellipsis", max_width=40)
    for row in rows:
        ok = Text(f"{row.tensors} tensors equal", "green") if not row.problems else Text(row.problems[0], "red")
        cells: list[str | Text] = [str(row.number), f"{row.nbytes:,}", f"{row.gb_per_s:.2f}", ok]
        if not synthetic:
            cells += [f"{row.sent_loss:.4f}", f"{row.received_loss:.4f}", Text(row.sample.replace("\n", " / "))]
        shown.add_row(*cells)
    return shown
