"""Hashes of whole tensors, by which the demo compares every element without sending any through Etha."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


def digest(tensor: torch.Tensor) -> str:
    """BLAKE2b of shape, dtype and every byte of a plain tensor, in C order."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    state = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
    state.update(flat.numpy().data)
    return state.hexdigest()


def digests(tensors: Iterable[tuple[str, torch.Tensor]], *, here: bool) -> dict[str, str]:
    """Name -> ``digest`` of the full tensor, gathered through the tensors' own process groups.

    For DTensors this is a collective: every rank calls it, and only ranks with ``here`` hash and get a result.
    """
    found: dict[str, str] = {}
    for name, tensor in tensors:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if here:
            found[name] = digest(full)
    return found
