"""StandIn: a checkpoint tensor without elements, from which loaders take what they keep.

Views of it are views of a meta tensor of the checkpoint's shape. Their offset, sizes and strides show which elements a
loader uses. Any operation that is not a view reads: the stand-in's tap gives the tensor to compute with, an empty one
while recording, the received bytes in a replay. The result of a read is not wrapped again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from etha.integrations.vllm.weights.cut import RegionCut
from etha.integrations.vllm.weights.trace import Trace, whole

aten: Any = torch.ops.aten


class Tap(Protocol):
    """Handles the reads of a stand-in. ``trace`` is None if a view is not a product of index sets."""

    def read(self, trace: Trace | None, seen: torch.Tensor) -> torch.Tensor:
        """The tensor to compute with in place of the view. ``seen`` is the view of a meta tensor."""
        ...

    def copy(self, into: torch.Tensor, trace: Trace | None, seen: torch.Tensor) -> None:
        """Carry out ``into.copy_`` of the view."""
        ...

    def put(self, into: torch.Tensor, value: torch.Tensor) -> None:
        """Carry out ``into.copy_`` of the result of an earlier read."""
        ...

    def change(self) -> torch.Tensor:
        """The whole tensor, contiguous, for a loader that writes into it. Later reads use it."""
        ...


class StandIn(torch.Tensor):
    """A tensor of ``shape`` and ``dtype`` on ``device`` whose reads go through ``tap``."""

    _seen: torch.Tensor
    _whole: tuple[int, ...]
    _tap: Tap

    @staticmethod
    def __new__(cls, seen: torch.Tensor, whole: tuple[int, ...], device: torch.device, tap: Tap) -> StandIn:
        self: StandIn = torch.Tensor._make_wrapper_subclass(
            cls,
            seen.shape,
            strides=seen.stride(),
            storage_offset=seen.storage_offset(),
            dtype=seen.dtype,
            device=device,
            requires_grad=False,
        )
        self._seen, self._whole, self._tap = seen, whole, tap
        return self

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, tap: Tap) -> StandIn:
        """A stand-in for a whole contiguous checkpoint tensor."""
        return cls(torch.empty(tuple(shape), dtype=dtype, device="meta"), tuple(shape), device, tap)

    # __torch_dispatch__ returns the results of operations; they must not be wrapped in this class again.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"StandIn({tuple(self.shape)}, dtype={self.dtype}, of {self._whole})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Views give views, everything else reads; see the module."""
        kwargs = kwargs or {}
        if func.is_view and isinstance(args[0], cls):
            source = args[0]
            seen = func(source._seen, *args[1:], **kwargs)
            if isinstance(seen, torch.Tensor) and seen.dtype != source.dtype:
                # The same bits as other numbers have other offsets than the tensor's elements.
                return func(source._read(), *args[1:], **kwargs)
            return tree_map(lambda t: cls(t, source._whole, source.device, source._tap), seen)
        if func is aten._unsafe_view.default:  # of what nobody else has: the copy that a reshape makes
            source = args[0]
            return cls(aten.view(source._seen, *args[1:]), source._whole, source.device, source._tap)
        if func is aten.clone.default:
            seen = func(args[0]._seen, *args[1:], **kwargs)
            if seen.is_contiguous():
                return cls(seen, tuple(seen.shape), args[0].device, _Clone(args[0]))
        if func is aten.copy_.default and not isinstance(args[0], cls):
            args[1]._tap.copy(args[0], args[1]._trace(), args[1]._seen)
            return args[0]
        if func is aten._to_copy.default and isinstance(args[0], cls) and _same_kind(args[0], kwargs):
            found = args[0]._read()
            return func(found, *args[1:], **{**kwargs, "device": found.device})
        if isinstance(args[0], cls) and _writes(func):
            source = args[0]
            changed = source._tap.change()
            mine = changed.as_strided(source.shape, source.stride(), int(source._seen.storage_offset()))
            args, kwargs = tree_map(lambda t: t._read() if isinstance(t, cls) else t, (args[1:], kwargs))
            func(mine, *args, **kwargs)
            return source
        args, kwargs = tree_map(lambda t: t._read() if isinstance(t, cls) else t, (args, kwargs))
        return func(*args, **kwargs)

    def _trace(self) -> Trace | None:
        seen = self._seen
        return Trace.of(self._whole, int(seen.storage_offset()), seen.shape, seen.stride())

    def _read(self) -> torch.Tensor:
        return self._tap.read(self._trace(), self._seen)


class _Clone:
    """The tap of a copy that is not made: reads of it are reads of the original tensor.

    A loader that reorders rows (permute, then reshape) keeps only its part of them afterwards.
    """

    def __init__(self, source: StandIn) -> None:
        self._source = source
        self._changed: torch.Tensor | None = None

    def read(self, trace: Trace | None, seen: torch.Tensor) -> torch.Tensor:
        through = self._through(trace)
        if through is not None:
            return self._source._tap.read(through, seen)
        made = self._source._read().contiguous() if self._changed is None else self._changed
        if trace is None:
            return made.as_strided(seen.shape, seen.stride(), int(seen.storage_offset()))
        return RegionCut(made, whole(made.shape)).read(trace)  # ``seen`` may be a view of a copy of this one

    def copy(self, into: torch.Tensor, trace: Trace | None, seen: torch.Tensor) -> None:
        through = self._through(trace)
        if through is not None:
            self._source._tap.copy(into, through, seen)
        else:
            self.put(into, self.read(trace, seen))

    def put(self, into: torch.Tensor, value: torch.Tensor) -> None:
        self._source._tap.put(into, value)

    def change(self) -> torch.Tensor:
        if self._changed is None:
            self._changed = self._source._read().clone(memory_format=torch.contiguous_format)
        return self._changed

    def _through(self, trace: Trace | None) -> Trace | None:
        """A view of the copy as a view of the original tensor; None if it is not one, or if the copy has changed."""
        if trace is None or self._changed is not None:
            return None
        seen = self._source._seen
        offset = int(seen.storage_offset())
        offset += sum(at * stride for at, stride in zip(trace.start, seen.stride(), strict=True))
        strides = [0 if dim < 0 else step * seen.stride(dim) for dim, step in trace.walks]
        through = Trace.of(self._source._whole, offset, trace.counts, strides)
        return None if through is None else replace(through, sizes=trace.sizes)


def _same_kind(tensor: StandIn, kwargs: dict[str, Any]) -> bool:
    """Whether a copy to the stand-in's own device is asked for, which needs no copy.

    A copy to meta needs none either, because a loader may ask for its parameter's device, which is meta here.
    """
    device = kwargs.get("device")
    return device is None or torch.device(device).type in (tensor.device.type, "meta")


def _writes(func: Any) -> bool:
    """Whether an operation changes its first argument."""
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return first is not None and bool(first.is_write)
