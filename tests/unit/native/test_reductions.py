"""Every reduction of every dtype, bit by bit: against torch for two sources, against plain loops of NumPy for more."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from functools import reduce as fold
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from etha.native import (
    DtypeCode,
    NativeLibrary,
    ReduceCode,
    RunResult,
    StepKind,
    open_library,
    partial_bytes,
    run_arguments,
)
from etha.native.build import FLAGS, SOURCE_FILE, source_hash
from tests.unit.native import libraries
from tests.unit.native.pages import Pages, reduce, sources, spaces, steps

NUMPY: dict[DtypeCode, Any] = {
    DtypeCode.F16: np.float16,
    DtypeCode.BF16: np.uint16,  # its bits
    DtypeCode.F32: np.float32,
    DtypeCode.F64: np.float64,
    DtypeCode.U8: np.uint8,
    DtypeCode.I8: np.int8,
    DtypeCode.I16: np.int16,
    DtypeCode.I32: np.int32,
    DtypeCode.I64: np.int64,
    DtypeCode.BOOL: np.uint8,
}
TORCH = {
    DtypeCode.F16: torch.float16,
    DtypeCode.BF16: torch.bfloat16,
    DtypeCode.F32: torch.float32,
    DtypeCode.F64: torch.float64,
    DtypeCode.U8: torch.uint8,
    DtypeCode.I8: torch.int8,
    DtypeCode.I16: torch.int16,
    DtypeCode.I32: torch.int32,
    DtypeCode.I64: torch.int64,
    DtypeCode.BOOL: torch.bool,
}
FLOATS = (DtypeCode.F16, DtypeCode.BF16, DtypeCode.F32, DtypeCode.F64)
INTEGERS = (DtypeCode.U8, DtypeCode.I8, DtypeCode.I16, DtypeCode.I32, DtypeCode.I64)
BITWISE = (ReduceCode.BAND, ReduceCode.BOR, ReduceCode.BXOR)
ARITHMETIC = (ReduceCode.SUM, ReduceCode.AVG, ReduceCode.PREMUL_SUM, ReduceCode.PRODUCT, ReduceCode.MIN, ReduceCode.MAX)
CASES = [
    *itertools.product(FLOATS, ARITHMETIC),
    *itertools.product(INTEGERS, (*ARITHMETIC, *BITWISE)),
    *itertools.product(
        [DtypeCode.BOOL], (ReduceCode.SUM, ReduceCode.PRODUCT, ReduceCode.MIN, ReduceCode.MAX, *BITWISE)
    ),
]
EACH_CASE = pytest.mark.parametrize(
    ("dtype", "op"), [pytest.param(*case, id=f"{case[0].name}-{case[1].name}") for case in CASES]
)


def random_bits(seed: int, dtype: DtypeCode, count: int) -> NDArray:
    """Elements of random bits: every kind of NaN, infinities and denormals among floats; 0 and 1 for bool."""
    random = np.random.default_rng(seed)
    if dtype is DtypeCode.BOOL:
        return random.integers(0, 2, count, dtype=np.uint8)
    return np.frombuffer(random.bytes(count * np.dtype(NUMPY[dtype]).itemsize), NUMPY[dtype]).copy()


def bf16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    return torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy()


def wide(dtype: DtypeCode, x: NDArray) -> NDArray:
    """What is computed with: float32 for 16-bit floats, otherwise the elements themselves."""
    if dtype is DtypeCode.F16:
        return x.astype(np.float32)
    if dtype is DtypeCode.BF16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x


def narrow(dtype: DtypeCode, x: NDArray) -> NDArray:
    if dtype is DtypeCode.BF16:
        return bf16_bits(x)
    return x.astype(NUMPY[dtype])


COMBINE: dict[ReduceCode, Callable[[NDArray, NDArray], NDArray]] = {
    ReduceCode.SUM: np.add,
    ReduceCode.AVG: np.add,
    ReduceCode.PREMUL_SUM: np.add,
    ReduceCode.PRODUCT: np.multiply,
    ReduceCode.MIN: np.minimum,
    ReduceCode.MAX: np.maximum,
    ReduceCode.BAND: np.bitwise_and,
    ReduceCode.BOR: np.bitwise_or,
    ReduceCode.BXOR: np.bitwise_xor,
}
FOR_BOOL = {ReduceCode.SUM: ReduceCode.BOR, ReduceCode.PRODUCT: ReduceCode.BAND}


def reference(dtype: DtypeCode, op: ReduceCode, inputs: list[NDArray], factor: float, divisor: int) -> NDArray:
    """One source after the other, in NumPy."""
    parts = [wide(dtype, x) for x in inputs]
    if dtype is DtypeCode.BOOL:
        op = FOR_BOOL.get(op, op)
    if op is ReduceCode.PREMUL_SUM:
        parts = [(x * parts[0].dtype.type(factor)).astype(x.dtype) for x in parts]
    if op is ReduceCode.AVG and dtype in INTEGERS:
        total = fold(np.add, [x.astype(np.int64) for x in parts])
        return (np.sign(total) * (abs(total) // divisor)).astype(NUMPY[dtype])
    result = fold(COMBINE[op], parts)
    if op is ReduceCode.AVG:
        result = result / result.dtype.type(divisor)
    return narrow(dtype, result)


def same(dtype: DtypeCode, one: NDArray, two: NDArray) -> bool:
    """Equal bits, but any NaN is as good as any other, and -0 is as small as 0."""
    x, y = wide(dtype, one), wide(dtype, two)
    if dtype in FLOATS:
        return bool(np.all((x == y) | (np.isnan(x) & np.isnan(y))))
    return bool(np.array_equal(x, y))


def run(
    library: NativeLibrary,
    dtype: DtypeCode,
    op: ReduceCode,
    inputs: list[NDArray],
    *,
    shift: int = 0,
    into: int | None = None,
    factor: float = 1.0,
    divisor: int = 0,
) -> NDArray:
    """Reduce copies of the inputs that lie ``shift`` bytes behind an aligned address, in place of input ``into``."""
    count, itemsize = len(inputs[0]), inputs[0].dtype.itemsize
    held = []
    for x in [*inputs, np.zeros_like(inputs[0])]:
        buffer = np.full(count * itemsize + 128, 0xA5, np.uint8)
        buffer[shift : shift + count * itemsize] = x.view(np.uint8)
        held.append(buffer)
    target = len(inputs) if into is None else into
    args = run_arguments(
        Pages(1).member(0),
        steps(reduce(target, 0, len(inputs), count, dst=shift)),
        sources(*((i, shift) for i in range(len(inputs)))),
        spaces(*held),
        phase_base=0,
        call_number=0,
        dtype=dtype,
        op=op,
        factor=factor,
        divisor=divisor,
    )
    assert library.run(args) is RunResult.DONE
    out = held[target]
    assert (out[:shift] == 0xA5).all() and (out[shift + count * itemsize :] == 0xA5).all()
    for i, x in enumerate(inputs):
        assert i == target or (held[i][shift : shift + count * itemsize] == x.view(np.uint8)).all()
    return out[shift : shift + count * itemsize].copy().view(inputs[0].dtype)


@EACH_CASE
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_any_number_of_sources_equals_a_plain_loop(library: NativeLibrary, dtype: DtypeCode, op: ReduceCode) -> None:
    counts = iter(itertools.cycle([5000, 1, 2, 3, 7, 8, 15, 17, 33, 63, 65, 1023, 1024, 1025, 2049, 0]))
    for n, shift in itertools.product((1, 2, 3, 4, 9), (0, 1, 6)):
        inputs = [random_bits(100 * n + 10 * shift + i, dtype, next(counts)) for i in range(1)]
        inputs += [random_bits(7 * n + i, dtype, len(inputs[0])) for i in range(1, n)]
        for into in (None, 0, n - 1):
            found = run(
                library, dtype, op, inputs, shift=shift, into=into, factor=0.3 if dtype in FLOATS else 3, divisor=n
            )
            assert same(dtype, found, reference(dtype, op, inputs, 0.3 if dtype in FLOATS else 3, n)), (n, shift, into)


@pytest.mark.parametrize("op", [ReduceCode.MIN, ReduceCode.MAX])
@pytest.mark.parametrize("dtype", FLOATS)
def test_of_equal_ones_the_first_stays(library: NativeLibrary, dtype: DtypeCode, op: ReduceCode) -> None:
    """Members with and without the compiled library must get the same bits."""
    zeros = narrow(dtype, np.array([0.0, -0.0] * 9))
    for inputs in ([zeros, zeros[::-1].copy()], [zeros, zeros[::-1].copy(), zeros[::-1].copy()]):
        assert run(library, dtype, op, inputs).tobytes() == zeros.tobytes()


# ---- two levels: the sources of each host, then the hosts --------------------------------------


def two_levels(
    dtype: DtypeCode, op: ReduceCode, inputs: list[NDArray], hosts: list[int], factor: float, divisor: int
) -> NDArray:
    """The sources of each host one after the other, then the hosts one after the other; rounded once."""
    if op is ReduceCode.AVG and dtype in INTEGERS:
        return reference(dtype, op, inputs, factor, divisor)
    parts = [wide(dtype, x) for x in inputs]
    if dtype is DtypeCode.BOOL:
        op = FOR_BOOL.get(op, op)
    if op is ReduceCode.PREMUL_SUM:
        parts = [(x * parts[0].dtype.type(factor)).astype(x.dtype) for x in parts]
    sums = [
        fold(COMBINE[op], [x for x, h in zip(parts, hosts, strict=True) if h == host]) for host in sorted(set(hosts))
    ]
    result = fold(COMBINE[op], sums)
    if op is ReduceCode.AVG:
        result = result / result.dtype.type(divisor)
    return narrow(dtype, result)


def run_levels(
    library: NativeLibrary, dtype: DtypeCode, op: ReduceCode, inputs: list[NDArray], hosts: list[int], factor: float,
    *, shift: int, at_once: bool,
) -> NDArray:  # fmt: skip
    """By one GROUPED into the first input, or by a PARTIAL for each host and a COMBINE of what they made."""
    n, count, itemsize = len(inputs), len(inputs[0]), inputs[0].dtype.itemsize
    each, between = sorted(set(hosts)), partial_bytes(dtype, op)
    held = [np.full(count * itemsize + 64, 0xA5, np.uint8) for _ in inputs]
    for buffer, x in zip(held, inputs, strict=True):
        buffer[shift : shift + count * itemsize] = x.view(np.uint8)
    sums = [np.full(count * between + 64, 0xA5, np.uint8) for _ in each]
    rows = [(i, shift) for i in range(n)]
    if at_once:
        program = steps(reduce(0, 0, n, count, dst=shift, kind=StepKind.GROUPED))
    else:
        first = [hosts.index(host) for host in each]
        program = steps(
            *(
                reduce(n + k, first[k], hosts.count(host), count, dst=shift, kind=StepKind.PARTIAL)
                for k, host in enumerate(each)
            ),
            reduce(0, n, len(each), count, dst=shift, kind=StepKind.COMBINE),
        )
        rows += [(n + k, shift) for k in range(len(each))]
    args = run_arguments(
        Pages(1).member(0),
        program,
        sources(*rows, hosts=[*hosts, *range(len(rows) - n)]),
        spaces(*held, *sums),
        phase_base=0,
        call_number=0,
        dtype=dtype,
        op=op,
        factor=factor,
        divisor=n,
    )
    assert library.run(args) is RunResult.DONE
    for buffer, length in [*((b, itemsize) for b in held), *((b, between) for b in sums)]:
        assert (buffer[:shift] == 0xA5).all() and (buffer[shift + count * length :] == 0xA5).all()
    return held[0][shift : shift + count * itemsize].copy().view(inputs[0].dtype)


@EACH_CASE
@pytest.mark.parametrize("at_once", [True, False], ids=["grouped", "partial and combine"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sources_of_a_host_are_reduced_before_the_hosts(
    library: NativeLibrary, dtype: DtypeCode, op: ReduceCode, at_once: bool
) -> None:
    factor = 0.3 if dtype in FLOATS else 3
    if not at_once and not partial_bytes(dtype, op):
        return
    layouts = ([0], [0, 0], [0, 1], [0, 0, 1, 1], [0, 0, 0, 1, 2, 2], [0, 1, 1, 1])
    for (number, hosts), count in itertools.product(enumerate(layouts), (1, 65, 1024, 2500)):
        shift = (0, 1, 6)[(number + count) % 3]
        inputs = [random_bits(31 * number + i + count, dtype, count) for i in range(len(hosts))]
        found = run_levels(library, dtype, op, inputs, hosts, factor, shift=shift, at_once=at_once)
        assert same(dtype, found, two_levels(dtype, op, inputs, hosts, factor, len(hosts))), (hosts, count, shift)


def test_the_order_of_hosts_shows_in_the_bits(library: NativeLibrary) -> None:
    big, one = np.array([2.0**24], np.float32), np.array([1.0], np.float32)
    inputs, hosts = [big, one, one, -big], [0, 1, 1, 0]
    by_host = [inputs[i] for i in (0, 3, 1, 2)]
    for at_once in (True, False):
        found = run_levels(
            library, DtypeCode.F32, ReduceCode.SUM, by_host, sorted(hosts), 1.0, shift=0, at_once=at_once
        )
        assert found[0] == 2.0
    assert run(library, DtypeCode.F32, ReduceCode.SUM, inputs)[0] == 0.0


@pytest.mark.parametrize("kind", [StepKind.PARTIAL, StepKind.COMBINE])
def test_an_average_of_integers_has_no_partial_sums(library: NativeLibrary, kind: StepKind) -> None:
    x = np.zeros(4, np.int32)
    args = run_arguments(
        Pages(1).member(0),
        steps(reduce(0, 0, 1, 4, kind=kind)),
        sources((0, 0)),
        spaces(x),
        phase_base=0,
        call_number=0,
        dtype=DtypeCode.I32,
        op=ReduceCode.AVG,
    )
    assert library.run(args) is RunResult.INVALID


TORCH_OPS: dict[ReduceCode, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceCode.SUM: torch.add,
    ReduceCode.PRODUCT: torch.mul,
    ReduceCode.MIN: torch.minimum,
    ReduceCode.MAX: torch.maximum,
    ReduceCode.BAND: torch.bitwise_and,
    ReduceCode.BOR: torch.bitwise_or,
    ReduceCode.BXOR: torch.bitwise_xor,
}


@EACH_CASE
def test_two_sources_equal_torch(library: NativeLibrary, dtype: DtypeCode, op: ReduceCode) -> None:
    inputs = [random_bits(seed, dtype, 70_001) for seed in (1, 2)]
    one, two = (torch.from_numpy(x.view(np.uint8).copy()).view(TORCH[dtype]) for x in inputs)
    if op is ReduceCode.PREMUL_SUM:
        expected = one * 2 + two * 2
    elif op is ReduceCode.AVG:
        if dtype in INTEGERS:
            total = one.long() + two.long()
            expected = torch.div(total, 2, rounding_mode="trunc").to(TORCH[dtype])
        else:
            wider = torch.float32 if dtype in (DtypeCode.F16, DtypeCode.BF16) else TORCH[dtype]
            expected = ((one.to(wider) + two.to(wider)) / 2).to(TORCH[dtype])
    else:
        expected = TORCH_OPS[op](one, two)
    if op is ReduceCode.PREMUL_SUM and dtype in (DtypeCode.F16, DtypeCode.BF16):
        expected = (one.float() * 2 + two.float() * 2).to(TORCH[dtype])
    found = run(library, dtype, op, inputs, factor=2.0, divisor=2)
    assert same(dtype, found, expected.view(torch.uint8).numpy().view(NUMPY[dtype]))


@pytest.mark.parametrize("dtype", [DtypeCode.F16, DtypeCode.BF16])
def test_every_number_of_16_bits_survives(library: NativeLibrary, dtype: DtypeCode) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).view(NUMPY[dtype])
    found = run(library, dtype, ReduceCode.SUM, [bits])
    x = wide(dtype, bits)
    assert (found.view(np.uint16) == bits.view(np.uint16))[~np.isnan(x)].all()
    assert np.isnan(wide(dtype, found))[np.isnan(x)].all()


@pytest.mark.parametrize("dtype", [DtypeCode.F16, DtypeCode.BF16])
def test_16_bits_are_rounded_once_to_nearest_even(library: NativeLibrary, dtype: DtypeCode) -> None:
    """Every number plus fractions of its last place; a sum in 16 bits would lose them one after the other."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(NUMPY[dtype])
    x = wide(dtype, bits)
    with np.errstate(all="ignore"):
        inputs = [
            bits,
            *(narrow(dtype, (x * np.float32(part)).astype(np.float32)) for part in (2**-9, 2**-10, -(2**-12))),
        ]
        expected = narrow(dtype, fold(np.add, [wide(dtype, y) for y in inputs]))
        assert same(dtype, run(library, dtype, ReduceCode.SUM, inputs), expected)


