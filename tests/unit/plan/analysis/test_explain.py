"""What a person is told of a plan: link classes, who is busiest, bounds, time, packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard

from etha.plan import Layout, Links, Plan, TensorSpec, build_plan
from etha.plan.analysis.packing import packing

MIB = 1 << 20


def plan_of(source: Placement, target: Placement, shape: tuple[int, ...] = (4096, 1024), **where: Any) -> Plan:
    """Four ranks to four, bf16."""
    here, there = (TensorSpec(shape, torch.bfloat16, Layout((4,), [p])) for p in (source, target))
    return build_plan({"w": here}, {"w": there}, **where)


def test_the_text_names_link_classes_the_busiest_the_bound_and_the_time() -> None:
    where = {"source_hosts": list("aabb"), "target_hosts": list("ccdd"), "target_agents": list("wxyz")}
    text = plan_of(Shard(0), Replicate(), fan_out="direct", **where).explain(
        Links(nic=1.0, host=10.0, local=100.0, latency=0.0)
    )
    assert "wire     33.6 MB over 16 links, between hosts" in text
    assert "source rank 0: 8.39 MB out over 4 links; the mean is 8.39 MB of 4 ranks" in text
    assert "host of target ranks 0-1: 16.8 MB in, 8.39 MB of it is not held there" in text
    # Each of two hosts needs all of it, over two NICs; sent directly both ranks of a host take it from afar.
    assert "a NIC 4.19 MB, from what a host must take in (2 NICs a host)" in text
    assert "quality    2.000" in text
    assert "predicted  8.39 ms: the longest of wire 8.39 ms, host 0 us, local 0 us" in text and "bound 4.19 ms" in text


def test_what_targets_pass_on_is_told_apart() -> None:
    where = {"source_hosts": list("aabb"), "target_hosts": list("ccdd"), "target_agents": list("wxyz")}
    text = plan_of(Shard(0), Replicate(), **where).explain(Links(nic=1.0, host=10.0, local=100.0, latency=0.0))
    assert "wire     16.8 MB over" in text and "quality    1.000" in text
    assert "passed on by targets: 0 B between hosts, 16.8 MB inside hosts; 1 hop at most" in text
    assert "predicted  4.19 ms: the longest of wire 4.19 ms, host 419 us" in text


def test_what_is_carried_is_told_apart_from_what_is_passed_on() -> None:
    """One of two NICs of a host needs all of a tensor, the other one little."""
    whole, little = (Layout((2,), [Shard(0)]), Layout.replicated(2)), (4096, 4096)
    source = {"w": TensorSpec(little, torch.float32, whole[0]), "s": TensorSpec((64, 64), torch.float32, whole[0])}
    only = Layout(torch.tensor([0]), [Replicate()])
    target = {"w": TensorSpec(little, torch.float32, only), "s": TensorSpec((64, 64), torch.float32, whole[1])}
    where = {"source_hosts": list("ab"), "target_hosts": list("cc"), "target_agents": list("yz")}
    plan = build_plan(source, target, **where)
    text = plan.explain()
    assert "carried for neighbours with busier NICs: 33.6 MB inside hosts; over NCCL nothing is carried" in text
    assert "passed on by targets" not in text
    assert "carried" not in plan.uncarried().explain()


def test_bytes_to_reduce_are_told_apart() -> None:
    text = plan_of(Partial(), Shard(0)).explain()
    assert "of it to reduce" in text


def test_latency_counts_the_peers_of_the_busiest_rank() -> None:
    text = plan_of(Shard(0), Replicate()).explain(Links(latency=1.0))
    assert "and 4 s of latency" in text


@pytest.mark.parametrize(
    ("source", "target", "zero", "packed", "segments"),
    [
        (Shard(0), Shard(0), 8 * MIB, 0, 0),
        (Shard(0), Replicate(), 32 * MIB, 0, 0),
        (Shard(1), Shard(1), 8 * MIB, 0, 0),
        # One run a row of 256 elements: 4096 rows over four columns.
        (Shard(0), Shard(1), 0, 8 * MIB, 4 * 4096),
        (Partial(), Shard(0), 0, 8 * MIB, 16),
    ],
)
def test_what_is_one_run_at_both_ends_needs_no_packing(
    source: Placement, target: Placement, zero: int, packed: int, segments: int
) -> None:
    found = packing(plan_of(source, target))
    assert (found.zero_copy, found.packed) == (zero, packed)
    assert found.segments == segments or isinstance(source, Partial)


def test_short_pieces_and_casts_are_packed() -> None:
    assert packing(plan_of(Shard(0), Shard(0), (64, 8))).zero_copy == 0
    here, there = (TensorSpec((4096, 1024), d, Layout((1,), [Shard(0)])) for d in (torch.float32, torch.bfloat16))
    assert packing(build_plan({"w": here}, {"w": there})).zero_copy == 0


def test_plans_that_move_nothing_have_a_text() -> None:
    assert "0 tensors" in build_plan({}, {}).explain()


def test_a_strided_placement_is_written_as_torch_and_the_json_write_it() -> None:
    strided = TensorSpec((64, 8), torch.float32, Layout((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]))
    whole = TensorSpec((64, 8), torch.float32, Layout((2,), [Replicate()]))
    text = build_plan({"w": strided}, {"w": whole}).explain()
    assert "[_S(0, 2), S(0)]" in text and "SS(" not in text
