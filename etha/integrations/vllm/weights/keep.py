"""Finds what one worker's loaders keep of each checkpoint tensor, by letting them load stand-ins once.

kept = Recording(model_parameters).of(metas, load)        # stores nothing and does not change the model
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from etha.integrations.vllm.weights.standin import StandIn, aten
from etha.integrations.vllm.weights.trace import Region, Trace, empty, shape_of, union, whole


@dataclass(frozen=True, slots=True)
class Meta:
    """A checkpoint tensor as its trainer announces it: name, global shape, dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Copy:
    """One ``copy_`` of a loader: its source, and its destination in the parameter ``param`` (None: somewhere else)."""

    trace: Trace
    param: str | None
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPart:
    """What a worker keeps of a tensor: ``region`` of it, as ``dtype``.

    ``copies``: all its reads, if each was a ``copy_`` into elements that nothing else writes; else None. ``why``: the
    reason why it could not be recorded, so that all of it is kept.
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
    filled: Counter[str] = field(default_factory=Counter)
    plain: bool = True
    why: str | None = None
    casts: set[tuple[str, torch.dtype, torch.dtype]] = field(default_factory=set)

    def read(self, trace: Trace | None, seen: torch.Tensor) -> torch.Tensor:
        self.plain = False
        self._note(trace)
        return torch.empty_like(seen)

    def copy(self, into: torch.Tensor, trace: Trace | None, seen: torch.Tensor) -> None:
        if into.numel() != seen.numel() or not _fits(seen.shape, into.shape):
            raise ValueError(f"a loader copies {tuple(seen.shape)} of it into {tuple(into.shape)}")
        self._note(trace)
        self.dtypes.add(into.dtype)
        if lossy(seen.dtype, into.dtype):
            self.casts.add((self.params.get(into.untyped_storage()._cdata, "(none)"), seen.dtype, into.dtype))
        param = self.params.get(into.untyped_storage()._cdata)
        if param is not None:
            self.filled[param] += into.numel()
        if trace is None:
            self.plain = False
            return
        self.copies.append(Copy(trace, param, int(into.storage_offset()), tuple(into.shape), into.stride()))

    def put(self, into: torch.Tensor, value: torch.Tensor) -> None:
        param = self.params.get(into.untyped_storage()._cdata)
        if param is not None:
            self.filled[param] += into.numel()
        if lossy(value.dtype, into.dtype):
            self.casts.add((param or "(none)", value.dtype, into.dtype))

    def change(self) -> torch.Tensor:
        self.plain = False
        self.why = "its loader writes into it"
        self.region = whole(self.meta.shape)
        return torch.empty(self.meta.shape, dtype=self.meta.dtype)

    def _note(self, trace: Trace | None) -> None:
        if trace is None:
            self.why = "a view of it is no product of index runs"
        self.region = union(self.region, whole(self.meta.shape) if trace is None else trace.region())

    def kept(self, worked: set[str]) -> KeptPart:
        region = self.region
        if region is None:  # nobody wants it; what has no dims cannot be left out in part
            region = ((),) * len(self.meta.shape)
        why = self.why
        if why is None and not self.plain and self.meta.shape and region == whole(self.meta.shape):
            why = "its loader computes with all of it"
        alone = self.plain and not any(copy.param in worked for copy in self.copies)
        copies = tuple(self.copies) if alone and self.copies else None
        dtype = self.meta.dtype
        if self.plain and len(self.dtypes) == 1:
            (into,) = self.dtypes
            # A copy_ converts; where Etha would, too, it does so on the way and fewer bytes are received.
            if dtype.is_floating_point and into.is_floating_point and into.itemsize <= dtype.itemsize:
                dtype = into
        return KeptPart(meta=self.meta, region=region, dtype=dtype, copies=copies, why=why)


#: Of these, nobody means the numbers themselves, but those times a scale.
_SCALED = frozenset(
    (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
)


def lossy(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether ``copy_`` changes the meaning of the numbers: integers and float8 need a scale, and it applies none."""
    if source == target:
        return False
    return not target.is_floating_point or target.itemsize == 1 or source in _SCALED


