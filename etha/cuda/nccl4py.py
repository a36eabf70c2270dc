"""The real NCCL, by NVIDIA's nccl4py: its low-level calls, which take raw addresses and release the GIL.

torch for CUDA brings libnccl (or the wheel ``nvidia-nccl-cu13`` does); nccl4py does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from etha.cuda.nccl import ID_BYTES, IN_PROGRESS, OK, NcclError
from etha.errors import ConfigError

_HINT = "install sub-etha[nccl] (nccl4py 0.6, beside a torch for CUDA, which brings libnccl)"


def _library() -> tuple[Any, Any]:
    try:
        from cuda.bindings import runtime
        from nccl.bindings import nccl as library
    except ImportError as error:
        raise ConfigError(
            f"NCCL is needed between GPUs of different hosts, and cannot be loaded ({error}): {_HINT}"
        ) from error
    try:
        library.get_version()
    except Exception as error:
        raise ConfigError(f"nccl4py found no libnccl ({error}): {_HINT}") from error
    return library, runtime


class Bindings:
    """Implements ``etha.cuda.nccl.Nccl``. ConfigError if nccl4py or libnccl is missing.

    ``bindings``: the modules nccl.bindings.nccl and cuda.bindings.runtime, or stand-ins.
    """

    def __init__(self, bindings: tuple[Any, Any] | None = None) -> None:
        self._nccl, self._rt = bindings or _library()
        self._comms: dict[int, Any] = {}

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        # nccl4py raises for everything but ncclSuccess and ncclInProgress.
        try:
            yield
        except self._nccl.NCCLError as error:
            raise NcclError(f"{what}: {error}") from error

    def version(self) -> str:
        major, rest = divmod(self._nccl.get_version(), 10_000)
        return f"{major}.{rest // 100}.{rest % 100}"

    def unique_id(self) -> bytes:
        """ID_BYTES bytes. This process listens for the other ranks until they have joined."""
        with self._told("ncclGetUniqueId"):
            return bytes(self._nccl.get_unique_id())

    def init(self, ordinal: int, nranks: int, rank: int, unique_id: bytes) -> int:
        """Begin a communicator that never blocks. Its device becomes the calling thread's current one."""
        if len(unique_id) != ID_BYTES:
            raise NcclError(f"a unique id has {ID_BYTES} bytes, not {len(unique_id)}")
        (code,) = self._rt.cudaSetDevice(ordinal)
        if code != self._rt.cudaError_t.cudaSuccess:
            raise NcclError(f"cudaSetDevice({ordinal}): {code.name}")
        config = self._nccl.Config()
        config.blocking = 0
        with self._told(f"ncclCommInitRankScalable, rank {rank} of {nranks}"):
            comm = self._nccl.comm_init_rank_scalable(nranks, rank, 1, bytearray(unique_id), config.ptr)
        self._comms[int(comm)] = comm
        return int(comm)

    def state(self, comm: int) -> str:
        """The state by ncclCommGetAsyncError; an error includes NCCL's last message about it."""
        with self._told("ncclCommGetAsyncError"):
            result = self._nccl.Result(self._nccl.comm_get_async_error(self._comms[comm]))
        if result == self._nccl.Result.Success:
            return OK
        if result == self._nccl.Result.InProgress:
            return IN_PROGRESS
        last = str(self._nccl.get_last_error(self._comms[comm])).strip()
        return f"{self._nccl.get_error_string(int(result))}{f' ({last})' if last else ''}"

    def group_start(self) -> None:
        with self._told("ncclGroupStart"):
            self._nccl.group_start()

    def group_end(self, comm: int) -> None:
        with self._told("ncclGroupEnd"):
            self._nccl.group_end()

    def send(self, comm: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        with self._told(f"ncclSend of {nbytes} bytes to rank {peer}"):
            self._nccl.send(address, nbytes, int(self._nccl.DataType.Uint8), peer, self._comms[comm], stream)

    def receive(self, comm: int, address: int, nbytes: int, peer: int, stream: int) -> None:
        with self._told(f"ncclRecv of {nbytes} bytes from rank {peer}"):
            self._nccl.recv(address, nbytes, int(self._nccl.DataType.Uint8), peer, self._comms[comm], stream)

    def abort(self, comm: int) -> None:
        """Abort and forget the communicator, even if ncclCommAbort fails."""
        with self._told("ncclCommAbort"):
            self._nccl.comm_abort(self._comms.pop(comm))

    def finalize(self, comm: int) -> None:
        with self._told("ncclCommFinalize"):
            self._nccl.comm_finalize(self._comms[comm])

    def destroy(self, comm: int) -> None:
        with self._told("ncclCommDestroy"):
            self._nccl.comm_destroy(self._comms.pop(comm))
