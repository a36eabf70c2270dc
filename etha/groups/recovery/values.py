"""Plain values with tensors in them, taken apart and put together; pure.

A frame is what msgpack carries: tensors are replaced by their names and travel by themselves. Nothing is pickled. The
same tensor twice, such as a tied weight, has one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etha.config import MAX_TENSOR_NAME
from etha.errors import ConfigError

#: Keys of values that msgpack does not have as such, in a map of one entry.
_TENSOR, _TUPLE, _MAP = "tensor", "tuple", "map"
#: Ints that msgpack carries as they are.
_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1


class TensorCollector:
    """Tensors by name, in the order in which ``take_apart`` has found them."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def take_apart(self, value: Any, path: str) -> Any:
        """``value`` as a frame. ``path`` says where it is, which names its tensors. ConfigError names what cannot be
        handed over."""
        match value:
            case Tensor():
                _check_tensor(value, path)
                return {_TENSOR: self._name(value, path)}
            case np.generic():
                return self.take_apart(value.item(), path)
            case None | bool() | bytes():
                return value
            case float():
                return float(value)  # not a class of its own, which msgpack does not know
            case str():
                return str(value)
            case int() if _LEAST_INT <= value <= _MOST_INT:
                return int(value)
            case int():
                raise ConfigError(f"members.state cannot hand over {path}: {value} does not fit into 64 bits")
            case list():
                return [self.take_apart(one, f"{path}/{number}") for number, one in enumerate(value)]
            case tuple():
                return {_TUPLE: [self.take_apart(one, f"{path}/{number}") for number, one in enumerate(value)]}
            case dict():
                pairs = [
                    [self.take_apart(key, f"{path}/key"), self.take_apart(one, f"{path}/{key}")]
                    for key, one in value.items()
                ]
                return {_MAP: pairs}
        raise ConfigError(
            f"members.state cannot hand over {path}, a {type(value).__name__}: give numbers, text, bytes, tensors, and "
            f"lists, tuples and dicts of these"
        )

    def _name(self, tensor: Tensor, path: str) -> str:
        known = self._names.get(id(tensor))
        if known is not None:
            return known
        name, more = _fitting(path), 1
        while name in self.found:  # the keys 1 and "1" have the same text
            more += 1
            name = _fitting(f"{path}#{more}")
        self.found[name] = tensor  # kept, so that no other tensor gets this id
        self._names[id(tensor)] = name
        return name


def _check_tensor(tensor: Tensor, path: str) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ConfigError(f"members.state cannot hand over {path}: a tensor must be dense, it is {tensor.layout}")
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(
            f"members.state cannot hand over {path}: it is a conjugated or negated view: give "
            f"tensor.resolve_conj().resolve_neg()"
        )


def put_together(frame: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``take_apart``."""
    match frame:
        case list():
            return [put_together(one, tensors) for one in frame]
        case {"tensor": str(name)}:
            return tensors[name]
        case {"tuple": list(items)}:
            return tuple(put_together(one, tensors) for one in items)
        case {"map": list(items)}:
            return {put_together(key, tensors): put_together(one, tensors) for key, one in items}
    return frame


def _fitting(path: str) -> str:
    """The end of a path that is too long for a tensor's name."""
    return path.encode()[-MAX_TENSOR_NAME:].decode(errors="ignore")
