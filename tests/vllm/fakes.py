"""An engine without a model: it speaks vLLM's routes and receives what is sent, in a process that starts at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import requests
import torch
from torch.distributed.tensor.placement_types import Replicate

from tests.vllm.nursery import PATIENCE, Child

Tensors = Mapping[str, torch.Tensor]


def digest(tensors: Tensors) -> str:
    """Of all values, whatever dtype they came in."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].detach().float().numpy().tobytes())
    return found.hexdigest()


class Fake:
    """An engine that answers at ``url`` once it is made, and again on the same port after ``kill`` and ``start``."""

    def __init__(self, env: dict[str, str], log: Path) -> None:
        self._env, self._log, self._port = env, log, 0
        self.start()

    def start(self) -> None:
        self.child = Child(_serve, self._port, env=self._env, log=self._log)
        self._port = self.child.hear()
        self.url = f"http://127.0.0.1:{self._port}"

    def kill(self) -> None:
        self.child.kill()

    def state(self) -> dict[str, Any]:
        """``version``, ``digest`` of what it has, ``paused``, ``versions`` that it has had."""
        return dict(requests.get(f"{self.url}/state", timeout=PATIENCE).json())

    def fail(self, route: str) -> None:
        """Answer ``route`` with an error the next time."""
        requests.post(f"{self.url}/fail", json={"route": route}, timeout=PATIENCE).raise_for_status()

    def die(self, route: str, *, times: int = 1) -> None:
        """SIGKILL to itself when it is asked for ``route`` so often from now on."""
        body = {"route": route, "times": times}
        requests.post(f"{self.url}/die", json=body, timeout=PATIENCE).raise_for_status()

    def asked(self, route: str, times: int) -> None:
        """Wait until it has been asked for ``route`` so often."""
        body = {"route": route, "times": times}
        requests.post(f"{self.url}/asked", json=body, timeout=PATIENCE).raise_for_status()

    def answered(self, route: str, times: int) -> None:
        """Wait until it has done so often what ``route`` asks for."""
        body = {"route": route, "times": times}
        requests.post(f"{self.url}/answered", json=body, timeout=PATIENCE).raise_for_status()


class _Engine:
    """What is behind the routes; all of it on one event loop."""

    def __init__(self) -> None:
        from etha import AsyncTensorBusClient

        self._bus = AsyncTensorBusClient(timeout=PATIENCE)
        self._batch: Any = None
        self._meeting: asyncio.Task[Any] | None = None
        self._coming: asyncio.Task[Any] | None = None
        self._received: dict[str, torch.Tensor] = {}
        self._pair: Any = None
        self._plan: dict[str, Any] = {}
        self._live: dict[str, torch.Tensor] = {}
        self._verify = False
        self._versions: list[str] = []
        self._paused = False

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if self._pair is not None and not self._pair.lost.is_set():
            if init_info.get("again"):
                assert self._meeting is not None
                await asyncio.wait([self._meeting])  # the trainer may have registered before this end has
                assert self._batch is not None
                await self._batch.close()
                self._meeting = asyncio.get_running_loop().create_task(self._register(init_info))
            return
        if self._meeting is not None:
            self._meeting.cancel()
        self._meeting = asyncio.get_running_loop().create_task(self._meet(init_info))

    async def _meet(self, plan: dict[str, Any]) -> None:
        self._pair = await self._bus.init_pair(
            plan["pair"], plan["local_name"], plan["remote_name"], 1, (1,), [Replicate()], rank=0, give_up=True
        )
        announced = zip(plan["names"], plan["dtypes"], plan["shapes"], strict=True)
        self._received = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in announced}
        await self._register(plan)

    async def _register(self, plan: dict[str, Any]) -> None:
        self._batch = await self._bus.register_tensors(
            plan["batch"], self._received, pair_name=plan["pair"], direction="recv"
        )
        self._plan = plan

    async def start_weight_update(self) -> None:
        assert self._meeting is not None, "no trainer was met"
        await self._meeting
        self._cancel()
        work = self._bus.transfer(self._plan["batch"], "recv", timeout=self._plan["timeout"])
        self._coming = asyncio.get_running_loop().create_task(work)

    def _cancel(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.cancel()

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        if "claim" in update_info:
            return
        if "release" in update_info:
            self._paused = False
            return
        if update_info.get("cancel"):
            self._cancel()
            raise RuntimeError("cancelled")
        assert self._coming is not None, "no version is coming"
        await self._coming
        self._verify = bool(update_info.get("verify"))
        if self._verify and digest(self._live) != digest(self._received):
            raise RuntimeError("it has other weights")

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        if not self._verify:
            assert self._paused, "a version comes in while requests are served"
            self._live = {name: tensor.clone() for name, tensor in self._received.items()}
            self._versions.append(str(weight_version))

    async def pause(self) -> None:
        self._paused = True

    async def state(self) -> dict[str, Any]:
        version = self._versions[-1] if self._versions else None
        return {
            "version": version, "versions": self._versions, "paused": self._paused, "digest": digest(self._live),
        }  # fmt: skip


class _Counts:
    """How often each route was asked for and has answered, and which fails next."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: dict[str, int] = {}
        self._answered: dict[str, int] = {}
        self._failing: list[str] = []
        self._dying: tuple[str, int] | None = None

    def die(self, route: str, times: int) -> None:
        self._dying = (route, self._asked.get(route, 0) + times)

    def ask(self, route: str) -> None:
        with self._changed:
            self._asked[route] = self._asked.get(route, 0) + 1
            self._changed.notify_all()
            if (route, self._asked[route]) == self._dying:
                os.kill(os.getpid(), signal.SIGKILL)
            if route in self._failing:
                self._failing.remove(route)
                raise RuntimeError(f"{route} was to fail")

    def fail(self, route: str) -> None:
        self._failing.append(route)

    def asked(self, route: str, times: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._asked.get(route, 0) >= times, PATIENCE), self._asked

    def answer(self, route: str) -> None:
        with self._changed:
            self._answered[route] = self._answered.get(route, 0) + 1
            self._changed.notify_all()

    def answered(self, route: str, times: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._answered.get(route, 0) >= times, PATIENCE), self._answered


def _serve(pipe: Connection, port: int) -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def make() -> _Engine:
        return _Engine()

    engine = asyncio.run_coroutine_threadsafe(make(), loop).result()
    counts = _Counts()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null") or {}
            route = self.path.partition("?")[0].strip("/")
            try:
                found = self._do(route, body)
            except Exception as error:
                self._say(500, {"error": f"{type(error).__name__}: {error}"})
            else:
                self._say(200, found)

        def _do(self, route: str, body: dict[str, Any]) -> Any:
            if route in ("fail", "asked", "answered", "die"):
                return getattr(counts, route)(**body)
            what = body.get("update_info") or {}
            name = "release" if "release" in what else route
            counts.ask(name)
            work: Callable[..., Any] = getattr(engine, route)
            found = asyncio.run_coroutine_threadsafe(work(**body), loop).result()
            counts.answer(name)
            return found

        def _say(self, status: int, found: Any) -> None:
            text = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = _answer

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    pipe.send(server.server_address[1])
    server.serve_forever()
