"""Who sends what: balance, nearness, classes, digests, links, and what a person reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard

from etha.errors import ConfigError
from etha.plan import LOCAL, MOVE, RECV, SEND, Layout, Plan, TensorSpec, build_plan, simulate

F32 = torch.float32


def spec(shape: tuple[int, ...], mesh: object, *placements: Placement, dtype: torch.dtype = F32) -> TensorSpec:
    return TensorSpec(shape, dtype, Layout(mesh, placements))


def sent(plan: Plan, ranks: int) -> list[int]:
    """Bytes that each source rank sends or copies."""
    return [int(plan.for_rank("source", r).nbytes.sum()) for r in range(ranks)]


def test_given_these_layouts_rank_3_receives_exactly_these_chunks() -> None:
    plan = build_plan({"w": spec((8, 6), (4,), Shard(0))}, {"w": spec((8, 6), (2, 2), Shard(0), Shard(1))})
    rp = plan.for_rank("target", 3)
    assert rp.source.tolist() == [2, 3]
    assert rp.target.tolist() == [3, 3]
    assert rp.role.tolist() == [RECV, RECV] and rp.kind.tolist() == [MOVE, MOVE]
    assert [[runs.tolist() for runs in rp.region(i).dims] for i in range(2)] == [
        [[[0, 0, 2]], [[3, 0, 3]]],
        [[[0, 2, 2]], [[3, 0, 3]]],
    ]
    assert rp.nbytes.tolist() == [24, 24]
    assert rp.slot.tolist() == rp.index.tolist() == rp.depends.tolist() == [-1, -1]
    assert plan.for_rank("source", 0).role.tolist() == [SEND, SEND]
    assert rp.round.tolist() == [1, 0]


def test_strided_shards_are_several_runs_of_one_row() -> None:
    source = spec((8,), (2,), _StridedShard(0, split_factor=2))
    rp = build_plan({"w": source}, {"w": spec((8,), (1,), Replicate())}).for_rank("target", 0)
    assert [rp.region(i).dims[0].tolist() for i in range(2)] == [[[0, 0, 2], [2, 4, 2]], [[0, 2, 2], [2, 6, 2]]]


def test_equal_cuts_are_one_run_however_strided() -> None:
    source = spec((8,), (2,), _StridedShard(0, split_factor=2))
    rp = build_plan({"w": source}, {"w": source}).for_rank("target", 1)
    assert [runs.tolist() for runs in rp.region(0).dims] == [[[0, 0, 4]]]


@pytest.mark.parametrize(("replicas", "copies"), [(2, 1), (2, 3), (3, 2), (4, 6), (5, 3), (8, 8)])
def test_every_replica_sends_exactly_its_share(replicas: int, copies: int) -> None:
    """PLANNING section 3: 1/P of the cell's bytes each, the lower bound for direct sending."""
    shape = (840, 64)
    source = spec(shape, (replicas, 2), Replicate(), Shard(0))
    plan = build_plan({"w": source}, {"w": spec(shape, (copies,), Replicate())})
    plan.check()
    assert set(sent(plan, 2 * replicas)) == {copies * 840 * 64 * 4 // (2 * replicas)}


def test_small_tensors_rotate_among_replicas() -> None:
    """A norm is not cut, so that the tensors of its class take turns."""
    names = [f"norm{i:02}" for i in range(12)]
    source, target = spec((32,), (4,), Replicate()), spec((32,), (3,), Replicate())
    plan = build_plan(dict.fromkeys(names, source), dict.fromkeys(names, target))
    plan.check()
    assert sent(plan, 4) == [12 * 3 * 128 // 4] * 4


def test_on_one_agent_everything_is_local_and_holders_share_evenly() -> None:
    names = [f"t{i}" for i in range(8)]
    source, target = spec((16, 8), (4, 2), Replicate(), Shard(0)), spec((16, 8), (3,), Shard(1))
    plan = build_plan(
        dict.fromkeys(names, source), dict.fromkeys(names, target), source_agents=["cpu"] * 8, target_agents=["cpu"] * 3
    )
    plan.check()
    rows = [plan.for_rank("target", r) for r in range(3)]
    assert {int(role) for rp in rows for role in rp.role} == {LOCAL}
    share = Counter(int(s) for rp in rows for s in rp.source)
    assert set(share.values()) == {8 * 3 * 2 // 8} and len(share) == 8
    assert plan.stats().local_bytes == 8 * 16 * 8 * 4 and plan.stats().wire_bytes == 0


def test_the_same_agent_then_the_same_host_is_preferred() -> None:
    source, target = spec((8, 8), (4,), Replicate()), spec((8, 8), (4,), Replicate())
    plan = build_plan(
        {"w": source},
        {"w": target},
        source_hosts=["a", "a", "b", "b"],
        target_hosts=["b", "b", "a", "c"],
        source_agents=["a0", "a1", "b0", "b1"],
        target_agents=["b1", "b9", "a9", "c0"],
    )
    plan.check()
    senders = [plan.for_rank("target", r).source.tolist() for r in range(4)]
    assert senders[0] == [3] and plan.for_rank("target", 0).role.tolist() == [LOCAL]
    assert set(senders[1]) <= {2, 3} and set(senders[2]) <= {0, 1}
    s = plan.stats()
    assert (s.local_bytes, s.host_bytes, s.wire_bytes) == (256, 512, 256)
    assert s.max_host_ingress == s.max_rank_ingress == 256


def test_several_layouts_of_one_name_are_replicas() -> None:
    """mesh["dp"] of a 2x2 mesh: both rows hold the norm, and both send."""
    parts = [Layout([0, 2], [Shard(0)]), Layout([1, 3], [Shard(0)])]
    names = ["n0", "n1"]
    plan = build_plan(
        dict.fromkeys(names, TensorSpec((6,), F32, parts)), dict.fromkeys(names, spec((6,), (1,), Replicate()))
    )
    plan.check()
    assert sent(plan, 4) == [12, 12, 12, 12]


def test_tied_weights_cut_in_different_ways_serve_together() -> None:
    parts = [Layout([0, 1], [Shard(0)]), Layout([4, 5, 6], [Shard(1)])]
    source = TensorSpec((6, 9), F32, parts)
    plan = build_plan({"w": source}, {"w": spec((6, 9), (2,), Replicate())})
    plan.check()
    assert all(n > 0 for n in (sent(plan, 7)[r] for r in (0, 1, 4, 5, 6)))


def test_the_narrower_dtype_is_what_rows_count() -> None:
    plan = build_plan({"w": spec((4,), (1,), Replicate())}, {"w": spec((4,), (1,), Replicate(), dtype=torch.bfloat16)})
    assert plan.wire_dtype(0) is torch.bfloat16
    assert plan.for_rank("source", 0).nbytes.tolist() == [8]


def test_casts_equal_to_of_the_target_dtype_to_the_bit() -> None:
    gen = torch.Generator().manual_seed(0)
    value = torch.randn(1000, generator=gen, dtype=torch.float64) * 1e3
    for a, b in [(F32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float64, F32), (torch.float16, F32),
                 (F32, torch.float8_e4m3fn), (torch.float8_e5m2, torch.bfloat16)]:  # fmt: skip
        here, there = value.to(a), torch.zeros(1000, dtype=b)
        plan = build_plan({"w": spec((1000,), (1,), Shard(0), dtype=a)}, {"w": spec((1000,), (1,), Shard(0), dtype=b)})
        simulate(plan, {0: {"w": here}}, {0: {"w": there}})
        assert torch.equal(there.view(torch.uint8), here.to(b).view(torch.uint8))


def test_equal_tensors_are_one_class_and_share_regions() -> None:
    layouts = [Layout((2,), [Shard(0)]) for _ in range(3)]  # equal, not identical
    names = ["a", "b", "c"]
    source = {n: TensorSpec((8,), F32, layout) for n, layout in zip(names, layouts, strict=True)}
    plan = build_plan(source, dict.fromkeys(names, spec((8,), (1,), Replicate())))
    assert len(plan.classes) == 1
    rp = plan.for_rank("target", 0)
    assert rp.tensor.tolist() == [0, 0, 1, 1, 2, 2]
    assert rp.region(0) is rp.region(2) is rp.region(4)


def test_source_and_target_may_be_one_memory() -> None:
    full = torch.arange(16.0)
    here = {r: {"w": full[r * 4 : r * 4 + 4].clone()} for r in range(4)}
    plan = build_plan({"w": spec((16,), (4,), Shard(0))}, {"w": spec((16,), [2, 0, 3, 1], Shard(0))})
    simulate(plan, here, here)
    assert {r: here[r]["w"].tolist() for r in range(4)} == {
        2: [0, 1, 2, 3], 0: [4, 5, 6, 7], 3: [8, 9, 10, 11], 1: [12, 13, 14, 15]
    }  # fmt: skip


def test_ranks_that_hold_nothing_have_empty_plans() -> None:
    plan = build_plan({"w": spec((4,), [3], Replicate())}, {"w": spec((4,), [0], Replicate())})
    for side, rank in (("source", 0), ("target", 7)):
        rp = plan.for_rank(side, rank)
        assert len(rp) == 0 and rp.slots == ()
    empty = build_plan({}, {})
    empty.check()
    assert len(empty.for_rank("source", 0)) == 0 and empty.stats().ops == 0 and empty.names == ()
    with pytest.raises(ConfigError, match="side='trainer' must be 'source' or 'target'"):
        plan.for_rank("trainer", 0)


DIGEST = """
import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from etha.plan import Layout, TensorSpec, build_plan
def side(layout, dtype):
    names = {f"t{i}" for i in range(50)} | {"ä", "z"}
    return {n: TensorSpec((9, 5), dtype, layout, frozenset({0, 1, 2, 3})) for n in names}
source = side(Layout((2, 2), [Partial(), Shard(0)]), torch.float32)
plan = build_plan(source, side(Layout((4,), [Shard(1)]), torch.bfloat16),
                  source_hosts=list("abab"), target_agents=list("wxyz"))
rows = [plan.for_rank(s, r) for s in ("source", "target") for r in range(4)]
print(plan.digest(), [(rp.source.tolist(), rp.tensor.tolist(), rp.index.tolist()) for rp in rows])
"""


@pytest.mark.slow
def test_digests_and_rows_do_not_depend_on_the_hash_seed() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "4711")
    }
    assert len(said) == 1


def test_the_digest_covers_everything_that_decides_rows() -> None:
    source, target = {"w": spec((8, 4), (2,), Shard(0))}, {"w": spec((8, 4), (2,), Shard(1))}
    same = build_plan(source, target).digest()
    assert build_plan({"w": spec((8, 4), (2,), Shard(-2))}, target).digest() == same
    assert build_plan(source, target, source_hosts=["a", "b"], target_hosts=["c", "d"]).digest() == same
    changed = [
        build_plan({"v": source["w"]}, {"v": target["w"]}),
        build_plan({**source, "x": source["w"]}, {**target, "x": target["w"]}),
        build_plan({"w": spec((8, 4), [1, 0], Shard(0))}, target),
        build_plan({"w": spec((8, 4), (2,), Shard(0), dtype=torch.bfloat16)}, target),
        build_plan({"w": spec((4, 8), (2,), Shard(0))}, {"w": spec((4, 8), (2,), Shard(1))}),
        build_plan({"w": spec((8, 4), (2,), Partial())}, target),
        build_plan({"w": spec((8, 4), (2,), Partial("avg"))}, target),
        build_plan(source, target, source_hosts=["a", "b"], target_hosts=["b", "a"]),
        build_plan(source, target, source_agents=["a", "b"], target_agents=["b", "a"]),
        build_plan(source, {"w": TensorSpec((8, 4), F32, Layout((2,), [Shard(1)]), frozenset({0}))}),
        build_plan(target, source),
    ]
    assert len({same, *(plan.digest() for plan in changed)}) == 1 + len(changed)


def test_explain_names_classes_links_and_violations(tmp_path: Path) -> None:
    plan = build_plan(
        {"w": spec((30, 7), (3,), Shard(0)), "x": spec((1,), (1,), Replicate())}, {"w": spec((30, 7), (2,), Shard(1))}
    )
    text = plan.explain()
    assert plan.digest()[:16] in text and "1 class, 3 -> 2 ranks" in text
    assert "[unknown_name] 'x'" in text
    assert "source 0 -> target 0" in text and "[30, 7] float32 -> float32" in text
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_thousand_ranks_cost_what_one_rank_moves() -> None:
    """16,384 -> 16,384 ranks: a rank's plan is made of its own rows alone."""
    source = spec((1 << 20, 64), (16384,), Shard(0))
    target = spec((1 << 20, 64), (2048, 8), Replicate(), Shard(1))
    plan = build_plan({"w": source}, {"w": target})
    assert len(plan.for_rank("source", 16383)) == 16384
    assert plan.for_rank("target", 5).nbytes.sum() == (1 << 20) * 8 * 4
