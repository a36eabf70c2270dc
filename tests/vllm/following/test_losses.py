"""An engine that follows a publication goes on serving, whatever becomes of its publisher, its agent and its Redis."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from etha import EthaError
from tests.unit.store.server import Server as Redis
from tests.unit.store.server import served
from tests.vllm.engines import Server
from tests.vllm.following.test_following import until
from tests.vllm.nursery import PATIENCE
from tests.vllm.publishers import PUBLICATION, Publisher
from tests.vllm.trainers import Trainer

Checkpoints = Callable[[str, int], Path]
Fresh = Callable[[Path, int], tuple[list[list[int]], dict[str, str]]]
Env = dict[str, str]
#: What an engine logs when it begins again.
AGAIN = "no version was received, and the engine goes on"


@pytest.fixture(scope="module")
def models(checkpoints: Checkpoints) -> list[Path]:
    return [checkpoints("qwen3", seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def right(models: list[Path], fresh: Fresh) -> list[list[list[int]]]:
    return [fresh(model, 1)[0] for model in models]


@pytest.fixture(scope="module")
def redis(room: Path) -> Iterator[Redis]:
    """A Redis that the tests here can stop."""
    directory = room / "redis"
    directory.mkdir()
    with served(directory) as found:
        yield found


@pytest.fixture(scope="module")
def own(env: Env, room: Path, redis: Redis) -> Env:
    """An agent of these tests' own, which meets others at that Redis."""
    directory = room / "own"
    directory.mkdir(mode=0o700)
    return {**env, "ETHA_RUNTIME_DIR": str(directory), "ETHA_REDIS_URL": redis.url}


@pytest.fixture(scope="module")
def follower(models: list[Path], own: Env, room: Path) -> Iterator[Server]:
    """An engine that follows, with the first version: ``models[0]``, "first"; its publisher is dead by then."""
    publisher = Publisher(models[0], own, room / "first.log")
    publisher.put(models[0], "first")
    follows = {"publication": PUBLICATION, "subscriber": "engine", "timeout": 60}
    server = Server(models[0], 1, own, room / "follower.log", follows=follows)
    try:
        server.wait()
        publisher.kill()
        yield server
    finally:
        server.kill()
        publisher.kill()


@pytest.fixture
def publisher(models: list[Path], own: Env, logs: Path, follower: Server) -> Iterator[Publisher]:
    """A launch of the publisher, after the one before was killed."""
    found = Publisher(models[0], own, logs / "publisher.log")
    yield found
    found.kill()


def warned(server: Server) -> int:
    return server.child.log.read_text(errors="replace").count(AGAIN)


def test_a_trainer_of_a_pair_is_refused(
    follower: Server, models: list[Path], own: Env, logs: Path, right: list[list[list[int]]]
) -> None:
    before = follower.version()
    trainer = Trainer((), models[0], follower.url, own, logs, timeout=20.0)
    try:
        with pytest.raises(EthaError, match=r"follows publication 'policy'.*let that trainer publish"):
            trainer.join()
    finally:
        trainer.kill()
    assert follower.version() == before
    assert follower.answers() in right


def test_a_paused_engine_takes_versions_and_stays_paused(
    follower: Server, publisher: Publisher, models: list[Path], right: list[list[list[int]]]
) -> None:
    requests.post(f"{follower.url}/pause?mode=wait", timeout=PATIENCE).raise_for_status()
    publisher.put(models[1], "while paused")
    follower.until_version("while paused")
    assert requests.get(f"{follower.url}/is_paused", timeout=PATIENCE).json() == {"is_paused": True}
    requests.post(f"{follower.url}/resume", timeout=PATIENCE).raise_for_status()
    assert follower.answers() == right[1]


def test_a_publisher_dies_and_others_follow_it_of_which_one_does_not_fit(
    follower: Server, models: list[Path], own: Env, logs: Path, right: list[list[list[int]]]
) -> None:
    first = Publisher(models[0], own, logs / "float32.log", dtype="float32")
    first.put(models[0], "of float32")
    follower.until_version("of float32")
    assert follower.answers() == right[0]
    first.kill()
    wrong = Publisher(models[0], own, logs / "wrong.log", cut="model.norm.weight")
    wrong.put(models[1], "wrong")
    why = "it does not fit, .*'model.norm.weight' has shape (127,) and had (128,)"
    pattern = re.compile(why.replace("(", r"\(").replace(")", r"\)"))
    until(lambda: pattern.search(follower.child.log.read_text(errors="replace")) is not None, why)
    assert follower.version() == "of float32"
    assert follower.answers() == right[0]
    wrong.kill()
    last = Publisher(models[0], own, logs / "last.log")
    try:
        last.put(models[1], "of the last one")
        follower.until_version("of the last one")
        assert follower.answers() == right[1]
    finally:
        last.kill()


def test_redis_is_away_for_a_while(
    follower: Server, publisher: Publisher, redis: Redis, models: list[Path], right: list[list[list[int]]]
) -> None:
    publisher.put(models[0], "before")
    follower.until_version("before")
    redis.signal(signal.SIGSTOP)
    try:
        assert follower.answers() == right[0]
        assert follower.version() == "before"
    finally:
        redis.signal(signal.SIGCONT)
    publisher.put(models[1], "after")
    follower.until_version("after")
    assert follower.answers() == right[1]


def test_the_agent_is_killed(
    follower: Server, models: list[Path], own: Env, logs: Path, right: list[list[list[int]]]
) -> None:
    before, warnings = follower.version(), warned(follower)
    os.kill(agent_of(own), signal.SIGKILL)
    until(lambda: warned(follower) > warnings, "it says that its agent is gone")
    assert follower.version() == before
    assert follower.answers() in right
    last = Publisher(models[0], own, logs / "publisher.log")
    try:
        last.put(models[0], "by another agent")
        follower.until_version("by another agent")
        assert follower.answers() == right[0]
    finally:
        last.kill()


def test_the_agent_and_all_that_redis_knew_are_lost(
    follower: Server, redis: Redis, models: list[Path], own: Env, logs: Path, right: list[list[list[int]]]
) -> None:
    """The numbers of versions begin again, below that of the engine's."""
    os.kill(agent_of(own), signal.SIGKILL)
    redis.restart()
    last = Publisher(models[0], own, logs / "publisher.log")
    try:
        assert last.put(models[1], "of another history") == 1
        follower.until_version("of another history")
        assert follower.answers() == right[1]
    finally:
        last.kill()


def agent_of(env: Env) -> int:
    """The process of the agent of a runtime directory."""
    found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _is_agent(path, env)]
    (pid,) = found
    return pid


def _is_agent(path: Path, env: Env) -> bool:
    try:
        command, environment = path.read_bytes(), (path.parent / "environ").read_bytes()
    except OSError:
        return False
    wanted = f"ETHA_RUNTIME_DIR={env['ETHA_RUNTIME_DIR']}".encode()
    return b"etha.agent" in command and re.search(re.escape(wanted) + rb"(\0|$)", environment) is not None
