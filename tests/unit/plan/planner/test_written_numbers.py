"""Every number in README and docs that a plan determines is the one that agents' plans have (timings are not)."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard

from etha.agent.protocol import evaluation
from etha.commands.planfile import read_plan, read_sides
from etha.config import STAGING
from etha.plan import Layout, PlanStats, TensorSpec, build_agent_plan, build_plan
from etha.plan.planner.rank_plan import Region
from etha.redistribute.request import without_kept
from etha.redistribute.route import make_route
from etha.transport.wire.crossings import Crossings
from etha.transport.wire.routing import Routing
from tests.flow.redistribute.test_redistribute_gradients import TRANSITIONS

ROOT = Path(__file__).resolve().parents[4]
ROW = re.compile(r"^\| *(\d+) \|(.*)\|$", re.MULTILINE)


def words(path: str) -> str:
    """The text of a page, in which lines may be broken anywhere."""
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


def rows(path: str) -> dict[int, list[str]]:
    """Number of a pair -> the cells of its row."""
    found = ROW.findall((ROOT / path).read_text(encoding="utf-8"))
    return {int(number): [cell.strip() for cell in cells.split("|")] for number, cells in found}


@contextmanager
def benchmark(name: str) -> Iterator[ModuleType]:
    """A module of bench/, which are programs beside each other and no package."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        yield importlib.import_module(name)
    for loaded in set(sys.modules) - before:
        if Path(getattr(sys.modules[loaded], "__file__", None) or "").parent == ROOT / "bench":
            del sys.modules[loaded]


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with benchmark("bench_plan") as module:
        yield module


@pytest.fixture(scope="module")
def stats(bench: ModuleType) -> dict[int, PlanStats]:
    """What agents' plans of the fifteen pairs cost, as ``etha plan`` computes it."""
    return {pair.number: read_plan(*bench.paths(pair)).stats() for pair in bench.PAIRS}


def test_the_planners_table_shows_what_agents_plan(bench: ModuleType, stats: dict[int, PlanStats]) -> None:
    table = rows("docs/planning.md")
    assert {number: cells[:5] for number, cells in table.items()} == {
        pair.number: [pair.title, *bench.planned(stats[pair.number])[3:]] for pair in bench.PAIRS
    }


def test_the_pages_say_that_all_pairs_reach_the_goal(bench: ModuleType, stats: dict[int, PlanStats]) -> None:
    assert len(stats) == 15
    assert {number: found.quality for number, found in stats.items() if found.quality > bench.GOAL} == {}
    assert f"All fifteen are at {bench.GOAL} or better." in words("docs/planning.md")
    assert "For all fifteen pairs of layouts with up to 2,048 ranks, the plan loads" in words("README.md")
    assert f"the busiest NIC with at most {bench.GOAL} times the lower bound" in words("README.md")
    assert f"pair 11 at {stats[11].quality:.3f}" in words("CHANGELOG.md")
    assert f"pair 13 at {stats[13].quality:.3f}" in words("CHANGELOG.md")


def test_the_page_says_what_pairs_reach_over_nccl(bench: ModuleType, stats: dict[int, PlanStats]) -> None:
    """There agents execute the plan without carrying."""
    plans = {pair.number: read_plan(*bench.paths(pair)) for pair in bench.PAIRS}
    less = {number: plan.uncarried().stats().quality for number, plan in plans.items() if plan.carries}
    assert all(found > bench.GOAL for found in less.values())
    listed = " and ".join(f"pair {number} at {quality:.3f}" for number, quality in sorted(less.items()))
    assert listed.replace("pair 11 at", "pair 11 is at") in words("docs/planning.md")
    assert f"Over NCCL that holds for {({13: 'thirteen'})[15 - len(less)]} of them" in words("README.md")


