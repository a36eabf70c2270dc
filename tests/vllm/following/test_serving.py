"""Engines feed each other: what an engine has received, its agent gives to the next one."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.vllm.engines import Server
from tests.vllm.following.test_following import until
from tests.vllm.publishers import PUBLICATION, Publisher

Checkpoints = Callable[[str, int], Path]
Fresh = Callable[[Path, int], tuple[list[list[int]], dict[str, str]]]
Env = dict[str, str]


def test_an_engine_of_other_parallelism_starts_from_one_that_runs_after_the_publisher_has_died(
    checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path
) -> None:
    models = [checkpoints("qwen3", seed) for seed in (0, 1)]
    right = {workers: [fresh(model, workers)[0] for model in models] for workers in (1, 2)}
    with ExitStack() as ends:

        def start(name: str, workers: int, core: int, **options: Any) -> Server:
            follows = {"publication": PUBLICATION, "subscriber": name, **options}
            server = Server(models[0], workers, env, logs / f"{name}.log", core=core, follows=follows)
            ends.callback(server.kill)
            return server.wait()

        def source(server: Server) -> list[str]:
            """Who has sent what each worker has started with."""
            log = server.child.log.read_text(errors="replace")
            return re.findall(r"rank \d+ of \d+ loads version first \(number \d+\) from (\S+):", log)

        publisher = Publisher(models[0], env, logs / "publisher.log")
        ends.callback(publisher.kill)
        publisher.put(models[0], "first")
        silent = start("silent", 1, 0, serve=False)
        assert source(silent) == ["trainer"]
        one = start("one", 1, 0)
        assert source(one) == ["trainer"], "an engine that serves nobody has fed it"
        silent.kill()
        publisher.kill()
        two = start("two", 2, 1)
        assert source(two) == ["one", "one"]
        assert one.answers() == right[1][0] and two.answers() == right[2][0]
        # What an engine of two workers holds is whole, too.
        one.kill()
        three = start("three", 1, 0)
        assert source(three) == ["two"] and three.answers() == right[1][0]
        again = Publisher(models[0], env, logs / "again.log")
        ends.callback(again.kill)
        again.put(models[1], "second")
        for server, workers in ((two, 2), (three, 1)):
            server.until_version("second")
            assert server.answers() == right[workers][1]
        until(
            lambda: again.subscribers() == {"two": ("current", "second"), "three": ("current", "second")},
            "who holds what",
        )
