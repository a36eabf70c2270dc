"""Process groups whose members come and go: ``torch.distributed`` groups that can be configured again after a loss.

Names are imported when they are first used. Importing this package makes "etha" a backend of `init_process_group`.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from etha.errors import GroupAbortedError, GroupError, GroupLostError, GroupMismatchError, GroupTimeoutError
    from etha.groups.base import GroupConfig, ProcessGroup
    from etha.groups.calls import GroupCall
    from etha.groups.dummy import ProcessGroupDummy
    from etha.groups.managed import ManagedProcessGroup
    from etha.groups.members import Members, Quorum
    from etha.groups.mesh import extend_device_mesh
    from etha.groups.store_client import create_store_client
    from etha.groups.work import GroupWork
    from etha.groups.wrappers import (
        ErrorSwallowingProcessGroupWrapper,
        FakeProcessGroupWrapper,
        ProcessGroupWrapper,
    )

__all__ = [
    "DiLoCo",
    "DistributedDataParallel",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "GroupAbortedError",
    "GroupCall",
    "GroupConfig",
    "GroupError",
    "GroupLostError",
    "GroupMismatchError",
    "GroupTimeoutError",
    "GroupWork",
    "LocalSGD",
    "ManagedProcessGroup",
    "Members",
    "Optimizer",
    "ProcessGroup",
    "ProcessGroupBaby",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupDummy",
    "ProcessGroupEtha",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "Quorum",
    "Sampler",
    "create_store_client",
    "extend_device_mesh",
]

#: Module -> its public names.
_NAMES = {
    "etha.errors": (
        "GroupAbortedError",
        "GroupError",
        "GroupLostError",
        "GroupMismatchError",
        "GroupTimeoutError",
    ),
    "etha.groups.baby.baby_groups": ("ProcessGroupBaby", "ProcessGroupBabyGloo", "ProcessGroupBabyNCCL"),
    "etha.groups.base": ("GroupConfig", "ProcessGroup"),
    "etha.groups.calls": ("GroupCall",),
    "etha.groups.dummy": ("ProcessGroupDummy",),
    "etha.groups.inprocess.nccl": ("ProcessGroupNCCL",),
    "etha.groups.inprocess.torch_groups": ("ProcessGroupGloo",),
    "etha.groups.managed": ("ManagedProcessGroup",),
    "etha.groups.members": ("Members", "Quorum"),
    "etha.groups.host.etha_group": ("ProcessGroupEtha",),
    "etha.groups.mesh": ("extend_device_mesh",),
    "etha.groups.store_client": ("create_store_client",),
    "etha.groups.training.ddp": ("DistributedDataParallel",),
    "etha.groups.training.local_sgd": ("DiLoCo", "LocalSGD"),
    "etha.groups.training.optimizer": ("Optimizer",),
    "etha.groups.training.sampler": ("Sampler",),
    "etha.groups.work": ("GroupWork",),
    "etha.groups.wrappers": (
        "ErrorSwallowingProcessGroupWrapper",
        "FakeProcessGroupWrapper",
        "ProcessGroupWrapper",
    ),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etha.groups' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _world(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    group = __getattr__("ProcessGroupEtha")(timeout)
    group.configure(store, f"rank {rank}", rank, size)
    return group


if "etha" not in dist.Backend.backend_list:
    dist.Backend.register_backend("etha", _world, devices=["cpu"])
