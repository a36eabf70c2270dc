"""Tells tensors, placements and modules of torch.distributed apart without importing what defines their classes.

``torch.distributed.tensor`` brings sympy and every operator's sharding rules, which costs half a second and 60 MiB in
each worker and agent. Whoever has an object of such a class has imported its module already, so a module that is not
loaded answers "no".
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_TENSOR = "torch.distributed.tensor"
_PLACEMENTS = "torch.distributed.tensor.placement_types"


def loaded_class(module: str, name: str) -> Any:
    """The class of that name if its module is loaded, else a value of which nothing is an instance."""
    return getattr(sys.modules.get(module), name, ())


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    return isinstance(value, loaded_class(_TENSOR, "DTensor"))


def is_placement(value: object) -> TypeGuard[Placement]:
    return isinstance(value, loaded_class(_PLACEMENTS, "Placement"))


def is_async_collective(value: object) -> TypeGuard[AsyncCollectiveTensor]:
    return isinstance(value, loaded_class("torch.distributed._functional_collectives", "AsyncCollectiveTensor"))


def is_fsdp_module(value: object) -> TypeGuard[FSDPModule]:
    return isinstance(value, loaded_class("torch.distributed.fsdp", "FSDPModule"))


def placement_class(name: str) -> Any:
    """A class of ``torch.distributed.tensor.placement_types`` if that is loaded; see ``loaded_class``."""
    return loaded_class(_PLACEMENTS, name)
