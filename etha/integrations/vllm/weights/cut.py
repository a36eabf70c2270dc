"""A dense tensor of one region of a larger tensor, read as views of the larger one.

A trace's elements inside the region mostly have even steps in the dense tensor, too. Then a read is a view.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from etha.integrations.vllm.weights.trace import Ints, Region, Trace


@dataclass(frozen=True, slots=True)
class RegionCut:
    """``dense`` holds ``region`` of a tensor: its dims are those of the tensor with only the runs of the region."""

    dense: torch.Tensor
    region: Region

    def read(self, trace: Trace) -> torch.Tensor:
        """What the view that left ``trace`` would show, in the same shape; a view of ``dense`` if one exists.

        ValueError if the trace touches elements outside the region.
        """
        if 0 in trace.counts:
            return self.dense.new_empty(trace.sizes)
        base, found = self.dense, []
        for dim, runs in enumerate(self.region):
            places = _places(runs, trace.lattice(dim), dim)
            steps = _steps(places)
            if steps is None:  # the gaps of the region make the steps uneven: gathered, in the order of the lattice
                base = base.index_select(dim, torch.from_numpy(places.reshape(-1)).to(base.device))
                places = np.arange(places.size, dtype=np.int64).reshape(places.shape)
                steps = _steps(places) or []
            found.append((int(places.reshape(-1)[0]), steps))
        start, strides = base.storage_offset(), [0] * len(trace.counts)
        for dim, (first, steps) in enumerate(found):
            start += first * base.stride(dim)
            axes = [k for k, (at, _) in enumerate(trace.walks) if at == dim]
            for axis, step in zip(axes, steps, strict=True):
                strides[axis] = step * base.stride(dim)
        return base.as_strided(trace.counts, strides, start).reshape(trace.sizes)


def _places(runs: tuple[tuple[int, int], ...], indices: Ints, dim: int) -> Ints:
    """The position of each index in the dense list of the runs."""
    starts = np.array([start for start, _ in runs], dtype=np.int64)
    stops = np.array([stop for _, stop in runs], dtype=np.int64)
    row = np.searchsorted(starts, indices, "right") - 1
    if (row < 0).any() or (indices >= stops[row]).any():
        raise ValueError(f"dim {dim}: a read of indices outside the runs {runs[:4]} that were kept of it")
    before = np.append(0, np.cumsum(stops - starts))
    found: Ints = before[row] + indices - starts[row]
    return found


def _steps(places: Ints) -> list[int] | None:
    """The step along each axis of ``places``; None if the steps are not even."""
    steps = []
    for axis, count in enumerate(places.shape):
        along = np.diff(places, axis=axis)
        step = int(along.reshape(-1)[0]) if count > 1 else 0
        if (along != step).any():
            return None
        steps.append(step)
    return steps
