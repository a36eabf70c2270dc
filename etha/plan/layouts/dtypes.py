"""Names, widths and casts of the dtypes that can move.

The wire dtype is the narrower of the two ends' dtypes, and the source's if they are equally wide. So the result always
equals ``source.to(target.dtype)`` to the bit, and the cast is on the side where it saves bytes.
"""

from __future__ import annotations

import torch

from etha.errors import LayoutError

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_SIGNED = ("int8", "int16", "int32", "int64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
#: Moved bit by bit between equal dtypes, never cast.
_OPAQUE = ("bool", "complex32", "complex64", "complex128", "float8_e8m0fnu")

#: Every dtype that can move, by name.
BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_FLOATS, *_FLOAT8, *_SIGNED, *_UNSIGNED, *_OPAQUE) if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in BY_NAME.items()}
_SIZES = {dtype: int(dtype.itemsize) for dtype in _NAMES}


def name_of(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``. LayoutError for a dtype that cannot move."""
    try:
        return _NAMES[dtype]
    except (KeyError, TypeError):
        raise LayoutError(f"dtype {dtype} cannot be moved; use one of {', '.join(BY_NAME)}") from None


def from_name(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``. LayoutError for an unknown name."""
    dtype = BY_NAME.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise LayoutError(f"unknown dtype {name!r}; use one of {', '.join(BY_NAME)}")
    return dtype


def itemsize(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return _SIZES[dtype]


def castable(source: torch.dtype, target: torch.dtype) -> str | None:
    """None if ``source`` may be received as ``target``, otherwise the reason why not."""
    if source == target:
        return None
    a, b = name_of(source), name_of(target)
    floats = (*_FLOATS, *_FLOAT8)
    if a in floats and b in floats:
        return None
    for family in (_SIGNED, _UNSIGNED):
        if a in family and b in family:
            if family.index(a) < family.index(b):
                return None
            return f"{a} does not widen to {b}: integers may only get wider"
    if (a in _SIGNED and b in _UNSIGNED) or (a in _UNSIGNED and b in _SIGNED):
        return f"{a} and {b} differ in signedness"
    return (
        f"{a} cannot be received as {b}: floats are cast into floats, integers into wider ones of the same signedness"
    )


def wire_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """The dtype that travels: the narrower one, or the source's if both are equally wide."""
    return target if _SIZES[target] < _SIZES[source] else source


def passable(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a target holds the bits that travelled, so that it can forward them.

    It does not if floats widen on arrival: narrowing them again keeps every number, but not the bits of a NaN.
    """
    return wire_dtype(source, target) == target or not (source.is_floating_point or source.is_complex)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which contributions of ``dtype`` are reduced: float32 for floats below 32 bits."""
    return torch.float32 if dtype.is_floating_point and _SIZES[dtype] < 4 else dtype


def reducible(dtype: torch.dtype, op: str) -> str | None:
    """None if ``op`` can reduce contributions of ``dtype``, otherwise the reason why not."""
    name = name_of(dtype)
    if name in ("uint16", "uint32", "uint64", "complex32", "float8_e8m0fnu"):
        return f"{name} has no arithmetic on the CPU, so Partial({op}) of it cannot be reduced"
    if op in ("avg", "norm") and not (dtype.is_floating_point or (op == "avg" and dtype.is_complex)):
        return f"Partial({op}) of {name} has no exact meaning: use a floating dtype"
    if name == "bool" and op not in ("max", "min"):
        return f"Partial({op}) of bool is not defined: use max or min"
    if dtype.is_complex and op in ("max", "min"):
        return f"Partial({op}) of {name} is not defined: complex numbers have no order"
    return None
