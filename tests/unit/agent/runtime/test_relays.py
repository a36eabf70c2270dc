"""What an agent passes on, takes and refuses of what is said through hubs, and whom a hub tells of a loss."""

from __future__ import annotations

from typing import Any

import pytest

from etha.agent.protocol.epoch_links import MESH, EpochLinks
from etha.agent.runtime.peers import PeerLinks
from etha.errors import PeerLostError
from etha.peer.introductions import LostPeer, Meet, Met, Relay
from etha.peer.messages import Done, Question, VerdictAnswer
from etha.peer.wire import Beat, Scope, encode

EPOCH = ("w", 1)
ABOUT = Scope(pair="w", epoch=1)
BATCH = Scope(pair="w", epoch=1, batch="b", generation=2)
SIDES = {"t": [(f"t{n:02}", f"h{n}") for n in range(MESH)], "i": [("i0", "h99")]}


class Wires:
    """Stands for a hub: who is linked, and what was sent."""

    def __init__(self, *linked: str) -> None:
        self.open = set(linked)
        #: Those whose link takes no more messages.
        self.full: set[str] = set()
        self.sent: list[tuple[str, Scope, Any]] = []

    def linked(self, agent: str) -> bool:
        return agent in self.open

    def send(self, agent: str, scope: Scope, message: Any) -> None:
        if agent not in self.open or agent in self.full:
            raise PeerLostError("no link", reason="died")
        self.sent.append((agent, scope, message))


class Still:
    """Stands for the loop and the data plane."""

    def time(self) -> float:
        return 0.0

    def drop(self, agent: str) -> None:
        pass


class One:
    """The links of one agent in the epoch."""

    def __init__(self, me: str, *linked: str) -> None:
        self.said: list[Any] = []
        self.lost: list[Any] = []
        unused: Any = None
        self.links = PeerLinks(
            me=me, host="h", store=unused, listen=None,
            said=lambda *said: self.said.append(said), on_agent_lost=lambda *lost: self.lost.append(lost),
        )  # fmt: skip
        self.wires = Wires(*linked)
        self.links.hub = self.wires  # type: ignore[assignment]
        self.links.plane = self.links._loop = Still()  # type: ignore[assignment]
        self.links._epochs[EPOCH] = EpochLinks.of(me, SIDES)

    def hear(self, agent: str, message: Any, scope: Scope = ABOUT) -> None:
        self.links._heard(agent, scope, message)


def relayed(message: Any, scope: Scope | None = BATCH, *, origin: str = "t05", to: str = "t06") -> Relay:
    return Relay(origin=origin, to=to, message=encode(scope, message))


def test_what_is_said_to_an_agent_without_a_link_goes_through_the_first_hub_that_is_linked() -> None:
    one = One("t05", "i0", "t00")
    one.links.tell("t06", BATCH, Done(seq=1))
    one.links.tell("i0", BATCH, Done(seq=2))
    one.wires.open.discard("i0")
    one.links.tell("t06", BATCH, Done(seq=3))
    assert one.wires.sent == [
        ("i0", ABOUT, relayed(Done(seq=1))), ("i0", BATCH, Done(seq=2)), ("t00", ABOUT, relayed(Done(seq=3))),
    ]  # fmt: skip
    one.wires.open.add("t06")
    one.links.tell("t06", BATCH, Done(seq=4))
    assert one.wires.sent[-1] == ("t06", BATCH, Done(seq=4)), "those that exchange data have a link"
    one.wires.open.clear()
    one.links.tell("t06", BATCH, Done(seq=5))
    assert len(one.wires.sent) == 4


def test_survivors_ask_and_answer_through_all_hubs() -> None:
    """One of them may stand still, which is not known for seconds: the coordinator that died may be a hub itself."""
    one = One("t05", "i0", "t00")
    for message in (Question(seq=1), VerdictAnswer(seq=1, verdict="fenced")):
        one.links.tell("t06", BATCH, message)
        assert one.wires.sent[-2:] == [("i0", ABOUT, relayed(message)), ("t00", ABOUT, relayed(message))]
    one.wires.full.add("i0")
    for message in (Question(seq=2), Done(seq=2)):
        one.links.tell("t06", BATCH, message)
        assert one.wires.sent[-1] == ("t00", ABOUT, relayed(message)), "a hub that takes nothing is passed over"
    assert len(one.wires.sent) == 6


