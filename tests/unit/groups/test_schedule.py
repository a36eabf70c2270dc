"""Programs of calls: what they look like, what is refused, what building one costs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from etha.groups import schedule
from etha.groups.schedule import COPY, MATCH, POST, REDUCE, WAIT, CallShape, Kind, Variant, program
from etha.native.structs import ALL, SOURCE, STEP


def allreduce(*counts: int, itemsize: int = 4) -> CallShape:
    return CallShape(kind=Kind.ALLREDUCE, itemsize=itemsize, inputs=counts, outputs=counts)


def test_a_small_call_has_one_phase_and_compares_descriptors_in_it() -> None:
    found = program(allreduce(6), rank=1, size=2, window_bytes=4096, variant=Variant.SMALL)
    assert [step.kind for step in found.steps] == [COPY, POST, WAIT, MATCH, REDUCE]
    assert (found.phases, found.rounds) == (1, 1)
    assert found.steps[-1].sources == ((found.spaces.window(0, 0), 0), (found.spaces.window(1, 0), 0))


def test_match_program_has_one_phase_and_no_round() -> None:
    found = schedule.match_program(3)
    assert [step.kind for step in found.steps] == [POST, WAIT, MATCH]
    assert (found.phases, found.rounds) == (1, 0)
    assert found.steps[1].src_space == ALL


def test_rank_r_reduces_slice_r_of_every_window() -> None:
    found = program(allreduce(64), rank=1, size=2, window_bytes=4096, variant=Variant.WINDOWS)
    reduction = next(step for step in found.steps if step.kind == REDUCE)
    own = found.spaces.window(1, 0)
    assert (reduction.dst_space, reduction.dst, reduction.amount) == (own, 128, 32)
    assert reduction.sources == ((found.spaces.window(0, 0), 128), (found.spaces.input(0), 128))
    assert (found.phases, found.rounds) == (2, 1)


def test_compiled_arrays_say_what_the_steps_say() -> None:
    found = program(allreduce(100, 0, 7), rank=0, size=3, window_bytes=256, variant=Variant.WINDOWS)
    steps, sources = found.compile()
    assert (steps.dtype, sources.dtype) == (STEP, SOURCE)
    assert len(steps) == len(found.steps)
    for row, step in zip(steps, found.steps, strict=True):
        assert tuple(row[["kind", "dst_space", "src_space", "dst", "count"]]) == (
            *(step.kind, step.dst_space, step.src_space, step.dst, step.amount),
        )
        table = sources[row["src"] : row["src"] + row["n"]] if step.sources else sources[:0]
        assert [(int(each["space"]), int(each["offset"])) for each in table] == list(step.sources)
    assert found.compile()[0] is steps
    assert not steps.flags.writeable


def test_spaces_have_numbers_of_their_own() -> None:
    spaces = schedule.Spaces(inputs=2, outputs=3, size=2, peer_inputs=2)
    numbers = [spaces.input(i) for i in range(2)] + [spaces.output(i) for i in range(3)]
    numbers += [spaces.window(k, w) for k in range(2) for w in range(2)]
    numbers += [spaces.peer_input(k, i) for k in range(2) for i in range(2)]
    assert numbers == list(range(spaces.count))
    assert [spaces.parse(n)[0] for n in numbers] == ["input"] * 2 + ["output"] * 3 + ["window"] * 4 + ["peer_input"] * 4
    assert spaces.parse(spaces.window(1, 0)) == ("window", 1, 0)
    assert spaces.parse(spaces.peer_input(1, 1)) == ("peer_input", 1, 1)


def test_programs_are_kept() -> None:
    wanted = {"rank": 0, "size": 2, "window_bytes": 4096, "variant": Variant.SMALL}
    assert program(allreduce(6), **wanted) is program(allreduce(6), **wanted)


@pytest.mark.parametrize("kind", sorted(schedule.POINT_TO_POINT))
def test_point_to_point_calls_have_no_program(kind: Kind) -> None:
    shape = CallShape(kind=kind, itemsize=4, inputs=(1,), outputs=(), root=1)
    with pytest.raises(ValueError, match="goes over a ring"):
        program(shape, rank=0, size=2, window_bytes=4096, variant=Variant.WINDOWS)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (CallShape(kind=Kind.ALLGATHER, itemsize=4, inputs=(3,), outputs=(3,)), "cannot have inputs"),
        (CallShape(kind=Kind.ALLGATHER, itemsize=4, inputs=(3,), outputs=(4, 3)), "cannot have inputs"),
        (CallShape(kind=Kind.REDUCE_SCATTER, itemsize=4, inputs=(3, 4), outputs=(4,)), "cannot have inputs"),
        (CallShape(kind=Kind.ALLTOALL, itemsize=4, inputs=(1, 1), outputs=(1, 1)), "matrix"),
        (CallShape(kind=Kind.BROADCAST, itemsize=4, inputs=(3,), outputs=(3,), root=2), "root 2"),
        (CallShape(kind=Kind.ALLREDUCE, itemsize=4, inputs=(3,), outputs=(3,), root=0), "root 0"),
        (CallShape(kind=Kind.ALLREDUCE, itemsize=3, inputs=(3,), outputs=(3,)), "3 bytes"),
        (CallShape(kind=Kind.ALLREDUCE, itemsize=4, inputs=(-1,), outputs=(-1,)), "negative"),
        (CallShape(kind=Kind.ALLREDUCE, itemsize=4, inputs=(2000,), outputs=(2000,)), "do not fit"),
    ],
)
def test_shapes_that_no_call_has_are_refused(shape: CallShape, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        program(shape, rank=0, size=2, window_bytes=4096, variant=Variant.SMALL)


def test_a_call_is_small_if_no_rank_reads_too_much() -> None:
    """Each rank reads all windows of a reduction, and one part of each window of a scattering one."""
    assert schedule.is_small(allreduce(1000), 2, 8000)
    assert not schedule.is_small(allreduce(1001), 2, 8000)
    assert not schedule.is_small(allreduce(1000), 3, 8000)
    gather = CallShape(kind=Kind.ALLGATHER, itemsize=4, inputs=(2000,), outputs=(2000,) * 3)
    assert schedule.is_small(gather, 3, 8000)


def test_an_alltoall_is_never_small() -> None:
    matrix = ((1, 1), (1, 1))
    alltoall = CallShape(kind=Kind.ALLTOALL, itemsize=1, inputs=(1, 1), outputs=(1, 1), matrix=matrix)
    assert not schedule.is_small(alltoall, 2)


@pytest.mark.parametrize("size", range(1, 65))
def test_slices_cover_a_window_and_begin_at_lines(size: int) -> None:
    for length in (0, 4, 63, 64, 65, 1000, 4096, 4 << 20):
        slices = [schedule._slice(length, rank, size) for rank in range(size)]
        assert slices[0][0] == 0
        assert slices[-1][1] == length
        assert all(a[1] == b[0] for a, b in pairwise(slices))
        assert all(first % schedule.LINE == 0 or first == length for first, _ in slices)


def test_a_stream_yields_each_byte_once() -> None:
    stream = schedule.TensorStream([(0, 5), (1, 0), (2, 3)])
    assert list(stream.pieces(0, 8)) == [(0, 0, 0, 5), (2, 0, 5, 3)]
    assert list(stream.pieces(4, 6)) == [(0, 4, 4, 1), (2, 0, 5, 1)]
    assert list(stream.pieces(8, 12)) == []
    assert list(schedule.TensorStream([]).pieces(0, 1)) == []
