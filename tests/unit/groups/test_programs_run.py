"""Compiled programs, carried out by the native library over real memory, do what the reference says."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from etha.groups import descriptor
from etha.groups.schedule import CallShape, Kind, Spaces
from etha.groups.simulator import IN_ONE_TENSOR, SimulatedCall
from etha.native import DtypeCode, GroupMemory, NativeLibrary, ReduceCode, RunResult, run_arguments

from ..native import libraries
from .test_simulator import examples

WINDOW = 1024
WINDOWS_AT = 8192


class Member:
    """One member: its windows, and the tensors of the current call."""

    def __init__(self, pages: list[int], rank: int) -> None:
        self.rank, self.pages = rank, pages
        stride = descriptor.slot_bytes(len(pages))
        self.memory = GroupMemory(rank=rank, pages=pages, descriptor_offset=4096, descriptor_stride=stride)
        self.phases = self.rounds = 0
        self.inputs: list[np.ndarray] = []
        self.outputs: list[np.ndarray] = []

    def begin(self, number: int, shape: CallShape) -> None:
        """Fill the tensors, write the descriptor."""
        self.inputs = [given(number, self.rank, i, count) for i, count in enumerate(shape.inputs)]
        self.outputs = [np.full(count, 255, dtype=np.uint8) for count in shape.outputs]
        if shape.kind in IN_ONE_TENSOR:
            self.outputs = self.inputs
        splits = descriptor.encode_splits(shape.inputs, shape.outputs) if shape.kind is Kind.ALLTOALL else b""
        slot = descriptor.encode_slot(descriptor.encode(shape.kind, "uint8"), number, splits=splits)
        at = self.pages[self.rank] + 4096 + number % 2 * descriptor.slot_bytes(len(self.pages))
        ctypes.memmove(at, slot, len(slot))

    def addresses(self, spaces: Spaces, members: list[Member]) -> np.ndarray:
        found = [array.ctypes.data for array in (*self.inputs, *self.outputs)]
        for page in self.pages:
            windows = [page + WINDOWS_AT, page + WINDOWS_AT + WINDOW]
            found += windows if self.rounds % 2 == 0 else windows[::-1]
        for member in members if spaces.peer_inputs else ():
            own = [array.ctypes.data for array in member.inputs]
            found += [*own, *[0] * (spaces.peer_inputs - len(own))]
        assert len(found) == spaces.count or spaces.inputs + spaces.outputs == 0  # match_program names no space
        return np.array(found, dtype=np.uint64)

    def run(self, library: NativeLibrary, number: int, call: SimulatedCall, members: list[Member]) -> RunResult:
        result = RunResult.DONE
        for program in call.programs[self.rank]:
            steps, sources = program.compile()
            args = run_arguments(
                *(self.memory, steps, sources, self.addresses(program.spaces, members)),
                phase_base=self.phases,
                call_number=number,
                dtype=DtypeCode.U8,
                op=ReduceCode.SUM,
            )
            result = library.run(args)
            self.phases += program.phases
            self.rounds += program.rounds
            if result is not RunResult.DONE:
                break
        return result


def given(number: int, rank: int, tensor: int, count: int) -> np.ndarray:
    return ((np.arange(count) * 7 + number * 31 + rank * 5 + tensor) % 256).astype(np.uint8)


def expected(number: int, call: SimulatedCall, rank: int) -> list[np.ndarray]:
    size, shape = len(call.shapes), call.shapes[rank]

    def of(r: int, tensor: int) -> np.ndarray:
        return given(number, r, tensor, call.shapes[r].inputs[tensor])

    def total(tensor: int) -> np.ndarray:
        return np.asarray(np.sum([of(r, tensor) for r in range(size)], axis=0, dtype=np.uint8))

    each = range(len(shape.outputs))
    return {
        Kind.ALLREDUCE: lambda: [total(i) for i in each],
        Kind.REDUCE: lambda: [total(i) if rank == shape.root else of(rank, i) for i in each],
        Kind.BROADCAST: lambda: [of(shape.root, i) for i in each],
        Kind.ALLGATHER: lambda: [of(i % size, i // size) for i in each],
        Kind.REDUCE_SCATTER: lambda: [total(i * size + rank) for i in each],
        Kind.ALLTOALL: lambda: [of(s, rank) for s in each],
        Kind.GATHER: lambda: [of(s, 0) for s in each],
        Kind.SCATTER: lambda: [of(shape.root, rank)],
        Kind.BARRIER: list,
    }[shape.kind]()


@contextlib.contextmanager
def members_of(size: int) -> Iterator[list[Member]]:
    maps = [mmap.mmap(-1, WINDOWS_AT + 2 * WINDOW) for _ in range(size)]
    pages = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in maps]
    yield [Member(pages, rank) for rank in range(size)]


@pytest.fixture(params=libraries.NAMES)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    found = libraries.get(request.param)
    if found is None:
        pytest.skip("no C compiler (cc) on the path")
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("elements", "window"), [(150, WINDOW), (300, 256)], ids=["one round", "several rounds"])
def test_a_row_of_all_calls(library: NativeLibrary, size: int, elements: int, window: int) -> None:
    calls = [*examples(size, elements=elements, window=window), *examples(size, elements=1, window=window)]
    with members_of(size) as members, ThreadPoolExecutor(size) as pool:
        for number, call in enumerate(calls):
            for member, shape in zip(members, call.shapes, strict=True):
                member.begin(number, shape)
            runs = [pool.submit(member.run, library, number, call, members) for member in members]
            assert [run.result(timeout=60) for run in runs] == [RunResult.DONE] * size
            for member in members:
                for got, wanted in zip(member.outputs, expected(number, call, member.rank), strict=True):
                    np.testing.assert_array_equal(got, wanted)
