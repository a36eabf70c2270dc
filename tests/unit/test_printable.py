"""Text from elsewhere cannot make a terminal do anything, nor begin a line that looks like one of ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etha.events import line
from etha.observe.history import Happening
from etha.printable import in_all_texts, one_line, printable

NASTY = "v1\n2026-01-01 00:00:00 forged\x1b]0;title\x07\x1b[2J\x9b31m\u202eesrever\r\t"


def test_what_moves_the_cursor_or_turns_the_writing_is_written_out() -> None:
    assert printable("a\x1b[2Jb\u202ec\rd") == "a\\x1b[2Jb\\u202ec\\rd"
    assert printable("two\nlines\tof text: ホスト é") == "two\nlines\tof text: ホスト é"
    assert one_line("two\nlines\tof") == "two\\nlines\\tof"


@given(st.text())
def test_one_line_is_one_line_that_every_terminal_and_every_file_takes(text: str) -> None:
    shown = one_line(text)
    assert len(shown.splitlines()) <= 1
    assert not any(character < " " or "\x7f" <= character <= "\x9f" for character in shown)
    assert shown.encode().decode() == shown


def test_all_texts_of_plain_data_are_changed() -> None:
    plain = {"a\n": ["b\n", {"c": ("d\n", 1, None, 2.5)}], "e": True}
    assert in_all_texts(one_line, plain) == {"a\\n": ["b\\n", {"c": ["d\\n", 1, None, 2.5]}], "e": True}


@pytest.mark.parametrize("field", ["host", "device", "where", "text"])
def test_a_line_of_events_is_one_line_whoever_named_what(field: str) -> None:
    parts = {"host": "h", "device": "cpu", "where": "p/b", "text": "t", field: NASTY}
    shown = line(Happening(at=1.0, failed=True, details={}, **parts))  # type: ignore[arg-type]
    assert shown == one_line(shown) and "forged" in shown