def _fits(small: torch.Size, large: torch.Size) -> bool:
    try:
        return bool(torch.broadcast_shapes(small, large) == large)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a load keeps: ``kept`` by checkpoint name, and what it leaves of the parameters.

    ``refused``: tensors that the loaders do not take, whatever they hold, with their error. ``partial``: parameters
    of which only a part was written; ``unfilled``: nothing. ``writes``: how often each parameter is written to, where
    no tensor is received whole for want of a record. ``casts``: parameters, with the dtypes from and to, that are
    filled by a copy that loses what the numbers mean.
    """

    kept: dict[str, KeptPart]
    refused: dict[str, str]
    partial: list[str]
    unfilled: list[str]
    writes: Mapping[str, int]
    casts: list[tuple[str, torch.dtype, torch.dtype]]


Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


class Recording:
    """Records loads into a model whose parameters are ``params``, on any device, mostly meta."""

    def __init__(self, params: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in params.items()}
        self._numel = {name: getattr(tensor, "weight_loader_numel", tensor.numel()) for name, tensor in params.items()}
        self._device = device

    def of(self, metas: Iterable[Meta], load: Load) -> Recorded:
        """What ``load`` keeps of each tensor.

        ``load`` takes (name, tensor) pairs, as a model's ``load_weights`` does. All tensors are loaded together, except
        those at which the load fails. These are kept whole, with the error in ``why``. If a load also fails for a
        tensor of that name with elements, the tensor is refused.
        """
        rest, odd = list(metas), []
        while True:
            taps = {meta.name: _Tensor(meta, self._names) for meta in rest}
            handed: list[Meta] = []
            try:
                dry = self._load(taps.values(), load, handed)
                worked = dry.worked
                break
            except Exception:
                at = self._fault(rest, handed, load)
                if at is None:
                    raise
                odd.append(at)
                rest.remove(at)
        kept = {name: tap.kept(worked) for name, tap in taps.items()}
        refused: dict[str, str] = {}
        for meta in odd:
            why = self._alone(meta, load) or "its loader fails beside others' tensors"
            if self._refuses(meta, load):
                refused[meta.name] = why
            else:
                kept[meta.name] = KeptPart(meta=meta, region=whole(meta.shape), dtype=meta.dtype, copies=None, why=why)
        filled: Counter[str] = Counter()
        for tap in taps.values():
            filled.update(tap.filled)
        complete = {name for name, n in self._numel.items() if filled[name] >= n} | worked
        partial = sorted(name for name in filled if name not in complete)
        unfilled = sorted(name for name in self._numel if name not in complete and name not in filled)
        casts = sorted({*dry.casts, *(cast for tap in taps.values() for cast in tap.casts)}, key=str)
        writes = {} if odd else dict(dry.writes)
        return Recorded(kept=kept, refused=refused, partial=partial, unfilled=unfilled, writes=writes, casts=casts)

    def _fault(self, rest: list[Meta], handed: list[Meta], load: Load) -> Meta | None:
        """The tensor at which a load of all failed: the last that it asked for, unless it had asked for all of them."""
        if handed and len(handed) < len(rest):
            return handed[-1]
        return next((meta for meta in reversed(rest) if self._alone(meta, load) is not None), None)

    def _alone(self, meta: Meta, load: Load) -> str | None:
        """The error of a load of this tensor's stand-in alone."""
        try:
            self._load([_Tensor(meta, self._names)], load, [])
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return None

    def _refuses(self, meta: Meta, load: Load) -> bool:
        """Whether a load fails of a tensor of that name and shape that does have elements."""
        real = torch.ones(1, dtype=torch.float32).to(meta.dtype).expand(meta.shape)
        try:
            with torch.no_grad(), _Dry(self._names):
                load(iter([(meta.name, real)]))
        except Exception:
            return True
        return False

    def _load(self, taps: Iterable[_Tensor], load: Load, handed: list[Meta]) -> _Dry:
        """Load stand-ins."""

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for tap in taps:
                handed.append(tap.meta)
                yield tap.meta.name, StandIn.of(tap.meta.shape, tap.meta.dtype, self._device, tap)

        dry = _Dry(self._names)
        with torch.no_grad(), dry:
            load(tensors())
        return dry


class _Dry(TorchDispatchMode):
    """Lets nothing write into the parameters that are there for real, and notes who is written to.

    ``writes``: how often. ``worked``: by anything but a ``copy_`` of a stand-in: loaders fill paddings, set scalars,
    and turn what they loaded into something else, in place.
    """

    def __init__(self, params: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._params = params
        self.worked: set[str] = set()
        self.writes: Counter[str] = Counter()
        self.casts: set[tuple[str, torch.dtype, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default and isinstance(args[1], StandIn) and not isinstance(args[0], StandIn):
            self._note(args[0])
            return func(*args, **kwargs)  # its tap notes it, and writes nothing
        for number, argument in enumerate(func._schema.arguments[: len(args)]):
            into = args[number]
            if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(into, torch.Tensor):
                continue
            param = None if isinstance(into, StandIn) else self._params.get(into.untyped_storage()._cdata)
            if param is not None and into.numel():
                self.worked.add(param)
                self.writes[param] += 1
                if func is aten.copy_.default and lossy(args[1].dtype, into.dtype):
                    self.casts.add((param, args[1].dtype, into.dtype))
                if into.device.type != "meta":
                    return into
        return func(*args, **kwargs)

    def _note(self, into: torch.Tensor) -> None:
        param = self._params.get(into.untyped_storage()._cdata)
        if param is not None and into.numel():
            self.writes[param] += 1


def nothing(kept: KeptPart) -> bool:
    """Whether the worker's loaders take no element of the tensor."""
    return empty(kept.region)
