"""Schedules in every order: right results, no race, and a checker that notices what is wrong.

The simulator fails on a read that nothing orders after the write, on a write that nothing orders after another rank's
read, on bytes of another round, on a byte of an output written twice or never, and on a wrong result.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etha.groups.schedule import (
    COMBINE,
    COPY,
    FLUSH,
    GROUPED,
    MATCH,
    PARTIAL,
    POST,
    REDUCE,
    SEND,
    WAIT,
    CallProgram,
    CallStep,
    Kind,
    Variant,
)
from etha.groups.simulator import ScheduleViolation, SimulatedCall, Simulation, shapes_of_all, walk
from tests.examples import examples as examples_of

from .calls import KINDS, rows, variants

ORDER = st.lists(st.integers(0, 64), max_size=200)
RELAXED = settings(max_examples=examples_of(150), deadline=None, suppress_health_check=list(HealthCheck))


def finish(simulation: Simulation, order: list[int], seed: int = 0) -> None:
    """Run to the end: first in the given order, then in a random one."""
    simulation.run(iter(order))
    rng = random.Random(seed)
    while ready := simulation.ready():
        simulation.step(rng.choice(ready))


@RELAXED
@given(rows(st.integers(1, 9)), ORDER)
def test_any_calls_in_any_order_give_the_results_of_the_reference(calls: list[SimulatedCall], order: list[int]) -> None:
    simulation = Simulation(calls)
    finish(simulation, order)
    assert simulation.gave_up == [None] * simulation.size


@pytest.mark.slow
@settings(RELAXED, max_examples=3)
@given(rows(st.sampled_from([16, 33, 64]), most=9, calls=1), ORDER)
def test_large_groups(calls: list[SimulatedCall], order: list[int]) -> None:
    finish(Simulation(calls), order)


@RELAXED
@given(rows(st.integers(2, 5)), ORDER, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=3))
def test_nobody_succeeds_with_wrong_bytes_if_others_give_up(
    calls: list[SimulatedCall], order: list[int], stops: list[tuple[int, int]]
) -> None:
    """Whoever ends a call has the right outputs; whoever cannot gives up; nobody waits for ever."""
    simulation = Simulation(calls)
    choices = iter(order)
    at = {moment: rank for moment, rank in stops if rank < simulation.size}
    for moment in range(10_000):
        if moment in at and not simulation.ended(at[moment]):
            simulation.give_up(at[moment])
        ready = simulation.ready()
        if not ready:
            break
        simulation.step(ready[next(choices, moment) % len(ready)])
    assert all(simulation.ended(rank) for rank in range(simulation.size))


@pytest.mark.parametrize("last", [1, 64, 100, 150, 256])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 0)], ids=str)
def test_rounds_between_hosts_overlap_without_harm_whatever_the_last_one_is(hosts: tuple[int, ...], last: int) -> None:
    """Four rounds, of which the last one may be shorter; in random orders, because every order would take too long."""
    size = len(hosts)
    call = example(Kind.ALLREDUCE, size, elements=3 * 256 + last, variant=Variant.WINDOWS, window=256, hosts=hosts)
    small = example(Kind.ALLREDUCE, size, elements=256, variant=Variant.SMALL, window=256, hosts=hosts)
    assert call.programs[0][-1].rounds == 4
    for seed in range(20):
        finish(Simulation([small, call, small, call]), [], seed)
    for first in range(size):  # and in those in which one rank is always as far behind as it can be
        simulation = Simulation([small, call, small, call])
        while ready := simulation.ready():
            simulation.step(max(ready, key=lambda rank: (rank - first) % size))


@pytest.mark.parametrize("last", [1, 63, 100, 192])
@pytest.mark.parametrize("partial", [1, 2], ids=["sums of a byte", "of two"])
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (5, 3, 5), (0, 1, 1, 2, 0), (0, 0, 0, 1)], ids=str)
def test_hosts_are_reduced_first_in_any_number_of_rounds(hosts: tuple[int, ...], partial: int, last: int) -> None:
    """One to four rounds between small calls that fill the same windows at once; in random orders, and in those in
    which one rank is always as far behind as it can be."""
    size, window = len(hosts), 192 * (1 + partial)
    for rounds in (1, 2, 3, 4):
        call = example(
            Kind.ALLREDUCE, size, elements=(rounds - 1) * 192 + last, variant=Variant.WINDOWS, window=window,
            hosts=hosts, partial=partial,
        )  # fmt: skip
        assert call.programs[0][-1].rounds == rounds
        smalls = [
            example(kind, size, elements=60, variant=Variant.SMALL, window=window, hosts=hosts, partial=partial)
            for kind in (Kind.ALLREDUCE, Kind.BROADCAST)
        ]
        calls = [smalls[0], call, smalls[0], call, call, smalls[1], call]
        for seed in range(3):
            finish(Simulation(calls), [], seed)
        for first in range(size):
            simulation = Simulation(calls)
            while ready := simulation.ready():
                simulation.step(max(ready, key=lambda rank: (rank - first) % size))


@pytest.mark.parametrize("partial", [1, 2], ids=["sums as wide as elements", "sums twice as wide"])
def test_what_a_host_sends_does_not_grow_with_its_members(partial: int) -> None:
    """As much as a ring of the hosts: of two, the whole once; of four, three halves of it. Sums of 16-bit floats are
    twice as wide, so there it is 1.5 times as much."""
    for count, members in ((2, 2), (2, 4), (4, 2), (2, 8), (4, 3)):
        hosts = tuple(rank % count for rank in range(count * members))
        call = example(
            Kind.ALLREDUCE, len(hosts), elements=1 << 16, variant=Variant.WINDOWS, window=(1 + partial) << 13,
            hosts=hosts, partial=partial,
        )  # fmt: skip
        sent = [0] * count
        for rank, programs in enumerate(call.programs):
            sent[hosts[rank]] += sum(step.amount for step in programs[-1].steps if step.kind == SEND)
        assert sent == [(1 + partial) * (count - 1) * (1 << 16) // count] * count, (count, members)


# ---- every order of small calls ---------------------------------------------------------------


def example(
    kind: Kind,
    size: int,
    *,
    elements: int = 5,
    variant: Variant,
    window: int = 192,
    hosts: tuple[int, ...] = (),
    partial: int = 0,
) -> SimulatedCall:
    """A small call of a kind, uneven where it can be. ``partial``: of a host's sums; 0: hosts are not reduced first."""
    root = size - 1 if kind in (Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER) else -1
    counts: tuple[int, ...] = (elements,)
    matrix = None
    if kind in (Kind.ALLGATHER, Kind.REDUCE_SCATTER):
        counts = tuple(max(0, elements - r) for r in range(size))
    elif kind is Kind.ALLTOALL:
        counts, matrix = (), tuple(tuple(elements + (s + d) % 2 for d in range(size)) for s in range(size))
    elif kind is Kind.BARRIER:
        counts = ()
    shapes = shapes_of_all(kind, size, counts=counts, root=root, matrix=matrix, partial=partial)
    return SimulatedCall.of(shapes, variant, window, hosts)


