"""The digest of a plan: specs, hosts, agents and options, in an order that depends on nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from etha.plan.layouts import dtypes
from etha.plan.layouts.tensor_spec import TensorSpec
from etha.plan.planner.m2m import MIN_SLICE, Topology

_FORMAT = "etha-plan-2"


def digest_of(
    source: Mapping[str, TensorSpec],
    target: Mapping[str, TensorSpec],
    topology: Topology,
    *,
    relay: int | None,
    carry: bool,
) -> str:
    """Hex digest of everything that decides rows: equal on both sides if and only if the plans are equal."""
    h = hashlib.sha256(f"{_FORMAT} {MIN_SLICE} {relay} {carry}".encode())
    t = topology
    for array in (t.source_host, t.target_host, t.source_agent, t.target_agent):
        h.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
    for side in (source, target):
        known: dict[object, bytes] = {}
        numbers: dict[bytes, int] = {}
        h.update(len(side).to_bytes(8, "little"))
        for name in sorted(side):
            spec = side[name]
            key = (spec.shape, spec.dtype, id(spec.layout), spec.present, id(spec.products))
            mark = known.get(key)
            if mark is None:
                mark = known[key] = _spec_digest(spec)
            # The first tensor of a kind carries its digest, the others its number.
            number = numbers.setdefault(mark, len(numbers))
            raw = name.encode("utf-8", "surrogatepass")
            fresh = mark if number == len(numbers) - 1 else b""
            h.update(b"%d:%s %d %s" % (len(raw), raw, number, fresh))
    return h.hexdigest()


def _spec_digest(spec: TensorSpec) -> bytes:
    h = hashlib.sha256(repr((spec.shape, dtypes.name_of(spec.dtype), len(spec.layouts))).encode())
    for layout in spec.layouts:
        grid = layout.grid(len(spec.shape))
        partial = [(axis.to_plain(), size) for axis, size in grid.partial]
        h.update(repr((grid.splits, grid.ranks.shape, partial)).encode())
        h.update(grid.ranks.astype("<i8").tobytes())
    if spec.present is not None:
        h.update(repr(sorted(spec.present)).encode())
    for more in spec.products:
        h.update(_spec_digest(more))
    return h.digest()
