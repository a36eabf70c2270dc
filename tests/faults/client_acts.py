"""What the two workers of a cell of the clients' table do: one call, the event at its moment, how it ended.

The worker whose client the event meets is the receiver. It tells the test when its call is open, and strikes where the
test says so, or by itself where only it can know the moment (in a callback, while it copies).
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import Replicate

import etha
from etha.client.memory.cpu import CpuMemory
from etha.errors import EthaError
from tests.flow.jobs import tell, wait_for

OLD, NEW = 77.0, 1.0
#: Elements; the large one is turned and cast on its way, so that it takes its time.
SMALL, LARGE = (64,), (4096, 4096)
#: Deadline of the calls of a cell, and of the ones that only set it up.
DEADLINE, PATIENCE = 15.0, 30.0
RAISED: dict[str, type[BaseException]] = {
    "Exception": ZeroDivisionError,
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
}


def ending(error: BaseException | None) -> str:
    """How a call ended, as the table has it."""
    if error is None:
        return "result"
    name = "CancelledError" if isinstance(error, asyncio.CancelledError) else type(error).__name__
    said = [getattr(error, "reason", None), getattr(error, "outcome", None)]
    return " ".join([name, ", ".join(str(word) for word in said if word)]).strip()


def holds(tensor: torch.Tensor) -> str:
    """What a target holds."""
    return "new" if bool((tensor == NEW).all()) else "old" if bool((tensor == OLD).all()) else "torn"


# ---- the sender ---------------------------------------------------------------------------------


def send(me: SimpleNamespace, pair: str, moment: str, ends_the_client: bool) -> str:
    """The other side: meets, registers, sends at the moment's time; how that ended."""
    with etha.TensorBusClient(timeout=PATIENCE) as client:
        bond = client.init_pair(pair, "trainer", "inference", 1, (1,), [Replicate()], rank=0)
        tensor = torch.full(LARGE, NEW, dtype=torch.float64).T if moment == "moving" else torch.full(SMALL, NEW)
        handle = client.register_tensors("b", {"w": tensor}, pair_name=pair)
        tell("registered")
        if moment in ("idle", "READY"):
            wait_for("call")
            if ends_the_client:
                assert bond.lost.wait(PATIENCE), "nobody has told that the pair is lost"
        try:
            handle.transfer("send", timeout=DEADLINE)
        except EthaError as error:
            return ending(error)
        return "result"


# ---- the receiver, as both kinds of client ------------------------------------------------------