def examples(
    size: int, *, elements: int = 5, window: int = 192, hosts: tuple[int, ...] = (), partial: int = 0
) -> list[SimulatedCall]:
    """Each kind in each way that it can go."""
    return [
        example(kind, size, elements=elements, variant=variant, window=window, hosts=hosts, partial=partial)
        for kind in KINDS
        for variant in variants(
            example(kind, size, elements=elements, variant=Variant.WINDOWS, window=window).shapes, window
        )
        if variant is not Variant.IN_PLACE or not hosts
    ]


@pytest.mark.slow
def test_every_order_of_any_two_calls_of_two_members() -> None:
    """Each pair of ways. docs/groups-proofs.md has the numbers of states."""
    calls = examples(2)
    assert sum(walk([a, b]) for a in calls for b in calls) == 66_959


def test_every_order_of_two_equal_calls_of_which_members_give_up() -> None:
    assert sum(walk([call, call], stops=2) for call in examples(2)) == 11_577


@pytest.mark.slow
def test_every_order_of_two_equal_calls_of_three_members() -> None:
    assert sum(walk([call, call]) for call in examples(3)) == 17_573


def test_every_order_of_calls_of_several_rounds() -> None:
    calls = [call for call in examples(2, elements=200, window=64) if call.programs[0][-1].rounds > 1]
    assert sum(walk([call, call], stops=1) for call in calls) == 6_508


