"""Every cell of the table in docs/recovery.md with real processes: SIGKILL in the suite, all in `make faults`."""

from __future__ import annotations

import pytest

from .conftest import Theatre
from .play import Play
from .table import DOCUMENT, Cell, cells, parse


def _parameters() -> list[object]:
    return [
        pytest.param(cell, id=str(cell), marks=() if cell.signal == "KILL" else pytest.mark.faults) for cell in cells()
    ]


@pytest.mark.parametrize("cell", _parameters())
def test_cell(theatre: Theatre, cell: Cell) -> None:
    cast = theatre.cast(cell.way)
    try:
        cast.prepare()
        Play(cast, cell).run()
    except BaseException:
        theatre.dismiss(cell.way)
        raise


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("| idle |", "| asleep |", "no test knows"),
        ("KILL, TERM", "KILL", "nothing is said"),
        ("PeerLostError died, aborted", "PeerLostError bored, aborted", "no test knows the ending"),
        ("local, tcp", "local, tcp, tcp", "stands there twice"),
    ],
)
def test_a_table_that_no_test_knows_is_refused(old: str, new: str, complaint: str) -> None:
    text = DOCUMENT.read_text()
    assert old in text
    with pytest.raises(ValueError, match=complaint):
        parse(text.replace(old, new, 1))
