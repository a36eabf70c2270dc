"""One call of one member: steps run in order, stop where they must, and go on where they stopped."""

from __future__ import annotations

import time

import numpy as np
import pytest

from etha.native import ALL, GroupMemory, NativeLibrary, RunArguments, RunResult, run_arguments
from tests.unit.native.pages import Pages, copy, match, post, reduce, sources, spaces, steps, wait


def arguments(memory: GroupMemory, *rows: tuple[int, ...], base: int = 0, call: int = 1, **more: int) -> RunArguments:
    return run_arguments(memory, steps(*rows), sources(), spaces(), phase_base=base, call_number=call, **more)


def test_copies_and_reduces_between_spaces(library: NativeLibrary) -> None:
    one, two, out = (np.arange(5, dtype=np.int32), np.full(5, 10, np.int32), np.zeros(6, np.int32))
    rows = steps(copy(2, 0, 8, dst=16, src=4), reduce(2, 0, 3, 4))
    table = sources((0, 4), (1, 0), (1, 4))
    args = run_arguments(
        Pages(1).member(0), rows, table, spaces(one, two, out), phase_base=0, call_number=0, dtype=8, op=1
    )
    assert library.run(args) is RunResult.DONE
    assert out.tolist() == [21, 22, 23, 24, 1, 2]


def test_a_wait_ends_when_the_other_has_posted(library: NativeLibrary) -> None:
    pages = Pages(2)
    past = time.monotonic_ns()
    args = arguments(pages.member(1), wait(2, 0), deadline_ns=past)
    assert library.run(args) is RunResult.TIMEOUT
    assert (args.failed_rank, args.failed_ranks.tolist()) == (0, [1, 0])
    assert library.run(arguments(pages.member(0), post(2))) is RunResult.DONE
    assert library.run(args) is RunResult.DONE and args.failed_rank == ALL


def test_a_slice_that_is_over_says_again_and_the_run_goes_on(library: NativeLibrary) -> None:
    pages = Pages(3)
    args = arguments(pages.member(0), post(1), wait(1), post(2), slice_ms=1)
    assert library.run(args) is RunResult.AGAIN and args.next == 1
    assert [pages.word(0, 0), pages.word(0, 132)] == [1, 0]
    for rank in (1, 2):
        assert library.run(arguments(pages.member(rank), post(1))) is RunResult.DONE
    assert library.run(args) is RunResult.DONE and pages.word(0, 0) == 2


def test_a_run_that_begins_briefly_goes_on_in_the_usual_way(library: NativeLibrary) -> None:
    pages = Pages(2)
    args = arguments(pages.member(0), post(1), wait(1), brief_us=50, slice_ms=1)
    assert library.run(args) is RunResult.AGAIN and args.next == 1
    assert library.run(arguments(pages.member(1), post(1), wait(1), brief_us=50)) is RunResult.DONE
    assert library.run(args) is RunResult.DONE


@pytest.mark.parametrize(("given_up", "result"), [(4, "GAVE_UP"), (5, "GAVE_UP"), (6, "TIMEOUT")])
def test_a_member_that_gave_up_ends_waits_of_that_call_and_later_ones(
    library: NativeLibrary, given_up: int, result: str
) -> None:
    pages = Pages(2)
    library.give_up(pages.member(1), given_up)
    args = arguments(pages.member(0), wait(1), call=5, deadline_ns=time.monotonic_ns())
    assert library.run(args).name == result and args.failed_rank == 1


def test_the_first_call_given_up_counts(library: NativeLibrary) -> None:
    pages = Pages(2)
    library.give_up(pages.member(1), 3)
    library.give_up(pages.member(1), 2)
    assert pages.word(1, 64) == 4


def test_a_satisfied_wait_is_satisfied_but_the_call_has_failed(library: NativeLibrary) -> None:
    pages = Pages(2)
    library.run(arguments(pages.member(1), post(1)))
    library.give_up(pages.member(1), 1)
    args = arguments(pages.member(0), wait(1), post(1), call=1)
    assert library.run(args) is RunResult.GAVE_UP
    assert args.next == 2 and args.failed_rank == 1
    assert library.run(arguments(pages.member(0), wait(1), call=0)) is RunResult.DONE


def test_a_stopped_member_runs_nothing(library: NativeLibrary) -> None:
    pages = Pages(1)
    member = pages.member(0)
    library.stop(member, 7)
    assert library.run(arguments(member, post(1))) is RunResult.STOPPED
    assert pages.word(0, 0) == 0 and member.stop_word[0] == 7


def test_descriptors_are_compared_bytewise(library: NativeLibrary) -> None:
    pages = Pages(3)
    at = 4096 + 512  # odd calls
    for rank in range(3):
        pages.maps[rank][at : at + 3] = b"sum"
        pages.maps[rank][at + 128] = 1 if rank == 2 else 5
    args = arguments(pages.member(0), match())
    assert library.run(args) is RunResult.DONE and args.flags_all == 1
    pages.maps[1][at + 127] = 9
    assert library.run(arguments(pages.member(0), match(), call=2)) is RunResult.DONE
    args = arguments(pages.member(0), match())
    assert library.run(args) is RunResult.MISMATCH
    assert (args.failed_rank, args.failed_ranks.tolist()) == (1, [0, 1, 0])


def test_what_one_gives_the_other_takes(library: NativeLibrary) -> None:
    pages = Pages(2)
    for rank, splits in enumerate(([1, 2, 1, 3], [3, 4, 2, 4])):  # give[2], take[2]
        pages.maps[rank][4096 + 128] = 2
        pages.maps[rank][4096 + 256 : 4096 + 288] = np.array(splits, dtype="<u8").tobytes()
    assert library.run(arguments(pages.member(0), match(), call=0)) is RunResult.DONE
    pages.maps[1][4096 + 256] = 5
    args = arguments(pages.member(0), match(), call=0)
    assert library.run(args) is RunResult.MISMATCH and args.failed_rank == 1


def test_one_member_claims_the_cause(library: NativeLibrary) -> None:
    pages = Pages(2)
    assert library.claim_cause(pages.at[0], 1) == 1
    assert library.claim_cause(pages.at[0], 0) == 1


def test_an_unknown_step_is_refused(library: NativeLibrary) -> None:
    args = arguments(Pages(1).member(0), (99, 0, 0, 0, 0, 0, 0))
    assert library.run(args) is RunResult.INVALID
