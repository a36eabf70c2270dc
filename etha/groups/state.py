"""What a newcomer must have before its first step, and how it is handed over: tensors, and plain values around them.

``MemberState`` takes the state of model, optimizer and whatever the program adds apart into tensors and a frame of
plain values, which msgpack carries. Tensors are sent one by one through a process group, each rank its own part (the
local tensor of a DTensor), so both ends need the same sharding. A checksum covers all bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from etha.errors import ConfigError, ProtocolError

#: Keys of values that msgpack does not have as such, in a map of one entry.
_TENSOR, _TUPLE, _MAP = "tensor", "tuple", "map"
#: Most bytes of a frame.
_MOST_BYTES = 1 << 30
#: Ints that msgpack carries as they are.
_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1


class MemberState:
    """``extra``: (get, set); ``get()`` returns numbers, text, bytes, tensors, and lists, tuples and dicts of these."""

    def __init__(
        self, model: Any, optimizer: Any, extra: tuple[Callable[[], Any], Callable[[Any], None]] | None
    ) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise ConfigError(f"members.state(model): a torch.nn.Module is needed, not {type(model).__name__}")
        if optimizer is not None and not hasattr(optimizer, "load_state_dict"):
            raise ConfigError("members.state(optimizer=...): it has no load_state_dict")
        if extra is not None and not (len(extra) == 2 and all(map(callable, extra))):
            raise ConfigError("members.state(extra=...): two functions are needed, (get, set)")
        self._model, self._optimizer, self._extra = model, optimizer, extra

    def send(self, group: Any, rank: int, counts: dict[str, int]) -> None:
        """Hand the state to ``rank``, which calls ``receive``."""
        tensors: list[Tensor] = []
        whole = {
            "model": None if self._model is None else self._model.state_dict(),
            "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
            "extra": None if self._extra is None else self._extra[0](),
            "counts": counts,
        }
        frame = _apart(whole, tensors)
        checksum = 0
        for tensor in tensors:
            checksum = _checksum(tensor, checksum)
        shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        packed = msgspec.msgpack.encode({"frame": frame, "shapes": shapes, "checksum": checksum})
        if len(packed) > _MOST_BYTES:
            raise ConfigError(f"members.state: {len(packed)} bytes of plain values, at most {_MOST_BYTES} are possible")
        group.send([torch.tensor([len(packed)])], rank, 0).wait()
        group.send([torch.frombuffer(bytearray(packed), dtype=torch.uint8)], rank, 0).wait()
        for tensor in tensors:
            if tensor.numel():
                group.send([tensor], rank, 0).wait()

    def receive(self, group: Any, rank: int) -> dict[str, int]:
        """Take the state from ``rank``; returns its counts. Nothing is changed unless all of it has arrived whole."""
        length = torch.zeros(1, dtype=torch.int64)
        group.recv([length], rank, 0).wait()
        if not 0 < int(length) <= _MOST_BYTES:
            raise ProtocolError(f"rank {rank} announces a state of {int(length)} bytes")
        packed = torch.empty(int(length), dtype=torch.uint8)
        group.recv([packed], rank, 0).wait()
        heard = msgspec.msgpack.decode(bytes(packed.numpy()))
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in heard["shapes"]]
        checksum = 0
        for tensor in tensors:
            if tensor.numel():
                group.recv([tensor], rank, 0).wait()
            checksum = _checksum(tensor, checksum)
        if checksum != heard["checksum"]:
            raise ProtocolError(f"the state of rank {rank} did not arrive as it was sent: its checksum differs")
        whole = _together(heard["frame"], tensors)
        self._load(whole)
        return dict(whole["counts"])

    def _load(self, whole: dict[str, Any]) -> None:
        with torch.no_grad():
            if self._model is not None:
                _into(self._model.state_dict(), whole["model"])
            if self._optimizer is not None:
                self._optimizer.load_state_dict(_sharded(whole["optimizer"], self._optimizer))
        if self._extra is not None:
            self._extra[1](whole["extra"])


def _into(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Copy a module's tensors in place; whatever else its state holds must be equal in kind."""
    if mine.keys() != theirs.keys():
        differ = sorted(mine.keys() ^ theirs.keys())[:10]
        raise ConfigError(f"members.state: the models of the replicas differ: {differ}")
    for name, value in mine.items():
        if not isinstance(value, Tensor):
            continue
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.shape != theirs[name].shape or local.dtype != theirs[name].dtype:
            raise ConfigError(
                f"members.state: {name} is {local.dtype} of {list(local.shape)} here and {theirs[name].dtype} of "
                f"{list(theirs[name].shape)} at the replica that it is loaded from"
            )
    for name, value in mine.items():
        if isinstance(value, Tensor):
            (value.to_local() if isinstance(value, DTensor) else value).copy_(theirs[name])


def _sharded(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """An optimizer's state of local tensors, with DTensors where the parameter is one."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        entry = state["state"].get(number)
        if entry is None or not isinstance(parameter, DTensor):
            continue
        shape = parameter.to_local().shape
        for name, value in entry.items():
            if isinstance(value, Tensor) and value.shape == shape:
                entry[name] = DTensor.from_local(
                    value.to(parameter.device),
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
    return state


def _apart(value: Any, tensors: list[Tensor]) -> Any:
    """Plain values as msgpack has them; tensors are numbered and collected."""
    match value:
        case Tensor():
            local = value.to_local() if isinstance(value, DTensor) else value
            tensors.append(local.detach().cpu().contiguous())
            return {_TENSOR: len(tensors) - 1}
        case None | bool() | float() | str() | bytes():
            return value
        case int() if _LEAST_INT <= value <= _MOST_INT:
            return value
        case list():
            return [_apart(one, tensors) for one in value]
        case tuple():
            return {_TUPLE: [_apart(one, tensors) for one in value]}
        case dict():
            return {_MAP: [[_apart(key, tensors), _apart(one, tensors)] for key, one in value.items()]}
    raise ConfigError(
        f"members.state cannot hand over a {type(value).__name__}: give numbers, text, bytes, tensors, and lists, "
        f"tuples and dicts of these"
    )


def _together(value: Any, tensors: list[Tensor]) -> Any:
    """The inverse of ``_apart``."""
    match value:
        case list():
            return [_together(one, tensors) for one in value]
        case {"tensor": int(number)}:
            return tensors[number]
        case {"tuple": list(items)}:
            return tuple(_together(one, tensors) for one in items)
        case {"map": list(items)}:
            return {_together(key, tensors): _together(one, tensors) for key, one in items}
    return value


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    for at in range(0, len(flat), 1 << 24):
        yield flat[at : at + (1 << 24)].data


def _checksum(tensor: Tensor, before: int) -> int:
    for piece in _pieces(tensor) if tensor.numel() else ():
        before = zlib.crc32(piece, before)
    return before
