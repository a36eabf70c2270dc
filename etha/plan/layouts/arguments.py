"""Checks of what callers of ``etha.plan`` give: each raises ConfigError with the argument, its value and what is
allowed.

What is wrong inside a layout is a LayoutError of the layout itself. ``etha.client`` has checks of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any

import torch

from etha.errors import ConfigError
from etha.plan.layouts.tensor_spec import TensorSpec


def _shown(value: object) -> str:
    """``value`` in an error: short, and safe if its ``repr`` fails."""
    try:
        text = repr(value)
    except Exception:  # an int of very many digits, or a class of the caller's
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_specs(what: str, value: Any) -> None:
    """What a side holds: a mapping of names to TensorSpecs."""
    example = '{"w": TensorSpec(shape, dtype, layout)}'
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what}={_shown(value)} must be a mapping of names to TensorSpecs, such as {example}")
    for name, spec in value.items():
        if not isinstance(name, str):
            raise ConfigError(f"{what} has the name {_shown(name)}: names are of type str, as in {example}")
        if not isinstance(spec, TensorSpec):
            raise ConfigError(f"{what}[{_shown(name)}]={_shown(spec)} must be a TensorSpec, as in {example}")


def check_places(what: str, value: Any) -> None:
    """None, or a sequence of texts: the host or the agent of each rank. The topology checks how many."""
    ordered = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping | Set | torch.Tensor)
    if value is not None and not (ordered and all(isinstance(name, str) for name in value)):
        raise ConfigError(f'{what}={_shown(value)} must be a sequence of a str for each rank, such as ["a", "b"]')


def check_choice(what: str, value: Any, *allowed: str) -> None:
    """One of these texts."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{what}={_shown(value)} must be {' or '.join(map(repr, allowed))}")


def check_bytes(what: str, value: Any) -> None:
    """A number of bytes, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{what}={_shown(value)} must be a number of bytes, 0 or more")


def check_flag(what: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{what}={_shown(value)} must be True or False")


def check_locals(what: str, value: Any) -> None:
    """What a side's ranks hold: a mapping of ranks to mappings of names to tensors."""
    example = '{0: {"w": tensor}}'
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what}={_shown(value)} must be a mapping of ranks to their tensors, such as {example}")
    for rank, held in value.items():
        if not isinstance(held, Mapping):
            raise ConfigError(f"{what}[{_shown(rank)}]={_shown(held)} must be a mapping, as in {example}")
        for name, tensor in held.items():
            if not isinstance(tensor, torch.Tensor):
                where = f"{what}[{_shown(rank)}][{_shown(name)}]"
                raise ConfigError(f"{where}={_shown(tensor)} must be a tensor, as in {example}")