@pytest.mark.slow
def test_every_order_of_calls_between_hosts() -> None:
    """docs/groups-proofs.md has the numbers of states."""
    two = examples(2, hosts=(0, 1))
    assert sum(walk([a, b]) for a in two for b in two) == 33_434
    assert sum(walk([call, call], stops=2) for call in two) == 8_361
    assert sum(walk([call, call]) for call in examples(3, hosts=(0, 1, 0))) == 15_357
    long = [c for c in examples(2, elements=200, window=64, hosts=(0, 1)) if c.programs[0][-1].rounds > 1]
    assert sum(walk([call, call], stops=1) for call in long) == 9_076


def by_host(elements: int, hosts: tuple[int, ...] = (0, 1, 0)) -> SimulatedCall:
    """An ALLREDUCE in which hosts are reduced first, in rounds of 256 bytes."""
    return example(
        Kind.ALLREDUCE, len(hosts), elements=elements, variant=Variant.WINDOWS, window=512, hosts=hosts, partial=1
    )


@pytest.mark.slow
def test_every_order_of_reductions_by_host() -> None:
    assert walk([by_host(256), by_host(256)]) == 3_381
    assert walk([by_host(512), by_host(512)]) == 12_149


@pytest.mark.proof
def test_every_order_of_reductions_by_host_of_which_a_member_gives_up() -> None:
    assert walk([by_host(1018)], stops=1) == 71_510
    four = by_host(256, (0, 0, 1, 1))
    assert walk([four, four]) == 30_623


@pytest.mark.proof
def test_every_order_of_any_two_calls_of_three_members() -> None:
    calls = examples(3)
    assert sum(walk([a, b]) for a in calls for b in calls) == 451_876


@pytest.mark.proof
def test_every_order_of_two_equal_calls_of_three_members_of_which_one_gives_up() -> None:
    assert sum(walk([call, call], stops=1) for call in examples(3)) == 100_663


# ---- the checker notices what is wrong --------------------------------------------------------


def changed(call: SimulatedCall, rank: int, part: int, steps: list[CallStep]) -> SimulatedCall:
    """The call with other steps in one program of one rank."""
    programs = [list(each) for each in call.programs]
    programs[rank][part] = dataclasses.replace(programs[rank][part], steps=steps)
    return dataclasses.replace(call, programs=tuple(map(tuple, programs)))


def mutants(call: SimulatedCall) -> Iterator[tuple[str, SimulatedCall]]:
    """The call with one step of one rank left out or changed."""
    for rank, programs in enumerate(call.programs):
        for part, program in enumerate(programs):
            for at, step in enumerate(program.steps):
                for name, instead in worse(program, step):
                    steps = [*program.steps[:at], *instead, *program.steps[at + 1 :]]
                    yield f"rank {rank} {name}: {step}", changed(call, rank, part, steps)


def worse(program: CallProgram, step: CallStep) -> Iterator[tuple[str, list[CallStep]]]:
    names = {
        COPY: "copy",
        REDUCE: "reduction",
        POST: "post",
        WAIT: "wait",
        MATCH: "match",
        SEND: "send",
        FLUSH: "flush",
        PARTIAL: "sum of a host",
        COMBINE: "reduction over hosts",
        GROUPED: "reduction host by host",
    }
    name = names[step.kind]
    yield f"without a {name}", []
    if step.kind == WAIT and step.amount > 1:
        yield "that waits for the phase before", [step._replace(amount=step.amount - 1)]
    if len(step.sources) > 1:
        yield "that reduces in another order", [step._replace(sources=step.sources[::-1])]
        yield "that leaves out a source", [step._replace(sources=step.sources[:-1], hosts=step.hosts[:-1])]
    if step.kind == SEND:
        yield "that sends less", [step._replace(amount=step.amount - 1)]
    if step.kind == COPY or step.sources:
        if program.spaces.parse(step.dst_space)[0] == "output":
            yield "that writes a result twice", [step, step]
        yield "that copies less", [step._replace(amount=step.amount - 1)]
    if step.kind == COPY:
        for field in ("src_space", "dst_space"):
            name, rank, w = program.spaces.parse(getattr(step, field))
            if name == "window":
                other = program.spaces.window(rank, 1 - w)
                yield f"with the other window as {field}", [step._replace(**{field: other})]


