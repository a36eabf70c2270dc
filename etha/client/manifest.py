"""Turns the arguments of ``register_tensors`` into one list of entries: names, layouts, memory.

It computes and reads tensors, and sends nothing. The list form is matched by position within each pair, the mapping by
name. Both become names here, so that the rest of Etha knows one form only.

A tensor that cannot be moved becomes a Refusal, so that one call reports all of them and every rank of both sides gets
the reasons. A region of a plain tensor is a product of runs, or a list of products that lie one after another in a flat
tensor. Etha moves products, so each product of a list is registered by itself, as a view of the flat tensor under a
name of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from etha.bus.messages import Refusal
from etha.client.arguments.checks import (
    check_each,
    check_mapping,
    check_placements,
    check_sizes,
    check_text,
    impossible,
    shown,
)
from etha.client.arguments.world import RankInfo, check_mesh
from etha.client.memory.base import TensorMemory, Unmoved, fingerprint, memory_of
from etha.config import MAX_TENSOR_NAME, check_name
from etha.errors import ConfigError, LayoutError
from etha.plan import Layout
from etha.plan.layouts import dtypes
from etha.plan.layouts.region import part_name
from etha.torch_types import is_async_collective, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Mesh = DeviceMesh | torch.Tensor | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDefaults:
    """The defaults of ``init_pair`` for plain tensors: this worker's place in the side, the mesh, the placements.

    ``publication``: ``name`` is that of a publication, which has a mesh and no default placements.
    """

    name: str
    place: RankInfo
    mesh: Mesh | None
    placements: tuple[Placement, ...] | None
    publication: bool = False

    @classmethod
    def of(cls, name: str, place: RankInfo, mesh: Mesh | None, placements: Sequence[Placement] | None) -> Self:
        """Check and make them. LayoutError for an invalid default layout, ConfigError for placements without a mesh."""
        check_placements("placements", placements)
        if mesh is not None:
            check_mesh(mesh)
        if placements is not None and mesh is None:
            raise ConfigError("init_pair(placements=...) needs device_mesh=")
        defaults = cls(name=name, place=place, mesh=mesh, placements=None if placements is None else tuple(placements))
        if placements is not None:
            defaults.default_layout()
        return defaults

    @classmethod
    def of_publication(cls, name: str, place: RankInfo, mesh: Mesh | None) -> Self:
        """Those of ``publish`` and ``subscribe``. LayoutError for an invalid mesh."""
        return replace(cls.of(name, place, mesh, None), publication=True)

    def default_layout(self) -> Layout:
        """The default layout of plain tensors; LayoutError names the pair."""
        assert self.mesh is not None and self.placements is not None
        try:
            return self.place.layout_of(self.mesh, self.placements)
        except LayoutError as error:
            raise LayoutError(f"the default layout of pair {self.name!r}: {error.message}") from None

    def layout(self, name: str, placements: Sequence[Placement] | None) -> Layout:
        """The layout of the plain tensor ``name``: its own placements, else the pair's default."""
        chosen = placements if placements is not None else self.placements
        if chosen is None or self.mesh is None:
            own = f"give placements={{{name!r}: [...]}} and "
            remedy = (
                f"{own}device_mesh= with publication {self.name!r}"
                if self.publication
                else f"{own}init_pair(..., device_mesh=...), or device_mesh and placements as the default of pair "
                f"{self.name!r}"
            )
            raise LayoutError(f"tensor {name!r} is a plain tensor and has no layout: {remedy}")
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
    """One valid tensor. ``local`` is the plain local tensor, ``owner`` the tensor that the user registered."""

    name: str
    pair: int
    owner: torch.Tensor
    local: torch.Tensor
    layout: Layout
    shape: tuple[int, ...] | None
    #: The tensor of which this is one more part; each part has a name of its own.
    of: str | None = None
    #: The first item with the same elements of the same memory.
    tied: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorManifest:
    """All that one worker registers in one batch."""

    form: Literal["list", "map"]
    pairs: tuple[str, ...]
    items: tuple[Item, ...]
    refusals: tuple[Refusal, ...]

    def same_tensors(self, other: TensorManifest) -> bool:
        """Whether both name the same memory under the same names and layouts, in any order of a mapping."""
        return (self.form, self.pairs, self._named()) == (other.form, other.pairs, other._named())

    def unmoved(self) -> Unmoved:
        """Where all of them lie now."""
        return Unmoved([(item.name, item.owner) for item in self.items])

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
    home: TensorMemory,
) -> TensorManifest:
    """Read both forms. LayoutError and ConfigError for wrong arguments, Refusals for bad tensors."""
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
    # ``placements`` and ``shapes`` may name tensors of other ranks, because all ranks may pass the same mappings. A
    # region describes this rank's own tensor.
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
        if is_dtensor(tensor):
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
    return TensorManifest(form=form, pairs=used, items=tuple(_tied(items)), refusals=tuple(refusals))


def _tied(items: Sequence[Item]) -> Iterator[Item]:
    """The items; those with the memory of an earlier one get its name in ``tied``."""
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