@pytest.mark.slow
@pytest.mark.parametrize("number", [11, 13])
def test_what_agents_exchange_loads_their_nics_as_planned(
    number: int, bench: ModuleType, stats: dict[int, PlanStats]
) -> None:
    """What each agent finds to send and to receive when it compiles, of the pairs in which some carry."""
    [pair] = [pair for pair in bench.PAIRS if pair.number == number]
    plan = read_plan(*bench.paths(pair))
    where = plan.topology
    here, there = (tuple(map(str, agents.tolist())) for agents in (where.source_agent, where.target_agent))
    host = dict(zip((*here, *there), (*where.source_host.tolist(), *where.target_host.tolist()), strict=True))
    sent, received = dict.fromkeys(host, 0), dict.fromkeys(host, 0)
    sizes: dict[int, int] = {}  # rows of equal tensors share a region

    def size(region: Region) -> int:
        if id(region) not in sizes:
            sizes[id(region)] = prod(region.shape) * plan.wire_dtype(0).itemsize
        return sizes[id(region)]

    # All hosts of pair 13 have the same load, so one is enough.
    for me in [agent for agent in host if number == 11 or host[agent] == 0]:
        crossings = Crossings(plan, Routing(me=me, source=here, target=there), STAGING // 8)
        relays, carrying = crossings.relays, crossings.carrying
        sizes.clear()
        for total, rows in (
            (sent, (crossings.sent, relays.given, carrying.given)),
            (received, (crossings.received, relays.taken, {"another host": carrying.carried})),
        ):
            for peer, some in ((peer, some) for found in rows for peer, some in found.items()):  # type: ignore[attr-defined]
                if host.get(peer) != host[me]:
                    total[me] += sum(size(one.region) for one in some)
        assert {host[peer] for peer in carrying.handed} <= {host[me]}
    assert max(sent.values()) == stats[number].max_nic_egress
    assert max(received.values()) == stats[number].max_nic_ingress
    assert max(*sent.values(), *received.values()) / stats[number].bound_nic <= bench.GOAL


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").glob("*-plans.md")), ids=lambda p: p.name)
def test_the_saved_tables_show_what_was_planned(path: Path, bench: ModuleType, stats: dict[int, PlanStats]) -> None:
    text = path.read_text(encoding="utf-8")
    for pair in bench.PAIRS:
        found = stats[pair.number]
        if "(`build_plan(carry=False)`)" in text:
            found = read_plan(*bench.paths(pair)).uncarried().stats()
        cells = rows(str(path.relative_to(ROOT)))[pair.number]
        assert [cells[0], *(cell.rstrip("*") for cell in cells[1:8])] == [pair.title, *bench.planned(found)]


def test_the_table_of_relays_counts_the_copies_that_are_sent() -> None:
    """docs/planning.md and bench/relay.py: one source host, a copy on each of four hosts."""
    here, there, shape = ["s"] * 2, ["t0", "t1", "t2", "t3"], (4096, 1024)
    sent = {}
    for way in ("direct", "relay"):
        found = build_plan(
            {"t": TensorSpec(shape, torch.float32, Layout((2,), [Shard(0)]))},
            {"t": TensorSpec(shape, torch.float32, Layout.replicated(4))},
            source_hosts=here,
            target_hosts=there,
            source_agents=here,
            target_agents=there,
            fan_out=way,
        ).stats()
        sent[way] = f"{found.max_host_egress / (4096 * 1024 * 4):.2f} copies"
    assert sent == {"direct": "4.00 copies", "relay": "1.00 copies"}
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert all(f"| {way} | {copies} |" in text for way, copies in sent.items())


def test_the_saved_table_of_redistribute_counts_what_is_exchanged() -> None:
    """Exchanges, and MiB that the busiest rank sends, of 8 MiB over 8 ranks."""
    path = ROOT / "bench" / "results" / "2026-11-29-redistribute.md"
    saved = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if line.startswith("| (")]
    with benchmark("redistribute") as bench:
        cases = bench.CASES
        rows = [(8 << 20) // (4 * bench.COLUMNS) - (5 if case.uneven else 0) for case in cases]
        found = {str(case): exchanged(case, (rows, bench.COLUMNS)) for case, rows in zip(cases, rows, strict=True)}
    assert {cells[0]: (cells[1], cells[4]) for cells in saved} == found


def test_gradients_are_tested_of_all_transitions_that_are_timed() -> None:
    with benchmark("redistribute") as bench:
        timed = [(case.mesh, list(case.source), list(case.target)) for case in bench.CASES]
    assert len(timed) == 36
    assert [case for case in timed if case not in [tuple(tested) for tested in TRANSITIONS]] == []


def exchanged(case: Any, shape: tuple[int, int]) -> tuple[str, str]:
    """(exchanges, MiB sent by the busiest rank) of one of the benchmark's transitions."""
    mesh = torch.tensor(case.ranks).reshape(case.mesh)
    sides = tuple((Layout(mesh, side, strided="order"),) for side in (case.source, case.target))
    pairs = [without_kept(*sides, rank, same=True) for rank in range(8)]
    routes = [make_route(shape, torch.float32, *pair, rank) for rank, pair in enumerate(pairs)]
    sent = [
        sum(piece.numel for stage in route.stages for pieces in stage.sends.values() for piece in pieces)
        for route in routes
    ]
    loud = {sum(not stage.quiet for stage in route.stages) for route in routes}
    return str(max(loud)), f"{max(sent) * 4 / 2**20:.2f}"


def test_the_command_and_agents_plan_with_one_function(tmp_path: Path) -> None:
    assert vars(evaluation)["build_agent_plan"] is build_agent_plan
    sides = [tmp_path / name for name in ("a.json", "b.json")]
    sides[0].write_text('{"mesh": [2], "placements": ["S(0)"], "tensors": {"w": {"shape": [8, 8], "dtype": "int8"}}}')
    sides[1].write_text('{"mesh": [2], "placements": ["R"]}')
    a, b = read_sides(*sides)
    assert read_plan(*sides).digest() == build_agent_plan(a.specs, b.specs).digest()
    assert read_plan(*sides).carry


def test_timings_carry_their_command_machine_and_date() -> None:
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    after = text.split("| 15 |", 1)[1].split("\n\n")[1].replace("\n", " ")
    assert "bench/bench_plan.py --rows" in after and re.search(r"20\d\d-\d\d-\d\d", after) and "cores" in after
