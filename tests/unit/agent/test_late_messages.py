"""What other agents still say about a batch that is over is taken without a word in the log."""

from __future__ import annotations

import weakref
from collections.abc import Coroutine
from typing import Any

import torch

from etha.agent.protocol.capabilities import Terms
from etha.agent.protocol.evaluation import Evaluation
from etha.agent.runtime.sessions import OpenCalls
from etha.agent.services.batch_state import LocalRegistration, RegisteredBatch
from etha.agent.services.registration import RegistrationService
from etha.agent.services.stream_order import StreamOrder
from etha.agent.services.transfers import TransferService
from etha.errors import PeerLostError
from etha.peer.messages import PeerOffer
from etha.plan import Layout, TensorSpec, build_plan
from etha.store.records import PairView, RankHolder, SideView

#: What nobody here uses.
UNUSED: Any = None
SPEC = TensorSpec((4,), torch.float32, Layout.replicated(1))


def never(work: Coroutine[Any, Any, Any]) -> Any:
    work.close()
    raise AssertionError("a late message begins nothing")


def begin() -> tuple[RegistrationService, TransferService, LocalRegistration]:
    """The services of agent "A", which has closed its part in a batch between one rank each of agents "A" and "B"."""
    holders = {"inference": "A", "trainer": "B"}
    sides = {
        side: SideView(world_size=1, members={0: RankHolder(agent=agent, host=agent, pid=1, start=1)})
        for side, agent in holders.items()
    }
    view = PairView(name="weights", state="formed", epoch=1, sides=sides)
    registration = LocalRegistration.begin("A", "b", ("weights",), {"weights": 1}, 1, view, None)
    calls = OpenCalls()
    transfers = TransferService(
        store=UNUSED,
        links=UNUSED,
        calls=calls,
        lane=UNUSED,
        spawn=never,
        stream_order=StreamOrder(None, calls),
        recorder=UNUSED,
    )
    service = RegistrationService(
        me="A",
        store=UNUSED,
        links=UNUSED,
        calls=calls,
        rendezvous=UNUSED,
        transfers=transfers,
        gc_scheduler=UNUSED,
        spawn=never,
        hints=UNUSED,
    )
    service._memory.keep(registration)
    return service, transfers, registration


def test_an_offer_for_a_registered_batch_whose_pair_was_just_lost() -> None:
    service, transfers, registration = begin()
    plan = build_plan({"w": SPEC}, {"w": SPEC})
    evaluation = Evaluation(
        sides=("inference", "trainer"),
        plans={"trainer": plan},
        digests={},
        violations={"inference": (), "trainer": ()},
        refused=(),
        atomic=False,
        bucket_size=None,
        verify=None,
        seq=0,
        tensors=1,
        sizes={"trainer": 8},
    )
    registration.machine.evaluation = evaluation
    registration.registered = RegisteredBatch(registration, evaluation, Terms(), None, lambda batch, source: False)
    transfers.break_up(registration.registered, PeerLostError("trainer rank 0 died", reason="died"))
    registration.forget()
    for standing in (True, False):
        service.hear("B", registration.scope, PeerOffer(side="trainer", standing=standing, version=3))
    assert not registration.registered.offers
    large = weakref.ref(plan)
    del plan, evaluation
    assert large() is None, "the plans of a batch that is over are kept"


def test_an_offer_for_a_batch_that_was_closed_before_all_had_registered() -> None:
    service, _, registration = begin()
    registration.forget()
    service.hear("B", registration.scope, PeerOffer(side="trainer", standing=True, version=3))
    assert registration.early == []
