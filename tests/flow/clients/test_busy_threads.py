"""A blocking call beside Python threads that are busy: it gets the interpreter's lock soon, and leaves no trace."""

from __future__ import annotations

import sys

import pytest

from etha.client.loop_thread import SHORT_SWITCH
from tests.flow.duets import PATIENCE, Background, Duet
from tests.flow.sites import Site

pytestmark = pytest.mark.ways("local")


@pytest.mark.parametrize("blocking", [True, False])
def test_only_a_call_that_blocks_shortens_the_switch_interval(site: Site, pair: str, blocking: bool) -> None:
    before, seen = sys.getswitchinterval(), []
    assert before > SHORT_SWITCH

    def on_commit() -> None:
        seen.append(sys.getswitchinterval())

    def receive(duet: Duet) -> None:
        if blocking:
            duet.recv.transfer("recv", on_commit=on_commit)
        else:
            duet.recv.transfer("recv", on_commit=on_commit, blocking=False).result(PATIENCE)

    with Duet(site, pair, atomic=True) as duet:
        receiving = Background(lambda: receive(duet))
        duet.send.transfer("send", blocking=False).result(PATIENCE)
        receiving.result()
        assert duet.holds == "new"
    assert seen == [SHORT_SWITCH if blocking else before]
    assert sys.getswitchinterval() == before
