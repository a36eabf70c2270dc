"""Process groups whose members come and go: ``torch.distributed`` groups that can be configured again after a loss.

Names are imported when they are first used, because the schedule and the membership need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etha.errors import GroupAbortedError, GroupError, GroupLostError, GroupMismatchError, GroupTimeoutError
    from etha.groups.base import GroupConfig, ProcessGroup
    from etha.groups.calls import GroupCall
    from etha.groups.work import GroupWork

__all__ = [
    "GroupAbortedError",
    "GroupCall",
    "GroupConfig",
    "GroupError",
    "GroupLostError",
    "GroupMismatchError",
    "GroupTimeoutError",
    "GroupWork",
    "ProcessGroup",
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
    "etha.groups.base": ("GroupConfig", "ProcessGroup"),
    "etha.groups.calls": ("GroupCall",),
    "etha.groups.work": ("GroupWork",),
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
