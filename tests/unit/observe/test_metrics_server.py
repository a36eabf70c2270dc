"""Who asks an agent for its metrics: rightly, wrongly, slowly, and all at once."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from etha.addresses import parse_address
from etha.observe import metrics_server
from etha.observe.metrics import AgentGauges, TransferTotals
from etha.observe.metrics_server import MAX_CONNECTIONS, MetricsServer
from tests.unit.observe.test_metrics import GAUGES


def numbers(lag: float) -> tuple[TransferTotals, AgentGauges]:
    return TransferTotals(), GAUGES


@pytest.fixture
async def server() -> AsyncIterator[MetricsServer]:
    found = MetricsServer("127.0.0.1", 0, numbers)
    yield found
    await found.close()
    await found.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "etha-metrics"]


async def ask(server: MetricsServer, head: str, *, end: str = "\r\n\r\n") -> tuple[int, dict[str, str], str]:
    """Status, headers and body of the answer to a request."""
    reader, writer = await asyncio.open_connection(*parse_address(server.address, 65535))
    try:
        writer.write((head + end).encode("latin-1"))
        data = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    first, _, body = data.decode().partition("\r\n\r\n")
    status, *lines = first.split("\r\n")
    return int(status.split(" ")[1]), dict(line.split(": ", 1) for line in lines), body


async def test_a_page_is_served_as_text_and_as_openmetrics(server: MetricsServer) -> None:
    status, headers, body = await ask(server, "GET /metrics HTTP/1.1\r\nHost: x")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=") and "etha_redis_up 1.0" in body
    assert int(headers["Content-Length"]) == len(body.encode()) and headers["Connection"] == "close"
    accept = "Accept: application/openmetrics-text; version=1.0.0, text/plain;q=0.5"
    status, headers, body = await ask(server, f"GET /metrics?x=y HTTP/1.0\r\n{accept}")
    assert status == 200 and "openmetrics" in headers["Content-Type"] and body.endswith("# EOF\n")
    status, headers, body = await ask(server, "HEAD /metrics HTTP/1.1")
    assert status == 200 and int(headers["Content-Length"]) > 1000 and body == ""


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET / HTTP/1.1", 404),
        ("GET /metrics/../etc/passwd HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("DELETE /metrics HTTP/1.1", 405),
        ("GET /metrics", 400),
        ("GET /metrics SMTP/1.1", 400),
        ("\x16\x03\x01\x02\x00", 400),
        ("GET /metrics HTTP/1.1\r\n" + "X: y\r\n" * 10_000, 431),
    ],
)
async def test_anything_else_is_refused(server: MetricsServer, head: str, status: int) -> None:
    assert (await ask(server, head))[0] == status


async def test_who_is_slow_is_given_up_and_delays_nobody(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "SECONDS", 1.0)
    address = parse_address(server.address, 65535)
    slow = [await asyncio.open_connection(*address) for _ in range(MAX_CONNECTIONS - 1)]
    slow[0][1].write(b"GET /metr")
    assert (await ask(server, "GET /metrics HTTP/1.1"))[0] == 200, "there is room for one more"
    for reader, writer in slow:
        assert await reader.read() == b""
        writer.close()
    assert (await ask(server, "GET /metrics HTTP/1.1"))[0] == 200


async def test_more_connections_than_there_is_room_for_are_closed_at_once(server: MetricsServer) -> None:
    address = parse_address(server.address, 65535)
    first = [await asyncio.open_connection(*address) for _ in range(MAX_CONNECTIONS)]
    for _, writer in first:
        writer.write(b"G")
    reader, writer = await asyncio.open_connection(*address)
    with pytest.raises(ConnectionError):
        while await reader.read(1) != b"":
            pass
        raise ConnectionResetError
    writer.close()
    for reader, writer in first:
        writer.write(b"ET /metrics HTTP/1.1\r\n\r\n")
        assert (await reader.read(12)) == b"HTTP/1.1 200"
        writer.close()


async def test_who_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "SECONDS", 1.0)
    large = TransferTotals()
    large.incidents = {f"{n:06}" * 50: n for n in range(20_000)}  # more than socket buffers hold
    server = MetricsServer("127.0.0.1", 0, lambda lag: (large, GAUGES))
    connection = socket.create_connection(parse_address(server.address, 65535))
    connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    await asyncio.sleep(0)
    assert (await ask(server, "GET / HTTP/1.1"))[0] == 404
    await server.close()  # does not wait for the one who does not read
    connection.close()


async def test_a_loop_that_hangs_is_an_error_of_the_scrape_and_not_a_hanging_scrape(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "LOOP_SECONDS", 0.2)
    answers: list[bytes] = []

    def scrape() -> None:
        with socket.create_connection(parse_address(server.address, 65535)) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            while data := connection.recv(1 << 16):
                answers.append(data)

    thread = threading.Thread(target=scrape)
    thread.start()
    thread.join()  # the loop is blocked by this
    assert b"503" in answers[0] and b"has not answered within 0.2 s" in b"".join(answers)
    assert (await ask(server, "GET /metrics HTTP/1.1"))[0] == 200


async def test_numbers_that_cannot_be_read_are_an_error_of_the_scrape(caplog: pytest.LogCaptureFixture) -> None:
    def broken(lag: float) -> Any:
        raise ValueError("nothing here")

    server = MetricsServer("127.0.0.1", 0, broken)
    status, _, body = await ask(server, "GET /metrics HTTP/1.1")
    await server.close()
    assert status == 503 and "ValueError: nothing here" in body and "could not be read" in caplog.text


async def test_a_port_that_is_taken_is_an_error(server: MetricsServer) -> None:
    with pytest.raises(OSError, match="in use"):
        MetricsServer(*parse_address(server.address, 65535), numbers)


async def test_it_listens_on_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        server = MetricsServer("::1", 0, numbers)
    except OSError:
        pytest.skip("no IPv6 loopback")
    assert server.address.startswith("[::1]:") and (await ask(server, "GET /metrics HTTP/1.1"))[0] == 200
    await server.close()
