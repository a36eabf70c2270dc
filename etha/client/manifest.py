"""From what a user hands to ``register_tensors`` to one list of entries: names, layouts, memory.

Computes and reads tensors; sends nothing. The list form is matched by position within each pair, the
mapping by name; both become names here, so that the rest of Etha knows one form only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from etha.bus.messages import Refusal
from etha.client.arguments import check_each, check_mapping, check_placements, check_sizes, impossible, shown
from etha.client.inspect import (
    Region,
    aliases,
    check_tensor_name,
    local_of,
    refusals_of,
    region_of,
    unsharded_parameters,
)
from etha.client.memory.base import Home
from etha.client.products import Runs, check_region, parts_of
from etha.client.world import Place, check_mesh
from etha.config import check_name
from etha.errors import ConfigError, LayoutError
from etha.memory.handles import fingerprint
from etha.plan import Layout

Mesh = DeviceMesh | torch.Tensor | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDefaults:
    """What ``init_pair`` said of plain tensors: where this worker stands, the mesh, the placements."""

    name: str
    place: Place
    mesh: Mesh | None
    placements: tuple[Placement, ...] | None

    @classmethod
    def of(cls, name: str, place: Place, mesh: Mesh | None, placements: Sequence[Placement] | None) -> Self:
        """Checked: LayoutError for a default layout that is none, ConfigError for placements without a mesh."""
        check_placements("placements", placements)
        if mesh is not None:
            check_mesh(mesh)
        if placements is not None and mesh is None:
            raise ConfigError("init_pair(placements=...) needs device_mesh=")
        defaults = cls(name=name, place=place, mesh=mesh, placements=None if placements is None else tuple(placements))
        if placements is not None:
            defaults.default_layout()
        return defaults

    def default_layout(self) -> Layout:
        """The layout of plain tensors without one of their own; LayoutError names the pair."""
        assert self.mesh is not None and self.placements is not None
        try:
            return self.place.layout_of(self.mesh, self.placements)
        except LayoutError as error:
            raise LayoutError(f"the default layout of pair {self.name!r}: {error.message}") from None

    def layout(self, name: str, placements: Sequence[Placement] | None) -> Layout:
        """The layout of the plain tensor ``name``: its own placements, else the pair's default."""
        chosen = placements if placements is not None else self.placements
        if chosen is None or self.mesh is None:
            raise LayoutError(
                f"tensor {name!r} is a plain tensor and has no layout: give placements={{{name!r}: [...]}} and "
                f"init_pair(..., device_mesh=...), or device_mesh and placements as the default of pair {self.name!r}"
            )
        try:
            return self.place.layout_of(self.mesh, chosen)
        except LayoutError as error:
            raise _named(name, error) from None

    def layout_of_dtensor(self, name: str, tensor: DTensor) -> Layout:
        """A DTensor's own layout, in ranks of the side; LayoutError names the tensor."""
        try:
            return self.place.translate(Layout.from_dtensor(tensor))
        except LayoutError as error:
            raise _named(name, error) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One good tensor: ``local`` is the plain local tensor, ``owner`` what the user registered."""

    name: str
    pair: int
    owner: torch.Tensor
    local: torch.Tensor
    layout: Layout
    shape: tuple[int, ...] | None
    #: The tensor of which this is one more part, each of them with a name of its own.
    of: str | None = None
    #: The first item that is the same elements of the same memory.
    tied: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything one worker registers in one batch."""

    form: Literal["list", "map"]
    pairs: tuple[str, ...]
    items: tuple[Item, ...]
    refusals: tuple[Refusal, ...]

    def same_tensors(self, other: Manifest) -> bool:
        """Whether both name the same memory under the same names and layouts; a mapping's order does not matter."""
        return (self.form, self.pairs, self._named()) == (other.form, other.pairs, other._named())

    def _named(self) -> dict[str, tuple[object, ...]]:
        # A list's names are its positions.
        return {
            item.name: (item.pair, item.shape, item.layout, item.of, *fingerprint(item.local)) for item in self.items
        }


