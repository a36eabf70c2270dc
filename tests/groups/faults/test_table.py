"""The table "Faults" of docs/groups-proofs.md with real processes: some cells here, all in `make faults-groups`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.groups.faults.crew import Crew
from tests.groups.faults.play import FaultPlay
from tests.groups.faults.table import DOCUMENT, GROUPS, FaultCell, cells, parse

#: How often `make faults-groups` plays each cell, each time with another victim, root and moment.
TURNS = int(os.environ.get("ETHA_FAULT_TURNS", "20"))


def events() -> dict[tuple[str, str, str], list[FaultCell]]:
    """The cells of each group, event and phase: one for each kind of call."""
    found: dict[tuple[str, str, str], list[FaultCell]] = {}
    for cell in cells():
        found.setdefault((cell.group, cell.event, cell.phase), []).append(cell)
    return found


def sample() -> list[FaultCell]:
    """One cell of each event and phase, over all kinds of calls; over children, one of each event."""
    found: dict[tuple[str, ...], FaultCell] = {}
    for number, ((group, event, phase), these) in enumerate(events().items()):
        place = (group, event, phase) if group == "etha" else (group, event)
        if place not in found or number % 3 == 0:
            found[place] = these[number * 7 % len(these)]
    return list(found.values())


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[str, Crew]]:
    found: dict[str, Crew] = {}
    yield found
    for each in found.values():
        each.close()


def play(crews: dict[str, Crew], cell: FaultCell, turn: int) -> None:
    """Play a cell; one that fails leaves a crew that nobody knows, so the next gets a new one."""
    if cell.group not in crews:
        crews[cell.group] = Crew(GROUPS[cell.group])
    try:
        FaultPlay(crews[cell.group], cell, turn).run()
    except BaseException:
        crews.pop(cell.group).close()
        raise


@pytest.mark.parametrize("cell", sample(), ids=str)
def test_a_cell(crews: dict[str, Crew], cell: FaultCell) -> None:
    play(crews, cell, 0)


@pytest.mark.faults
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("group", "event", "phase"), events())
def test_every_call(crews: dict[str, Crew], group: str, event: str, phase: str) -> None:
    """With workers of a DataLoader in every second turn."""
    failed: list[str] = []
    for cell in events()[group, event, phase]:
        for turn in range(TURNS):
            try:
                play(crews, cell, turn)
            except AssertionError as error:
                failed.append(f"{cell}, turn {turn}: {error}")
    assert not failed, f"{len(failed)} of {TURNS * len(events()[group, event, phase])}:\n" + "\n".join(failed)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("| etha | abort |", "| etha | sigh |", "no test knows"),
        ("| etha | mismatch | before | collectives |", "| etha | abort | before | collectives |", "stands there twice"),
        ("| GroupMismatchError | GroupMismatchError |", "| GroupMismatchError | GroupOddError |", "no test knows"),
        ("| etha | mismatch | before | messages |", "| etha | mismatch | before | some |", "no test knows"),
        ("| etha | mismatch | before | messages |", "| baby | mismatch | before | messages |", "stands there twice"),
        ("| etha | wait timeout | waiting, moving |", "| etha | wait timeout | waiting |", "nothing is said"),
    ],
)
def test_a_table_that_no_test_knows_is_refused(old: str, new: str, complaint: str) -> None:
    text = DOCUMENT.read_text()
    assert old in text
    with pytest.raises(ValueError, match=complaint):
        parse(text.replace(old, new, 1))
