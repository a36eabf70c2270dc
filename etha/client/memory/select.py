"""The home for a device or an agent: the host's, or a GPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from etha.client.memory.base import TensorMemory
from etha.client.memory.cpu import CpuMemory
from etha.config import CUDA_AGENT
from etha.cuda.driver import DeviceError
from etha.cuda.select import driver
from etha.errors import ConfigError

if TYPE_CHECKING:
    from etha.client.memory.cuda import GpuMemory


def agent_of(device: torch.device) -> str:
    """The name of a device's agent, "cpu" or "cuda-GPU-<uuid>"; ConfigError for a device that does not exist."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise ConfigError(f"device={str(device)!r}: Etha serves cpu and cuda devices")
    try:
        devices = driver().devices()
    except DeviceError as error:
        raise ConfigError(f"device={str(device)!r}: {error}; `etha doctor` says more") from error
    try:
        index = torch.cuda.current_device() if device.index is None else device.index
    except (AssertionError, RuntimeError) as error:  # a torch without CUDA, or without a GPU
        why = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"device={str(device)!r}: torch {torch.__version__} has no GPU here ({why}); `etha doctor` says more, "
            f"and device='cpu' moves tensors of the host"
        ) from None
    for found in devices:
        if found.ordinal == index:
            return f"{CUDA_AGENT}{found.uuid}"
    raise ConfigError(
        f"device={str(device)!r} is not among the {len(devices)} GPUs that this process sees; `etha doctor` says more, "
        f"and device='cpu' moves tensors of the host"
    )


def home_of(agent: str, gpu: str = "") -> TensorMemory:
    """The home that the agent of this name serves. ``gpu``: the host's agent serves copies of that GPU's tensors."""
    if gpu:
        from etha.client.memory.gpu_on_host import GpuOnHost

        return GpuOnHost(_gpu_memory(gpu))
    if not agent.startswith(CUDA_AGENT):
        return CpuMemory()
    return _gpu_memory(agent)


def _gpu_memory(agent: str) -> GpuMemory:
    """Of the GPU whose agent has this name."""
    from etha.client.memory.cuda import GpuMemory

    try:
        return GpuMemory(driver(), agent.removeprefix(CUDA_AGENT))
    except DeviceError as error:
        raise ConfigError(f"the agent serves {agent}: {error}; `etha doctor` says more") from error
