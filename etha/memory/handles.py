"""Where a tensor lies, as plain data that crosses the bus.

A handle names bytes either in a mapped segment (a sealed memfd that the agent maps, too) or in the worker's own memory,
which the agent reaches with ``process_vm_readv``. Nothing here touches memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    import torch

#: Most characters of a text, and most dims of a tensor, in a handle that comes from a socket.
MAX_TEXT = 1 << 10
MAX_DIMS = 1 << 10


class TensorHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Where one local tensor lies.

    ``segment`` is the id (hex) of a mapped segment, and ``offset`` a byte offset in it. Or ``segment`` is None, and
    ``offset`` is a virtual address of the worker. ``shape`` is local, ``strides`` are in elements and not negative,
    ``dtype`` is a name such as "float32". A handle from a socket is not trusted: ``WorkerMemory.resolve`` checks it
    against what is mapped. It holds plain data, so it is exempt from garbage collection (``gc=False``), because
    registrations have many.
    """

    segment: Annotated[str, Meta(max_length=MAX_TEXT)] | None
    offset: int
    shape: Annotated[tuple[int, ...], Meta(max_length=MAX_DIMS)]
    strides: Annotated[tuple[int, ...], Meta(max_length=MAX_DIMS)]
    dtype: Annotated[str, Meta(max_length=MAX_TEXT)]


def is_expanded(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of a strided tensor share memory because it was expanded."""
    return any(size > 1 and not stride for size, stride in zip(shape, strides, strict=True))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a strided tensor has each element once, and nothing between them, in any order of its dims."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def span_nbytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first to one past the last element of a strided tensor; 0 if it is empty."""
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * itemsize


def describe(tensor: torch.Tensor) -> TensorHandle:
    """The handle of a plain strided CPU tensor: of a segment if it lies in one, otherwise of the process's own memory.

    The caller has refused everything else (devices, sparse, quantized, conjugate, subclasses).
    """
    from etha.memory import shared  # imports torch; the bus's messages, which use handles, do not

    shape, strides, address = tuple(tensor.shape), tuple(tensor.stride()), tensor.data_ptr()
    found = shared.find(address, span_nbytes(shape, strides, tensor.itemsize))
    segment, offset = found if found is not None else (None, address)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorHandle(segment=segment, offset=offset, shape=shape, strides=strides, dtype=dtype)
