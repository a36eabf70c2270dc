"""Etha: tensors between two PyTorch jobs, from any layout to any layout. Public names, nothing else."""

from etha.client.aio import AsyncTensorBusClient
from etha.client.future import TransferFuture
from etha.client.results import Offer, TransferResult
from etha.client.sync import TensorBusClient
from etha.client.sync_handle import BatchHandle
from etha.client.sync_pair import Pair
from etha.client.tensors import empty, empty_like, share_module
from etha.errors import (
    AgentLostError,
    AgentUnavailableError,
    ConfigError,
    EthaError,
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
from etha.version import __version__

__all__ = [
    "AgentLostError",
    "AgentUnavailableError",
    "AsyncTensorBusClient",
    "BatchHandle",
    "ConfigError",
    "EthaError",
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