#: Steps that the exact overlap test of two strided views may take before they count as overlapping.
_OVERLAP_WORK = 100_000
#: Most elements whose offsets are listed if those steps do not suffice.
_LISTED = 1 << 22

#: Address, shape, strides and dtype.
Region = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


def check_tensor_name(name: str) -> str:
    """``name`` itself; ConfigError if it is not a text of 1 to 500 bytes."""
    if not isinstance(name, str) or not name or len(check_text("tensor name", name).encode()) > MAX_TENSOR_NAME:
        raise ConfigError(f"tensor name {shown(name)} must be a text of 1 to {MAX_TENSOR_NAME} bytes")
    return name


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain local tensor (no grad, same memory). Waits for an unfinished async collective."""
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    if is_async_collective(local):
        local = local.wait()
    return local.detach()


def refusals_of(name: str, tensor: Any, home: TensorMemory, unsharded: Mapping[int, str]) -> Iterator[Refusal]:
    """Every reason why ``tensor`` cannot be moved, most basic first; none for a valid one."""

    def no(text: str) -> Refusal:
        return Refusal(code="unsupported", name=name, text=text, target_only=False)

    if not isinstance(tensor, torch.Tensor):
        yield no(f"not a tensor, but of type {type(tensor).__name__}")
        return
    if id(tensor) in unsharded:
        yield no(
            f"an unsharded parameter of the FSDP2 module {unsharded[id(tensor)]!r}: call its reshard() first "
            f"(or fully_shard(..., reshard_after_forward=True)) and register the sharded parameters"
        )
        return
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if type(local) not in plain and not is_async_collective(local):
        yield no(f"tensors of class {type(local).__name__} cannot be moved; register the plain tensors it is made of")
    elif local.is_meta:
        yield no("a meta tensor has no memory; materialise it first (module.to_empty(device=...))")
    elif local.is_nested:
        yield no("a nested tensor; register the tensors that unbind() gives")
    elif local.is_mkldnn:
        yield no("an MKL-DNN tensor, whose memory is packed; register to_dense()")
    elif local.layout != torch.strided:
        yield no(f"a sparse tensor ({local.layout}); register its indices and values, or to_dense()")
    elif local.is_quantized:
        yield no("a quantized tensor; register its int_repr() and scales")
    elif local.dtype not in dtypes.BY_NAME.values():
        yield no(f"dtype {local.dtype} cannot be moved; register a view as uint8: view(torch.uint8)")
    elif local.is_conj() or local.is_neg():
        yield no("a conjugate or negative view; call resolve_conj() / resolve_neg() first")
    elif not home.holds(local):
        yield no(
            f"it lies on {local.device}, this client's agent serves {home.agent}; "
            f"use a client with device={str(local.device)!r}"
        )
    elif local.numel() and _is_freed(memory_of(tensor)):
        yield no("it has no memory: its storage was freed or cut short (untyped_storage().resize_); allocate it first")
    elif overlaps_itself(local):
        text = "several of its elements share one memory place (stride 0 or overlapping); fine to send, not to receive"
        yield Refusal(code="alias", name=name, text=text, target_only=True)


def _is_freed(local: torch.Tensor) -> bool:
    """Whether the storage ends before the tensor does. The tensor must have elements."""
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    need = (local.storage_offset() + 1 + last) * local.itemsize
    return not local.data_ptr() or local.untyped_storage().nbytes() < need


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements share memory. Also True if the exact answer takes too long."""
    if tensor.is_contiguous():  # nearly all of a thousand tensors are: one call instead of three
        return False
    axes = sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1)
    if not tensor.numel() or _nested(axes):
        return False
    return any(stride == 0 for stride, _ in axes) or _collide(axes)


