"""Publications of a GPU's tensors: a trainer on the card, subscribers on the card and on the host."""

from __future__ import annotations

from pathlib import Path

from . import ON_A_CARD, acts
from .world import World

pytestmark = ON_A_CARD
#: MiB of the large tensor, and how many versions are put.
SCALE, VERSIONS = 512, 4


def test_every_version_of_a_card_reaches_a_card_and_a_host(directory: Path) -> None:
    with World(directory, played=False) as world:
        trainer = world.puppet("trainer", 0, 1)
        followers = [world.puppet("inference", 0, 1), world.puppet("inference", 1, 1, device="cpu")]
        trainer.begin(acts.publish, SCALE, VERSIONS)
        for version in range(1, VERSIONS + 1):
            assert trainer.worker.expect("put") == version
            if version == 1:
                for follower in followers:
                    follower.begin(acts.follow, SCALE, VERSIONS)
            for follower in followers:
                assert follower.worker.expect("held") == version
            if version < VERSIONS:
                trainer.worker.go("next")
        seconds = {"put": trainer.ends(), "next, on the card": followers[0].ends(), "next, host": followers[1].ends()}
    print(f"\n{SCALE} MiB and some, seconds of each version:")
    for what, found in seconds.items():
        print(f"    {what:20} {', '.join(f'{one:.3f}' for one in found)}")
