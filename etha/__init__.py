"""Etha: moves tensors between two PyTorch jobs, from any layout to any layout. This module has the public names only.

A name's module is imported when the name is first used, because most of them import torch. That takes seconds, and the
command line answers without it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from etha.lazy_names import lazy_names
from etha.version import __version__

if TYPE_CHECKING:
    from etha.client.aio import AsyncTensorBusClient
    from etha.client.future import TransferFuture
    from etha.client.memory.tensors import empty, empty_like, share_module
    from etha.client.publication import AsyncPublication, PublishedVersion, SubscriberState
    from etha.client.publishing import Publication, Subscription
    from etha.client.results import Offer, TransferResult
    from etha.client.subscription import AsyncSubscription, Update
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
    "AsyncPublication",
    "AsyncSubscription",
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
    "Publication",
    "PublishedVersion",
    "RedisUnavailableError",
    "RegistrationError",
    "RendezvousTimeoutError",
    "SubscriberState",
    "Subscription",
    "TensorBusClient",
    "TransferAbortedError",
    "TransferError",
    "TransferFuture",
    "TransferResult",
    "TransferTimeoutError",
    "Update",
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
    "etha.client.publication": ("AsyncPublication", "PublishedVersion", "SubscriberState"),
    "etha.client.publishing": ("Publication", "Subscription"),
    "etha.client.results": ("Offer", "TransferResult"),
    "etha.client.subscription": ("AsyncSubscription", "Update"),
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
#: Submodules that are attributes after ``import etha`` alone.
_MODULES = ("bus", "client", "config", "cuda", "errors", "memory", "plan", "publishing", "testing", "version")


class _Package(ModuleType):
    """Keeps ``etha.redistribute`` the function, even after the package of the same name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "redistribute" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
__getattr__, __dir__ = lazy_names(__name__, _NAMES, _MODULES)
