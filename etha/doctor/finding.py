"""Finding: the result of one check. A check returns what it found, or raises Failing with the cure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from etha.errors import EthaError


class Failing(Exception):
    """Something does not work. ``mend`` says what to do about it."""

    def __init__(self, message: str, mend: str) -> None:
        super().__init__(message)
        self.mend = mend


class Noteworthy(Exception):
    """Works, but for this host alone or slower than it could. ``mend`` says what to do about that."""

    def __init__(self, message: str, mend: str) -> None:
        super().__init__(message)
        self.mend = mend


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check. ``mend`` is empty if it passed without a note."""

    name: str
    ok: bool
    text: str
    mend: str = ""

    @property
    def verdict(self) -> str:
        """ "ok", "note" (it works, but not for other hosts, or slowly) or "fails"."""
        return "fails" if not self.ok else "note" if self.mend else "ok"


def found(name: str, check: Callable[[], str]) -> Finding:
    """Run one check. Errors of Etha and of the kernel become its finding."""
    try:
        return Finding(name=name, ok=True, text=check())
    except Noteworthy as note:
        return Finding(name=name, ok=True, text=str(note), mend=note.mend)
    except Failing as failing:
        return Finding(name=name, ok=False, text=str(failing), mend=failing.mend)
    except EthaError as error:
        return Finding(name=name, ok=False, text=error.message, mend="change the setting that the table names")
    except OSError as error:
        return Finding(
            name=name, ok=False, text=str(error), mend="the kernel or the container refuses this; see the text"
        )
