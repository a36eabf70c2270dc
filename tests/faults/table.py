"""The table of expected outcomes in docs/recovery.md, as cells: each is one test.

| way | victim | moment | signal | own workers | same side | other side | within |

The first four columns hold one or several values; together the rows have to name every combination once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "recovery.md"
HEADER = ("way", "victim", "moment", "signal", "own workers", "same side", "other side", "within")
#: On one agent the source's and the target's agent are the same process.
VICTIMS = {
    "local": ("source worker", "target worker", "agent", "Redis"),
    "tcp": ("source worker", "target worker", "source agent", "target agent", "Redis"),
}
MOMENTS = ("rendezvous", "idle", "READY", "moving", "voted")
SIGNALS = ("KILL", "TERM", "STOP")
_ENDING = re.compile(
    r"(?P<after>after )?(?:(?P<plain>none|gone|waits|result)"
    r"|(?P<kind>AgentLostError) (?P<fate>unknown or withdrawn|unknown|withdrawn)"
    r"|(?P<error>PeerLostError) (?P<reason>died|closed or died), (?P<outcome>aborted or unknown|aborted|withdrawn))"
)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call ends; ``after``: once a frozen victim goes on. ``what``: none, gone, waits, result or a class."""

    what: str
    after: bool = False
    reason: str | None = None
    outcome: str | None = None

    @classmethod
    def parse(cls, text: str) -> Ending:
        found = _ENDING.fullmatch(text)
        if found is None:
            raise ValueError(f"{DOCUMENT.name}: no test knows the ending {text!r}")
        return cls(
            found["plain"] or found["kind"] or found["error"],
            bool(found["after"]),
            found["reason"],
            found["fate"] or found["outcome"],
        )

    @property
    def reasons(self) -> list[str]:
        """What ``pair.lost`` may say, and the error where it has a reason: of a death that is also a leave, either."""
        return (self.reason or "closed or died").split(" or ")

    @property
    def outcomes(self) -> list[str]:
        """What the error may say of the transfer."""
        return (self.outcome or "").split(" or ")

    @property
    def is_error(self) -> bool:
        return self.what.endswith("Error")


@dataclass(frozen=True, slots=True)
class Cell:
    """``own``, ``same``, ``other``: endings of the victim's own workers, of others of its side, of the other side."""

    way: str
    victim: str
    moment: str
    signal: str
    own: Ending
    same: Ending
    other: Ending
    within: float

    def __str__(self) -> str:
        return "-".join((self.way, self.victim.replace(" ", "_"), self.moment, self.signal))

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.way, self.victim, self.moment, self.signal

    @property
    def side(self) -> str:
        """The side that the victim is of; the source's where it is of both or of none."""
        return "inference" if self.victim.startswith("target") else "trainer"


def expected_keys() -> set[tuple[str, str, str, str]]:
    """Every combination that the table has to name."""
    return {key for way, names in VICTIMS.items() for key in itertools.product((way,), names, MOMENTS, SIGNALS)}


def tables(text: str, header: tuple[str, ...]) -> Iterator[list[str]]:
    """The rows of all tables that have this header."""
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        columns = [column.strip() for column in line.strip("|").split("|")]
        if tuple(columns) == header:
            inside = True
        elif inside and set(line) - set("|-: "):
            yield columns


def parse(text: str) -> list[Cell]:
    """All cells; ValueError for a row that no test knows, and for a combination that is missing or named twice."""
    cells: dict[tuple[str, str, str, str], Cell] = {}
    for columns in tables(text, HEADER):
        if len(columns) != len(HEADER):
            raise ValueError(f"{DOCUMENT.name}: {len(columns)} columns in {columns}")
        keys = itertools.product(*(_values(column) for column in columns[:4]))
        own, same, other = (Ending.parse(column) for column in columns[4:7])
        for key in keys:
            if key in cells:
                raise ValueError(f"{DOCUMENT.name}: {key} stands there twice")
            cells[key] = Cell(*key, own, same, other, float(columns[7].removesuffix(" s")))  # type: ignore[call-arg]
    if unknown := cells.keys() - expected_keys():
        raise ValueError(f"{DOCUMENT.name}: no test knows {sorted(unknown)}")
    if missing := expected_keys() - cells.keys():
        raise ValueError(f"{DOCUMENT.name}: nothing is said of {sorted(missing)}")
    return sorted(cells.values(), key=_order)


def _values(column: str) -> Iterable[str]:
    return [value.strip() for value in column.split(",")]


def _order(cell: Cell) -> tuple[int, ...]:
    return (
        SIGNALS.index(cell.signal),
        tuple(VICTIMS).index(cell.way),
        VICTIMS[cell.way].index(cell.victim),
        MOMENTS.index(cell.moment),
    )


def cells() -> list[Cell]:
    """The cells of the document."""
    return parse(DOCUMENT.read_text())