def test_a_hub_passes_on_what_its_sender_says_for_itself() -> None:
    hub = One("t00", *(agent for agent, _ in SIDES["t"]), "i0")
    hub.hear("t05", relayed(Question(seq=1)))
    assert hub.wires.sent == [("t06", ABOUT, relayed(Question(seq=1)))]
    for sender, relay in (
        ("t05", relayed(Done(seq=1), origin="t04")),
        ("t05", relayed(Done(seq=1), to="nobody")),
        ("nobody", relayed(Done(seq=1), origin="nobody")),
    ):
        hub.hear(sender, relay)
    hub.hear("t05", relayed(Done(seq=1)), Scope(pair="another", epoch=1))
    assert len(hub.wires.sent) == 1 and not hub.said
    hub.wires.open.discard("t06")
    hub.hear("t05", relayed(Done(seq=1)))  # everybody is told of that loss, so nobody waits


def test_a_hub_still_passes_on_when_the_epoch_is_over() -> None:
    """Then survivors ask each other how the last transfer ended."""
    hub = One("t00", "t06")
    hub.links.forget(*EPOCH)
    hub.hear("t05", relayed(Question(seq=1)))
    assert hub.wires.sent == [("t06", ABOUT, relayed(Question(seq=1)))]


def test_only_what_a_hub_passes_on_is_heard() -> None:
    one = One("t06", "i0", "t00")
    one.hear("i0", relayed(Question(seq=1)))
    assert one.said == [("t05", BATCH, Question(seq=1))]
    meet = Meet(pid=1, started=1, address=1, token=b"")
    for sender, relay in (
        ("t04", relayed(Done(seq=1))),
        ("i0", relayed(Done(seq=1), origin="t00")),
        ("i0", relayed(Done(seq=1), origin="nobody")),
        ("i0", relayed(Done(seq=1), Scope(pair="w", epoch=2))),
        ("i0", relayed(Done(seq=1), Scope(pair="another", epoch=1))),
        ("i0", relayed(Beat(number=1), None)),
        ("i0", relayed(meet, ABOUT)),
        ("i0", relayed(Met(reads=True), ABOUT)),
        ("i0", relayed(relayed(Done(seq=1)), ABOUT)),
        ("i0", relayed(LostPeer(agent="t07", text=""), ABOUT)),
        ("i0", Relay(origin="t05", to="t06", message=b"no message")),
    ):
        one.hear(sender, relay)
    assert len(one.said) == 1 and not one.lost and not one.wires.sent
    assert not one.links.read_by


def test_a_hub_tells_everybody_whom_it_has_lost() -> None:
    others = {agent for agent, _ in SIDES["t"]} | {"i0"}
    hub = One("t00", *others - {"t00", "t06"})
    hub.links._on_link_lost("t06", "cut")
    assert [lost[0] for lost in hub.lost] == ["t06"] and hub.lost[0][2] is None
    assert {agent for agent, _, _ in hub.wires.sent} == others - {"t00", "t06"}
    assert {(scope, message) for _, scope, message in hub.wires.sent} == {(ABOUT, LostPeer(agent="t06", text="cut"))}
    ordinary = One("t05", "i0", "t00")
    ordinary.links._on_link_lost("i0", "cut")
    assert not ordinary.wires.sent, "only a hub knows that its link was needed"


@pytest.mark.parametrize(("sender", "agent", "heard"), [("t00", "t06", 1), ("t04", "t06", 0), ("t00", "i0", 0)])
def test_a_loss_is_believed_of_a_hub(sender: str, agent: str, heard: int) -> None:
    one = One("t05", "i0", "t00")
    one.hear(sender, LostPeer(agent=agent, text="cut"))
    assert [(lost[0], lost[2]) for lost in one.lost] == [(agent, EPOCH)] * heard
    assert all("agent t00 has lost it: cut" in lost[1] for lost in one.lost)
