"""Hosts of a way that each file of this folder defines as WAY; the agents of ``rough`` are killed."""

from __future__ import annotations

import pytest

from tests.flow.conftest import forget_environment
from tests.flow.sites import Commons, Site


@pytest.fixture
def site(request: pytest.FixtureRequest, commons: Commons, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Hosts that all tests of a file share."""
    return _hosts(request, commons, monkeypatch, "")


@pytest.fixture
def rough(request: pytest.FixtureRequest, commons: Commons, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The same, other ones."""
    return _hosts(request, commons, monkeypatch, "rough")


def _hosts(request: pytest.FixtureRequest, commons: Commons, monkeypatch: pytest.MonkeyPatch, name: str) -> Site:
    forget_environment(monkeypatch)
    monkeypatch.setenv("ETHA_IDLE", "300")
    way = request.module.WAY
    return commons.site(way, name) if name else commons.site(way)
