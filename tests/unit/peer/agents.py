"""A namespace of hubs for tests, and one hub as a process of its own.

python -m tests.unit.peer.agents    reads one JSON line of what it is and knows, prints "address ADDRESS",
                                    opens what it is told to, answers each Done(seq) with Commit(seq)
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import zmq

from etha.peer.hub import Hub
from etha.peer.keys import Keys
from etha.peer.messages import Commit, Done, Message
from etha.peer.wire import Scope

ROOT = Path(__file__).resolve().parents[3]
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
            on_gone=lambda agent, text: self.note("gone", agent, text),
            beat=beat,
        )

    def message(self, agent: str, scope: Scope, message: Message) -> None:
        self.note(agent, scope, message)

    def note(self, *event: Any) -> None:
        self.events.append(event)
        self._changed.set()

    async def heard(self, count: int, within: float = 5.0) -> list[tuple[Any, ...]]:
        """The first ``count`` events, once there are so many."""
        async with asyncio.timeout(within):
            while len(self.events) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.events[:count]

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


async def until(condition: Callable[[], bool], within: float = 5.0) -> None:
    """Return once ``condition()`` holds: for what no event tells of."""
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


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


@contextmanager
def process(name: str, keys: Keys, known: dict[str, str]) -> Iterator[tuple[Popen[bytes], str]]:
    """A hub in a process of its own and its address; killed at the end."""
    with Popen([sys.executable, "-m", "tests.unit.peer.agents"], stdin=PIPE, stdout=PIPE, cwd=ROOT) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            told = {"name": name, "public": keys.public, "secret": keys.secret, "known": known}
            child.stdin.write(json.dumps(told).encode() + b"\n")
            child.stdin.flush()
            word, address = child.stdout.readline().split()
            assert word == b"address"
            yield child, address.decode()
        finally:
            child.kill()


def tell(child: Popen[bytes], *, agent: str, address: str, key: str) -> None:
    """Have a process open a link; returns when it has."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(json.dumps({"agent": agent, "address": address, "key": key}).encode() + b"\n")
    child.stdin.flush()
    assert child.stdout.readline() == b"opened\n"


async def main() -> None:
    told = json.loads(sys.stdin.readline())
    known: dict[str, str] = told["known"]

    def answer(agent: str, scope: Scope, message: Message) -> None:
        if isinstance(message, Done):
            hub.send(agent, scope, Commit(seq=message.seq))

    keys = Keys(public=told["public"], secret=told["secret"])
    hub = Hub(
        None, keys, known=known.get, on_message=answer, on_gone=lambda agent, text: print("gone", agent), beat=BEAT
    )
    async with hub:
        print("address", hub.address, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            to = json.loads(line)
            await hub.open(to["agent"], to["address"], to["key"], 5.0)
            print("opened", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
