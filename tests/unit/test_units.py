"""How numbers are written for people."""

from __future__ import annotations

import pytest

from etha.units import counted, seconds, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (1_610_612_736, "1.61 GB"), (5e15, "5e+03 TB")],
)
def test_bytes_are_in_powers_of_ten(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


def test_counts_have_separators_and_a_plural() -> None:
    assert (counted(1, "link"), counted(67456, "link"), counted(2, "class")) == ("1 link", "67,456 links", "2 classes")


def test_seconds_have_a_fitting_unit() -> None:
    assert [seconds(value) for value in (2.5, 0.0042, 3e-5)] == ["2.5 s", "4.2 ms", "30 us"]
    assert [seconds(value) for value in (0.9996, 0.0009996)] == ["1 s", "1 ms"]
