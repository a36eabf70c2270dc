"""Every cell of the clients' table in docs/recovery.md: half of it in the suite, all in `make faults`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.flow.sites import environment
from tests.seconds import within

from .clients import ClientCell, Company, cells, matches, parse
from .table import DOCUMENT


class Companies:
    """The company that plays; a test that fails gets the next one a new company."""

    def __init__(self) -> None:
        self._company: Company | None = None

    def get(self) -> Company:
        if self._company is None:
            self._company = Company()
        return self._company

    def dismiss(self) -> None:
        """Nobody knows in what state it is."""
        company, self._company = self._company, None
        if company is not None:
            company.close()


@pytest.fixture(scope="module")
def companies() -> Iterator[Companies]:
    with environment({}):
        found = Companies()
        try:
            yield found
        finally:
            found.dismiss()


def _parameters() -> list[object]:
    return [pytest.param(cell, id=str(cell), marks=() if cell.in_suite else pytest.mark.faults) for cell in cells()]


@pytest.mark.parametrize("cell", _parameters())
def test_cell(companies: Companies, cell: ClientCell) -> None:
    try:
        ended = companies.get().play(cell.client, cell.event, cell.moment)
        assert matches(cell.own, ended.own), ended
        assert matches(cell.target, ended.target), ended
        assert matches(cell.other, ended.other), ended
        assert ended.seconds < within(cell.within), ended
    except BaseException:
        companies.dismiss()
        raise


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("| blocking, async | close client |", "| blocking, async | close door |", "no test knows"),
        ("| blocking, async | close client |", "| blocking | close client |", "nothing is said"),
    ],
)
def test_a_table_that_no_test_knows_is_refused(old: str, new: str, complaint: str) -> None:
    text = DOCUMENT.read_text()
    assert old in text
    with pytest.raises(ValueError, match=complaint):
        parse(text.replace(old, new, 1))
