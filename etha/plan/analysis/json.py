"""One side of a plan as plain data, the JSON that ``etha plan`` reads and ``describe`` writes.

    {"mesh": [2, 4], "placements": ["R", "S(0)"],
     "layouts": {"row": {"mesh": [2, 4], "placements": ["R", "S(1)"]}},
     "hosts": {"name": "node{}", "ranks": 8},
     "tensors": {"layers.{0..31}.o_proj": {"shape": [64, 64], "dtype": "bfloat16", "layout": "row"}}}

docs/planning.md describes every key. Nothing here reads a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from etha.errors import LayoutError
from etha.plan.layouts import dtypes
from etha.plan.layouts.layout import Layout
from etha.plan.layouts.mesh import check_mesh_shape
from etha.plan.layouts.tensor_spec import TensorSpec

Specs = dict[str, TensorSpec]
#: Name of a placement in the file -> its code in plain data, and the type of its arguments.
_PLACEMENTS: dict[str, tuple[str, type]] = {
    "S": ("S", int),
    "_S": ("SS", int),
    "R": ("R", str),
    "P": ("P", str),
    "NP": ("NP", float),
}
_WRITTEN = {code: name for name, (code, _) in _PLACEMENTS.items()}
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
#: The keys that each object of the file may have.
_SIDE = ("mesh", "placements", "strided", "layouts", "hosts", "agents", "tensors")
_TENSOR = ("shape", "dtype", "mesh", "placements", "strided", "layout", "regions")
_LAYOUT = ("mesh", "placements", "strided", "region", "ranks")
_MESH = ("shape", "first", "ranks")
_PLACES = ("name", "ranks")
#: A name that stands for more tensors than this is a mistake.
_MAX_NAMES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one side holds and where: ``specs`` by name; host and agent of each rank if the data names them."""

    specs: Specs
    hosts: list[str] | None = None
    agents: list[str] | None = None


