"""A nursery whose children have a played GPU, and an NCCL that is Gloo over the played GPU's memory."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from etha.cuda.select import driver, install_driver
from etha.groups.baby import child_program, nursery_program
from etha.groups.baby.child_program import serve
from etha.groups.inprocess import nccl
from tests.fakes.cuda import GPU0, FakeDriver


class PlayedNCCL:
    """torch's ProcessGroupNCCL: every tensor must lie on the GPU, or the call fails."""

    class Options:
        _timeout: timedelta

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self._rank, self._size = rank, size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options._timeout)

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._gloo, method)

        def begin(*args: Any) -> Any:
            for tensor in _tensors(args):
                if tensor.numel() and driver().holds(tensor) != GPU0:
                    raise RuntimeError(f"{method} of a tensor that is not on the GPU")
            return call(*args)

        return begin

    def reduce_scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> Any:
        """Gloo has none."""
        if opts.reduceOp != ReduceOp.SUM:
            raise RuntimeError("the played reduce_scatter sums only")
        for output, pieces in zip(outputs, inputs, strict=True):
            for rank, piece in enumerate(pieces):
                total = piece.clone()
                self._gloo.allreduce([total]).wait()
                if rank == self._rank:
                    output.copy_(total)
        return self._gloo.barrier()

    def alltoall(self, outputs: list[Any], inputs: list[Any], opts: Any) -> Any:
        """Gloo has it for one flat tensor."""
        given, taken = torch.cat(inputs), torch.empty(sum(map(len, outputs)), dtype=inputs[0].dtype)
        lengths = [[len(each) for each in tensors] for tensors in (outputs, inputs)]
        self._gloo.alltoall_base(taken, given, *lengths).wait()
        for output, piece in zip(outputs, taken.split(lengths[0]), strict=True):
            output.copy_(piece)
        return self._gloo.barrier()


def _tensors(args: Any) -> list[torch.Tensor]:
    if isinstance(args, torch.Tensor):
        return [args]
    return [t for each in args for t in _tensors(each)] if isinstance(args, (list, tuple)) else []


def serve_on_a_played_gpu(connection: socket.socket) -> None:
    """As the child does it, but over the played GPU. The driver's first call is in this process."""
    install_driver(FakeDriver((GPU0,)))
    serve(connection)


if __name__ == "__main__":
    nccl._c10d.ProcessGroupNCCL = PlayedNCCL
    child_program.serve = serve_on_a_played_gpu
    nursery_program.main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
