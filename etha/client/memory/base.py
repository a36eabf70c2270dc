"""Homes: the memory in which a client's tensors lie, with the operations that differ between a CPU and a GPU.

name        "cpu", or a GPU's uuid          agent    its agent's name: "cpu", "cuda-GPU-..."
describe    where a tensor lies, for the agent
show        what the agent needs to map it
mark        the device work that must come before a call
reach       wait for that work in this process
copy        live tensors <-> their staging

``Unmoved`` finds out, before every transfer, whether registered tensors still lie where they did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from etha.cuda.driver import DeviceError
from etha.cuda.select import driver, installed_driver
from etha.errors import RegistrationError, TransferError
from etha.memory.handles import TensorHandle
from etha.torch_types import is_async_collective, is_dtensor

if TYPE_CHECKING:
    from etha.memory.revocation import RevocationPage
    from etha.native.unmoved import PlaceTable

#: See ``fingerprint``.
Fingerprint = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, bool]


def _nothing() -> None:
    """The end of a mark without an event."""


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class Mark:
    """A point in the caller's queue of device work. ``handle`` names it to the agent; b"" if there is nothing to wait
    for.

    ``failed``: why the mark could not be made. ``end`` is called when the call has ended; dropping the last reference
    to the mark calls it, too. ``lent`` is what the call lends from then on.
    """

    handle: bytes = b""
    event: int = 0
    failed: TransferError | None = None
    end: Callable[[], object] = _nothing
    lent: LentMemory = field(default_factory=lambda: LentMemory())

    def check(self) -> None:
        """Raise TransferError if the mark could not be made."""
        if self.failed is not None:
            raise self.failed


class LentMemory:
    """The memory that a call lends, for the thread that waits for the call.

    That thread may leave before the call has ended: a second Ctrl-C does not wait. Its tensors are its own again then,
    so nobody may take what it writes into them for what it has sent. Either thread may come first.
    """

    def __init__(self) -> None:
        self._lent: tuple[RevocationPage, int] | None = None
        self._left = False

    def lend(self, page: RevocationPage, word: int) -> None:
        """The call lends its memory under this word; no longer, if its thread has left."""
        self._lent = (page, word)
        if self._left:
            page.revoke(word)

    def leave(self) -> None:
        """The thread leaves: take the memory back. Idempotent, and harmless after the call's end."""
        self._left = True
        if self._lent is not None:
            page, word = self._lent
            page.revoke(word)