def noticed(calls: list[SimulatedCall]) -> bool:
    """Whether one of some orders shows the fault: in turn, the first rank that can, the last rank that can, and for
    each rank those in which it is as far ahead or behind as it can be."""
    size = len(calls[0].shapes)
    try:
        for order in (range(100_000), [0] * 100_000, [-1] * 100_000):
            Simulation(calls).run(iter(order))
        for first, sign in itertools.product(range(size), (1, -1)):
            simulation = Simulation(calls)
            while ready := simulation.ready():
                simulation.step(max(ready, key=lambda rank: sign * ((rank - first) % size)))
    except ScheduleViolation:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(), (0, 1, 0)], ids=["one host", "two hosts"])
@pytest.mark.parametrize(("elements", "window"), [(150, 384), (342, 192)], ids=["one round", "several rounds"])
def test_any_step_that_is_left_out_or_changed_is_noticed(elements: int, window: int, hosts: tuple[int, ...]) -> None:
    """Between two calls that fill the whole window, and whose first write no match protects."""
    survivors = []
    around = example(Kind.ALLREDUCE, 3, elements=window, variant=Variant.SMALL, window=window, hosts=hosts)
    for call in examples(3, elements=elements, window=window, hosts=hosts):
        survivors += [(call.kind.name, text) for text, mutant in mutants(call) if not noticed([around, mutant, around])]
    assert survivors == []


@pytest.mark.slow
@pytest.mark.parametrize("elements", [256, 3 * 256 + 250], ids=["one round", "four rounds"])
@pytest.mark.parametrize("variant", [Variant.SMALL, Variant.WINDOWS])
def test_any_step_of_a_reduction_by_host_that_is_left_out_or_changed_is_noticed(
    elements: int, variant: Variant
) -> None:
    """The same where hosts are reduced first. Every member has a share of every part."""
    window, hosts = 1024 if variant is Variant.SMALL else 512, (0, 1, 0)
    around = example(Kind.ALLREDUCE, 3, elements=window, variant=Variant.SMALL, window=window, hosts=hosts)
    call = example(Kind.ALLREDUCE, 3, elements=elements, variant=variant, window=window, hosts=hosts, partial=1)
    survivors = [text for text, mutant in mutants(call) if not noticed([around, mutant, around])]
    if elements > 256 and variant is Variant.WINDOWS:
        # Sums of round 1 come before results of round 0, for which all have waited. The wait says when to send them.
        survivors = [text for text in survivors if not (f"kind={WAIT}," in text and "amount=4," in text)]
    assert survivors == []


def test_one_window_in_place_of_two_is_noticed() -> None:
    """Every rank uses window 0 in all rounds: someone overwrites what another one still reads."""
    for call in examples(3, elements=2 * 384 + 100, window=384):
        if call.programs[0][-1].rounds > 1:
            assert noticed([same_window(call)]), call.kind


def same_window(call: SimulatedCall) -> SimulatedCall:
    def first(program: CallProgram, space: int) -> int:
        name, rank, _ = program.spaces.parse(space)
        return program.spaces.window(rank, 0) if name == "window" else space

    def change(program: CallProgram) -> CallProgram:
        steps = [
            step._replace(
                dst_space=first(program, step.dst_space),
                src_space=step.src_space if step.kind == WAIT else first(program, step.src_space),
                sources=tuple((first(program, space), offset) for space, offset in step.sources),
            )
            for step in program.steps
        ]
        return dataclasses.replace(program, steps=steps)

    return dataclasses.replace(call, programs=tuple(tuple(map(change, each)) for each in call.programs))
