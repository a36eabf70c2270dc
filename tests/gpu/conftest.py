"""A private runtime directory, and the company of a stage: two trainers and two inference workers on one card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.flow.sites import private_directory

from .company import Companies


@pytest.fixture
def directory() -> Iterator[Path]:
    with private_directory() as found:
        yield found


@pytest.fixture(scope="module")
def companies() -> Iterator[Companies]:
    with ExitStack() as stack:
        yield Companies(stack)
