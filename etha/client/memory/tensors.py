"""``etha.empty``, ``etha.empty_like``, ``etha.share_module``: tensors that an agent maps directly.

A transfer then copies the data once, without a system call. Nothing else in Etha moves a user's tensor to other memory.
On a GPU this is torch's own memory as its allocator gives it by default. With
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True or backend:cudaMallocAsync torch's memory has no IPC handle: then
``empty`` takes memory of cudaMalloc.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from etha import limits
from etha.client.arguments.checks import check_shape, shown
from etha.client.arguments.world import device_of
from etha.cuda.driver import DeviceError
from etha.cuda.select import driver
from etha.errors import ConfigError
from etha.memory import shared
from etha.plan.layouts import dtypes
from etha.torch_types import is_dtensor, is_fsdp_module


def empty(
    shape: Sequence[int] | int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """A zeroed contiguous tensor of ``shape`` in memory that an agent maps: shared CPU memory, or torch's own on a GPU.

    If torch's memory there cannot be mapped (expandable segments, cudaMallocAsync), the tensor gets 2 MiB or a multiple
    of cudaMalloc's, which are freed with it. ConfigError for other devices.
    """
    where = device_of(device)
    _check_served(where, "empty")
    size = check_shape("etha.empty: shape", (shape,) if isinstance(shape, int) else shape)
    _check_dtype(dtype, "empty")
    if where.type == "cuda":
        try:
            made = torch.zeros(size, dtype=dtype, device=where)
        except AssertionError as error:  # a torch without CUDA
            raise ConfigError(f"etha.empty: device {where} is not here: {error}") from None
        return _exportable(made, "empty")
    strides = [math.prod(max(n, 1) for n in size[d + 1 :]) for d in range(len(size))]
    return _allocate(size, strides, dtype)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """``empty`` with the shape, dtype, device and (if dense) strides of a plain ``tensor``."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"etha.empty_like: {shown(tensor)} is not a tensor")
    if is_dtensor(tensor):
        raise ConfigError("etha.empty_like: the tensor is a DTensor: give its local tensor, to_local()")
    _check_plain(tensor, "empty_like: the tensor")
    _check_served(tensor.device, "empty_like")
    _check_dtype(tensor.dtype, "empty_like")
    if tensor.device.type == "cuda":
        return _exportable(torch.zeros_like(tensor), "empty_like")
    model = torch.empty_like(tensor, device="meta")
    return _allocate(tuple(model.shape), model.stride(), model.dtype)


def share_module(module: torch.nn.Module) -> torch.nn.Module:
    """Move every parameter and buffer of ``module`` into memory that an agent maps, and return it.

    In place: parameters keep their identity and strides; tied ones and views of one storage stay tied. Tensors on a GPU
    stay where they are, because an agent maps torch's own memory there (except expandable segments). NumPy arrays and
    raw pointers still refer to the old memory. Call it before ``fully_shard``, which keeps pointers of its own.
    ConfigError for tensors of other devices, before anything has moved.
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"etha.share_module: {shown(module)} is not a torch.nn.Module")
    if any(is_fsdp_module(m) for m in module.modules()):
        raise ConfigError("etha.share_module: the module is already fully_shard-ed; share it before fully_shard")
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        local = tensor._local_tensor if is_dtensor(tensor) else tensor
        _check_plain(local, f"share_module: {name!r}")
        if type(local.data) is not torch.Tensor:
            raise ConfigError(f"etha.share_module: {name!r} is a {type(local).__name__}, not a plain strided tensor")
        _check_served(local.device, f"share_module: {name!r}")
        if local.numel() and local.device.type == "cpu":
            tensors[id(local)] = local

    # By old storage: the bytes in use, and the tensors that use them.
    used: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        used.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    groups = [(*_extent(group), group) for group in used.values()]
    for (low, high, group), new in zip(groups, _storages([h - lo for lo, h, _ in groups]), strict=True):
        old = group[0].untyped_storage()
        torch.empty(0, dtype=torch.uint8).set_(new).copy_(torch.empty(0, dtype=torch.uint8).set_(old)[low:high])
        for tensor in group:
            offset = (tensor.storage_offset() * tensor.itemsize - low) // tensor.itemsize
            tensor.data = shared.strided(new, tensor.shape, tensor.stride(), tensor.dtype, offset)
    return module


def _storages(sizes: Sequence[int]) -> list[torch.UntypedStorage]:
    """Storages of these sizes. Large ones have a segment each, so that ``atomic="swap"`` can exchange it, unless that
    would take more than a quarter of the descriptors that this process has left; all others share one."""
    own = [i for i, nbytes in enumerate(sizes) if nbytes >= shared.SMALL]
    if len(own) > (limits.descriptor_limit() - limits.descriptors_open()) // 4:
        own = []
    made = {i: shared.storage(sizes[i]) for i in own}
    rest = [i for i in range(len(sizes)) if i not in made]
    made |= zip(rest, shared.storages([sizes[i] for i in rest]), strict=True)
    return [made[i] for i in range(len(sizes))]


def _extent(group: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Byte range of one storage that these tensors use. Its start is a multiple of 16, for any dtype."""
    lows: list[int] = []
    highs: list[int] = []
    for t in group:
        lows.append(int(t.storage_offset()) * t.itemsize)
        highs.append(lows[-1] + (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.itemsize)
    return min(lows) // 16 * 16, int(max(highs))


def _allocate(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return shared.strided(shared.storage(extent * dtype.itemsize), shape, strides, dtype)


def _exportable(made: torch.Tensor, what: str) -> torch.Tensor:
    """A zeroed tensor of a GPU, or another one like it if no agent can map its memory."""
    if not made.is_cuda or not made.numel() or type(made) is not torch.Tensor:  # a fake one has no memory
        return made
    from etha.client.memory import cuda  # for who has a GPU

    try:
        return cuda.exportable(driver(), made)
    except DeviceError as error:
        raise ConfigError(f"etha.{what}: {error}; `etha doctor` says more") from error


def _check_plain(tensor: torch.Tensor, what: str) -> None:
    """ConfigError for a tensor whose memory is not its elements at strides."""
    if is_lazy(tensor):
        raise ConfigError(f"etha.{what} is a {type(tensor).__name__}: run a forward first, which gives it a shape")
    forms = {"quantized": tensor.is_quantized, "nested": tensor.is_nested, "MKL-DNN": tensor.is_mkldnn}
    if form := next((name for name, is_one in forms.items() if is_one), None):
        raise ConfigError(f"etha.{what} is a {form} tensor, not a plain strided one")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"etha.{what} is a sparse tensor ({tensor.layout}), not a plain strided one")


def _check_dtype(dtype: torch.dtype, what: str) -> None:
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"etha.{what}: dtype={shown(dtype)} is no torch.dtype, such as torch.float32; a shape is one argument, as "
            f"in etha.empty((8, 5))"
        )
    if dtype not in dtypes.BY_NAME.values():
        raise ConfigError(f"etha.{what}: dtype {dtype} cannot be moved; use one of {', '.join(dtypes.BY_NAME)}")


def _check_served(device: torch.device, what: str) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"etha.{what}: device {device} is not supported, an agent maps memory of cpu and cuda only")
