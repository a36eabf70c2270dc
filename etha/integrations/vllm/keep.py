"""What one worker's loaders keep of each checkpoint tensor, learned by letting them load stand-ins once.

kept = Recording(model_parameters).of(metas, load)        # nothing is stored, nothing of the model changes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from etha.integrations.vllm.standin import StandIn, aten
from etha.integrations.vllm.trace import Region, Trace, empty, shape_of, union, whole


@dataclass(frozen=True, slots=True)
class Meta:
    """A checkpoint tensor as its trainer announces it: name, global shape, dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Copy:
    """One ``copy_`` of a loader: what it takes, and where it goes in the parameter ``param`` (None: somewhere else)."""

    trace: Trace
    param: str | None
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a worker keeps of a tensor: ``region`` of it, as ``dtype``.

    ``copies`` are all its reads where each was a ``copy_`` into what nothing else writes, else None. ``why`` says
    what stood against recording it: then all of it is kept.
    """

    meta: Meta
    region: Region
    dtype: torch.dtype
    copies: tuple[Copy, ...] | None
    why: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a tensor that holds the region densely."""
        return shape_of(self.region)

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(slots=True)
class _Tensor:
    """The tap of one stand-in while a loader has it: notes, and gives empty tensors to compute with."""

    meta: Meta
    params: Mapping[int, str]
    region: Region | None = None
    copies: list[Copy] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)
    plain: bool = True

    def read(self, trace: Trace | None, seen: torch.Tensor) -> torch.Tensor:
        self.plain = False
        self._note(trace)
        return torch.empty_like(seen)

    def copy(self, into: torch.Tensor, trace: Trace | None, seen: torch.Tensor) -> None:
        if into.numel() != seen.numel() or not _fits(seen.shape, into.shape):
            raise ValueError(f"a loader copies {tuple(seen.shape)} of it into {tuple(into.shape)}")
        self._note(trace)
        self.dtypes.add(into.dtype)
        if trace is None:
            self.plain = False
            return
        param = self.params.get(into.untyped_storage()._cdata)
        self.copies.append(Copy(trace, param, int(into.storage_offset()), tuple(into.shape), into.stride()))

    def _note(self, trace: Trace | None) -> None:
        self.region = union(self.region, whole(self.meta.shape) if trace is None else trace.region())

    def kept(self, worked: set[str]) -> Kept:
        region = self.region
        if region is None:  # nobody wants it; what has no dims cannot be left out in part
            region = ((),) * len(self.meta.shape)
        alone = self.plain and not any(copy.param in worked for copy in self.copies)
        copies = tuple(self.copies) if alone and self.copies else None
        dtype = self.meta.dtype
        if self.plain and len(self.dtypes) == 1:
            (into,) = self.dtypes
            # A copy_ converts; where Etha would, too, it does so on the way and fewer bytes are received.
            if dtype.is_floating_point and into.is_floating_point and into.itemsize <= dtype.itemsize:
                dtype = into
        return Kept(meta=self.meta, region=region, dtype=dtype, copies=copies)


def _fits(small: torch.Size, large: torch.Size) -> bool:
    try:
        return bool(torch.broadcast_shapes(small, large) == large)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False


class Recording:
    """Records loads into a model whose parameters are ``params``, on whichever device, mostly meta."""

    def __init__(self, params: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._params = {tensor.untyped_storage()._cdata: name for name, tensor in params.items()}
        self._device = device

    def of(self, metas: Iterable[Meta], load: Callable[[list[tuple[str, torch.Tensor]]], Any]) -> dict[str, Kept]:
        """What ``load`` keeps of each tensor: of all at once, and where that fails of one after another.

        ``load`` takes (name, tensor) pairs, as a model's ``load_weights``. A tensor that cannot be recorded is kept
        whole, with the error in ``why``.
        """
        metas = list(metas)
        taps = {meta.name: _Tensor(meta, self._params) for meta in metas}
        try:
            worked = self._load(taps.values(), load)
        except Exception:
            return {meta.name: self._one(meta, load) for meta in metas}
        return {name: tap.kept(worked) for name, tap in taps.items()}

    def _one(self, meta: Meta, load: Callable[[list[tuple[str, torch.Tensor]]], Any]) -> Kept:
        tap = _Tensor(meta, self._params)
        try:
            worked = self._load([tap], load)
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            return Kept(meta=meta, region=whole(meta.shape), dtype=meta.dtype, copies=None, why=why)
        return tap.kept(worked)

    def _load(self, taps: Iterable[_Tensor], load: Callable[[list[tuple[str, torch.Tensor]]], Any]) -> set[str]:
        """Load stand-ins; the parameters into which the loaders wrote anything but a ``copy_`` of these."""
        tensors: list[tuple[str, torch.Tensor]] = []
        for tap in taps:
            tensors.append((tap.meta.name, StandIn.of(tap.meta.shape, tap.meta.dtype, self._device, tap)))
        dry = _Dry(self._params)
        with torch.no_grad(), dry:
            load(tensors)
        return dry.worked


class _Dry(TorchDispatchMode):
    """Lets nothing write into the parameters that are there for real, and notes who is written to (``worked``).

    Loaders fill paddings, set scalars, and turn what they loaded into something else, in place.
    """

    def __init__(self, params: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._params = params
        self.worked: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default and isinstance(args[1], StandIn):
            return func(*args, **kwargs)  # its tap notes it, and writes nothing
        for number, argument in enumerate(func._schema.arguments[: len(args)]):
            into = args[number]
            if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(into, torch.Tensor):
                continue
            param = None if isinstance(into, StandIn) else self._params.get(into.untyped_storage()._cdata)
            if param is not None and into.numel():
                self.worked.add(param)
                if into.device.type != "meta":
                    return into
        return func(*args, **kwargs)


def nothing(kept: Kept) -> bool:
    """Whether the worker's loaders take no element of the tensor."""
    return empty(kept.region)