def _nested(axes: Sequence[tuple[int, int]]) -> bool:
    """Whether each (stride, size), ascending, steps beyond all elements of those before it."""
    reach = 0
    for stride, size in axes:
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _collide(axes: Sequence[tuple[int, int]]) -> bool:
    """Whether two different steps along these axes end at the same offset.

    If so, one of them is ahead of the other along some axis. Then the elements at least one step along that axis and
    the elements at its beginning have an offset in common.
    """
    try:
        for i, (stride, size) in enumerate(axes):
            others = [*axes[:i], *axes[i + 1 :]]
            ahead = _Places(stride, [(stride, size - 1), *others])
            work: Any = _OVERLAP_WORK
            if np.shares_memory(np.asarray(ahead), np.asarray(_Places(0, others)), max_work=work):
                return True
    except np.exceptions.TooHardError:
        if prod(size for _, size in axes) > _LISTED:
            return True
        places = np.zeros(1, np.int64)
        for stride, size in axes:
            places = (places[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return len(np.unique(places)) < len(places)
    return False


def region_of(tensor: torch.Tensor) -> Region:
    """The memory region of a tensor's elements, in order. Dims of one element have no stride that counts."""
    strides = tuple(stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tuple(tensor.shape), strides, tensor.dtype


def aliases(locals_: Sequence[tuple[str, torch.Tensor]]) -> Iterator[Refusal]:
    """Refusals (target only) for names whose memory overlaps without being the same region."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + _reach(t), name, t) for name, t in locals_ if t.numel() and not t.is_meta
    )
    for i, (_, end, name, tensor) in enumerate(spans):
        for start, _, other, peer in spans[i + 1 :]:
            if start >= end:
                break
            if region_of(tensor) == region_of(peer) or not _share_memory(tensor, peer):
                continue
            text = f"its memory overlaps that of {other!r}; a target may have two names only for the same region"
            yield Refusal(code="alias", name=name, text=text, target_only=True)


def unsharded_parameters() -> dict[int, str]:
    """id of each live FSDP2 parameter that is unsharded now -> its name in its module.

    PyTorch has no public list, so this reads its private registry of module states. If PyTorch moves that registry,
    nothing is found here, and such parameters meet the ordinary layout checks.
    """
    try:
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError:
        return {}
    found: dict[int, str] = {}
    for state in list(_module_state_mapping.values()):
        ref = state() if callable(state) else state
        groups = getattr(ref, "_fsdp_param_groups", None) or filter(None, [getattr(ref, "_fsdp_param_group", None)])
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    found[id(unsharded)] = str(getattr(parameter, "_param_fqn", None) or "?")
    return found


def _reach(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return int((last + 1) * tensor.element_size())


class _Places:
    """A numpy view of bytes at these (stride, size), from ``first``. It is never read."""

    def __init__(self, first: int, axes: Sequence[tuple[int, int]]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (4096 + first, False),
            "shape": tuple(size for _, size in axes),
            "strides": tuple(stride for stride, _ in axes),
            "typestr": "|u1",
        }


class _Bytes:
    """A numpy view of a tensor's memory, as opaque items because numpy has no bfloat16."""

    def __init__(self, tensor: torch.Tensor) -> None:
        item = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(s * item for s in tensor.stride()),
            "typestr": f"|V{item}",
        }


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        work: Any = _OVERLAP_WORK
        return bool(np.shares_memory(np.asarray(_Bytes(a)), np.asarray(_Bytes(b)), max_work=work))
    except np.exceptions.TooHardError:
        return True


#: For each tensor dim the (start, stop) of the global tensor that this rank holds, or a list of such products.
Runs = Sequence[Sequence[tuple[int, int]]] | Sequence[Sequence[Sequence[tuple[int, int]]]]
Part = tuple[str, str | None, torch.Tensor, Layout]


def parts_of(name: str, tensor: torch.Tensor, runs: Runs, rank: int) -> list[Part]:
    """(name, the tensor's own name if this is another part of it, local tensor, layout) of what ``rank`` registers.

    LayoutError names the tensor if the runs are invalid, or if a list of products does not fill a flat tensor.
    """
    products = _listed(runs)
    try:
        if products is None:
            return [(name, None, tensor, Layout.region(cast("Any", runs), [rank]))]
        layouts = [Layout.region(product, [rank]) for product in products]
    except LayoutError as error:
        raise LayoutError(f"tensor {name!r}: {error.message}") from None
    shapes = [tuple(kept.size for kept in layout.kept or ()) for layout in layouts]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if tensor.ndim != 1 or not tensor.is_contiguous() or len(tensor) != sum(sizes):
        raise LayoutError(
            f"tensor {name!r}: a list of {len(products)} products lies in one flat contiguous tensor, one after "
            f"another, here of shape ({sum(sizes)},); this one has shape {tuple(tensor.shape)}"
        )
    return [
        (part_name(name, i), name if i else None, flat.view(shape), layout)
        for i, (flat, shape, layout) in enumerate(zip(torch.split(tensor, sizes), shapes, layouts, strict=True))
    ]


def _listed(runs: Any) -> list[Any] | None:
    """The products, if ``runs`` nest one level deeper than a product. Without any run it is a product."""
    if not isinstance(runs, Sequence):
        return None
    for product in runs:
        for dim in product if isinstance(product, Sequence) else ():
            for run in dim if isinstance(dim, Sequence) else ():
                return list(runs) if isinstance(run, Sequence) else None
    return None


def check_region(
    name: str,
    tensor: torch.Tensor,
    placements: Mapping[str, Sequence[Placement]] | None,
    shapes: Mapping[str, Sequence[int]] | None,
) -> None:
    """ConfigError or LayoutError for a region that contradicts the other arguments about the tensor."""
    if is_dtensor(tensor):
        raise ConfigError(f"regions[{name!r}]: the tensor is a DTensor and brings its own layout; register a plain one")
    if placements and name in placements:
        raise ConfigError(f"tensor {name!r} has both regions[...] and placements[...]: give one of them")
    if not shapes or name not in shapes:
        raise LayoutError(
            f"tensor {name!r} holds a region of a global tensor whose shape it does not tell: "
            f"give shapes={{{name!r}: (...)}}, the shape of the whole tensor"
        )
