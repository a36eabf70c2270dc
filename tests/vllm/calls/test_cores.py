"""Where a worker of a CPU engine computes, and Etha's threads in it, which leave the core of its own thread."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import environment
from tests.vllm.nursery import Child

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")


def _cores(pipe: Connection, name: str) -> None:
    """Bound as OpenMP binds a worker of vLLM; where Etha's loop, its helper threads and an agent would run."""
    import torch

    from etha.integrations.vllm.engine.follow_options import FollowOptions
    from etha.integrations.vllm.engine.meeting import Meetings
    from etha.integrations.vllm.engine.subscriber import EngineSubscriber

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if name == "meets a trainer":
        owner: Any = Meetings(torch.device("cpu"), redis_url=None, namespace=None)
    else:
        owner = EngineSubscriber(FollowOptions(publication="policy"), name="one", rank=0, world=1)

    def child() -> set[int]:
        asked = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
        return {int(core) for core in subprocess.run(asked, capture_output=True, check=True).stdout.split()}

    async def found() -> list[set[int]]:
        mine = os.sched_getaffinity(0)
        return [mine, await asyncio.to_thread(os.sched_getaffinity, 0), await asyncio.to_thread(child)]

    own = os.sched_getaffinity(0)
    pipe.send([own, *owner._membership.loop_thread.call(found())])


@pytest.mark.parametrize("name", ["meets a trainer", "follows a publication"])
def test_etha_leaves_the_core_of_the_engine(name: str, env: dict[str, str], logs: Path) -> None:
    child = Child(_cores, name, env=env, log=logs / "worker.log")
    try:
        own, *etha = child.hear()
    finally:
        child.end()
    assert own == {min(os.sched_getaffinity(0))}, "the engine's thread stays where it is"
    assert etha == [os.sched_getaffinity(0)] * 3


def _threads(pipe: Connection) -> None:
    """How many threads compute here, and in a fork, as an engine of these tests is one."""
    import torch

    near, far = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(far, bytes([torch.get_num_threads()]))
        os._exit(0)
    os.waitpid(pid, 0)
    pipe.send((torch.get_num_threads(), os.read(near, 1)[0]))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_of_these_tests_has_one_thread_for_each_worker(workers: int, env: dict[str, str], logs: Path) -> None:
    """As vLLM's own workers; what is measured of engines, as by bench/joining.py, is else of threads in each other's
    way."""
    child = Child(_threads, env={**env, **environment(workers)}, log=logs / "engine.log")
    try:
        assert child.hear() == (1, 1)
    finally:
        child.end()
