"""Whether registered tensors still lie where they did when they were registered, asked before every transfer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etha.errors import RegistrationError
from etha.native.unmoved import PlaceTable, load_unmoved
from etha.torch_types import is_async_collective, is_dtensor

#: (address, shape, strides, dtype)
Fingerprint = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]

#: Classes whose instances hold their own memory.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory a registered one uses now: its local tensor, or itself."""
    if type(tensor) in _PLAIN:
        return tensor
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    return local.elem if is_async_collective(local) else local


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """What must not change between registration and transfer: (address, shape, strides, dtype)."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class Unmoved:
    """Where registered tensors lie. It keeps them allocated.

    Compiled code looks at all of them at once, about 0.1 us for each. Where there is none, or a tensor of a kind that
    it does not know, each is asked by Python, about 1 us. Clones that share memory until one is written, which torch
    makes in private functions only (``torch._lazy_clone``), are noticed by Python alone.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """``named``: what the user registered, DTensors as they are."""
        self._named = tuple(named)
        held = [memory_of(tensor) for _, tensor in named]
        self._known: tuple[Fingerprint, ...] = tuple(map(fingerprint, held))
        #: A DTensor and the local tensor that it had. What else holds its memory in another tensor is left to Python.
        self._locals = [(owner, own) for (_, owner), own in zip(named, held, strict=True) if own is not owner]
        self._table = _table_of(held) if all(_local_of(owner) is own for owner, own in self._locals) else None

    def changed(self) -> list[str]:
        """The names of the tensors that are not where they were, or have another shape, stride or dtype."""
        if (
            self._table is not None
            and all(_local_of(owner) is own for owner, own in self._locals)
            and self._table.unmoved()
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
    library = load_unmoved()
    if library is None or any(type(tensor) not in _PLAIN for tensor in held):
        return None
    try:
        return PlaceTable(library, held)
    except ValueError:  # no such dtype in DLPack, too many axes
        return None
