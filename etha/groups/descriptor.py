"""What a member says about its call before any byte moves: 128 bytes that all compare, and the splits of ALLTOALL.

A slot: common part (`COMMON` bytes, `encode`) | flags u64 | number of the call u64 | zeros up to `HEAD`
        | give u64[n] | take u64[n], for ALLTOALL: elements to and from each rank | zeros up to a multiple of 64.
All little-endian. Pure: the windows and the native executor read and write the slots.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

from etha.groups.schedule import Kind, Variant
from etha.native.structs import CALL_AT, COMMON_BYTES, HAS_SPLITS, SPLITS_AT

#: Bytes that are compared, and the length of what stands before the splits.
COMMON, HEAD = COMMON_BYTES, SPLITS_AT
#: Flag: my tensors of this call lie in memory that the others have mapped. (2 is `HAS_SPLITS`.)
READABLE_IN_PLACE = 1

#: Element types by their name in torch. The number is the place in the tuple, which is never reordered; 0 is no tensor.
DTYPES = (
    *("none", "float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"),
    *("complex32", "complex64", "complex128", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16"),
)
#: Collectives by torch's names, also those of older releases; a refusal says which one was called. Never reordered.
METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced"),
    *("all_gather_single", "_allgather_base", "all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    *("gather", "scatter", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("all_to_all_single", "alltoall_base", "alltoall", "barrier"),
)
#: ``extra`` of a BARRIER that stands for a call whose arguments its member has refused: this and a place in METHODS.
REFUSED = 1 << 40
#: ``extra`` of a reduction of complex numbers, whose tensors are those of their real and imaginary parts.
PAIRS = 1 << 39
_COMPLEX = {"float16": "complex32", "float32": "complex64", "float64": "complex128"}
#: Reductions; "none" for a call that only moves.
OPS = ("none", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

_DTYPE_NUMBER = {name: number for number, name in enumerate(DTYPES)}
_OP_NUMBER = {name: number for number, name in enumerate(OPS)}
_VARIANT_NUMBER = {None: 0, Variant.SMALL: 1, Variant.WINDOWS: 2, Variant.IN_PLACE: 3}

# kind, dtype, op, variant; root, tensors; elements of the first four; all elements; extra; factor; window; hash
_COMMON = struct.Struct("<4I iI 4Q Q q d Q 16s 24x")
assert _COMMON.size == COMMON


@lru_cache(maxsize=1024)
def encode(
    kind: Kind,
    dtype: str = "none",
    op: str = "none",
    *,
    counts: tuple[int, ...] = (),
    root: int = -1,
    factor: float = 0.0,
    extra: int = 0,
    variant: Variant | None = None,
    window_bytes: int = 0,
) -> bytes:
    """The common part. `counts`: elements of each tensor or piece, as far as all ranks must agree on them.

    `factor` is PREMUL_SUM's. `variant`, `window_bytes` and `extra` are whatever else the ranks must have equal. Raises
    ValueError for a dtype or an op that has no number.
    """
    if dtype not in _DTYPE_NUMBER or op not in _OP_NUMBER:
        raise ValueError(f"a group has no calls with tensors of {dtype} and the reduction {op}")
    first = (*counts[:4], 0, 0, 0, 0)[:4]
    digest = hashlib.blake2b(struct.pack(f"<{len(counts)}Q", *counts), digest_size=16).digest()
    return _COMMON.pack(
        *(kind, _DTYPE_NUMBER[dtype], _OP_NUMBER[op], _VARIANT_NUMBER[variant], root, len(counts)),
        *first,
        *(sum(counts), extra, factor, window_bytes, digest),
    )


def decode(common: bytes) -> str:
    """What an error says about a call: "allreduce SUM of 6 float32", "reduce AVG to rank 1 of 2 tensors of 2, 5 int64".

    Never raises if it is given 128 bytes, because they come from another process.
    """
    kind, dtype, op, _, root, tensors, *rest = _COMMON.unpack(common)
    first, elements, extra, factor = rest[:4], rest[4], rest[5], rest[6]
    if is_refusal(common):
        method = METHODS[extra - REFUSED] if extra - REFUSED < len(METHODS) else "a call"
        return f"{method.strip('_')} with arguments that it refused"
    words = [Kind(kind).name.lower() if kind in Kind._value2member_map_ else f"call of kind {kind}"]
    if op:
        words.append(OPS[op] if op < len(OPS) else f"op {op}")
    if op == _OP_NUMBER["PREMUL_SUM"]:
        words.append(f"by {factor:g}")
    if root >= 0:
        words.append(f"{'to' if kind in (Kind.REDUCE, Kind.GATHER) else 'from'} rank {root}")
    if dtype or tensors:
        name = DTYPES[dtype] if dtype < len(DTYPES) else f"dtype {dtype}"
        if extra == PAIRS and name in _COMPLEX:
            name, first, elements = _COMPLEX[name], [count // 2 for count in first], elements // 2
        words.append(f"of {_sizes(tensors, first, elements)} {name}")
    return " ".join(words)


def is_refusal(common: bytes) -> bool:
    """Whether a member has refused the arguments of its own call, and says so to the others."""
    kind, *_, extra, _factor, _window, _digest = _COMMON.unpack(common)
    return bool(kind == Kind.BARRIER and extra >= REFUSED)


def encode_reason(text: str, room: int) -> bytes:
    """Why a call was refused, in at most ``room`` bytes."""
    data = text.encode()[: room - 2].decode(errors="ignore").encode()
    return struct.pack("<H", len(data)) + data


def decode_reason(data: bytes) -> str:
    """The text of `encode_reason`; whatever another process wrote there does no harm."""
    (length,) = struct.unpack_from("<H", data)
    return data[2 : 2 + length].decode(errors="replace")


def _sizes(tensors: int, first: Sequence[int], elements: int) -> str:
    if tensors <= 1:
        return str(elements)
    shown = ", ".join(str(count) for count in first[:tensors])
    return f"{tensors} tensors of {shown}{f', ... ({elements} together)' if tensors > len(first) else ''}"


def difference(mine: bytes, theirs: bytes) -> str:
    """In what two common parts that read the same differ, for an error; "" if they are equal."""
    names = (
        *("kind", "dtype", "reduction", "way of the bytes", "root", "number of tensors"),
        *(f"elements of tensor {i}" for i in range(4)),
        *("elements", "extra argument", "factor", "window size", "elements of a later tensor"),
    )
    pairs = zip(names, _COMMON.unpack(mine), _COMMON.unpack(theirs), strict=True)
    return ", ".join(name for name, a, b in pairs if a != b)


def slot_bytes(size: int) -> int:
    """The length of one slot of a group of `size`."""
    return -(-(HEAD + 16 * size) // 64) * 64


def encode_slot(common: bytes, call_number: int, *, flags: int = 0, splits: bytes = b"") -> bytes:
    """A whole slot but for the zeros at its end. `splits`: give and take, from `encode_splits`."""
    flags |= HAS_SPLITS if splits else 0
    return common + struct.pack("<QQ", flags, call_number) + bytes(HEAD - CALL_AT - 8) + splits


def encode_splits(give: Sequence[int], take: Sequence[int]) -> bytes:
    """What stands behind HEAD for an ALLTOALL: elements to each rank, elements from each rank."""
    return struct.pack(f"<{len(give) + len(take)}Q", *give, *take)


def decode_splits(slot: bytes | memoryview, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(give, take) of a slot."""
    both = struct.unpack_from(f"<{2 * size}Q", slot, HEAD)
    return both[:size], both[size:]


def split_matrix(slots: Sequence[bytes | memoryview]) -> tuple[tuple[int, ...], ...]:
    """`CallShape.matrix` out of all ranks' slots of an ALLTOALL. They have been compared before (`MATCH`)."""
    return tuple(decode_splits(slot, len(slots))[0] for slot in slots)


def wrong_splits(slots: Sequence[bytes | memoryview]) -> list[tuple[int, int, int, int]]:
    """(sender, receiver, elements that it gives, elements that the other takes) where these differ."""
    size = len(slots)
    both = [decode_splits(slot, size) for slot in slots]
    return [
        (s, d, both[s][0][d], both[d][1][s]) for s in range(size) for d in range(size) if both[s][0][d] != both[d][1][s]
    ]
