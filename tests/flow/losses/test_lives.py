"""Workers and agents are killed at every stage: the others hear at once who it was, and all goes on afterwards."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

import etha
from tests.flow.acts import die_half_way, init, is_old, lost, recv, register, register_large, send, transfer
from tests.flow.jobs import tell, wait_gone
from tests.flow.puppets import Puppet, Stage, together
from tests.flow.ways import Way
from tests.seconds import within

#: Seconds within which everybody has heard of a death.
SOON = 1.0


def check(failed: Any, killed: float, who: str) -> None:
    """``failed`` is the loss of ``who``, heard in time."""
    assert (failed.kind, failed.code, failed.reason) == ("PeerLostError", "peer_lost", "died"), failed
    assert who in failed.text, failed
    assert failed.at - killed < within(SOON), f"heard after {failed.at - killed:.2f} s"


def meet(puppets: list[Puppet]) -> None:
    together(puppets, init)
    together(puppets, register)


# ---- workers ------------------------------------------------------------------------------------


def test_killed_during_rendezvous_its_rank_is_free_and_the_others_go_on_waiting(stage: Stage) -> None:
    trainers, inference = stage.side("trainer", 2), stage.puppet("inference", 0, 1)
    for puppet in trainers:
        puppet.begin(init)
        puppet.worker.expect("started")
    trainers[1].kill()
    wait_gone(trainers[1].pid)
    again = stage.puppet("trainer", 1, 2)
    for puppet in (again, inference):
        puppet.begin(init)
    assert [puppet.ends() for puppet in (trainers[0], again, inference)] == [1, 1, 1]


def test_killed_while_idle_the_next_call_of_the_others_says_who(stage: Stage) -> None:
    trainers, inference = stage.side("trainer", 2), stage.puppet("inference", 0, 1)
    meet([*trainers, inference])
    killed = trainers[1].kill()
    for puppet in (trainers[0], inference):
        reason, at = puppet.do(lost)
        assert reason == "died" and at - killed < within(SOON)
    check(trainers[0].begin(send, 1).fails(), time.monotonic(), "trainer rank 1")
    check(inference.begin(recv).fails(), time.monotonic(), "trainer rank 1")


def test_killed_while_it_registers(stage: Stage) -> None:
    trainers, inference = stage.side("trainer", 2), stage.puppet("inference", 0, 1)
    together([*trainers, inference], init)
    waiting = [puppet.begin(register) for puppet in (trainers[0], inference)]
    killed = trainers[1].kill()
    for puppet in waiting:
        check(puppet.fails(), killed, "trainer rank 1")


def test_killed_before_go_the_waiting_calls_end(stage: Stage) -> None:
    trainers, inference = stage.side("trainer", 2), stage.puppet("inference", 0, 1)
    meet([*trainers, inference])
    inference.begin(recv)
    trainers[1].begin(send, 1)
    killed = trainers[1].kill()
    check(inference.fails(), killed, "trainer rank 1")
    again = stage.puppet("trainer", 1, 2)
    meet([trainers[0], again, inference])
    trainers[0].begin(send, 2)
    again.begin(send, 2)
    assert inference.do(recv) == (1, 2), "no number has been used up"


@pytest.mark.parametrize("victim", ["trainer", "inference"])
@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
def test_killed_in_a_transfer_all_others_hear_who_and_tensors_are_old_or_known_to_be_torn(
    stage: Stage, victim: str, atomic: bool
) -> None:
    trainers = stage.side("trainer", 1 + (victim == "trainer"))
    inference = stage.side("inference", 1 + (victim == "inference"))
    dying = (trainers if victim == "trainer" else inference)[-1]
    together([*trainers, *inference], init)
    together([*trainers, *inference], register_large, {"atomic": atomic})
    others = [puppet for puppet in (*trainers, *inference) if puppet is not dying]
    for puppet in others:
        puppet.begin(transfer)
    dying.begin(die_half_way)
    killed = dying.worker.expect("half way")
    for puppet in others:
        failed = puppet.fails()
        check(failed, killed, f"{victim} rank 1")
        assert failed.data["outcome"] == "aborted"
        if puppet in inference:
            assert failed.data["torn"] is not atomic
            assert not atomic or puppet.do(is_old), "an atomic target holds the old version"
        else:
            assert not failed.data["torn"]


# ---- agents -------------------------------------------------------------------------------------


def agent_pid(me: SimpleNamespace) -> int:
    pid: int = me.client.status()["agent"]["pid"]
    return pid


def registering(me: SimpleNamespace) -> None:
    tell("registering")
    register(me)


def test_the_agent_is_killed_and_all_works_again_after_init_pair_and_register(rough_stage: Stage, way: Way) -> None:
    trainer, inference = rough_stage.puppet("trainer", 0, 1), rough_stage.puppet("inference", 0, 1)
    meet([trainer, inference])
    trainer.begin(send, 1)
    assert inference.do(recv) == (1, 1)
    assert trainer.ends() == 1

    trainer.begin(send, 2)
    agent = inference.do(agent_pid)
    killed = time.monotonic()
    os.kill(agent, signal.SIGKILL)
    failed = trainer.fails()
    if way == "local":
        assert (failed.kind, failed.code, failed.data["outcome"]) == ("AgentLostError", "agent_lost", "unknown")
        assert failed.at - killed < within(SOON)
    else:  # the other side's agent
        check(failed, killed, "inference rank 0")
        assert failed.data["outcome"] == "withdrawn"
    assert inference.do(lost)[0] == "died"
    for puppet in (trainer, inference):
        failed = puppet.begin(register).fails()
        own = way == "local" or puppet is inference
        assert failed.kind == ("AgentLostError" if own else "PeerLostError") and "init_pair" in failed.text

    together([trainer, inference], init)
    together([trainer, inference], register)
    trainer.begin(send, 3)
    seq, version = inference.do(recv)
    assert (trainer.ends(), version) == (seq, 3) and seq >= 2, "no number is given twice"
    assert inference.do(agent_pid) != agent


def test_the_agent_is_killed_during_rendezvous(rough_stage: Stage) -> None:
    trainer, inference = rough_stage.puppet("trainer", 0, 1), rough_stage.puppet("inference", 0, 1)
    trainer.do(connect)
    agent = trainer.do(agent_pid)
    trainer.begin(init)
    rough_stage.puppet("trainer", 0, 1).do(see_it_wait)
    os.kill(agent, signal.SIGKILL)
    failed = trainer.fails()
    assert failed.kind == "AgentLostError" and "call init_pair and register_tensors again" in failed.text
    # Whoever joins first may complete an epoch with the dead agent, which Redis lists for ten seconds: it is lost.
    assert len(set(together([trainer, inference], init))) == 1


def connect(me: SimpleNamespace) -> None:
    me.client = etha.TensorBusClient(timeout=20)
    me.client.status()


def see_it_wait(me: SimpleNamespace) -> None:
    """Returns once the agent of this place has a worker that waits for the other side."""
    connect(me)
    while not any(pair["pair"] == me.pair and pair["waiting_for"] for pair in me.client.status()["pairs"]):
        pass


@pytest.mark.ways("local", reason="it is about one agent and the next at its place")
def test_a_client_that_comes_while_the_agent_leaves_is_served_by_another(rough_stage: Stage) -> None:
    """SIGTERM, and at once the next clients: they wait for the end of the old agent and start a new one."""
    trainer, inference = rough_stage.puppet("trainer", 0, 1), rough_stage.puppet("inference", 0, 1)
    trainer.do(connect)
    agent = trainer.do(agent_pid)
    os.kill(agent, signal.SIGTERM)
    inference.begin(init)
    wait_gone(agent)
    trainer.begin(init)
    assert inference.ends() == trainer.ends() == 1
    assert trainer.do(agent_pid) == inference.do(agent_pid) != agent
