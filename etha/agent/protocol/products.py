"""Regions that are lists of products: what ranks registered as parts of a tensor, beside the source's one tensor; pure.

A part is planned as a tensor by itself, of which the source is the tensor of which it is a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from etha.errors import LayoutError, Violation
from etha.plan import TensorSpec

if TYPE_CHECKING:
    from etha.agent.protocol.records import Described, Manifest


def parts_of(manifests: Mapping[int, Manifest]) -> dict[str, str]:
    """Name of each part that a rank of a side registered -> its tensor's."""
    return {name: d.of for m in manifests.values() for name, d in m.tensors.items() if d.of is not None}


def clashes(manifests: Mapping[int, Manifest], side: str, parts: Mapping[str, str]) -> list[Violation]:
    """Names of ``side`` that are also those of ``parts``, of either side, but of other tensors."""
    found = []
    for rank, manifest in manifests.items() if parts else ():
        for name in manifest.tensors.keys() & parts.keys():
            if manifest.tensors[name].of != parts[name]:
                text = f"it has the name of a part of {parts[name]!r} on another rank: rename it"
                found.append(Violation(code="layout", name=name, side=side, rank=rank, text=text))
    return sorted(found, key=lambda v: (v.name, v.rank or 0))


def joined(
    source: Mapping[str, TensorSpec],
    target: Mapping[str, TensorSpec],
    source_parts: Mapping[str, str],
    target_parts: Mapping[str, str],
) -> tuple[Mapping[str, TensorSpec], Mapping[str, TensorSpec]]:
    """What is planned: for each part of a target the source's tensor under the part's name.

    What a source has in parts, and parts of what the source has not, are told by their tensors alone.
    """
    if source_parts:
        source = {name: spec for name, spec in source.items() if name not in source_parts}
    if target_parts:
        target = {n: spec for n, spec in target.items() if n not in target_parts or target_parts[n] in source}
        source = {**source, **{n: source[of] for n, of in target_parts.items() if n in target}}
    return source, target


def beyond(name: str, side: str, ranks: Mapping[int, Described]) -> list[Violation]:
    """Ranks whose region does not lie in the global shape, each by itself."""
    found = []
    for rank, d in ranks.items():
        if d.layout.kept is None:
            continue
        try:
            if d.shape is None:
                raise LayoutError("it registers a region without the global shape: give shapes=")
            d.layout.check(d.shape)
        except LayoutError as error:
            found.append(Violation(code="layout", name=name, side=side, rank=rank, text=error.message))
    return found
