"""Options of all tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--ways``: see tests/flow/ways.py."""
    parser.addoption(
        "--ways",
        default="local,tcp,host,three",
        help="how the sides of flow tests lie: local (one agent), tcp (two hosts), host (two agents of one host), "
        "three (three hosts, for the tests that ask for it)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ways(*names, reason=None): run in these ways only; without it in local, tcp and host"
    )
