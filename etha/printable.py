"""Text from elsewhere, made safe to show: names, versions and reasons may hold what makes a terminal do something.

A version label of another job could else clear the screen, set the window's title, or begin a line that looks like one
of ours. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

#: Control characters but tab and newline, ends of lines that editors know but ``split`` does not, marks that turn the
#: direction of writing round, and halves of surrogate pairs, which no UTF-8 holds.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text: str) -> str:
    """``text`` with control characters written out, except for tabs and newlines: ESC becomes ``\\x1b``."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """``printable``, with tabs and newlines written out, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def in_all_texts(change: Callable[[str], str], value: Any) -> Any:
    """Plain data (dicts, lists, tuples) with ``change`` of each text in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {in_all_texts(change, key): in_all_texts(change, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [in_all_texts(change, inner) for inner in value]
    return value
