"""Every kind of call of a process group, with inputs and results that each rank can check by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Elements of a call that is small, and of a piece of one that takes several rounds of 1 MiB.
SMALL, LARGE = 6, 700_001

COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "all_to_all_single",
    "alltoall",
    "gather",
    "scatter",
    "barrier",
)
MESSAGES = ("send", "recv", "recv_anysource")
KINDS = (*COLLECTIVES, *MESSAGES)


@dataclass(slots=True, kw_only=True)
class FaultCall:
    """``make`` makes the call; ``outputs`` are what it writes; ``right()`` says whether they are the result."""

    make: Callable[[Any], Any]
    outputs: list[Any]
    right: Callable[[], bool]

    def keep(self) -> list[Any]:
        """What the outputs hold now."""
        return [output.clone() for output in self.outputs]


def fault_call(kind: str, rank: int, size: int, numel: int, root: int, peer: int) -> FaultCall:
    """A call of ``rank``: rank r gives r + 1. ``peer`` is the other end of a message."""
    import torch

    def of(value: float, count: int = numel) -> Any:
        return torch.full((count,), float(value))

    def equal(*pairs: tuple[Any, float]) -> Callable[[], bool]:
        return lambda: all(bool((tensor == value).all()) for tensor, value in pairs)

    mine, total = of(rank + 1), size * (size + 1) / 2
    every, scattered = range(size), [rank + 1 + d for d in range(size)]
    match kind:
        case "allreduce":
            return FaultCall(make=lambda g: g.allreduce([mine]), outputs=[mine], right=equal((mine, total)))
        case "allreduce_coalesced":
            two = [mine, of(2 * rank + 2)]
            return FaultCall(
                make=lambda g: g.allreduce_coalesced(two),
                outputs=two,
                right=equal((two[0], total), (two[1], 2 * total)),
            )
        case "broadcast":
            return FaultCall(make=lambda g: g.broadcast_one(mine, root), outputs=[mine], right=equal((mine, root + 1)))
        case "reduce":
            value = total if rank == root else rank + 1
            return FaultCall(
                make=lambda g: g.reduce([mine], root=root), outputs=[mine] * (rank == root), right=equal((mine, value))
            )
        case "allgather":
            pieces = [of(0) for _ in every]
            return FaultCall(
                make=lambda g: g.allgather([pieces], [mine]),
                outputs=pieces,
                right=equal(*((piece, r + 1) for r, piece in enumerate(pieces))),
            )
        case "all_gather_single" | "all_gather_single_coalesced":
            whole = of(0, numel * size)
            parts = list(whole.chunk(size))
            if kind == "all_gather_single":
                make = lambda g: g.all_gather_single(whole, mine)  # noqa: E731
            else:
                make = lambda g: g.all_gather_single_coalesced([whole], [mine])  # noqa: E731
            return FaultCall(make=make, outputs=[whole], right=equal(*((part, r + 1) for r, part in enumerate(parts))))
        case "reduce_scatter":
            inputs, out = [of(value) for value in scattered], of(0)
            return FaultCall(
                make=lambda g: g.reduce_scatter([out], [inputs]), outputs=[out], right=equal((out, total + size * rank))
            )
        case "reduce_scatter_single" | "reduce_scatter_single_coalesced":
            given, out = torch.cat([of(value) for value in scattered]), of(0)
            if kind == "reduce_scatter_single":
                make = lambda g: g.reduce_scatter_single(out, given)  # noqa: E731
            else:
                make = lambda g: g.reduce_scatter_single_coalesced([out], [given])  # noqa: E731
            return FaultCall(make=make, outputs=[out], right=equal((out, total + size * rank)))
        case "all_to_all_single":
            given, whole = torch.cat([of(10 * rank + d) for d in every]), of(0, numel * size)
            parts, splits = list(whole.chunk(size)), [numel] * size
            return FaultCall(
                make=lambda g: g.all_to_all_single(whole, given, splits, splits),
                outputs=[whole],
                right=equal(*((part, 10 * r + rank) for r, part in enumerate(parts))),
            )
        case "alltoall":
            inputs, pieces = [of(10 * rank + d) for d in every], [of(0) for _ in every]
            return FaultCall(
                make=lambda g: g.alltoall(pieces, inputs),
                outputs=pieces,
                right=equal(*((piece, 10 * r + rank) for r, piece in enumerate(pieces))),
            )
        case "gather":
            pieces = [of(0) for _ in every] if rank == root else []
            return FaultCall(
                make=lambda g: g.gather([pieces] if pieces else [], [mine], root=root),
                outputs=pieces,
                right=equal(*((piece, r + 1) for r, piece in enumerate(pieces))),
            )
        case "scatter":
            inputs, out = [of(10 * rank + d) for d in every] if rank == root else [], of(0)
            return FaultCall(
                make=lambda g: g.scatter([out], [inputs] if inputs else [], root=root),
                outputs=[out],
                right=equal((out, 10 * root + rank)),
            )
        case "barrier":
            return FaultCall(make=lambda g: g.barrier(), outputs=[], right=lambda: True)
        case "send":
            return FaultCall(make=lambda g: g.send([mine], peer, 3), outputs=[], right=lambda: True)
        case "recv":
            return FaultCall(make=lambda g: g.recv([mine], peer, 3), outputs=[mine], right=equal((mine, peer + 1)))
        case "recv_anysource":
            return FaultCall(make=lambda g: g.recv_anysource([mine], 3), outputs=[mine], right=equal((mine, peer + 1)))
    raise ValueError(f"{kind} is no kind of call")
