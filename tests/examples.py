"""How many examples a property test draws: hypothesis's profile scales what the test asks for.

`make check` takes the profile "dev", a tenth of them; `make test` takes all of them.

    @settings(max_examples=examples(200), deadline=None)
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

#: What each profile makes of a hundred examples.
PROFILES = {"dev": 10, "suite": 100}


def register() -> None:
    """Make the profiles known; pytest loads the one that --hypothesis-profile names before it imports a test."""
    for name, hundred in PROFILES.items():
        settings.register_profile(name, max_examples=hundred, deadline=None)
    settings.load_profile("suite")


def parts(number: int, kept: int) -> list[Any]:
    """Numbers of equal parts of a random test; all but the first ``kept`` are left to `make test-more`."""
    return [pytest.param(part, marks=() if part < kept else pytest.mark.more) for part in range(number)]


def examples(number: int) -> int:
    """``number``, or the share of it that the loaded profile asks for; at least 5."""
    return min(number, max(5, number * settings().max_examples // PROFILES["suite"]))
