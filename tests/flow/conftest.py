"""Where flow tests run: at the common site of their way, or at one of their own that ends with them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.flow import nursery
from tests.flow.jobs import Job
from tests.flow.puppets import Stage
from tests.flow.sites import Commons, Site, private_directory
from tests.flow.team import Team
from tests.flow.ways import WAYS, Way


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test whose fixtures depend on ``way`` runs once in each: in `make test` in the first of them, or in all of
    them where the way is what the test is about.
    """
    if "way" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("ways")
        ways = [Way(name) for name in marker.args] if marker else list(WAYS)
        kept = ways if marker and marker.kwargs.get("each") else ways[:1]
        found = [pytest.param(way, id=str(way), marks=() if way in kept else pytest.mark.more) for way in ways]
        metafunc.parametrize("way", found)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``--ways``: the others are left out."""
    chosen = [Way(name) for name in config.getoption("ways").split(",")]
    out = [item for item in items if isinstance(item, pytest.Function) and _way(item) not in (None, *chosen)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def _way(item: pytest.Function) -> Way | None:
    found: Way | None = getattr(item, "callspec", None) and item.callspec.params.get("way")
    return found


def forget_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller of pytest has set must not reach the tests."""
    for name in list(os.environ):
        if name.startswith("ETHA_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def agents(request: pytest.FixtureRequest) -> Iterator[None]:
    """Agents are forked from a process that has torch loaded; ``--cold``: each loads it anew."""
    if request.config.getoption("cold") or nursery.address() is not None:
        yield
    else:
        nursery.open_nursery()
        yield
        nursery.close_nursery()


@pytest.fixture
def cold() -> Iterator[None]:
    """Agents of this test start as a user's do."""
    with nursery.cold():
        yield


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private ETHA_RUNTIME_DIR for one test, also in this process's environment."""
    forget_environment(monkeypatch)
    with private_directory() as directory:
        monkeypatch.setenv("ETHA_RUNTIME_DIR", str(directory))
        yield directory


@pytest.fixture(scope="session")
def commons() -> Iterator[Commons]:
    """What tests share, made when first asked for."""
    with ExitStack() as stack:
        yield Commons(stack)


@pytest.fixture
def site(commons: Commons, way: Way, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The common site of this way: such tests use pair names of their own."""
    forget_environment(monkeypatch)
    monkeypatch.setenv("ETHA_IDLE", "300")  # an agent takes it from whom its first client is in
    if way is Way.FAR:
        monkeypatch.setenv(nursery.MESH, "1")
    return commons.site(way)


@pytest.fixture
def served(commons: Commons, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The common site of one agent, which is also in this process's environment."""
    forget_environment(monkeypatch)
    site = commons.site(Way.LOCAL)
    for name, value in site.at("a").items():
        monkeypatch.setenv(name, value)
    return site


@pytest.fixture
def rough(commons: Commons, way: Way, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site whose agents are killed, one test after the other: the next client starts new ones."""
    forget_environment(monkeypatch)
    monkeypatch.setenv("ETHA_IDLE", "300")
    if way is Way.FAR:
        monkeypatch.setenv(nursery.MESH, "1")
    return commons.site(way, "rough")


@pytest.fixture
def team(commons: Commons, way: Way) -> Team:
    """Two trainers and two inference workers, for every test that only needs batches of its own."""
    return commons.team(way)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> str:
    """A pair name of this test's own; tests of two files may have one name, and one site, and one that has failed may
    run again there."""
    name = re.sub(r"[^A-Za-z0-9._-]", ".", f"{request.path.stem}.{request.node.name}")[-100:]
    runs = getattr(request.node, "execution_count", 1)
    return name if runs == 1 else f"{name}.{runs}"


@pytest.fixture
def guests(site: Site) -> Iterator[Job]:
    """Start workers at the common site."""
    with Job(site.env) as job:
        yield job


@pytest.fixture
def stage(guests: Job, pair: str) -> Stage:
    """Puppets that meet as a pair of this test's own name, at the common site."""
    return Stage(guests, pair)


@pytest.fixture
def rough_stage(rough: Site, pair: str) -> Iterator[Stage]:
    """Puppets that meet where agents are killed."""
    with Job(rough.env) as job:
        yield Stage(job, pair)
