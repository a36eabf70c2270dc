"""How pieces are dealt to streams: few routes in each, equal shares, and the same at both ends."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from etha.plan import Layout, TensorSpec
from etha.transport.wire.flows import CHUNK, PAD, SHARE, STREAMS, TURNS, Flow, FlowPiece, make_flow
from etha.transport.wire.worker_rows import worker_stretches
from tests.examples import examples
from tests.unit.transport.agents import Job, make_plan

MESHES: list[tuple[int, Placement]] = [(2, Shard(0)), (2, Shard(1)), (3, Shard(0)), (1, Replicate())]


def job_of(shapes: dict[str, tuple[int, ...]], source: tuple[int, Placement], target: tuple[int, Placement]) -> Job:
    """Everything goes from agent a to agent b, all tensors private."""
    layouts = [Layout((ranks,), [placement]) for ranks, placement in (source, target)]
    specs = [{name: TensorSpec(s, torch.float32, layout) for name, s in shapes.items()} for layout in layouts]
    here, there = ("a",) * source[0], ("b",) * target[0]
    held = [
        {rank: {n: torch.zeros(spec.local_shape(rank)) for n, spec in side.items()} for rank in range(ranks)}
        for side, (ranks, _) in zip(specs, (source, target), strict=True)
    ]
    return Job(
        plan=make_plan(specs[0], specs[1], here, there), source_agents=here, target_agents=there, staging=64 << 20,
        source=held[0], target=held[1], private=(True, True),
    )  # fmt: skip


def routes(flow: Flow) -> list[list[tuple[int, ...]]]:
    """The routes of each lane, each as often as it begins."""
    found = []
    for lane in flow.lanes:
        pieces = [piece.route for span in lane for _, piece in span.pieces]
        found.append([r for i, r in enumerate(pieces) if i == 0 or r != pieces[i - 1]])
    return found


def test_each_of_four_streams_between_two_and_two_ranks_has_one_route_and_one_worker_at_each_end() -> None:
    job = job_of({f"layer {i}": (512, 512) for i in range(12)}, (2, Shard(0)), (2, Shard(1)))
    sent, received = job.wire("a"), job.wire("b")
    pairs = [[(s, t)] for s in range(2) for t in range(2)]
    assert routes(sent.sends["b"]) == routes(received.receives["a"]) == pairs
    assert [len(lane) for program in (sent, received) for lane in worker_stretches(program).values()] == [1] * 8


def test_one_route_is_divided_among_all_streams() -> None:
    job = job_of({"w": (2048, 1024)}, (1, Replicate()), (1, Replicate()))
    assert job.wire("a").sends["b"].wire == (2 << 20,) * 4


def test_little_goes_over_one_stream() -> None:
    job = job_of({f"bias {i}": (64,) for i in range(20)}, (2, Shard(0)), (2, Shard(0)))
    assert len(job.wire("a").sends["b"].lanes) == 1


@pytest.mark.parametrize("seed", range(examples(40)))
def test_both_ends_deal_alike_in_shares_that_differ_by_a_piece(seed: int) -> None:
    rng = random.Random(seed)
    shapes = {f"t{i}": (rng.randrange(1, 700), rng.randrange(1, 900)) for i in range(rng.randrange(1, 9))}
    job = job_of(shapes, rng.choice(MESHES), rng.choice(MESHES))
    sent, received = job.wire("a").sends["b"], job.wire("b").receives["a"]
    assert (sent.wire, sent.digest, routes(sent)) == (received.wire, received.digest, routes(received))
    assert max(sent.wire) - min(sent.wire) <= 2 * CHUNK
    distinct = {r for lane in routes(sent) for r in lane}
    if sum(sent.wire) >= STREAMS * SHARE:
        turns = 1 + sum(sent.wire) // (max(STREAMS, len(distinct)) * SHARE)
        assert sum(len(lane) for lane in routes(sent)) <= turns * (len(distinct) + STREAMS - 1)


def test_uneven_tensors_of_many_turns_load_all_streams_alike() -> None:
    job = job_of({f"layer {i:02}": (1153, 1024) for i in range(24)}, (1, Replicate()), (2, Shard(0)))
    flow = job.wire("a").sends["b"]
    assert max(flow.wire) - min(flow.wire) <= CHUNK
    assert sum(len(lane) for lane in routes(flow)) <= TURNS * (2 + STREAMS - 1)


def test_tensors_come_one_after_the_other_for_those_who_pass_them_on() -> None:
    job = job_of({f"layer {i:02}": (1024, 1024) for i in range(32)}, (2, Shard(0)), (2, Shard(1)))
    for lane in job.wire("a").sends["b"].lanes:
        tensors = [piece.tensor for span in lane for _, piece in span.pieces]
        assert max(a - b for a, b in itertools.pairwise(tensors)) <= 32 // TURNS
        assert {*tensors} == {*range(32)}


def flow_of(pieces: list[FlowPiece], bucket: int = CHUNK) -> Flow:
    return make_flow(peer="b", names=("a", "b"), mark="m", pieces=pieces, streams=STREAMS, bucket=bucket)


def piece(number: int, nbytes: int, route: tuple[int, ...] = (), stage: int = 1) -> FlowPiece:
    return FlowPiece(stage=stage, tensor=number, nbytes=nbytes, dtype=torch.uint8, owners=(("source", 0),), route=route)


def test_what_is_passed_on_takes_turns_and_stays_in_order() -> None:
    flow = flow_of([piece(i, CHUNK) for i in range(8)])
    assert [[p.tensor for span in lane for _, p in span.pieces] for lane in flow.lanes] == [
        [0, 4], [1, 5], [2, 6], [3, 7],
    ]  # fmt: skip


def test_stages_follow_each_other_in_every_stream() -> None:
    pieces = [piece(i, CHUNK, (i % 2, 0) if stage == 1 else (), stage) for stage in range(3) for i in range(8)]
    flow = flow_of(sorted(pieces, key=lambda p: (p.stage, p.route)))
    for lane in flow.lanes:
        stages = [p.stage for span in lane for _, p in span.pieces]
        assert stages == sorted(stages)
        assert {*stages} == {0, 1, 2}


def test_odd_sizes_are_padded_in_their_shares() -> None:
    flow = flow_of([piece(i, 1 + i, (0, i % 3)) for i in range(30)])
    assert flow.wire == (sum(-(-(1 + i) // PAD) * PAD for i in range(30)),)
