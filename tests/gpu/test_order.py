"""A call comes after the work that its caller's stream had queued, and nobody touches a tensor before that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from . import ON_A_CARD, acts
from .world import World, everybody

pytestmark = ON_A_CARD
#: About a second of spinning, at any clock of a data centre's card.
CYCLES = 2_000_000_000


def behind(me: SimpleNamespace, snapshot: bool) -> bool:
    """A transfer called on a side stream, behind a long kernel and what it leads to; whether that was still to come."""
    # CUDA loads a kernel at its first launch, and waits for the device to do so.
    torch.cuda._sleep(1)
    me.one.clone().fill_(0)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    done.record()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        if me.side == "trainer":
            me.one.fill_(9)
        else:
            seen = me.one.clone()
        done.record()
        early = not done.query()
        if me.side == "trainer" and snapshot:
            future = me.handles["one"].transfer("send", version=9, snapshot=True)
            me.one.fill_(10)
            future.result(60)
        else:
            me.handles["one"].transfer("send" if me.side == "trainer" else "recv", timeout=60)
    assert done.query(), "the call has returned before the work that it comes after"
    if me.side == "inference":
        side.synchronize()
        assert bool((seen == acts.OLD).all()), "the target was written before it was read"
        assert bool((me.one == 9).all()), "the source was read before it was written"
    return early


@pytest.mark.parametrize("snapshot", [False, True], ids=["transfer", "snapshot"])
def test_behind_a_long_kernel_on_a_side_stream(directory: Path, snapshot: bool) -> None:
    with World(directory, played=False) as world:
        both = [world.puppet(side, 0, 1) for side in ("trainer", "inference")]
        everybody(both, acts.enter)
        everybody(both, acts.register_one, 16, {})
        assert everybody(both, behind, snapshot) == [True, True], "the kernel was too short to show anything"
        everybody(both, acts.leave)


def default_stream(me: SimpleNamespace) -> None:
    """The legacy default stream, with no synchronisation of the program's own anywhere."""
    for version in range(1, 30):
        if me.side == "trainer":
            torch.cuda._sleep(20_000_000)
            me.one.fill_(version)
            me.handles["one"].transfer("send", version=version)
            me.one.fill_(-1)  # behind the transfer, which is over
        else:
            result = me.handles["one"].transfer("recv")
            assert bool((me.one == result.version).all()), f"version {result.version} is not whole"


def test_the_default_stream_needs_no_synchronisation(directory: Path) -> None:
    with World(directory, played=False) as world:
        both = [world.puppet(side, 0, 1) for side in ("trainer", "inference")]
        everybody(both, acts.enter)
        everybody(both, acts.register_one, 32, {})
        everybody(both, default_stream)
        everybody(both, acts.leave)
