"""NCCL in child processes: two trainers that share the card, whose children open the trainers' tensors."""

from __future__ import annotations

from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from . import ON_A_CARD, probes
from .test_questions import ONE_CARD
from .world import World

pytestmark = ON_A_CARD


def test_a_baby_group_over_nccl_is_exact_and_survives_the_death_of_a_child(directory: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with World(directory, played=False) as world:
        found = [
            world.start(probes.baby_nccl, rank, store.port, env={**ONE_CARD, "NCCL_HOSTID": f"trainer-{rank}"})
            for rank in range(2)
        ]
        seen = [each.result(300) for each in found]
    print(f"\nNCCL in a child, two ranks on one card: {seen}")
    assert all(each["wrong"] == [] for each in seen)
