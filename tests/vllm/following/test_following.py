"""Engines that follow a publication while they are asked: they answer with the version that they report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import requests

from tests.vllm.engines import PROMPTS, TOKENS, Server
from tests.vllm.nursery import PATIENCE
from tests.vllm.publishers import PUBLICATION, Publisher
from tests.vllm.users import question

Checkpoints = Callable[[str, int], Path]
Fresh = Callable[[Path, int], tuple[list[list[int]], dict[str, str]]]
Env = dict[str, str]
#: Versions before an engine is killed, while it is away, and after it is back: 20 with the one that they start with.
BEFORE, AWAY, AFTER = 11, 2, 6


class Witness:
    """Asks an engine all the time, and compares each answer before and after which the engine reports one version.

    ``tokens``: for each version's name those of a fresh engine, by prompt. ``found``: how many were compared.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.tokens: dict[str, list[list[int]]] = {}
        self.found: dict[str, int] = {}
        self.wrong: list[str] = []
        self._ended, self._changed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def wait(self, version: str) -> None:
        """Until an answer of ``version`` has been compared."""
        with self._changed:
            assert self._changed.wait_for(lambda: version in self.found or self.wrong, PATIENCE), (
                f"{self.found} and not {version}; log:\n{self._server.child.tail()}"
            )
            assert not self.wrong, self.wrong

    def end(self) -> None:
        self._ended.set()
        self._thread.join(PATIENCE)

    def _ask(self) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            try:
                before = self._server.version()
                body = question(PROMPTS[number % len(PROMPTS)], TOKENS)
                answer = requests.post(f"{self._server.url}/v1/completions", json=body, timeout=PATIENCE)
                answer.raise_for_status()
                tokens = answer.json()["choices"][0]["token_ids"]
                after = self._server.version()
            except requests.RequestException as error:
                if not self._ended.is_set():
                    self._say(None, f"{type(error).__name__}: {error}")
                return
            if before == after:
                right = self.tokens[before][number % len(PROMPTS)]
                self._say(before, "" if tokens == right else f"version {before}: {tokens} and not {right}")

    def _say(self, version: str | None, wrong: str) -> None:
        with self._changed:
            if version is not None:
                self.found[version] = self.found.get(version, 0) + 1
            if wrong:
                self.wrong.append(wrong)
            self._changed.notify_all()


@contextmanager
def witness(server: Server, tokens: dict[str, list[list[int]]]) -> Iterator[Witness]:
    found = Witness(server)
    found.tokens = tokens
    try:
        yield found
    finally:
        found.end()


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_engines_of_different_parallelism_follow_while_they_are_asked_and_one_is_killed(
    checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path, ends: ExitStack
) -> None:
    models = [checkpoints("qwen3", seed) for seed in (0, 1)]
    right = {workers: [fresh(model, workers)[0] for model in models] for workers in (1, 2)}
    publisher = Publisher(models[0], env, logs / "publisher.log")
    ends.callback(publisher.kill)
    names: dict[int, dict[str, list[list[int]]]] = {1: {}, 2: {}}
    number = 0

    def put() -> str:
        nonlocal number
        number += 1
        for workers in names:
            names[workers][f"v{number}"] = right[workers][number % 2]
        publisher.put(models[number % 2], f"v{number}")
        return f"v{number}"

    def start(workers: int, pause: str) -> Server:
        follows = {"publication": PUBLICATION, "subscriber": f"engine-{workers}", "pause": pause}
        log = logs / f"server{workers}-{number}.log"
        server = Server(models[0], workers, env, log, core=workers - 1, follows=follows)
        ends.callback(server.kill)
        return server

    last = put()
    one, two = start(1, "wait"), start(2, "keep")
    assert (one.wait().version(), two.wait().version()) == (last, last), "before it answers"
    with witness(one, names[1]) as of_one:
        with witness(two, names[2]) as of_two:
            for _ in range(BEFORE):
                last = put()
                of_one.wait(last)
                of_two.wait(last)
            of_two.end()
        two.kill()
        for _ in range(AWAY):
            last = put()
            of_one.wait(last)
        two = start(2, "keep").wait()
        assert two.version() == last
        with witness(two, names[2]) as of_two:
            of_two.wait(last)
            for _ in range(AFTER):
                last = put()
                of_one.wait(last)
                of_two.wait(last)
    until(lambda: publisher.subscribers() == {f"engine-{n}": ("current", last) for n in (1, 2)}, "who holds what")
    print(f"{number} versions, answers compared: {of_one.found} and {of_two.found}")


def until(condition: Callable[[], bool], what: str) -> None:
    """Redis is told of a hop's end behind it, and tells nobody who has not asked."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)