def side_from_plain(side: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> Side:
    """Read one side. ``tensors`` are used if it has none of its own. LayoutError names what is malformed."""
    _check_keys("a side", side, _SIDE)
    named = side.get("layouts", {})
    if not isinstance(named, Mapping) or not all(isinstance(layout, Mapping) for layout in named.values()):
        raise LayoutError('"layouts" maps names to objects with "mesh" and "placements"')
    for name, layout in named.items():
        _check_keys(f"layout {name!r}", layout, _LAYOUT)
    layouts = _Layouts(side, named)
    specs: Specs = {}
    for pattern, tensor in side.get("tensors", tensors or {}).items():
        if isinstance(tensor, Mapping):
            _check_keys(f"tensor {pattern!r}", tensor, _TENSOR)
        try:
            found = TensorSpec(tuple(tensor["shape"]), dtypes.from_name(tensor["dtype"]), layouts.of(tensor))
            names = expand(pattern)
        except (LayoutError, KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise LayoutError(f"tensor {pattern!r} needs shape, dtype, mesh and placements: {why}") from None
        twice = specs.keys() & set(names)
        if twice:
            raise LayoutError(f"tensor {min(twice)!r} is described twice, the second time by {pattern!r}")
        specs.update(dict.fromkeys(names, found))
    parts = {id(p): p for spec in specs.values() for p in spec.layouts}.values()
    world = max((int(part.ranks.max()) + 1 for part in parts), default=0)
    return Side(specs=specs, hosts=_places("hosts", side, world), agents=_places("agents", side, world))


def _check_keys(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise LayoutError for a key that is not read, because it is usually a misspelling."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            if near:
                why = f"did you mean {near[0]!r}?"
            else:
                why = "it belongs to a tensor" if key in _TENSOR else f"it may have {', '.join(known)}"
            raise LayoutError(f"{what} has the key {key!r}, which is not read there: {why}")


class _Layouts:
    """The layouts of one side, each made once, because tensors that share one are planned together."""

    def __init__(self, side: Mapping[str, Any], named: Mapping[str, Any]) -> None:
        self._side, self._named = side, named
        self._made: dict[str, Layout] = {}

    def of(self, tensor: Mapping[str, Any]) -> Layout | list[Layout]:
        which, regions = tensor.get("layout"), tensor.get("regions")
        if regions is not None:
            for region in regions:
                _check_keys("a region", region, _LAYOUT)
            return [self._one(region) for region in regions]
        if isinstance(which, list):
            return [self._one(self._named[name]) for name in which]
        if which is not None:
            return self._one(self._named[which])
        return self._one({**self._side, **tensor})

    def _one(self, plain: Mapping[str, Any]) -> Layout:
        if "region" in plain:
            key = repr((plain["region"], plain["ranks"]))
            return self._made.get(key) or self._made.setdefault(key, Layout.region(plain["region"], plain["ranks"]))
        mesh, placements, strided = plain.get("mesh"), plain.get("placements"), plain.get("strided", "auto")
        key = repr((mesh, placements, strided))
        found = self._made.get(key)
        if found is None:
            if not isinstance(placements, list):
                raise ValueError("placements are a list with one placement per mesh axis")
            axes = [_placement(p) for p in placements]
            found = self._made[key] = Layout.from_plain({"mesh": _mesh(mesh), "placements": axes, "strided": strided})
        return found


def _mesh(mesh: Any) -> dict[str, Any]:
    if isinstance(mesh, Mapping):
        _check_keys("a mesh", mesh, _MESH)
        if "ranks" in mesh:
            return {"shape": list(mesh["shape"]), "ranks": list(mesh["ranks"])}
        shape, first = mesh["shape"], int(mesh.get("first", 0))
        count = int(np.prod(check_mesh_shape(shape), dtype=np.int64))
        return {"shape": list(shape), "ranks": list(range(first, first + count))}
    table = np.asarray(mesh, dtype=np.int64)
    if table.ndim == 1:
        return {"shape": table.tolist(), "ranks": None}
    return {"shape": list(table.shape), "ranks": table.reshape(-1).tolist()}


def _placement(text: str) -> list[Any]:
    name, _, rest = text.strip().rstrip(")").partition("(")
    if name not in _PLACEMENTS:
        raise ValueError(f"placement {text!r} is none of S(dim), R, P(op), NP(norm), _S(dim, split_factor)")
    code, read = _PLACEMENTS[name]
    return [code, *(read(part.strip()) for part in rest.split(",") if part.strip())]


def _places(key: str, side: Mapping[str, Any], world: int) -> list[str] | None:
    if isinstance(side.get(key), Mapping):
        _check_keys(f'"{key}"', side[key], _PLACES)
    match side.get(key):
        case None:
            return None
        case list() as names if all(isinstance(n, str) for n in names):
            return list(names)
        case {"name": str(name), "ranks": int(each)} if each > 0 and "{}" in name:
            return [name.replace("{}", str(rank // each)) for rank in range(world)]
    raise LayoutError(f'"{key}" is a name for each rank, or {{"name": "node{{}}", "ranks": 8}}, not {side[key]!r}')


def expand(pattern: str) -> list[str]:
    """``"layers.{0..2}.w"`` -> one name for each number, ascending. A name without a range stands for itself."""
    ranges = [(int(a), int(b)) for a, b in _RANGE.findall(pattern)]
    if int(np.prod([max(b - a + 1, 0) for a, b in ranges], dtype=np.float64)) > _MAX_NAMES:
        raise LayoutError(f"{pattern!r} stands for more than {_MAX_NAMES} names")
    between = _RANGE.sub("\0", pattern).split("\0")
    names = []
    for numbers in product(*(range(a, b + 1) for a, b in ranges)):
        names.append("".join(p + str(n) for p, n in zip(between, [*numbers, ""], strict=True)))
    return names


def describe(
    state_dict: Mapping[str, Any],
    *,
    layouts: Mapping[str, Layout] | Layout | None = None,
    hosts: Sequence[str] | None = None,
    agents: Sequence[str] | None = None,
) -> dict[str, Any]:
    """One side as plain data for ``json.dump``, from a state dict of DTensors on any one rank.

    A plain tensor takes ``layouts[name]``, or ``layouts`` itself if that is one Layout. It must be whole here, because
    its shape is taken for the global one. LayoutError for a tensor without a layout. ``hosts`` and ``agents`` name the
    host and the agent of each rank.
    """
    named: dict[Layout, str] = {}
    tensors: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            continue  # optimizers and modules keep numbers beside their tensors
        if _RANGE.search(name):
            raise LayoutError(f"tensor {name!r}: {{a..b}} in a name is read as a range; rename it")
        if hasattr(tensor, "placements"):
            layout: Layout | None = Layout.from_dtensor(tensor)
        else:
            layout = layouts if isinstance(layouts, Layout) else (layouts or {}).get(name)
        if layout is None:
            raise LayoutError(f"tensor {name!r} is no DTensor: give its layout in layouts=")
        number = named.setdefault(layout, f"layout{len(named)}")
        tensors[name] = {"shape": list(tensor.shape), "dtype": dtypes.name_of(tensor.dtype), "layout": number}
    side: dict[str, Any] = {"layouts": {number: layout_to_plain(layout) for layout, number in named.items()}}
    for key, names in (("hosts", hosts), ("agents", agents)):
        if names is not None:
            side[key] = list(names)
    return {**side, "tensors": tensors}


def layout_to_plain(layout: Layout) -> dict[str, Any]:
    """A layout in the file's form: {"mesh": ..., "placements": [...]}, or {"region": ..., "ranks": [...]}."""
    plain = layout.to_plain()
    if layout.kept is not None:
        return {"region": plain["region"], "ranks": layout.ranks.tolist()}
    ranks, shape = plain["mesh"]["ranks"], plain["mesh"]["shape"]
    mesh: Any = shape
    if ranks is not None:
        mesh = {"shape": shape, "first": ranks[0]}
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            mesh = {"shape": shape, "ranks": ranks}
    axes = []
    for code, *arguments in plain["placements"]:
        if code not in _WRITTEN:
            raise LayoutError("a _MaskPartial cannot be described: reduce the embedding's output first")
        text = ", ".join(str(a) for a in arguments)
        axes.append(f"{_WRITTEN[code]}({text})" if text else _WRITTEN[code])
    reading = {} if layout.strided == "auto" else {"strided": layout.strided}
    return {"mesh": mesh, "placements": axes, **reading}
