"""A namespace of hubs for tests: on this loop, as a process of its own, and strangers to it."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import zmq

from etha.peer.hub import Hub
from etha.peer.keys import Keys
from etha.peer.link import State
from etha.peer.messages import Commit, Done, Message
from etha.peer.wire import Scope

SCOPE = Scope(pair="weights", epoch=1, batch="step", generation=1)
BEAT = 0.1


class Namespace:
    """What agents have published: public key -> agent id. ``late`` is seen only after a refresh."""

    def __init__(self) -> None:
        self.published: dict[str, str] = {}
        self.late: dict[str, str] = {}
        self.refreshes = 0

    async def refresh(self) -> None:
        self.refreshes += 1
        self.published |= self.late


class Agent:
    """A hub that writes down what it hears in ``events``."""

    def __init__(self, name: str, namespace: Namespace, *, beat: float = BEAT, listen: str | None = None) -> None:
        self.name, self.keys = name, Keys.fresh()
        self.events: list[tuple[Any, ...]] = []
        self._changed = asyncio.Event()
        self.namespace = namespace
        self.hub = Hub(
            listen,
            self.keys,
            known=namespace.published.get,
            refresh=namespace.refresh,
            on_message=self.message,
            on_agent_lost=lambda agent, text: self.note("gone", agent, text),
            beat=beat,
        )

    def message(self, agent: str, scope: Scope, message: Message) -> None:
        self.note(agent, scope, message)

    def note(self, *event: Any) -> None:
        self.events.append(event)
        self._changed.set()

    async def heard(self, count: int, within: float = 30.0) -> list[tuple[Any, ...]]:
        """The first ``count`` events, once there are so many."""
        async with asyncio.timeout(within):
            while len(self.events) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.events[:count]

    def is_open(self, agent: str) -> bool:
        """Whether the hub's link to ``agent`` is open now."""
        link = self.hub._links.get(agent)
        return link is not None and link.state is State.OPEN

    async def open(self, other: Agent, timeout: float = 5.0) -> None:
        await self.hub.open(other.name, other.hub.address, other.keys.public, timeout)

    def send(self, other: Agent, message: Message) -> None:
        self.hub.send(other.name, SCOPE, message)


@asynccontextmanager
async def agent(name: str, namespace: Namespace, *, publish: bool = True, **options: Any) -> AsyncIterator[Agent]:
    made = Agent(name, namespace, **options)
    if publish:
        namespace.published[made.keys.public] = name
    async with made.hub:
        yield made


async def until(condition: Callable[[], bool], within: float = 30.0) -> None:
    """Return once ``condition()`` holds: for what no event tells of."""
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def complaints(lines: Iterable[str], words: str) -> int:
    """How many strangers the log complains of: in a line of their own, or counted in the next one."""
    found = 0
    for line in lines:
        if words in line:
            more = re.search(r"\((\d+) such in a second\)$", line)
            found += int(more[1]) if more else 1
    return found


class Stranger:
    """A bare DEALER that speaks CURVE as well as anybody, with whatever keys it is given."""

    def __init__(self, address: str, server_key: str, keys: Keys | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        keys = keys or Keys.fresh()
        for option, value in (
            (zmq.CURVE_SERVERKEY, server_key),
            (zmq.CURVE_PUBLICKEY, keys.public),
            (zmq.CURVE_SECRETKEY, keys.secret),
        ):
            self.socket.setsockopt(option, value.encode())
        self.monitor = self.socket.get_monitor_socket()
        self.socket.connect(f"tcp://{address}")

    def close(self) -> None:
        self.socket.disable_monitor()
        self.context.destroy(0)


class Remote:
    """A hub in a process of its own; see ``serve``. ``pid`` may be signalled."""

    def __init__(self, context: Any, name: str, keys: Keys, known: dict[str, str]) -> None:
        self.pipe, theirs = mp.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, keys.public, keys.secret, known), daemon=True)
        self.process.start()
        theirs.close()
        self.name, self.keys = name, keys
        self.address = str(self.said()[1])

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def said(self, within: float = 20.0) -> tuple[str, ...]:
        """The next thing that it tells its parent."""
        assert self.pipe.poll(within), f"agent {self.name} says nothing"
        return tuple(self.pipe.recv())

    def open(self, other: Agent) -> None:
        """Have it open its link to ``other``."""
        self.pipe.send((other.name, other.hub.address, other.keys.public))
        assert self.said() == ("opened", other.name)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def serve(pipe: Connection, name: str, public: str, secret: str, known: dict[str, str]) -> None:
    """A process that is one agent: says its address, opens what it is told to, answers each Done with Commit."""
    asyncio.run(_serve(pipe, Keys(public=public, secret=secret), known))


async def _serve(pipe: Connection, keys: Keys, known: dict[str, str]) -> None:
    def answer(agent: str, scope: Scope, message: Message) -> None:
        if isinstance(message, Done):
            hub.send(agent, scope, Commit(seq=message.seq))

    def on_lost(agent: str, text: str) -> None:
        pipe.send(("gone", agent))

    async with Hub(None, keys, known=known.get, on_message=answer, on_agent_lost=on_lost, beat=BEAT) as hub:
        pipe.send(("address", hub.address))
        while True:
            agent, address, key = await asyncio.to_thread(pipe.recv)
            await hub.open(agent, address, key, 5.0)
            pipe.send(("opened", agent))
