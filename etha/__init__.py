"""Etha: moves tensors between two PyTorch jobs, from any layout to any layout. This module has the public names only.

A name's module is imported when the name is first used, because most of them import torch. That takes seconds, and the
command line answers without it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from etha.version import __version__

if TYPE_CHECKING:
    from etha.client.aio import AsyncTensorBusClient
    from etha.client.future import TransferFuture
    from etha.client.memory.tensors import empty, empty_like, share_module
    from etha.client.results import Offer, TransferResult
    from etha.client.sync import BatchHandle, Pair, TensorBusClient
    from etha.errors import (
        AgentLostError,
        AgentUnavailableError,
        ConfigError,
        EthaError,
        GroupAbortedError,
        GroupError,
        GroupLostError,
        GroupMismatchError,
        GroupTimeoutError,
        LayoutError,
        PeerLostError,
        PlanError,
        ProtocolError,
        RedisUnavailableError,
        RegistrationError,
        RendezvousTimeoutError,
        TransferAbortedError,
        TransferError,
        TransferTimeoutError,
        Violation,
    )
    from etha.redistribute import redistribute

__all__ = [
    "AgentLostError",
    "AgentUnavailableError",
    "AsyncTensorBusClient",
    "BatchHandle",
    "ConfigError",
    "EthaError",
    "GroupAbortedError",
    "GroupError",
    "GroupLostError",
    "GroupMismatchError",
    "GroupTimeoutError",
    "LayoutError",
    "Offer",
    "Pair",
    "PeerLostError",
    "PlanError",
    "ProtocolError",
    "RedisUnavailableError",
    "RegistrationError",
    "RendezvousTimeoutError",
    "TensorBusClient",
    "TransferAbortedError",
    "TransferError",
    "TransferFuture",
    "TransferResult",
    "TransferTimeoutError",
    "Violation",
    "__version__",
    "empty",
    "empty_like",
    "redistribute",
    "share_module",
]

#: Module -> its public names.
_NAMES = {
    "etha.client.aio": ("AsyncTensorBusClient",),
    "etha.client.future": ("TransferFuture",),
    "etha.client.results": ("Offer", "TransferResult"),
    "etha.client.sync": ("BatchHandle", "Pair", "TensorBusClient"),
    "etha.client.memory.tensors": ("empty", "empty_like", "share_module"),
    "etha.errors": (
        "AgentLostError",
        "AgentUnavailableError",
        "ConfigError",
        "EthaError",
        "GroupAbortedError",
        "GroupError",
        "GroupLostError",
        "GroupMismatchError",
        "GroupTimeoutError",
        "LayoutError",
        "PeerLostError",
        "PlanError",
        "ProtocolError",
        "RedisUnavailableError",
        "RegistrationError",
        "RendezvousTimeoutError",
        "TransferAbortedError",
        "TransferError",
        "TransferTimeoutError",
        "Violation",
    ),
    "etha.redistribute": ("redistribute",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
#: Submodules that are attributes after ``import etha`` alone.
_MODULES = frozenset({"bus", "client", "config", "cuda", "errors", "memory", "plan", "testing", "version"})


class _Package(ModuleType):
    """Keeps ``etha.redistribute`` the function, even after the package of the same name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"etha.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'etha' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
