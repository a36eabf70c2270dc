"""Every kind of tensor, in every element, between two jobs on one card; most of it on a played card, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import ON_A_CARD, STAGES, acts
from .company import Companies, Company
from .world import World, everybody


def scale(played: bool) -> int:
    return 1 if played else 48


@pytest.mark.parametrize("played", STAGES)
@pytest.mark.parametrize(
    "options",
    [{}, {"atomic": True}, {"verify": "full"}, {"atomic": True, "verify": "sample"}],
    ids=["plain", "atomic", "verified", "atomic and sampled"],
)
def test_every_kind_arrives(companies: Companies, played: bool, options: dict[str, Any]) -> None:
    company = companies.of(played)
    batch = "-".join(["b", *options])
    company.all(acts.register, batch, scale(played), "trainer", options)
    for version in (1, 2, 3):
        assert set(company.all(acts.move, batch, version)) == {version}
    [line] = {(b["transport"], b["seq"]) for s in company.all(acts.status) for b in s["batches"] if b["batch"] == batch}
    assert line == ("local", 3)
    company.all(acts.leave_batch, batch)


@pytest.mark.parametrize("played", STAGES)
def test_a_snapshot_arrives_though_its_source_has_changed(companies: Companies, played: bool) -> None:
    company = companies.of(played)
    company.all(acts.register, "s", scale(played), "trainer", {})
    for version in (1, 2):
        company.all(acts.move, "s", version, True)
    company.all(acts.leave_batch, "s")


@pytest.mark.parametrize("played", STAGES)
@pytest.mark.parametrize("source", ["trainer", "inference"], ids=["to the CPU", "from the CPU"])
def test_a_card_and_a_cpu(directory: Path, played: bool, source: str) -> None:
    """The trainer on the card, the other job on the host's memory."""
    with World(directory, played=played) as world:
        company = Company(world, inference="cpu")
        company.all(acts.register, "b", scale(played), source, {"verify": "full"})
        for version in (1, 2):
            company.all(acts.move, "b", version)
        company.end()


@pytest.mark.parametrize("played", STAGES)
@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
def test_memory_without_an_ipc_handle(directory: Path, played: bool, atomic: bool) -> None:
    """Expandable segments: copied through plain memory of the worker, and status says so."""
    env = {} if played else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with World(directory, played=played) as world:
        both = [world.puppet(side, 0, 1, env=env, exportable=False) for side in ("trainer", "inference")]
        everybody(both, acts.enter)
        everybody(both, acts.register, "b", scale(played), "trainer", {"atomic": atomic})
        for version in (1, 2):
            everybody(both, acts.move, "b", version)
        [report, _] = everybody(both, acts.status)
        texts = [worker["memory"] for worker in report["agent"]["workers"]]
        print(f"\nstatus of staged workers: {texts}")
        assert len(texts) == 2 and all("expandable" in text for text in texts)
        everybody(both, acts.leave)


class TestOnACardOnly:
    pytestmark = ON_A_CARD

    def test_etha_empty_on_a_card_needs_no_staging(self, directory: Path) -> None:
        """Also in a process whose own allocator gives memory without handles."""
        env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        with World(directory, played=False) as world:
            both = [world.puppet(side, 0, 1, env=env) for side in ("trainer", "inference")]
            everybody(both, acts.enter)
            everybody(both, acts.register_shared)
            everybody(both, acts.move_one, 5)
            [report, _] = everybody(both, acts.status)
            assert all("expandable" not in worker["memory"] for worker in report["agent"]["workers"])
            everybody(both, acts.leave)