def test_sources_are_added_in_their_order(library: NativeLibrary) -> None:
    big, one = np.array([2.0**24], np.float32), np.array([1.0], np.float32)
    assert run(library, DtypeCode.F32, ReduceCode.SUM, [big, one, one, -big])[0] == 0.0
    assert run(library, DtypeCode.F32, ReduceCode.SUM, [one, one, big, -big])[0] == 2.0


def test_an_average_of_16_bits_does_not_overflow(library: NativeLibrary) -> None:
    most = np.full(3, 65504, np.float16)
    assert run(library, DtypeCode.F16, ReduceCode.AVG, [most] * 4, divisor=4).tolist() == [65504.0] * 3


def test_products_are_not_fused_with_sums(library: NativeLibrary) -> None:
    """A fused multiply-add would give 2**-24 here, on the processors that have one."""
    x = np.array([1 + 2.0**-12] * 64, np.float32)
    y = np.array([-(1 + 2.0**-11)] * 64, np.float32)
    factor = 1 + 2.0**-12
    found = run(library, DtypeCode.F32, ReduceCode.PREMUL_SUM, [x, y], factor=factor)
    expected = x * np.float32(factor) + y * np.float32(factor)
    assert (found == expected).all()


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(DtypeCode.F32, ReduceCode.BAND), (DtypeCode.BOOL, ReduceCode.AVG), (0, 1), (11, 1), (3, 0), (3, 10)],
)
def test_what_has_no_meaning_is_refused(library: NativeLibrary, dtype: int, op: int) -> None:
    x = np.zeros(4)
    args = run_arguments(
        Pages(1).member(0),
        steps(reduce(0, 0, 1, 4)),
        sources((0, 0)),
        spaces(x),
        phase_base=0,
        call_number=0,
        dtype=dtype,
        op=op,
    )
    assert library.run(args) is RunResult.INVALID


@pytest.mark.slow
def test_processors_without_wide_registers_compute_the_same(tmp_path: Path) -> None:
    """Members on different processors must hold the same bits."""
    wide_library = libraries.get("compiled")
    if wide_library is None:
        pytest.skip("no C compiler (cc) on the path")
    made = tmp_path / "plain.so"
    flags = [*FLAGS, "-DETHA_PLAIN", f"-DETHA_SOURCE={source_hash(SOURCE_FILE)}"]
    subprocess.run(["cc", *flags, "-o", made, SOURCE_FILE], check=True)
    plain = open_library(made)
    assert plain is not None
    for dtype, op in CASES:
        inputs = [random_bits(seed, dtype, 3001) for seed in range(3)]
        one, two = (run(library, dtype, op, inputs, factor=0.3, divisor=3) for library in (plain, wide_library))
        assert same(dtype, one, two), (dtype, op)
