"""Who may link: a ZAP handler on the hub's own loop that admits the keys of the namespace's agents.

Without one, CURVE admits anybody who knows the server's public key. ZeroMQ asks the handler once per connection, before
any message. ``User-Id`` of an admitted connection's messages is the handler's answer, never a peer's claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

import zmq

from etha import limits
from etha.bus.socket import LoopSocket
from etha.config import NAME
from etha.errors import EthaError
from etha.peer.keys import public_key_text

log = logging.getLogger(__name__)

DOMAIN = b"etha"
#: Where ZeroMQ looks for the handler of a context.
_ENDPOINT = "inproc://zeromq.zap.01"
#: Unknown keys that may wait for a refresh. More are refused at once. A thousand agents may come to a hub at a time.
MAX_WAITING = 2048
#: Seconds between refreshes, however many strangers try to connect.
REFRESH_GAP = 0.2
#: Seconds before a refresh, for whoever comes with an epoch of which this agent is about to read anyway.
REFRESH_DELAY = 0.02
#: Seconds that a refresh may take, less than a connection has to prove its key.
REFRESH_TIMEOUT = 3.0


def identify(user_id: str) -> tuple[str, str]:
    """(agent id, public key) from an admitted connection's ``User-Id``."""
    agent, _, key = user_id.partition(" ")
    return agent, key


class Gate:
    """Asks ``known`` for the agent behind a public key. If it does not know, one ``refresh`` follows, and it is asked
    again."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        known: Callable[[str], str | None],
        refresh: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._known = known
        self._refresh = refresh
        self._waiting: list[tuple[Sequence[bytes], str]] = []
        self._wanted = asyncio.Event()
        self._refusals = limits.WarningLimit(log)
        handler = context.socket(zmq.ROUTER)
        handler.setsockopt(zmq.LINGER, 0)
        handler.bind(_ENDPOINT)
        self._socket = LoopSocket(handler, self._asked)

    async def run(self) -> None:
        """Refresh for the waiting requests, one refresh at a time, until cancelled."""
        loop = asyncio.get_running_loop()
        while self._refresh is not None:
            await self._wanted.wait()
            await asyncio.sleep(REFRESH_DELAY)
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            if not waiting:
                continue
            earliest = loop.time() + REFRESH_GAP
            try:
                async with asyncio.timeout(REFRESH_TIMEOUT):
                    await self._refresh()
            except (EthaError, TimeoutError) as error:
                log.warning("agents could not be looked up for %d new links: %s", len(waiting), error)
            for request, key in waiting:
                self._decide(request, key)
            await asyncio.sleep(max(0.0, earliest - loop.time()))

    def look_again(self) -> None:
        """More agents are known now: admit those of them that wait."""
        waiting, self._waiting = self._waiting, []
        for request, key in waiting:
            if self._find(key) is None:
                self._waiting.append((request, key))
            else:
                self._decide(request, key)

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self._socket.close()
        self._refusals.close()

    def _asked(self, frames: Sequence[zmq.Frame]) -> None:
        # identity, "", version, request id, domain, address, routing id, mechanism, credentials...
        request = [frame.bytes for frame in frames]
        if len(request) != 9 or request[2] != b"1.0" or request[4] != DOMAIN or request[7] != b"CURVE":
            return self._refuse(request, "it does not use CURVE")
        key = public_key_text(request[8])
        if self._find(key) is None and self._refresh is not None and len(self._waiting) < MAX_WAITING:
            self._waiting.append((request, key))
            self._wanted.set()
        else:
            self._decide(request, key)

    def _find(self, key: str) -> str | None:
        try:
            return self._known(key)
        except EthaError as error:
            log.warning("the agent behind key %s could not be looked up: %s", key, error)
            return None

    def _decide(self, request: Sequence[bytes], key: str) -> None:
        agent = self._find(key)
        if agent is None or NAME.fullmatch(agent) is None:
            return self._refuse(request, f"its key {key} is no agent's of this namespace")
        self._answer(request, b"200", b"", f"{agent} {key}".encode())

    def _refuse(self, request: Sequence[bytes], why: str) -> None:
        self._refusals.warn("refused a link: %s", why)
        if len(request) > 3:
            self._answer(request, b"400", b"not an agent of this namespace", b"")

    def _answer(self, request: Sequence[bytes], status: bytes, text: bytes, user_id: bytes) -> None:
        # A peer that has hung up meanwhile has no pipe any more, and nobody reads a full one.
        if not self._socket.closed:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(request[0], b"", b"1.0", request[3], status, text, user_id, b"")