@dataclass(slots=True, kw_only=True)
class StagedTensors:
    """Memory that the agent maps instead of this worker's tensors, by entry (None: the tensor itself).

    ``memory`` keeps it allocated.
    """

    home: TensorMemory
    tensors: list[torch.Tensor | None]
    memory: object = field(default=None, repr=False)

    @property
    def serves(self) -> bool:
        """Whether any tensor is staged."""
        return any(tensor is not None for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the staged tensors."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    @property
    def quick(self) -> bool:
        """Whether copying is faster than handing it to a thread."""
        return not self.serves or self.home.quick(self.nbytes)

    def without(self, entries: Collection[int]) -> StagedTensors:
        """The same without these entries, whose tensors need no copy."""
        if not entries:
            return self
        return replace(self, tensors=[None if i in entries else tensor for i, tensor in enumerate(self.tensors)])

    def handles(self, live: Sequence[TensorHandle]) -> list[TensorHandle]:
        """Where the agent reads or writes, by entry."""
        return [self.home.describe(t) if t is not None else h for t, h in zip(self.tensors, live, strict=True)]

    def pull(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy live tensors -> stage, before sending, once the call's mark is reached. Done on return."""
        self.home.copy([(s, t) for s, t in zip(self.tensors, tensors, strict=True) if s is not None], live=False)

    def push(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy stage -> live tensors, after receiving, once no queued work reads them. Done on return."""
        self.home.copy([(t, s) for s, t in zip(self.tensors, tensors, strict=True) if s is not None], live=True)


class TensorMemory(Protocol):
    """See the module."""

    name: str
    agent: str

    @property
    def refused(self) -> str:
        """Why some memory of this home cannot be shared with an agent, and what to do; "" if all can."""
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor lies in this home."""
        ...

    def describe(self, tensor: torch.Tensor) -> TensorHandle:
        """Where a plain strided tensor lies. Its ``segment`` is None if the agent cannot map it."""
        ...

    def show(self, segment: str) -> tuple[dict[str, Any], list[int]]:
        """(header, descriptors) by which an agent maps a segment."""
        ...

    def stage(self, tensors: Sequence[torch.Tensor], chosen: Sequence[bool]) -> StagedTensors:
        """Memory of the same shapes, dense, for the chosen tensors."""
        ...

    def mark(self) -> Mark:
        """The work that the calling thread has queued. It never raises: the mark has the error."""
        ...

    def reach(self, mark: Mark, stop: threading.Event) -> bool:
        """Block until ``mark``'s work is done; False if ``stop`` is set first. Any thread."""
        ...

    def backed(self, tensor: torch.Tensor) -> bool:
        """Whether a registered tensor still has memory."""
        ...

    def writable(self, tensor: torch.Tensor) -> bool:
        """Whether ``copy`` may write into a registered tensor that has memory."""
        ...

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, live: bool) -> None:
        """Copy (target, source) pairs. Any thread; done on return.

        ``live``: the targets are the user's tensors, so copy after all work that this process has queued.
        """
        ...

    def quick(self, nbytes: int) -> bool:
        """Whether copying ``nbytes`` is faster than handing it to a thread."""
        ...

    @property
    def lends(self) -> bool:
        """Whether its memory may only be freed after the agent has closed it."""
        ...

    def close(self, *, released: bool) -> None:
        """Close it, once no call needs it. ``released``: the agent has closed its memory, too. Idempotent."""
        ...


def home_name(tensor: torch.Tensor) -> str:
    """ "cpu", the uuid of the GPU that holds a plain tensor's memory, or another device's own name.

    Asks a driver only if there is one. RegistrationError for a GPU that does not answer.
    """
    if tensor.device.type not in ("cpu", "cuda"):
        return str(tensor.device)
    one = driver() if tensor.device.type == "cuda" else installed_driver()
    try:
        return (one.holds(tensor) if one is not None else None) or "cpu"
    except DeviceError as error:
        raise RegistrationError(f"the GPU of a tensor on {tensor.device}: {error}; `etha doctor` says more") from error


#: Classes whose instances hold their own memory.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory a registered one uses now: its local tensor, or itself."""
    if type(tensor) in _PLAIN:
        return tensor
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    return local.elem if is_async_collective(local) else local


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """What must not change between registration and transfer; the last: whether it is a conjugate or negative view."""
    odd = tensor.is_conj() or tensor.is_neg()
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, odd


class Unmoved:
    """Where registered tensors lie. It keeps them allocated.

    Compiled code looks at all of them at once, about 0.1 us for each. Where there is none, or a tensor of a kind that
    it does not know, each is asked by Python, about 1 us. Only Python notices clones that share memory until one is
    written, which torch makes in private functions only (``torch._lazy_clone``), and that a real tensor became the
    imaginary part of a conjugate view, which is the same memory with the other sign.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """``named``: what the user registered, DTensors as they are."""
        self._named = tuple(named)
        held = [memory_of(tensor) for _, tensor in named]
        self._known: tuple[Fingerprint, ...] = tuple(map(fingerprint, held))
        #: A DTensor and the local tensor that it had. What else holds its memory in another tensor is left to Python.
        self._locals = [(owner, own) for (_, owner), own in zip(named, held, strict=True) if own is not owner]
        self._complex = [own for own in held if own.is_complex()]  # which become conjugate views where they lie
        self._table = _table_of(held) if all(_local_of(owner) is own for owner, own in self._locals) else None

    def changed(self) -> list[str]:
        """The names of the tensors that are not where they were, or have another shape, stride, dtype or sign."""
        if (
            self._table is not None
            and all(_local_of(owner) is own for owner, own in self._locals)
            and self._table.unmoved()
            and not any(own.is_conj() for own in self._complex)
        ):
            return []
        return [
            name
            for (name, tensor), known in zip(self._named, self._known, strict=True)
            if fingerprint(memory_of(tensor)) != known
        ]

    def check(self, what: str) -> None:
        """RegistrationError about ``what`` that names the first ten of ``changed``."""
        if changed := self.changed():
            raise RegistrationError(
                f"{what}: memory, shape, stride or dtype of {len(changed)} registered tensors has changed since they "
                f"were registered: {', '.join(map(repr, changed[:10]))}; close it and register them again"
            )


def _local_of(owner: torch.Tensor) -> torch.Tensor | None:
    return getattr(owner, "_local_tensor", None)


def _table_of(held: Sequence[torch.Tensor]) -> PlaceTable | None:
    from etha.native.unmoved import (  # here, because who only imports the client needs none of it
        PlaceTable,
        load_unmoved,
    )

    library = load_unmoved()
    if library is None or any(type(tensor) not in _PLAIN for tensor in held):
        return None
    try:
        return PlaceTable(library, held)
    except ValueError:  # no such dtype in DLPack, too many axes
        return None