def build_manifest(
    tensors: Sequence[tuple[torch.Tensor, str]] | Mapping[str, torch.Tensor],
    *,
    pair_name: str | None,
    placements: Mapping[str, Sequence[Placement]] | None,
    shapes: Mapping[str, Sequence[int]] | None,
    regions: Mapping[str, Runs] | None = None,
    pairs: Mapping[str, PairDefaults],
    home: Home,
) -> Manifest:
    """Read both forms; LayoutError and ConfigError for what is wrong here, Refusals for bad tensors."""
    check_mapping("placements", placements, "{'w': [Shard(0)]}")
    check_each("placements", placements, check_placements)
    check_mapping("shapes", shapes, "{'w': (4, 8)}")
    check_mapping("regions", regions, "{'w': [[(0, 2)], [(0, 8)]]}")
    sizes = {name: check_sizes(f"shapes[{shown(name)}]", shape) for name, shape in (shapes or {}).items()}
    nowhere = {name: f"shapes[{shown(name)}]: {why}" for name, shape in sizes.items() if (why := impossible(shape))}
    form, named = _entries(tensors, pair_name)
    used = tuple(sorted({pair for _, _, pair in named} | ({pair_name} if pair_name is not None else set())))
    if unknown := [pair for pair in used if pair not in pairs]:
        raise ConfigError(f"pairs {unknown} are not formed in this client: call init_pair first")
    # ``placements`` and ``shapes`` may name tensors of other ranks: all may give the same mappings. A region is
    # of this rank's own tensor.
    if strangers := sorted((regions or {}).keys() - {name for name, _, _ in named}):
        raise ConfigError(f"regions={{{strangers[0]!r}: ...}} is of no tensor that this rank registers")
    items: list[Item] = []
    refusals = [
        Refusal(code="shape_mismatch", name=name, text=text, target_only=False) for name, text in nowhere.items()
    ]
    unsharded = unsharded_parameters()
    layouts: dict[Any, Layout] = {}
    for name, tensor, pair in named:
        check_tensor_name(name)
        found = list(refusals_of(name, tensor, home, unsharded))
        refusals += found
        if name in nowhere or any(not refusal.target_only for refusal in found):
            continue
        defaults = pairs[pair]
        shape: tuple[int, ...] | None
        key: Any
        if regions and name in regions:
            check_region(name, tensor, placements, sizes)
            shape = sizes[name]
            items += [
                Item(name=part, pair=used.index(pair), owner=tensor, local=view, shape=shape, of=of,
                     layout=layouts.setdefault(layout, layout))
                for part, of, view, layout in parts_of(name, local_of(tensor), regions[name], defaults.place.rank)
            ]  # fmt: skip
            continue
        if isinstance(tensor, DTensor):
            spec = tensor._spec
            key = (pair, id(spec.mesh), spec.placements)
            layout = layouts.get(key) or layouts.setdefault(key, defaults.layout_of_dtensor(name, tensor))
            shape = tuple(tensor.shape)
            if sizes.get(name, shape) != shape:
                raise ConfigError(f"shapes[{name!r}]={sizes[name]} but the DTensor's shape is {shape}")
        else:
            own = (placements or {}).get(name)
            key = (pair, None if own is None else tuple(own))
            layout = layouts.get(key) or layouts.setdefault(key, defaults.layout(name, own))
            shape = sizes.get(name)
        items.append(
            Item(name=name, pair=used.index(pair), owner=tensor, local=local_of(tensor), layout=layout, shape=shape)
        )
    if any(item.of is not None for item in items):
        _check_names([item.name for item in items])
    refusals += aliases([(item.name, item.local) for item in items])
    return Manifest(form=form, pairs=used, items=tuple(_tied(items)), refusals=tuple(refusals))


def _tied(items: Sequence[Item]) -> Iterator[Item]:
    """The items, those that are an earlier one's memory with its name."""
    first: dict[Region, str] = {}
    for item in items:
        name = first.setdefault(region_of(item.local), item.name) if item.local.numel() else item.name
        yield item if name == item.name else replace(item, tied=name)


def _check_names(names: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"tensor {twice[0]!r} has the name of a part of another tensor's region: rename it")


def _named(name: str, error: LayoutError) -> LayoutError:
    return LayoutError(f"tensor {name!r}: {error.message}")


def _entries(tensors: Any, pair_name: str | None) -> tuple[Literal["list", "map"], list[tuple[str, torch.Tensor, str]]]:
    if pair_name is not None:
        check_name("pair", pair_name)
    if isinstance(tensors, Mapping):
        if pair_name is None:
            raise ConfigError("register_tensors with a mapping of names needs pair_name=")
        return "map", [(name, tensor, pair_name) for name, tensor in tensors.items()]
    if isinstance(tensors, str | bytes | torch.Tensor) or not isinstance(tensors, Iterable):
        raise ConfigError(
            f"tensors={shown(tensors)} must be a mapping name -> tensor or a list of (tensor, pair_name) tuples"
        )
    named = []
    counts: dict[str, int] = {}
    for position, entry in enumerate(tensors):
        if not isinstance(entry, tuple | list) or len(entry) != 2 or not isinstance(entry[1], str):
            raise ConfigError(
                f"tensors[{position}] is not a (tensor, pair_name) tuple; or pass a mapping name -> tensor"
            )
        tensor, pair = entry
        index = counts.get(pair, 0)
        counts[pair] = index + 1
        named.append((f"{pair}[{index}]", tensor, pair))
    if not named and pair_name is None:
        raise ConfigError("an empty list of tensors names no pair: give pair_name=, too")
    if pair_name is not None and set(counts) - {pair_name}:
        raise ConfigError(f"pair_name={pair_name!r} but the list names the pairs {sorted(counts)}")
    return "list", named
