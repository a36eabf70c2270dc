"""Carries loaders' writes to parameters on meta to real memory, which is allocated when it is needed.

    loader:   param.data[0:4].copy_(part)      views of a parameter on meta cost nothing, and stay views on meta
    here:     memory of param[0:4].copy_(part) any operation that is not a view works on the parameter's own memory

It does not matter how or in which order a loader gets to a parameter. This is a first load, a module at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from etha.errors import ConfigError
from etha.integrations.vllm.weights.keep import lossy
from etha.integrations.vllm.weights.standin import StandIn, aten
from etha.integrations.vllm.weights.trace import Region, Trace, area


@dataclass(slots=True, eq=False)
class ParameterMemory:
    """A parameter or buffer ``leaf`` of ``module`` as its loaders see it, mostly on meta, and its memory.

    ``due``: how often a load writes to it, if that is known. ``regions``: the parts that were written. ``closed``: its
    module is finished. ``written_at``, ``read_at``: the last tensors of the load at which it was; see ``Filling.step``.
    """

    name: str
    module: nn.Module
    leaf: str
    seen: torch.Tensor
    due: int | None = None
    memory: torch.Tensor | None = None
    writes: int = 0
    regions: set[Region] = field(default_factory=set)
    odd: bool = False
    closed: bool = False
    written_at: int = -1
    read_at: int = -1

    @property
    def read_alone(self) -> bool:
        """Whether a loader has read it since it was last written to, while it had another tensor."""
        return self.read_at > self.written_at

    def covered(self) -> int:
        """How many of its elements were written. Those of a part that is not a product of runs do not count."""
        return area(self.regions)

    def note(self, into: torch.Tensor) -> None:
        """Record a write to ``into``, a view of the tensor that the loaders see."""
        self.writes += 1
        offset = int(into.storage_offset()) - int(self.seen.storage_offset())
        trace = Trace.of(self.seen.shape, offset, into.shape, into.stride()) if self.seen.is_contiguous() else None
        if trace is not None:
            self.regions.add(trace.region())
        elif into.numel() == self.seen.numel():
            self.regions.add(tuple(((0, n),) for n in self.seen.shape))
        else:
            self.odd = True


class Filling(TorchDispatchMode, ABC):
    """Carries operations on ``places`` to their memory, which ``make`` allocates when a place is first used."""

    def __init__(self, places: Iterable[ParameterMemory], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places: Mapping[int, ParameterMemory] = {p.seen.untyped_storage()._cdata: p for p in places}
        self._device = device
        self._off = False
        #: How many tensors of the load are over.
        self.step = 0
        #: Casts that lose the meaning of a number: parameter, dtype from, dtype to.
        self.casts: set[tuple[str, torch.dtype, torch.dtype]] = set()
        #: Parameters that were written after they were closed.
        self.late: set[str] = set()

    @abstractmethod
    def make(self, place: ParameterMemory) -> torch.Tensor:
        """New memory for a place."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable this mode inside."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Views stay as they are; everything else works on the places' memory."""
        kwargs = kwargs or {}
        if self._off or func.is_view:
            return func(*args, **kwargs)
        if "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs = {**kwargs, "device": self._device}  # a loader that asked a parameter where it is
        stands: dict[int, torch.Tensor] = {}
        written = [(place, into) for into in _written(func, args, kwargs) if (place := self._place(into)) is not None]

        def real(found: Any) -> Any:
            place = self._place(found)
            if place is None:
                return found
            if not any(found is into for _, into in written):
                place.read_at = self.step
            memory = self._view(place, found)
            stands[id(memory)] = found
            return memory

        if func is aten.copy_.default and written and lossy(args[1].dtype, args[0].dtype):
            self.casts.add((written[0][0].name, args[1].dtype, args[0].dtype))
        args, kwargs = tree_map(real, (args, kwargs))
        tree_map(_refuse_meta, (args, kwargs))
        result = func(*args, **kwargs)
        for place, into in written:
            if not into.numel():
                continue
            place.note(into)
            place.written_at = self.step
            if place.closed:
                self.late.add(place.name)
        return tree_map(lambda found: stands.get(id(found), found), result)

    def _place(self, found: Any) -> ParameterMemory | None:
        if not isinstance(found, torch.Tensor) or isinstance(found, StandIn):
            return None
        return self._places.get(found.untyped_storage()._cdata)

    def _view(self, place: ParameterMemory, seen: torch.Tensor) -> torch.Tensor:
        if place.memory is None:
            place.memory = self.make(place)
        base = place.memory.detach()
        if seen.dtype != base.dtype:
            base = base.view(seen.dtype)
        offset = int(base.storage_offset()) + int(seen.storage_offset()) - int(place.seen.storage_offset())
        return base.as_strided(seen.shape, seen.stride(), offset)


class MetaReadError(ConfigError):
    """Loaders compute with a tensor that has no numbers."""


class RealIndices(TorchFunctionMode):
    """Makes tensors of lists by which tensors are indexed, because torch makes them on the device of what is indexed.

    On meta they would lose their numbers before any operation could be seen.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = tuple(map(_index, args[1])) if isinstance(args[1], tuple) else _index(args[1])
            args = (args[0], index, *args[2:])
        return func(*args, **(kwargs or {}))


def _index(given: Any) -> Any:
    return torch.tensor(given) if isinstance(given, list) and all(isinstance(one, int) for one in given) else given


def _refuse_meta(found: Any) -> Any:
    """MetaReadError for a tensor on meta that is no parameter's: an operation with it gives undefined numbers."""
    if isinstance(found, torch.Tensor) and found.is_meta and found.numel() and not isinstance(found, StandIn):
        raise MetaReadError(
            f"the engine's loaders compute with a tensor of shape {tuple(found.shape)} on the meta device, where their "
            f"parameters are while a version comes in: this model is not supported"
        )
    return found


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        into = args[number] if number < len(args) else kwargs.get(argument.name)
        for found in into if isinstance(into, (list, tuple)) else [into]:
            if isinstance(found, torch.Tensor):
                yield found
