"""One call to a process group, brought into one form, and checked as far as one member can check it.

torch calls a process group by about thirty names and overloads, with options objects, lists and lists of lists. Each
becomes a `GroupCall` with flat lists of inputs and outputs, so that what carries calls out knows twelve kinds only.
Wrong arguments raise `GroupError`. What fits another size of the group than it has, as a graph that was compiled for
more members, raises `GroupMismatchError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from etha.errors import GroupError, GroupMismatchError
from etha.groups import descriptor
from etha.groups.schedule import Kind
from etha.memory.handles import is_expanded, span_nbytes

_OP: Any = ReduceOp.RedOpType
_BITWISE = (_OP.BAND, _OP.BOR, _OP.BXOR)
_LINEAR = (_OP.SUM, _OP.AVG, _OP.PREMUL_SUM)
#: Reduced in float32 and rounded once. torch has no arithmetic for them.
FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
#: What options objects hold if their maker set no timeout.
_UNSET = timedelta(milliseconds=-1)


@dataclass(slots=True, kw_only=True, eq=False)
class GroupCall:
    """One call in normal form. Inputs and outputs may be the same tensors; then the call works in place.

    - ALLREDUCE, REDUCE, BROADCAST: inputs[i] and outputs[i] are the same tensor.
    - ALLGATHER: k inputs, k*n outputs; outputs[t*n + s] gets input t of rank s.
    - REDUCE_SCATTER: k*n inputs, k outputs; inputs[t*n + d] goes to output t of rank d.
    - ALLTOALL: n inputs, by destination; n outputs, by source. Pieces may be empty or uneven.
    - GATHER: 1 input, n outputs on the root. SCATTER: n inputs on the root, 1 output.
    - SEND: inputs. RECV, RECV_ANY: outputs. BARRIER: none.

    ``method`` and ``args`` are what torch called. ``root`` is a rank of the group: the root, or the peer of SEND and
    RECV. ``timeout`` None means the group's. ``factor`` belongs to PREMUL_SUM. ``returned`` are the tensors that the
    call's future holds; the normal form may have views of them.
    """

    kind: Kind
    method: str
    args: tuple[Any, ...] = ()
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    op: Any = None
    factor: float | Tensor | None = None
    root: int = -1
    tag: int = 0
    timeout: timedelta | None = None
    async_op: bool = True
    returned: list[Tensor] = field(default_factory=list)
    #: Of a `refusal`: why.
    refused: str = ""

    def result(self) -> list[Tensor]:
        """What the call's future holds."""
        return self.returned

    def fill_defaults(self, rank: int) -> None:
        """Fill the outputs of a call that was skipped or failed: a reduction leaves its input, a gather its own piece.

        All other pieces are zeros. BARRIER and RECV have no defaults.
        """
        own = _own_pieces(self, rank)
        if own is None:
            return
        for output, piece in own:
            if piece is not None and not _same(output, piece):
                output.copy_(piece.reshape(output.shape))
        for output, piece in own:
            if piece is None:
                output.zero_()

    def describe(self) -> str:
        """``allreduce SUM of float32[2, 3]``, for errors."""
        tensors = self.inputs or self.outputs
        words = [self.method.strip("_")]
        if self.op is not None:
            words.append(self.op.name)
        if tensors:
            words.append("of " + ", ".join(_describe(tensor) for tensor in tensors[:4]))
        if len(tensors) > 4:
            words.append(f"and {len(tensors) - 4} more")
        if self.kind in (Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER):
            words.append(f"with root {self.root}")
        elif self.kind is Kind.SEND:
            words.append(f"to rank {self.root}")
        elif self.kind is Kind.RECV:
            words.append(f"from rank {self.root}")
        return " ".join(words)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _own_pieces(call: GroupCall, rank: int) -> list[tuple[Tensor, Tensor | None]] | None:
    """Each output with the own tensor that it has by default (None: zeros). None if the outputs stay as they are."""
    outputs, inputs = call.outputs, call.inputs
    match call.kind:
        case Kind.ALLGATHER:
            n = len(outputs) // max(1, len(inputs))
            return [(out, inputs[i // n] if i % n == rank else None) for i, out in enumerate(outputs)]
        case Kind.GATHER:
            return [(out, inputs[0] if i == rank else None) for i, out in enumerate(outputs)]
        case Kind.REDUCE_SCATTER:
            n = len(inputs) // max(1, len(outputs))
            return [(out, inputs[i * n + rank]) for i, out in enumerate(outputs)]
        case Kind.ALLTOALL:
            return [(out, inputs[rank] if i == rank else None) for i, out in enumerate(outputs)]
        case Kind.SCATTER:
            return [(outputs[0], inputs[rank] if inputs else None)]
        case _:
            return None


@contextmanager
def writing(tensors: Sequence[Tensor]) -> Iterator[None]:
    """No autograd; and inference mode where a tensor may be written in it alone."""
    with torch.inference_mode() if any(t.is_inference() for t in tensors) else torch.no_grad():
        yield


def normalize(method: str, args: Sequence[Any], *, rank: int, size: int, devices: Sequence[str] = ()) -> GroupCall:
    """The call ``method(*args)`` of a member in normal form.

    ``devices`` are the device types that the group serves; empty for any. Arguments come as torch's Python functions,
    its C++ code and users give them: options objects, plain reduce operations or roots, and timeouts.
    """
    call = _Builder(method, tuple(args), rank, size).build()
    _check_tensors(call, devices)
    return call


def refusal(method: str, reason: str) -> GroupCall | None:
    """What a member calls in place of a collective whose arguments it has refused: members compare it, no byte moves.

    It is equal on all members that refuse the same method, and unlike every other call. None if ``method`` is no
    collective.
    """
    if method not in descriptor.METHODS:
        return None
    tag = descriptor.REFUSED + descriptor.METHODS.index(method)
    return GroupCall(kind=Kind.BARRIER, method=method, tag=tag, refused=reason)


#: Names of a method by torch's releases: what it was called up to 2.12, and what it is called since.
ALIASES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


class _Builder:
    """Builds the GroupCall of one method call: one method for each of torch's."""

    def __init__(self, method: str, args: tuple[Any, ...], rank: int, size: int) -> None:
        self.method, self.args, self.rank, self.size = method, args, rank, size

    def build(self) -> GroupCall:
        name = ALIASES.get(self.method, self.method)
        maker: Callable[..., GroupCall] | None = getattr(self, name, None)
        if maker is None:
            raise GroupError(f"process groups have no method {self.method}")
        try:
            return maker(*self.args)
        except GroupError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise GroupError(f"wrong arguments for {self.method}: {error}") from error

    # ---- one tensor or several, in place -----------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> GroupCall:
        return self._in_place(Kind.ALLREDUCE, tensors, op=_operation(opts), opts=opts, timeout=timeout)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> GroupCall:
        return self._in_place(Kind.ALLREDUCE, tensors, op=_operation(opts), opts=opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> GroupCall:
        return self._in_place(Kind.BROADCAST, tensors, root=self._root(opts), opts=opts, timeout=timeout)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> GroupCall:
        operation = _operation(opts if op is None else op)
        return self._in_place(Kind.REDUCE, tensors, op=operation, root=self._root(opts), opts=opts, timeout=timeout)

    def _in_place(self, kind: Kind, tensors: Any, *, opts: Any, op: Any = None, **more: Any) -> GroupCall:
        given = self._list(tensors)
        views = [_as_real(tensor, op) for tensor in given]
        return self._call(kind, views, views, given, op=op, opts=opts, tag=_pairs_tag(given, op), **more)

    # ---- gathers -----------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupCall:
        sources = self._list(inputs)
        lists = [outputs] if isinstance(inputs, Tensor) else list(outputs)
        self._count("lists of outputs", lists, len(sources), "one for each input")
        for each in lists:
            self._fit("outputs", each, "one for each member")
        flat = [tensor for each in lists for tensor in each]
        return self._gather(sources, flat, flat, opts)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> GroupCall:
        return self._gather([source], self._pieces(output, source.numel()), [output], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupCall:
        sources, given = self._list(inputs), self._list(outputs)
        self._count("outputs", given, len(sources), "one for each input")
        pairs = zip(given, sources, strict=True)
        return self._gather(sources, [p for out, src in pairs for p in self._pieces(out, src.numel())], given, opts)

    def allgather_coalesced(self, lists: Any, inputs: Any, opts: Any = None) -> GroupCall:
        sources = self._list(inputs)
        self._fit("lists of outputs", lists, "one for each member")
        for each in lists:
            self._count("outputs", each, len(sources), "one for each input")
        flat = [lists[s][t] for t in range(len(sources)) for s in range(self.size)]
        return self._gather(sources, flat, [tensor for each in lists for tensor in each], opts)

    def _gather(self, sources: list[Tensor], outputs: list[Tensor], given: list[Tensor], opts: Any) -> GroupCall:
        for t, source in enumerate(sources):
            self._same_size("output", outputs[t * self.size + self.rank], "input", source)
        return self._call(Kind.ALLGATHER, sources, outputs, given, opts=opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> GroupCall:
        source = self._one("input", inputs)
        root = self._root(opts)
        lists = [outputs] if isinstance(inputs, Tensor) else list(outputs)
        flat = self._list_of_root(lists, root, "outputs")
        if flat:
            self._same_size("output", flat[self.rank], "input", source)
        return self._call(Kind.GATHER, [source], flat, flat, opts=opts, root=root, timeout=timeout)

    # ---- scatters ----------------------------------------------------------------------------

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> GroupCall:
        output = self._one("output", outputs)
        root = self._root(opts)
        lists = [inputs] if isinstance(outputs, Tensor) else list(inputs)
        flat = self._list_of_root(lists, root, "inputs")
        if flat:
            self._same_size("input", flat[self.rank], "output", output)
        return self._call(Kind.SCATTER, flat, [output], [output], opts=opts, root=root, timeout=timeout)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> GroupCall:
        given = self._list(outputs)
        lists = [inputs] if isinstance(outputs, Tensor) else list(inputs)
        self._count("lists of inputs", lists, len(given), "one for each output")
        for each in lists:
            self._fit("inputs", each, "one for each member")
        flat = [tensor for each in lists for tensor in each]
        return self._scatter(flat, given, opts, timeout)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> GroupCall:
        return self._scatter(self._pieces(source, output.numel()), [output], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupCall:
        given, sources = self._list(outputs), self._list(inputs)
        self._count("inputs", sources, len(given), "one for each output")
        pairs = zip(given, sources, strict=True)
        return self._scatter([p for out, src in pairs for p in self._pieces(src, out.numel())], given, opts)

    def _scatter(self, inputs: list[Tensor], outputs: list[Tensor], opts: Any, timeout: Any = None) -> GroupCall:
        op = _operation(opts)
        for t, output in enumerate(outputs):
            self._same_size("input", inputs[t * self.size + self.rank], "output", output)
        sources, targets = [_as_real(each, op) for each in inputs], [_as_real(each, op) for each in outputs]
        tag = _pairs_tag([*inputs, *outputs], op)
        return self._call(Kind.REDUCE_SCATTER, sources, targets, outputs, op=op, opts=opts, tag=tag, timeout=timeout)

    # ---- all to all --------------------------------------------------------------------------

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupCall:
        given, sources = self._list(outputs), self._list(inputs)
        self._fit("outputs", given, "one for each member")
        self._fit("inputs", sources, "one for each member")
        return self._alltoall(sources, given, given, opts)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_splits: Any = (), input_splits: Any = (), opts: Any = None
    ) -> GroupCall:
        return self._alltoall(self._split(source, input_splits), self._split(output, output_splits), [output], opts)

    def _alltoall(self, inputs: list[Tensor], outputs: list[Tensor], given: list[Tensor], opts: Any) -> GroupCall:
        self._same_size("own output", outputs[self.rank], "own input", inputs[self.rank])
        return self._call(Kind.ALLTOALL, inputs, outputs, given, opts=opts)

    # ---- without tensors, and point to point -------------------------------------------------

    def barrier(self, opts: Any = None) -> GroupCall:
        return self._call(Kind.BARRIER, [], [], [], opts=opts)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> GroupCall:
        given = self._list(tensors)
        return self._call(Kind.SEND, given, [], given, root=self._peer(peer), tag=self._tag(tag))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> GroupCall:
        given = self._list(tensors)
        return self._call(Kind.RECV, [], given, given, root=self._peer(peer), tag=self._tag(tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> GroupCall:
        given = self._list(tensors)
        return self._call(Kind.RECV_ANY, [], given, given, tag=self._tag(tag))

    # ---- parts -------------------------------------------------------------------------------

    def _call(
        self, kind: Kind, inputs: list[Tensor], outputs: list[Tensor], given: list[Tensor],
        *, op: Any = None, opts: Any = None, root: int = -1, tag: int = 0, timeout: Any = None,
    ) -> GroupCall:  # fmt: skip
        """The GroupCall. An operation comes as a pair of torch's value and its factor."""
        operation, factor = op if op is not None else (None, None)
        return GroupCall(
            kind=kind,
            method=self.method,
            args=self.args,
            inputs=inputs,
            outputs=outputs,
            returned=given,
            op=operation,
            factor=factor,
            root=root,
            tag=tag,
            timeout=_timeout(opts, timeout),
            async_op=bool(getattr(opts, "asyncOp", True)),
        )

    def _list(self, tensors: Any) -> list[Tensor]:
        found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not found:
            raise GroupError(f"{self.method} needs at least one tensor")
        if not all(isinstance(tensor, Tensor) for tensor in found):
            kinds = sorted({type(each).__name__ for each in found if not isinstance(each, Tensor)})
            raise GroupError(f"{self.method} takes tensors, not {', '.join(kinds)}")
        return found

    def _one(self, what: str, tensors: Any) -> Tensor:
        found = self._list(tensors)
        self._count(f"{what}s", found, 1, "one")
        return found[0]

    def _list_of_root(self, lists: list[Any], root: int, what: str) -> list[Tensor]:
        """The only list on the root; the others have none, or an empty one."""
        flat = [tensor for each in lists for tensor in each]
        if self.rank != root:
            if flat:
                raise GroupError(f"{self.method}: rank {self.rank} is not root {root}, but gives {len(flat)} {what}")
            return []
        self._fit(what, flat, "one for each member")
        return flat

    def _count(self, what: str, found: Sequence[Any], wanted: int, why: str) -> None:
        if len(found) != wanted:
            raise GroupError(f"{self.method} has {len(found)} {what}, it needs {wanted}: {why}")

    def _fit(self, what: str, found: Sequence[Any], why: str) -> None:
        """Like ``_count``, for what depends on the size of the group."""
        if len(found) != self.size:
            raise self._mismatch(f"{len(found)} {what}, but the group has {self.size} members ({why})")

    def _mismatch(self, text: str) -> GroupMismatchError:
        text_of_rank = f"rank {self.rank} called {self.method} with {text}"
        hint = "if the call was compiled, it was compiled for another number of members"
        return GroupMismatchError(f"{text_of_rank}; {hint}", calls={self.rank: f"{self.method} with {text}"})

    def _same_size(self, what: str, a: Tensor, other: str, b: Tensor) -> None:
        if a.numel() != b.numel():
            raise GroupError(
                f"{self.method}: the {what} for rank {self.rank} has {a.numel()} elements, the {other} {b.numel()}"
            )

    def _pieces(self, flat: Tensor, numel: int) -> list[Tensor]:
        """A tensor with n times ``numel`` elements as n views of ``numel`` elements each, in their order."""
        n = self.size
        if flat.numel() != n * numel:
            text = f"{flat.numel()} elements in one tensor and {numel} in the other"
            raise self._mismatch(f"{text}, but the group has {n} members")
        if n == 1:
            return [flat]
        if flat.is_contiguous():
            line = flat.view(-1)
            return [line[i * numel : (i + 1) * numel] for i in range(n)]
        if flat.dim() and flat.shape[0] % n == 0:
            rows = flat.shape[0] // n
            return [flat.narrow(0, i * rows, rows) for i in range(n)]
        raise GroupError(f"{self.method} cannot divide {_describe(flat)} by {n} members: make it contiguous")

    def _split(self, flat: Tensor, splits: Any) -> list[Tensor]:
        """Views of a tensor along dim 0: of the given sizes, or of equal sizes."""
        n, rows = self.size, flat.shape[0] if flat.dim() else 0
        sizes = [int(each) for each in splits or ()]
        if not sizes:
            if not flat.dim() or rows % n:
                raise self._mismatch(f"{_describe(flat)}, whose first dim cannot be divided by {n} members")
            sizes = [rows // n] * n
        self._fit("split sizes", sizes, "one for each member")
        if any(each < 0 for each in sizes) or sum(sizes) != rows:
            raise GroupError(f"{self.method}: split sizes {sizes} do not add up to {rows}, the first dim of the tensor")
        found, start = [], 0
        for each in sizes:
            found.append(flat.narrow(0, start, each))
            start += each
        return found

    def _root(self, opts: Any) -> int:
        """The root: from options (there may be several tensors; torch uses the first), or as a number."""
        root = opts if isinstance(opts, int) or opts is None else getattr(opts, "rootRank", opts)
        if opts is None or isinstance(root, timedelta):
            root = 0
        if not isinstance(root, int):
            raise GroupError(f"{self.method}: root {root!r} is no rank")
        if not 0 <= root < self.size:
            raise GroupError(f"{self.method}: root {root} is no rank of a group with {self.size} members")
        return int(root)

    def _tag(self, tag: int) -> int:
        if not 0 <= tag < 1 << 63:
            raise GroupError(f"{self.method}: tag {tag} is negative or has more than 63 bits")
        return int(tag)

    def _peer(self, peer: int) -> int:
        if not 0 <= peer < self.size:
            raise GroupError(f"{self.method}: {peer} is no rank of a group with {self.size} members")
        if peer == self.rank:
            raise GroupError(f"{self.method}: rank {peer} cannot exchange messages with itself")
        return int(peer)


def _operation(opts: Any) -> tuple[Any, Any]:
    """torch's reduce operation (a RedOpType) and its factor, from an options object, an operation, or None for SUM."""
    found = getattr(opts, "reduceOp", opts)
    if found is None or isinstance(found, timedelta | int):
        return _OP.SUM, None
    if isinstance(found, _OP):
        return found, None
    if not isinstance(found, ReduceOp):
        raise GroupError(f"{found!r} is no reduce operation")
    kind, supplement = _parts_of(found)
    return kind, supplement


def _parts_of(op: Any) -> tuple[Any, Any]:
    """The RedOpType in a ReduceOp, and the factor of PREMUL_SUM."""
    kind = next(each for each in _OP.__members__.values() if op == each)
    if kind != _OP.PREMUL_SUM:
        return kind, None
    factor = getattr(op, "factor", None)
    return kind, op.__getstate__()[1] if factor is None else factor


def _as_real(tensor: Tensor, op: tuple[Any, Any] | None) -> Tensor:
    """A complex tensor as pairs of real numbers, where the operation means the same for them."""
    if not tensor.is_complex() or op is None:
        return tensor
    if op[0] not in _LINEAR:
        raise GroupError(f"{op[0].name} is not defined for {tensor.dtype}")
    if tensor.is_conj():
        raise GroupError(f"{op[0].name} of a conjugated view of {tensor.dtype}: give tensor.resolve_conj()")
    return torch.view_as_real(tensor)


def _pairs_tag(tensors: Sequence[Tensor], op: tuple[Any, Any] | None) -> int:
    """What tells a reduction of complex numbers from one of as many real numbers again."""
    return descriptor.PAIRS if op is not None and any(tensor.is_complex() for tensor in tensors) else 0


def _timeout(opts: Any, given: Any) -> timedelta | None:
    found = given if given is not None else getattr(opts, "timeout", opts)
    return found if isinstance(found, timedelta) and found > timedelta(0) and found != _UNSET else None


def _check_tensors(call: GroupCall, devices: Sequence[str]) -> None:
    """One dtype, one device that the group serves, dense tensors, and an operation that the dtype has."""
    tensors = [*call.inputs, *call.outputs]
    if not tensors:
        return
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype != first.dtype:
            raise GroupError(f"{call.method}: tensors of {first.dtype} and of {tensor.dtype} in one call")
        if tensor.device != first.device:
            raise GroupError(f"{call.method}: tensors on {first.device} and on {tensor.device} in one call")
        if tensor.layout != torch.strided or tensor.is_nested:
            what = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
            raise GroupError(f"{call.method}: tensors must be dense, one {what}")
        _check_memory(call.method, tensor)
    for tensor in call.outputs:
        if is_expanded(tensor.shape, tensor.stride()):
            raise GroupError(f"{call.method}: an output was expanded, so its elements share memory: give a copy of it")
    if devices and first.device.type not in devices:
        served = " and ".join(devices)
        raise GroupError(f"{call.method}: a tensor is on {first.device}, this group serves {served} tensors")
    _check_operation(call, first.dtype)


def _check_memory(method: str, tensor: Tensor) -> None:
    """GroupError for a tensor without memory of its own: a wrapper (DTensor, FakeTensor), or one that was freed."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise GroupError(
            f"{method}: a {type(tensor).__name__} has no memory of its own: give the tensor that it stands for "
            f"(of a DTensor: to_local())"
        )
    itemsize = tensor.element_size()
    spanned = span_nbytes(tensor.shape, tensor.stride(), itemsize)
    if spanned and tensor.untyped_storage().nbytes() < tensor.storage_offset() * itemsize + spanned:
        raise GroupError(f"{method}: the memory of a tensor of {tuple(tensor.shape)} has been freed or is too short")


def _check_operation(call: GroupCall, dtype: torch.dtype) -> None:
    if call.op is None:
        return
    if dtype not in _REDUCIBLE:
        raise GroupError(f"{call.method}: tensors of {dtype} cannot be reduced")
    if call.op in _BITWISE and dtype.is_floating_point:
        raise GroupError(f"{call.method}: {call.op.name} is not defined for {dtype}")
    if call.op == _OP.PREMUL_SUM and not dtype.is_floating_point:
        raise GroupError(f"{call.method}: PREMUL_SUM is not defined for {dtype}")
    if call.op == _OP.AVG and dtype is torch.bool:
        raise GroupError(f"{call.method}: AVG is not defined for {dtype}")


#: What can be reduced. Other dtypes can be moved.
_REDUCIBLE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *FLOAT8,
}
