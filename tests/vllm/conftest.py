"""Checkpoints, a runtime directory with its Redis and agents, and engines, each made once and ended at the end."""

from __future__ import annotations

import importlib.util
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

from etha.demo.launch import stop
from etha.demo.process import adopting
from tests.vllm import cpu_paths

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*/test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines take their time to start, and what others' packages warn of is theirs."""
    why = cpu_paths.missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            if why is not None:
                item.add_marker(pytest.mark.skip(why))
            item.add_marker(pytest.mark.timeout(900))
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def room() -> Iterator[Path]:
    """A directory with a short name for sockets, checkpoints and logs."""
    path = Path(tempfile.mkdtemp(prefix="etha-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def env(room: Path) -> Iterator[dict[str, str]]:
    """The environment of both sides: one agent and an embedded Redis of their own, which end with the tests."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.vllm.preload"])
    forkserver.ensure_running()
    resource_tracker.ensure_running()
    runtime = room / "run"
    runtime.mkdir(mode=0o700)
    with adopting() as before:
        yield {"ETHA_RUNTIME_DIR": str(runtime), "ETHA_NAMESPACE": "vllm", "ETHA_IDLE": "600"}
        stop(before)


@pytest.fixture(scope="session")
def checkpoints(room: Path, env: dict[str, str]) -> Callable[..., Path]:
    """kind, seed, what is not as usual -> the directory of a small model."""
    from tests.vllm.checkpoints import make

    @cache
    def of(kind: str, seed: int, **changes: Any) -> Path:
        name = "".join(f"-{value}" for value in changes.values())
        return make(kind, room / f"{kind}{seed}{name}", seed=seed, **changes).path

    return of


@pytest.fixture(scope="session")
def fresh(room: Path, env: dict[str, str]) -> Callable[[Path, int], tuple[list[list[int]], dict[str, str]]]:
    """model, workers -> greedy tokens and checksums of an engine that loaded it from its file."""
    from tests.vllm import engines

    @cache
    def of(model: Path, workers: int) -> tuple[list[list[int]], dict[str, str]]:
        return engines.fresh(model, workers, env, room / f"fresh-{model.name}-{workers}.log")

    return of


@pytest.fixture
def logs(room: Path, request: pytest.FixtureRequest) -> Path:
    """This test's own logs."""
    path = Path(tempfile.mkdtemp(dir=room))
    return path
