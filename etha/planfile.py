"""The two JSON files of ``etha plan``, one a side, as planning takes them. Reads files, starts nothing.

    {"mesh": [2, 2], "placements": ["S(0)", "R"], "tensors": {"w": {"shape": [8, 8], "dtype": "float32"}}}

A flat mesh is a shape over ranks 0 .. n-1, a nested one a table of ranks. A tensor may have "mesh" and
"placements" of its own. A target without "tensors" takes the source's names, shapes and dtypes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from etha.errors import ConfigError, LayoutError
from etha.plan import Layout, TensorSpec
from etha.plan.dtypes import from_name

Specs = dict[str, TensorSpec]
#: What a placement is called in the file -> its code in plain data, and how to read its arguments.
_PLACEMENTS: dict[str, tuple[str, type]] = {
    "S": ("S", int),
    "_S": ("SS", int),
    "R": ("R", str),
    "P": ("P", str),
    "NP": ("NP", float),
}


def read_sides(source: Path, target: Path) -> tuple[Specs, Specs]:
    """Specs of both sides by name; ConfigError says which file and tensor is malformed."""
    sent, received = _read(source), _read(target)
    return _specs(source, sent, sent), _specs(target, received, received if "tensors" in received else _bare(sent))


def _read(path: Path) -> dict[str, Any]:
    try:
        side = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(side, dict) or not isinstance(side.get("tensors", {}), dict):
        raise ConfigError(f'{path} must hold an object with "mesh", "placements" and "tensors"')
    return side


def _bare(side: dict[str, Any]) -> dict[str, Any]:
    """The tensors of ``side`` without their layouts."""
    tensors = side.get("tensors", {})
    return {"tensors": {name: {k: t[k] for k in ("shape", "dtype")} for name, t in tensors.items()}}


def _specs(path: Path, side: dict[str, Any], described: dict[str, Any]) -> Specs:
    found = {}
    for name, tensor in described.get("tensors", {}).items():
        try:
            layout = Layout.from_plain(
                {
                    "mesh": _mesh(tensor.get("mesh", side.get("mesh"))),
                    "placements": [_placement(p) for p in tensor.get("placements", side.get("placements"))],
                    "strided": "auto",
                }
            )
            found[name] = TensorSpec(tuple(tensor["shape"]), from_name(tensor["dtype"]), layout)
        except (LayoutError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: tensor {name!r} needs shape, dtype, mesh and placements: {error}") from None
    return found


def _mesh(mesh: Any) -> dict[str, Any]:
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
