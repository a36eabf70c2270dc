"""A service and messages for tests of the bus; as a program, an agent or a worker in a process of its own.

python -m tests.unit.bus.echo agent PATH            serves until its standard input ends
python -m tests.unit.bus.echo worker PATH MODE      connects, then does as MODE says
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etha.bus.codec import Request, message
from etha.bus.handshake import WorkerHello, WorkerWelcome
from etha.bus.process import start_time
from etha.bus.schema import StrictStruct, Text
from etha.bus.sessions import Peer
from etha.errors import ConfigError, RegistrationError, TransferAbortedError, Violation


@message("test_echo")
class Echo(StrictStruct, frozen=True, kw_only=True):
    text: Text


@message("test_hold")
class Hold(StrictStruct, frozen=True, kw_only=True):
    """Answered when it is cancelled, with an abort; with ``deaf``, never."""

    deaf: bool = False


@message("test_fail")
class Fail(StrictStruct, frozen=True, kw_only=True):
    how: Text


@message("test_feed")
class Feed(StrictStruct, frozen=True, kw_only=True):
    """``count`` pushes under this request, of ``size`` characters each, then its echo."""

    count: int
    size: int = 1
    id_zero: bool = False


class EchoService:
    """Writes down what happens in ``events``; ``changed`` is set with every entry."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.peers: list[Peer] = []
        self.requests: list[Request] = []
        self.fds: list[int] = []
        self.refuse: str | None = None
        self._changed = asyncio.Event()

    def note(self, *event: Any) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, *event: Any, within: float = 5.0) -> None:
        async with asyncio.timeout(within):
            while event not in self.events:
                self._changed.clear()
                await self._changed.wait()

    async def asked(self, count: int, within: float = 5.0) -> None:
        async with asyncio.timeout(within):
            while len(self.requests) < count:
                self._changed.clear()
                await self._changed.wait()

    def hello(self, peer: Peer, hello: WorkerHello) -> WorkerWelcome:
        if self.refuse is not None:
            raise ConfigError(self.refuse)
        self.peers.append(peer)
        self.note("hello", hello.pid)
        return WorkerWelcome(version="0", namespace=hello.namespace, device="cpu", redis=None, pid=os.getpid())

    def received(self, peer: Peer, request: Request) -> None:
        self.requests.append(request)
        match request.message:
            case Echo():
                peer.reply(request.id, request.message)
            case Feed(count=count, size=size, id_zero=id_zero):
                for _ in range(count):
                    peer.push(Echo(text="x" * size), 0 if id_zero else request.id)
                peer.reply(request.id, request.message)
            case Fail(how="typed"):
                found = Violation(code="dtype", name="w", side="a", rank=1, text="no")
                raise RegistrationError("refused", violations=[found])
            case Fail(how="foreign"):
                raise ZeroDivisionError("one over nothing")
            case Fail(how="unsendable"):
                peer.reply(request.id, Echo(text=object()))  # type: ignore[arg-type]
        self.note("received", type(request.message).__name__)

    def said(self, peer: Peer, message: Any) -> None:
        match message:
            case Echo(text=text):
                self.note("told", text)
            case Fail(how=how):
                self.note("told", how)
                raise RegistrationError("refused") if how == "typed" else ZeroDivisionError("one over nothing")

    def cancelled(self, peer: Peer, request_id: int) -> None:
        request = next(r for r in self.requests if r.id == request_id)
        self.note("cancelled", request_id)
        if not request.message.deaf:
            peer.fail(request_id, TransferAbortedError("cancelled as you wished"))

    def descriptors(self, peer: Peer, header: dict[str, Any], fds: list[int]) -> None:
        self.fds += fds
        self.note("descriptors", str(header))
        if header.get("refuse"):
            raise ConfigError("not these")
        if header.get("break"):
            raise ZeroDivisionError("not these either")

    def on_disconnected(self, peer: Peer, reason: str) -> None:
        self.note("gone", reason, peer.pid)


def hello(**changes: Any) -> WorkerHello:
    fields = {"version": "0", "namespace": "default", "redis": None, "host": "here"}
    return WorkerHello(**{**fields, "pid": os.getpid(), "start": start_time(), **changes})


def open_descriptors() -> list[str]:
    """What this process has open, as the kernel names it."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except FileNotFoundError:  # the one that lists the directory
            continue
    return sorted(found)


def texts(messages: Sequence[Any]) -> list[str]:
    return [m.text for m in messages]
