"""Serves an agent's metrics to Prometheus, in a thread with an event loop of its own.

    GET /metrics --> this thread's loop --asks--> the agent's loop: numbers --> this thread makes and sends the page

Nothing but GET and HEAD of /metrics is answered. A request has ``MAX_REQUEST`` bytes and ``SECONDS`` for everything,
and ``MAX_CONNECTIONS`` are served at once, so who sends or reads slowly delays nobody, and least of all the agent: a
page costs its loop some microseconds. There is no authentication: listen on the loopback or on a network of your own.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus

from prometheus_client.exposition import choose_encoder

from etha.addresses import format_address
from etha.observe.metrics import AgentGauges, TransferTotals, registry_of

log = logging.getLogger(__name__)

PATH = "/metrics"
#: Bytes of a request's head, seconds from a connection to the end of its answer, and connections at once.
MAX_REQUEST = 8 << 10
SECONDS = 10.0
MAX_CONNECTIONS = 16
#: Seconds that the agent's loop has for its numbers.
LOOP_SECONDS = 5.0

Numbers = tuple[TransferTotals, AgentGauges]


class MetricsServer:
    """Listens from its construction, on the agent's loop, until ``close``. OSError if the address cannot be had.

    ``read(seconds)`` is called on the agent's loop, and returns numbers that do not change any more; ``seconds`` is how
    long the loop took to come to it.
    """

    def __init__(self, host: str, port: int, read: Callable[[float], Numbers]) -> None:
        self._read = read
        self._agent = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()
        self._listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
        #: HOST:PORT that is listened on.
        self.address = format_address(host, self._listener.getsockname()[1])
        self._open = 0
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="etha-metrics", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Stop listening, and end what is served now. Returns when the thread has ended. Idempotent."""
        with suppress(RuntimeError):  # the thread has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            log.exception("metrics are no longer served")
        finally:
            self._listener.close()
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener, limit=MAX_REQUEST)
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close."""
        if self._open >= MAX_CONNECTIONS:
            return writer.transport.abort()
        self._open += 1
        writer.transport.set_write_buffer_limits(0)  # so that ``drain`` returns once the kernel has everything
        try:
            async with asyncio.timeout(SECONDS):
                writer.write(await self._answer(reader))
                await writer.drain()
            writer.close()
        except (TimeoutError, OSError, EOFError):
            log.debug("a request for metrics was given up")
        except Exception:
            log.exception("a request for metrics failed")
        finally:
            self._open -= 1
            if not writer.is_closing():
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        method, _, rest = head[0].partition(" ")
        target, _, version = rest.partition(" ")
        if not version.startswith("HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST)
        if target.partition("?")[0] != PATH:
            return _response(HTTPStatus.NOT_FOUND, f"there is {PATH} only")
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "use GET", more="Allow: GET, HEAD\r\n")
        accepts = ",".join(line.partition(":")[2] for line in head[1:] if line.lower().startswith("accept:"))
        try:
            totals, gauges = await self._numbers()
        except TimeoutError:
            why = f"the agent's event loop has not answered within {LOOP_SECONDS:g} s"
            return _response(HTTPStatus.SERVICE_UNAVAILABLE, why)
        except RuntimeError as error:
            return _response(HTTPStatus.SERVICE_UNAVAILABLE, f"the agent is leaving, or failed: {error}")
        encode, kind = choose_encoder(accepts)
        page = encode(registry_of(totals, gauges))
        return _response(HTTPStatus.OK, page, kind, empty=method == "HEAD")

    async def _numbers(self) -> Numbers:
        """Those of the agent. TimeoutError if its loop is blocked, RuntimeError if it has ended or they failed."""
        began, found = time.perf_counter(), Future[Numbers]()

        def read() -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                found.set_result(self._read(time.perf_counter() - began))
            except Exception as error:
                log.exception("the agent's metrics could not be read")
                found.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

        self._agent.call_soon_threadsafe(read)
        async with asyncio.timeout(LOOP_SECONDS):
            return await asyncio.wrap_future(found)


def _response(
    status: HTTPStatus,
    body: str | bytes = b"",
    kind: str = "text/plain; charset=utf-8",
    *,
    more: str = "",
    empty: bool = False,
) -> bytes:
    """A whole answer; ``empty``: without its body, as for HEAD."""
    data = body if isinstance(body, bytes) else f"{status.phrase}: {body}\n".encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nDate: {formatdate(usegmt=True)}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(data)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if empty else data)
