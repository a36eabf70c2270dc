"""Sides on GPUs that are played: clients of this process and agents of their own, each with a FakeDriver.

    with Cards(runtime) as cards:
        cards.start(GPU0)
        client = cards.client("cuda:0")
        tensor = cards.tensor(torch.arange(4.0), GPU0)

Memory and events cross processes as CUDA IPC lets them; every broken contract fails the test, in whichever process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Self

import torch

import etha
from etha.agent.startup import Startup
from etha.config import Settings
from etha.cuda import select as cuda
from etha.cuda.driver import DeviceError
from tests.fakes.cuda import GPU0, GPU1, FakeDriver
from tests.flow.jobs import Job, Worker, tell
from tests.flow.sites import environment

UUIDS = (GPU0, GPU1)


def serve(device: str, uuids: Sequence[str], rest: Sequence[str], fail: str | None) -> list[str] | int:
    """In a process of its own: an agent of ``device`` until SIGTERM; what was broken or never given back.

    ``fail``: the driver's call of that name fails as the context is lost; the agent's status is returned.
    """
    from etha.agent.__main__ import main

    fake = FakeDriver(uuids)
    cuda.install_driver(fake)
    if fail is not None:
        fake.fail(fail, DeviceError("cudaErrorIllegalAddress", "by the test", sticky=True))
    read, write = os.pipe()
    tell("pid", os.getpid())

    def announce() -> None:
        with os.fdopen(read) as pipe:
            tell("ready", pipe.readline())

    thread = threading.Thread(target=announce, daemon=True)
    thread.start()
    code = main(["--device", device, "--ready-fd", str(write), *rest])
    thread.join()
    if fail is not None:
        fake.shut()
        return code
    try:
        fake.check()
    except AssertionError as error:
        return [f"{device}: {line}" for line in str(error).splitlines()] + [f"status {code}"]
    return [] if code == 0 else [f"{device}: status {code}"]


def serve_hosts(places: Sequence[str], hosts: Sequence[str], uuids: Sequence[str], redis: str) -> list[str]:
    """In a process of its own: agents of one card each on "hosts" with an NCCL between them, until SIGTERM."""
    from etha.agent import __main__ as daemon
    from etha.agent.runtime import device
    from tests.fakes.nccl import World

    # One process is one driver and one NCCL elsewhere; here each agent's task has its own.
    world, mine = World(), ContextVar[FakeDriver]("mine")
    fakes = [FakeDriver((uuid,)) for uuid in uuids]
    daemon.driver = mine.get  # type: ignore[assignment, attr-defined]
    device.nccl = lambda: world.join(mine.get().devices()[0].uuid, mine.get())  # type: ignore[assignment, attr-defined]

    async def both() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with asyncio.TaskGroup() as group:
            for i, place in enumerate(places):
                settings = Settings.from_env({"ETHA_RUNTIME_DIR": place, "ETHA_HOST_ID": hosts[i]})
                read, write = os.pipe()
                mine.set(fakes[i])
                group.create_task(
                    daemon.serve(settings, device="cuda:0", redis_url=redis, startup=Startup(write), stop=stop)
                )
                assert await asyncio.to_thread(os.read, read, 100) == b"ready\n"
                os.close(read)
            tell("ready", "ready\n")

    asyncio.run(both())
    found = []
    for check in (*(fake.check for fake in fakes), world.check):
        try:
            check()
        except AssertionError as error:
            found += str(error).splitlines()
    return found


class Cards:
    """See the module's head. ``env``: of agents and clients, besides the runtime directory."""

    def __init__(self, runtime: Path, uuids: Sequence[str] = UUIDS) -> None:
        self.runtime, self.uuids = runtime, uuids
        self.driver = FakeDriver(uuids)
        self._agents: dict[str, Worker] = {}
        self._job = Job({})

    def __enter__(self) -> Self:
        cuda.install_driver(self.driver)
        self._job.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            broken = [line for name in list(self._agents) for line in self.stop(name)]
            if error[0] is None:
                assert not broken, "\n".join(broken)
                gc.collect()  # the traceback of an expected error keeps what its test had registered
                self.driver.check()
        finally:
            self.driver.shut()
            cuda.install_driver(None)
            self._job.__exit__(*error)

    def env(self, **more: str) -> dict[str, str]:
        """What the environment of everybody here says."""
        return {"ETHA_RUNTIME_DIR": str(self.runtime), "ETHA_IDLE": "300", **more}

    def start(self, device: str, *rest: str, fail: str | None = None, **env: str) -> int:
        """An agent of ``device``; returns once it listens: its pid. ``fail`` as of ``serve``."""
        worker = self._job.start(serve, device, self.uuids, rest, fail, env=self.env(**env))
        self._agents[device] = worker
        assert worker.expect("ready") == "ready\n"
        pid = worker.expect("pid")
        assert isinstance(pid, int)
        return pid

    def start_hosts(self, redis: str, hosts: Sequence[str] | None = None) -> None:
        """Agents of all cards, each on a "host" of its own or as named, with NCCL: ``on_host`` has their clients."""
        places = [self.place(i) for i in range(len(self.uuids))]
        self._hosts = hosts or [f"host {i}" for i in range(len(self.uuids))]
        worker = self._job.start(serve_hosts, places, self._hosts, self.uuids, redis)
        self._agents["hosts"] = worker
        assert worker.expect("ready") == "ready\n"
        self._redis = redis

    def on_host(self, number: int) -> etha.AsyncTensorBusClient:
        """A client of card ``number``'s agent of ``start_hosts``."""
        env = {"ETHA_RUNTIME_DIR": self.place(number), "ETHA_HOST_ID": self._hosts[number]}
        return self.client(f"cuda:{number}", ETHA_REDIS_URL=self._redis, **env)

    def place(self, number: int) -> str:
        """The runtime directory of a "host" of ``start_hosts``."""
        return str(self.runtime / f"h{number}")

    def stop(self, name: str) -> list[str]:
        """End an agent as SIGTERM does; what it had broken."""
        worker = self._agents.pop(name)
        os.kill(worker.pid, signal.SIGTERM)
        found: list[str] = worker.result()
        return found

    def ended(self, name: str) -> int:
        """The status of an agent that ends by itself."""
        status: int = self._agents.pop(name).result()
        return status

    def worker(self, function: Callable[[Sequence[str]], None]) -> Worker:
        """A worker of its own process, which installs a driver with the uuids that it is given."""
        return self._job.start(function, self.uuids, env=self.env())

    def forget(self, name: str) -> None:
        """The agent was killed."""
        self._agents.pop(name)

    def client(self, device: str, **env: str) -> etha.AsyncTensorBusClient:
        """A client in this process, of the agent of ``device``, which runs already."""
        with environment(self.env(**env)):
            return etha.AsyncTensorBusClient(device=device, autostart=False, timeout=20)

    def tensor(self, like: torch.Tensor, uuid: str = GPU0, *, exportable: bool = True) -> torch.Tensor:
        """A copy of a CPU tensor on a card, with the same strides where they are dense."""
        if like.is_contiguous() or not like.numel():
            made = self.driver.empty(uuid, tuple(like.shape), like.dtype, exportable=exportable)
        else:
            whole = self.driver.empty(uuid, (like.untyped_storage().nbytes(),), torch.uint8, exportable=exportable)
            made = whole.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())
        made.copy_(like)
        return made
