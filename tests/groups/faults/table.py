"""The table "Faults" of docs/groups-proofs.md, as cells: each is one test.

| group | event | phase | calls | whom it meets | the others | within |

The first four columns hold one or several values; together the rows have to name every combination once.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from tests.faults.table import tables
from tests.groups.faults.calls import COLLECTIVES, KINDS, MESSAGES

DOCUMENT = Path(__file__).parents[3] / "docs" / "groups-proofs.md"
HEADER = ("group", "event", "phase", "calls", "whom it meets", "the others", "within")
GROUPS = {"etha": "ProcessGroupEtha", "baby": "ProcessGroupBabyGloo"}
ANY = ("before", "waiting", "moving", "between")
#: In which phases an event can meet a member of each kind of group.
EVENTS = {
    "etha": {
        "SIGKILL": ANY,
        "SIGSTOP": ANY,
        "exit": ANY,
        "abort": ANY,
        "wait timeout": ("waiting", "moving"),
        "Ctrl-C": ("waiting", "moving"),
        "mismatch": ("before",),
    },
    "baby": {
        "SIGKILL": ANY,
        "SIGSTOP": ANY,
        "exit": ANY,
        "abort": ANY,
        "wait timeout": ("waiting", "moving"),
        "Ctrl-C": ("waiting", "moving"),
        "mismatch": ("before",),
        "child SIGKILL": ANY,
        "child SIGSTOP": ANY,
    },
}
CALLS = {"all": KINDS, "collectives": COLLECTIVES, "messages": MESSAGES}
_ENDING = re.compile(r"(?P<after>after )?(?P<names>[A-Za-z]+( or [A-Za-z]+)*)(, (?P<seconds>[0-9.]+) s)?")
_NAMES = {"result", "ends", *(f"Group{name}Error" for name in ("Lost", "Timeout", "Mismatch", "Aborted"))}
_NAMES |= {"KeyboardInterrupt"}


@dataclass(frozen=True, slots=True)
class CallEnding:
    """How a call ends: one of ``names``; ``after``: once a stopped process goes on. ``seconds``: within which it does,
    if not within those of the row."""

    names: tuple[str, ...]
    after: bool = False
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> CallEnding:
        found = _ENDING.fullmatch(text)
        names = tuple(found["names"].split(" or ")) if found else ()
        if found is None or not set(names) <= _NAMES:
            raise ValueError(f"{DOCUMENT.name}: no test knows the ending {text!r}")
        return cls(names, bool(found["after"]), float(found["seconds"]) if found["seconds"] else None)


@dataclass(frozen=True, slots=True)
class FaultCell:
    """``victim``: how the call of the member ends that the event meets; ``others``: those of the other two."""

    group: str
    event: str
    phase: str
    kind: str
    victim: CallEnding
    others: CallEnding
    within: float

    def __str__(self) -> str:
        return "-".join((self.group, self.event.replace(" ", "_"), self.phase, self.kind))


def expected_keys() -> set[tuple[str, str, str, str]]:
    """Every combination that the table has to name."""
    return {
        (group, event, phase, kind)
        for group, events in EVENTS.items()
        for event, phases in events.items()
        for phase, kind in itertools.product(phases, KINDS)
        if happens(phase, kind)
    }


def happens(phase: str, kind: str) -> bool:
    """A barrier moves nothing."""
    return not (phase == "moving" and kind == "barrier")


def parse(text: str) -> list[FaultCell]:
    """All cells; ValueError for a row that no test knows, and for a combination that is missing or named twice."""
    cells: dict[tuple[str, ...], FaultCell] = {}
    for columns in tables(text, HEADER):
        if len(columns) != len(HEADER):
            raise ValueError(f"{DOCUMENT.name}: {len(columns)} columns in {columns}")
        groups, events, phases = ([value.strip() for value in column.split(",")] for column in columns[:3])
        if columns[3] not in CALLS:
            raise ValueError(f"{DOCUMENT.name}: no test knows the calls {columns[3]!r}")
        victim, others = (CallEnding.parse(column) for column in columns[4:6])
        for key in itertools.product(groups, events, phases, CALLS[columns[3]]):
            if not happens(key[2], key[3]):
                continue
            if key in cells:
                raise ValueError(f"{DOCUMENT.name}: {key} stands there twice")
            cells[key] = FaultCell(*key, victim, others, float(columns[6].removesuffix(" s")))
    if unknown := cells.keys() - expected_keys():
        raise ValueError(f"{DOCUMENT.name}: no test knows {sorted(unknown)}")
    if missing := expected_keys() - cells.keys():
        raise ValueError(f"{DOCUMENT.name}: nothing is said of {sorted(missing)}")
    return list(cells.values())


def cells() -> list[FaultCell]:
    """The cells of the document."""
    return parse(DOCUMENT.read_text())
