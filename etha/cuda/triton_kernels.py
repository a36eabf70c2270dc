"""Fused copies in Triton: any number of descriptors in one launch, by raw addresses.

One program (CUDA block) copies one piece, BLOCK units at a time. At most ``RANK`` + 1 divisions take the index of a
unit apart; without strides there are none.

Casts. Only those pairs of dtypes are cast here for which one instruction, or integer arithmetic in this file, produces
the bits that torch produces on the same device. The rest goes to torch_kernels.py. bfloat16 widens by a shift, as in
torch (a conversion would quieten NaNs). Rounding to bfloat16 is done in integers: to the nearest, ties to even, and any
NaN becomes 0x7FFF, as in torch on every GPU that has bfloat16. From float64 and between the 16-bit floats torch goes
through float32 and rounds twice, and so does this file. float16, float32 and float64 among each other are the same
instructions in both, but for a NaN from float16 to float64, which torch makes by way of float32. No float8 pair is cast
here, because torch and Triton differ in NaNs and in values too large for the format.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl

from etha.cuda.driver import Driver
from etha.cuda.kernels import (
    COLUMNS,
    COUNTS,
    RANK,
    RUN,
    SOURCE,
    SOURCE_STEPS,
    TARGET,
    TARGET_STEPS,
    TOTAL,
    UNITS,
    WIDTH,
    Fused,
)
from etha.cuda.torch_kernels import TorchKernels

#: Units that a block moves at once.
BLOCK = 1024

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
#: Pairs that are cast here (see the module). Integers only widen.
PAIRS = frozenset(
    (*itertools.permutations(_FLOATS, 2), *itertools.combinations(_SIGNED, 2), *itertools.combinations(_UNSIGNED, 2))
)
_TYPES = {dtype: getattr(tl, str(dtype).removeprefix("torch.")) for pair in PAIRS for dtype in pair}

_SOURCE, _TARGET, _TOTAL, _RUN = (tl.constexpr(i) for i in (SOURCE, TARGET, TOTAL, RUN))
_RANK, _WIDTH, _COUNTS = (tl.constexpr(i) for i in (RANK, WIDTH, COUNTS))
_SOURCE_STEPS, _TARGET_STEPS = tl.constexpr(SOURCE_STEPS), tl.constexpr(TARGET_STEPS)
#: Any NaN of float16 as float64, as torch has it on a GPU.
_WIDE_NAN = tl.constexpr(0x7FFFFFFFE0000000)
_COLUMNS, _UNITS, _BLOCK = tl.constexpr(COLUMNS), tl.constexpr(UNITS), tl.constexpr(BLOCK)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _places(row, unit, here: tl.constexpr, there: tl.constexpr):  # type: ignore[no-untyped-def]
    """Byte offsets of units at both ends; units are ``here`` and ``there`` bytes wide."""
    rank = tl.load(row + _RANK)
    source = unit.to(tl.int64) * here
    target = unit.to(tl.int64) * there
    if rank > 0:
        run = tl.load(row + _RUN).to(tl.uint32)  # division is shorter without a sign
        index = unit.to(tl.uint32)
        rest = index // run
        within = (index - rest * run).to(tl.int64)
        source = within * here
        target = within * there
        for i in tl.static_range(4):
            if i < rank:
                count = tl.load(row + _COUNTS + i).to(tl.uint32)
                outer = rest // count
                step = (rest - outer * count).to(tl.int64)
                source += step * tl.load(row + _SOURCE_STEPS + i)
                target += step * tl.load(row + _TARGET_STEPS + i)
                rest = outer
    return source, target


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _move(row, first, dtype: tl.constexpr, nbytes: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy one piece in units of one integer."""
    total = tl.load(row + _TOTAL).to(tl.int32)
    start, end = first, tl.minimum(first + _UNITS, total)
    while start < end:
        unit = start + tl.arange(0, _BLOCK)
        live = unit < total
        source, target = _places(row, unit, nbytes, nbytes)
        bits = tl.load((tl.load(row + _SOURCE) + source).to(tl.pointer_type(dtype)), mask=live)
        tl.store((tl.load(row + _TARGET) + target).to(tl.pointer_type(dtype)), bits, mask=live)
        start += _BLOCK


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _move_wide(row, first):  # type: ignore[no-untyped-def]
    """Copy one piece in units of 16 bytes: two integers side by side, which the compiler loads as one."""
    total = tl.load(row + _TOTAL).to(tl.int32)
    here, there = tl.load(row + _SOURCE), tl.load(row + _TARGET)
    half = tl.arange(0, 2)[None, :]
    start, end = first, tl.minimum(first + _UNITS, total)
    while start < end:
        unit = start + tl.arange(0, _BLOCK)
        live = (unit < total)[:, None]
        source, target = _places(row, unit, 16, 16)
        load = (here + source).to(tl.pointer_type(tl.int64))[:, None] + half
        store = (there + target).to(tl.pointer_type(tl.int64))[:, None] + half
        load = tl.max_contiguous(tl.multiple_of(load, (8, 16)), (1, 2))
        store = tl.max_contiguous(tl.multiple_of(store, (8, 16)), (1, 2))
        tl.store(store, tl.load(load, mask=live), mask=live)
        start += _BLOCK


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def copy_bits(table, pieces):  # type: ignore[no-untyped-def]
    """Copy rows whose dtypes are None."""
    piece = tl.load(pieces.to(tl.pointer_type(tl.int64)) + tl.program_id(0))
    row = table.to(tl.pointer_type(tl.int64)) + (piece >> 32) * _COLUMNS
    first = (piece & 0xFFFFFFFF).to(tl.int32) * _UNITS
    width = tl.load(row + _WIDTH)
    if width == 4:
        _move_wide(row, first)
    elif width == 3:
        _move(row, first, tl.int64, 8)
    elif width == 2:
        _move(row, first, tl.int32, 4)
    elif width == 1:
        _move(row, first, tl.int16, 2)
    else:
        _move(row, first, tl.int8, 1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rounded(value):  # type: ignore[no-untyped-def]
    """float32 as the bits of the nearest bfloat16."""
    bits = value.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, nearest).to(tl.uint16)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _cast(value, source: tl.constexpr, target: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of ``source`` as ``target``. bfloat16 is uint16 here, and its widening to float32 is uint32."""
    if source == tl.bfloat16:
        bits = value.to(tl.uint32) << 16
        if target == tl.float32:
            return bits
        else:
            return bits.to(tl.float32, bitcast=True).to(target)
    elif target == tl.bfloat16:
        return _rounded(value.to(tl.float32))
    elif source == tl.float64 and target == tl.float16:
        return value.to(tl.float32).to(target)
    elif source == tl.float16 and target == tl.float64:
        # A compiler makes one step of two, and that step keeps a NaN's bits.
        nan = (value.to(tl.uint16, bitcast=True) & 0x7FFF) > 0x7C00
        bits = value.to(target).to(tl.int64, bitcast=True)
        return tl.where(nan, _WIDE_NAN, bits).to(target, bitcast=True)
    else:
        return value.to(target)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def copy_cast(  # type: ignore[no-untyped-def]
    table,
    pieces,
    source_type: tl.constexpr,
    target_type: tl.constexpr,
    loads: tl.constexpr,
    stores: tl.constexpr,
    here: tl.constexpr,
    there: tl.constexpr,
):
    """Copy rows of one pair of dtypes. ``loads`` and ``stores`` are the types that cross memory, as ``_cast`` has
    them."""
    piece = tl.load(pieces.to(tl.pointer_type(tl.int64)) + tl.program_id(0))
    row = table.to(tl.pointer_type(tl.int64)) + (piece >> 32) * _COLUMNS
    first = (piece & 0xFFFFFFFF).to(tl.int32) * _UNITS
    total = tl.load(row + _TOTAL).to(tl.int32)
    start, end = first, tl.minimum(first + _UNITS, total)
    while start < end:
        unit = start + tl.arange(0, _BLOCK)
        live = unit < total
        source, target = _places(row, unit, here, there)
        value = tl.load((tl.load(row + _SOURCE) + source).to(tl.pointer_type(loads)), mask=live)
        tl.store(
            (tl.load(row + _TARGET) + target).to(tl.pointer_type(stores)),
            _cast(value, source_type, target_type),
            mask=live,
        )
        start += _BLOCK


def cast_types(source: torch.dtype, target: torch.dtype) -> dict[str, Any]:
    """The constants of ``copy_cast`` for one of PAIRS."""
    widens = source is torch.bfloat16 and target is torch.float32
    return {
        "source_type": _TYPES[source],
        "target_type": _TYPES[target],
        "loads": tl.uint16 if source is torch.bfloat16 else _TYPES[source],
        "stores": tl.uint16 if target is torch.bfloat16 else tl.uint32 if widens else _TYPES[target],
        "here": source.itemsize,
        "there": target.itemsize,
    }


class TritonKernels:
    """See the module."""

    name = "triton"

    def __init__(self) -> None:
        self._torch = TorchKernels()

    def launch(self, driver: Driver, uuid: str, stream: int, fused: Fused) -> None:
        source, target = fused.source, fused.target
        if source is not None and (source, target) not in PAIRS:
            self._torch.launch(driver, uuid, stream, fused)
            return
        table, pieces, grid = fused.table, fused.pieces, (fused.count,)

        def work() -> None:
            if source is None or target is None:
                copy_bits[grid](table, pieces)
                return
            copy_cast[grid](table, pieces, **cast_types(source, target))

        driver.launch(uuid, stream, work)
