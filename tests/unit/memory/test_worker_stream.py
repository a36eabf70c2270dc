"""A worker's stream: the rows travel in order, whoever cuts them how, and it ends at once when the socket is shut."""

from __future__ import annotations

import ctypes
import errno
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from etha.memory import worker_stream
from etha.memory.reach import ReachError
from etha.memory.worker_stream import ENDED, StreamRows, StreamRun
from etha.native.worker_stream import WorkerStreamStruct, load_worker_stream


@pytest.fixture(params=["compiled", "python"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(worker_stream, "load_worker_stream", lambda: None)
    elif load_worker_stream() is None:
        pytest.skip("no compiled library here")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        one = stack.enter_context(socket.create_connection(server.getsockname()))
        other = stack.enter_context(server.accept()[0])
        yield one, other


def rows_of(tensor: torch.Tensor, cuts: list[tuple[int, int]]) -> StreamRows:
    """(offset, bytes) of a tensor's memory; offset -1 is padding."""
    base = tensor.data_ptr()
    return StreamRows(rows=np.array([(0 if at < 0 else base + at, n) for at, n in cuts], np.uint64))


def wait(stream: StreamRun) -> None:
    assert select.select([stream.end_fd], [], [], 30)[0], "the stream does not end"


def random_cuts(total: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Cuts of ``total`` bytes, in an order of their own, with padding between some."""
    ends = np.unique(np.concatenate([rng.integers(1, total, 700), [total]]))
    cuts = [(int(a), int(b - a)) for a, b in zip(np.append(0, ends[:-1]), ends, strict=True)]
    found: list[tuple[int, int]] = []
    for i in rng.permutation(len(cuts)):
        found.append(cuts[i])
        if rng.random() < 0.3:
            found.append((-1, int(rng.integers(1, 16))))
    return found


@pytest.mark.usefixtures("library")
def test_rows_travel_in_their_order(pair: tuple[socket.socket, socket.socket]) -> None:
    rng = np.random.default_rng(5)
    total = 9_000_011
    source = torch.from_numpy(rng.integers(0, 256, total, np.uint8))
    target = torch.zeros(total, dtype=torch.uint8)
    cuts = random_cuts(total, rng)
    streams = [
        StreamRun(rows_of(tensor, cuts), conn.dup(), sends=sends)
        for tensor, conn, sends in ((source, pair[0], True), (target, pair[1], False))
    ]
    for stream in streams:
        stream.start()
    for stream in streams:
        wait(stream)
        assert (stream.error, stream.done) == (0, sum(n for _, n in cuts))
        stream.close()
    assert torch.equal(source, target)
    assert pair[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1, "the next reader would sleep too long"
    pair[0].sendall(b"next")
    assert pair[1].recv(16) == b"next", "it has read, or written, past its rows"


@pytest.mark.usefixtures("library")
def test_what_comes_slowly_comes(pair: tuple[socket.socket, socket.socket]) -> None:
    """The last bytes are fewer than those for which it usually wakes up, and what came before is taken already."""
    target = torch.zeros(1 << 20, dtype=torch.uint8)
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    stream = StreamRun(rows_of(target, [(0, 1 << 20)]), pair[1].dup(), sends=False)
    stream.start()
    memory = memoryview(data.numpy())  # type: ignore[arg-type, unused-ignore]
    for at in range(0, 1 << 20, 50_000):
        pair[0].sendall(memory[at : at + 50_000])
    wait(stream)
    assert stream.error == 0 and torch.equal(target, data)
    stream.close()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("sends", [True, False])
def test_a_shut_socket_ends_it(pair: tuple[socket.socket, socket.socket], sends: bool) -> None:
    tensor = torch.zeros(64 << 20, dtype=torch.uint8)
    stream = StreamRun(rows_of(tensor, [(0, 64 << 20)]), pair[0].dup(), sends=sends)
    stream.start()
    assert not select.select([stream.end_fd], [], [], 0)[0]
    pair[0].shutdown(socket.SHUT_RDWR)  # as an agent does with its own descriptor
    wait(stream)
    assert stream.error == (errno.EPIPE if sends else ENDED)
    assert stream.done < 64 << 20
    stream.close()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("sends", [True, False])
def test_stop_ends_it(pair: tuple[socket.socket, socket.socket], sends: bool) -> None:
    tensor = torch.zeros(64 << 20, dtype=torch.uint8)
    stream = StreamRun(rows_of(tensor, [(0, 64 << 20)]), pair[0].dup(), sends=sends)
    stream.start()
    stream.stop()
    wait(stream)
    assert stream.error
    stream.stop()
    stream.close()


def test_memory_that_is_not_there_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    if load_worker_stream() is None:
        pytest.skip("Python would be killed")
    rows = StreamRows(rows=np.array([(4096, 1 << 20)], np.uint64))
    stream = StreamRun(rows, pair[0].dup(), sends=True)
    stream.start()
    wait(stream)
    assert (stream.error, stream.done) == (errno.EFAULT, 0)
    stream.close()


def test_a_thread_that_cannot_be_had(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def start(self, stream: WorkerStreamStruct) -> int:
            return errno.EAGAIN

    monkeypatch.setattr(worker_stream, "load_worker_stream", Library)
    stream = StreamRun(rows_of(torch.zeros(8, dtype=torch.uint8), [(0, 8)]), pair[0].dup(), sends=True)
    with pytest.raises(OSError, match="temporarily"):
        stream.start()
    stream.close()


@pytest.mark.parametrize("cuts", [[], [(0, 0)], [(-1, 64)], [(0, 8), (-1, 4096)]])
def test_rows_that_cannot_be(cuts: list[tuple[int, int]]) -> None:
    tensor = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="rows"):
        StreamRows(
            rows=np.array([(0 if a < 0 else tensor.data_ptr() + a, n) for a, n in cuts], np.uint64).reshape(-1, 2)
        )


def test_rows_outside_of_the_tensors_are_refused() -> None:
    tensor = torch.zeros(64, dtype=torch.uint8)
    spans = np.array([(tensor.data_ptr(), 64)], np.uint64)
    rows_of(tensor, [(0, 32), (-1, 5), (32, 32)]).check_inside(spans)
    for cut in ((-5000, 32), (40, 32), (64, 1)):
        rows = StreamRows(rows=np.array([(tensor.data_ptr() + cut[0], cut[1])], np.uint64))
        with pytest.raises(ReachError, match="outside"):
            rows.check_inside(spans)


def test_the_struct_is_that_of_the_library() -> None:
    library = load_worker_stream()
    if library is None:
        pytest.skip("no compiled library here")
    assert ctypes.sizeof(WorkerStreamStruct) == library.struct_bytes
