"""NCCL as the agent knows it: the real library as far as it goes without a GPU, and what becomes of its answers."""

from __future__ import annotations

import enum
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from etha.cuda import select
from etha.cuda.nccl import ID_BYTES, IN_PROGRESS, OK, NcclError
from etha.cuda.nccl4py import Bindings
from etha.errors import ConfigError

#: What is called of nccl4py, and how its parameters are called.
CALLS = {
    "get_version": (),
    "get_unique_id": (),
    "comm_init_rank_scalable": ("nranks", "myrank", "n_id", "comm_ids", "config"),
    "comm_get_async_error": ("comm",),
    "get_last_error": ("comm",),
    "get_error_string": ("result",),
    "group_start": (),
    "group_end": (),
    "send": ("sendbuff", "count", "datatype", "peer", "comm", "stream"),
    "recv": ("recvbuff", "count", "datatype", "peer", "comm", "stream"),
    "comm_abort": ("comm",),
    "comm_finalize": ("comm",),
    "comm_destroy": ("comm",),
}


@pytest.fixture
def real() -> Any:
    return pytest.importorskip("nccl.bindings.nccl")


def test_the_real_library_makes_ids_without_a_gpu(real: object) -> None:
    made = Bindings()
    one, other = made.unique_id(), made.unique_id()
    assert len(one) == len(other) == ID_BYTES and one != other
    assert [int(part) for part in made.version().split(".")] >= [2, 28, 0]


def test_the_real_library_has_the_calls_that_are_made(real: Any) -> None:
    found = {name: tuple(inspect.signature(getattr(real, name)).parameters) for name in CALLS}
    assert found == CALLS
    assert (int(real.Result.Success), int(real.Result.InProgress), int(real.DataType.Uint8)) == (0, 7, 1)
    config = real.Config()
    config.blocking = 0
    assert config.blocking == 0 and config.ptr
    assert int(real.Comm(0x1234)) == 0x1234


def test_what_is_in_progress_is_no_error_to_the_real_library(real: Any) -> None:
    assert real.check_status(int(real.Result.InProgress)) is None
    with pytest.raises(real.NCCLError):
        real.check_status(int(real.Result.RemoteError))


def test_the_real_library_refuses_a_device_that_is_not_there(real: object) -> None:
    made = Bindings()
    with pytest.raises(NcclError, match=r"cudaSetDevice\(99\)"):
        made.init(99, 2, 0, made.unique_id())
    with pytest.raises(NcclError, match="128 bytes, not 3"):
        made.init(0, 2, 0, b"abc")


@pytest.mark.parametrize("missing", ["nccl.bindings", "cuda.bindings"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"sub-etha\[nccl\]"):
        Bindings()


def test_one_may_be_installed_in_its_place() -> None:
    before = select.installed_nccl()
    one: Any = object()
    try:
        select.install_nccl(one)
        assert select.nccl() is select.installed_nccl() is one
    finally:
        select.install_nccl(before)


class Library:
    """Looks like nccl.bindings.nccl, and notes what is asked of it."""

    class NCCLError(Exception):
        pass

    class Result(enum.IntEnum):
        Success = 0
        RemoteError = 6
        InProgress = 7

    DataType = SimpleNamespace(Uint8=1)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result = 7
        self.error: Exception | None = None

    def Config(self) -> SimpleNamespace:
        self.config = SimpleNamespace(ptr=0x500)
        return self.config

    def comm_init_rank_scalable(self, *asked: Any) -> int:
        self.calls.append(("init", *asked))
        return 0x77

    def comm_get_async_error(self, comm: int) -> int:
        return self.result

    def get_error_string(self, result: int) -> str:
        return self.Result(result).name

    def get_last_error(self, comm: int) -> str:
        return "connection reset by 10.0.0.2\n"

    def __getattr__(self, name: str) -> Any:
        def call(*asked: Any) -> None:
            self.calls.append((name, *asked))
            if self.error is not None:
                raise self.error

        return call


def cuda(code: str = "cudaSuccess") -> SimpleNamespace:
    codes = enum.Enum("cudaError_t", ["cudaSuccess", "cudaErrorInvalidDevice"])
    return SimpleNamespace(cudaError_t=codes, cudaSetDevice=lambda ordinal: (codes[code],))


def test_communicators_never_block_and_messages_are_bytes() -> None:
    library = Library()
    made = Bindings((library, cuda()))
    comm = made.init(1, 4, 2, bytes(range(128)))
    assert comm == 0x77 and library.config.blocking == 0
    assert library.calls == [("init", 4, 2, 1, bytearray(range(128)), 0x500)]
    library.calls.clear()
    made.group_start()
    made.send(comm, 0x1000, 64, 3, 0x9)
    made.receive(comm, 0x2000, 32, 1, 0x9)
    made.group_end(comm)
    assert library.calls == [
        ("group_start",), ("send", 0x1000, 64, 1, 3, 0x77, 0x9), ("recv", 0x2000, 32, 1, 1, 0x77, 0x9), ("group_end",)
    ]  # fmt: skip


def test_states_and_errors_are_told_in_words() -> None:
    library = Library()
    made = Bindings((library, cuda()))
    comm = made.init(0, 2, 0, bytes(128))
    assert made.state(comm) == IN_PROGRESS
    library.result = 0
    assert made.state(comm) == OK
    library.result = 6
    assert made.state(comm) == "RemoteError (connection reset by 10.0.0.2)"
    library.error = Library.NCCLError("unhandled system error")
    with pytest.raises(NcclError, match="ncclSend of 8 bytes to rank 1: unhandled system error"):
        made.send(comm, 1, 8, 1, 2)
    with pytest.raises(NcclError, match="ncclCommAbort"):
        made.abort(comm)


@pytest.mark.parametrize("end", ["abort", "destroy"])
def test_a_communicator_ends_once(end: str) -> None:
    library = Library()
    made = Bindings((library, cuda()))
    comm = made.init(0, 2, 0, bytes(128))
    library.calls.clear()
    made.finalize(comm)
    getattr(made, end)(comm)
    assert [call[0] for call in library.calls] == ["comm_finalize", f"comm_{end}"]
    with pytest.raises(KeyError):
        made.state(comm)


def test_a_device_that_cannot_be_had_begins_no_communicator() -> None:
    library = Library()
    with pytest.raises(NcclError, match="cudaErrorInvalidDevice"):
        Bindings((library, cuda("cudaErrorInvalidDevice"))).init(0, 2, 0, bytes(128))
    assert not library.calls