class Scene:
    """The moment of a call, and the event that comes at it. ``strike`` is set when it is time."""

    def __init__(self, event: str, moment: str) -> None:
        self.event, self.moment = event, moment
        self.here, self.go = threading.Event(), threading.Event()
        self.target = torch.full(LARGE if moment == "moving" else SMALL, OLD)
        self.atomic = True

    @property
    def raises(self) -> BaseException | None:
        words = self.event.split()
        return RAISED[words[-1]]("by the test") if words[0] in ("on_commit", "progress") else None

    def progress(self, done: int, total: int) -> None:
        if self.event.startswith("progress"):
            error = self.raises
            assert error is not None
            raise error
        if done < total:
            self.here.set()

    def plain(self) -> None:
        if (error := self.raises) is not None:
            raise error
        self.here.set()
        assert self.go.wait(PATIENCE)

    async def coroutine(self) -> None:
        if (error := self.raises) is not None:
            raise error
        self.here.set()
        await asyncio.to_thread(self.go.wait, PATIENCE)

    def options(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = {"timeout": DEADLINE}
        if self.moment == "on_commit":
            found["on_commit"] = self.plain if kind == "blocking" else self.coroutine
        if self.moment == "moving":
            found["progress"] = self.progress
        return found

    def wait(self) -> None:
        """Until it is time to strike."""
        if self.moment in ("moving", "on_commit", "copying"):
            assert self.here.wait(PATIENCE), f"the call has not come to {self.moment}"
        else:
            wait_for("strike")

    def gate(self) -> Any:
        """Where copies into the tensors are the moment, they wait for the event to have begun."""
        if self.moment != "copying":
            return mock.patch.object(CpuMemory, "lends", False)
        copy, scene = CpuMemory.copy, self

        def gated(home: CpuMemory, pairs: Any, *, live: bool) -> None:
            scene.here.set()
            assert scene.go.wait(PATIENCE)
            copy(home, pairs, live=live)

        return mock.patch.multiple(CpuMemory, copy=gated, quick=lambda home, nbytes: False)


def _thread(function: Callable[[], Any]) -> Future[Any]:
    """A call on a thread of its own; a daemon, which the end of the program does not wait for."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def receive(me: SimpleNamespace, kind: str, event: str, moment: str, pair: str) -> tuple[str, str, float]:
    """(how the call ended, what the target holds then, seconds from the event)."""
    scene = Scene(event, moment)
    with scene.gate():
        if kind == "blocking":
            return _blocking(scene, pair)
        try:
            asyncio.run(_outer(scene, pair))
        except _LoopEnds:
            gc.collect()
        return _said(scene)


def _said(scene: Scene) -> tuple[str, str, float]:
    ended, at, struck = scene.ended  # type: ignore[attr-defined]
    return ended, holds(scene.target), at - struck


def _blocking(scene: Scene, pair: str) -> tuple[str, str, float]:
    client = etha.TensorBusClient(timeout=PATIENCE)
    arguments = (pair, "inference", "trainer", 1, (1,), [Replicate()])
    call: Future[Any] | None = None
    handle: Any = None
    if scene.moment == "rendezvous":
        call = _thread(lambda: client.init_pair(*arguments, rank=0, timeout=DEADLINE))
    else:
        client.init_pair(*arguments, rank=0)
        handle = client.register_tensors("b", {"w": scene.target}, pair_name=pair, atomic=scene.atomic)
        if scene.moment != "idle":
            options = scene.options("blocking")
            if scene.event in ("drop", "exit"):
                waiting = handle.transfer("recv", blocking=False, **options)
                call = _thread(waiting.result)
            else:
                call = _thread(lambda: handle.transfer("recv", **options))
    tell("open")
    if scene.raises is None:
        scene.wait()
    struck = time.monotonic()
    match scene.event:
        case "close client":
            closing = _thread(client.close)
        case "close handle":
            closing = _thread(handle.close)
        case "drop":
            client = handle = None  # type: ignore[assignment]
            gc.collect()
            closing = _thread(lambda: None)
        case "exit":
            tell("exits")
            sys.exit(3)
        case _:
            closing = _thread(lambda: None)
    if scene.event == "drop":
        tell("dropped")
    scene.go.set()
    closing.result(PATIENCE)
    tell("struck")
    held = holds(scene.target)
    error = call.exception(PATIENCE) if call is not None else None
    at = time.monotonic()
    if scene.event.startswith("close") and scene.moment != "moving":
        assert held == holds(scene.target), "written after close() had returned"
    if scene.raises is not None:
        assert handle.version is None and client.status(), "the client lives on"
    if scene.event == "close handle":
        wait_for("over")
    if client is not None:
        client.close()
    return "none" if call is None else ending(error), holds(scene.target), at - struck


class _LoopEnds(Exception):
    """``main`` ends with this, and with it the event loop."""


async def _outer(scene: Scene, pair: str) -> None:
    scene.ended = ("none", 0.0, 0.0)  # type: ignore[attr-defined]
    client = etha.AsyncTensorBusClient(timeout=PATIENCE)
    handle: Any = None
    arguments = (pair, "inference", "trainer", 1, (1,), [Replicate()])
    call: asyncio.Task[Any] | None = None
    if scene.moment == "rendezvous":
        call = asyncio.ensure_future(client.init_pair(*arguments, rank=0, timeout=DEADLINE))
    else:
        await client.init_pair(*arguments, rank=0)
        handle = await client.register_tensors("b", {"w": scene.target}, pair_name=pair, atomic=scene.atomic)
        if scene.moment != "idle":
            call = asyncio.ensure_future(_kept(handle.transfer("recv", **scene.options("async"))))
    struck = time.monotonic()

    def ended(task: asyncio.Task[Any]) -> None:
        error: BaseException | None = asyncio.CancelledError() if task.cancelled() else task.exception()
        error = error or (task.result() if isinstance(task.result(), BaseException) else None)
        scene.ended = (ending(error), time.monotonic(), struck)  # type: ignore[attr-defined]

    if call is not None:
        call.add_done_callback(ended)
    tell("open")
    if scene.raises is None:
        await asyncio.to_thread(scene.wait)
    struck = time.monotonic()
    match scene.event:
        case "close client":
            closing = asyncio.ensure_future(client.close())
        case "close handle":
            closing = asyncio.ensure_future(handle.close())
        case "loop ends":
            scene.go.set()
            raise _LoopEnds
        case "exit":
            scene.go.set()
            tell("exits")
            sys.exit(3)
        case _:
            closing = asyncio.ensure_future(asyncio.sleep(0))
    if scene.event == "drop":
        client = handle = None  # type: ignore[assignment]
        gc.collect()
        tell("dropped")
    scene.go.set()
    await closing
    tell("struck")
    held = holds(scene.target)
    if call is not None:
        await asyncio.wait({call})
    if scene.event.startswith("close"):
        assert held == holds(scene.target), "written after close() had returned"
    if scene.raises is not None:
        assert await client.status(), "the client lives on"
    if scene.event in ("drop", "close handle"):
        await asyncio.to_thread(wait_for, "over")  # the loop has to live on for a client that is dropped
    if scene.event != "drop" and client is not None:
        await client.close()


async def _kept(work: Any) -> Any:
    """SystemExit and KeyboardInterrupt of a task end the loop; here only the call's way to end is of interest."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        return error
