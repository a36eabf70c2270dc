"""Either side is launched again, with another number of workers, while the other lives on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.errors import ConfigError, PeerLostError
from tests.flow.acts import close, init, is_lost, lost, recv, register, send
from tests.flow.jobs import Job, Worker, WorkerFailed, tell, wait_for
from tests.flow.puppets import Puppet, Stage, together
from tests.flow.truth import whole


def meet(sides: list[Puppet], epoch: int) -> None:
    """All of them form the pair and register the batch."""
    assert together(sides, init) == [epoch] * len(sides)
    together(sides, register)


def move(trainers: list[Puppet], inference: list[Puppet], version: int, seq: int) -> None:
    """One transfer from the trainers to the others."""
    for puppet in trainers:
        puppet.begin(send, version)
    for puppet in inference:
        puppet.begin(recv)
    assert [p.ends() for p in trainers] == [seq] * len(trainers)
    assert [p.ends() for p in inference] == [(seq, version)] * len(inference)


@pytest.mark.parametrize("how", ["closed", "died"])
def test_an_inference_side_of_another_size_takes_over(stage: Stage, how: str) -> None:
    """The trainer waits in a send meanwhile: it is told, forms the pair again and goes on with the next seq."""
    trainer, old = stage.puppet("trainer", 0, 1), stage.puppet("inference", 0, 1)
    meet([trainer, old], 1)
    move([trainer], [old], version=1, seq=1)
    assert trainer.do(is_lost) is False

    trainer.begin(send, 2)
    if how == "died":
        old.kill()
    else:
        old.do(close)
    failed = trainer.fails()
    assert (failed.kind, failed.code, failed.reason) == ("PeerLostError", "peer_lost", how)
    assert "inference rank 0" in failed.text and "init_pair" in failed.text
    assert trainer.do(lost)[0] == how
    assert trainer.begin(send, 2).fails().reason == how, "and so does every further call"
    assert trainer.begin(register).fails().reason == how

    new = stage.side("inference", 2)
    meet([trainer, *new], 2)
    move([trainer], new, version=3, seq=2)
    assert trainer.do(is_lost) is False


def test_trainers_of_another_size_take_over(stage: Stage) -> None:
    trainers, inference = stage.side("trainer", 2), stage.puppet("inference", 0, 1)
    meet([*trainers, inference], 1)
    move(trainers, [inference], version=1, seq=1)

    inference.begin(recv)
    for old in trainers:
        old.leave()  # without a close: the process ends
    failed = inference.fails()
    assert (failed.kind, failed.reason) == ("PeerLostError", "died")
    assert "trainer rank" in failed.text

    new = stage.puppet("trainer", 0, 1)
    meet([new, inference], 2)
    move([new], [inference], version=2, seq=2)


def test_an_explicit_launch_id_evicts_what_is_left_of_the_older_launch(stage: Stage) -> None:
    trainer = stage.puppet("trainer", 0, 1)
    old = stage.side("inference", 2, {"ETHA_LAUNCH_ID": "first"})
    meet([trainer, *old], 1)
    move([trainer], old, version=1, seq=1)

    new = stage.puppet("inference", 0, 1, {"ETHA_LAUNCH_ID": "second"}).begin(init)
    assert {trainer.do(lost)[0], *(puppet.do(lost)[0] for puppet in old)} == {"relaunched"}
    for puppet in old:
        assert puppet.begin(recv).fails().reason == "relaunched"
        assert puppet.begin(init).fails().reason == "relaunched", "the older launch is fenced"
    assert trainer.begin(send, 2).fails().reason == "relaunched"
    assert trainer.do(init) == new.ends() == 2
    together([trainer, new], register)
    move([trainer], [new], version=5, seq=2)


def test_a_rank_whose_holder_lives_refuses_a_second_one(stage: Stage) -> None:
    trainer, inference = stage.puppet("trainer", 0, 1), stage.puppet("inference", 0, 1)
    meet([trainer, inference], 1)
    refused = stage.puppet("trainer", 0, 1).begin(init).fails()
    assert (refused.kind, refused.code) == ("ConfigError", "config")
    assert str(trainer.pid) in refused.text and "host" in refused.text
    move([trainer], [inference], version=1, seq=1)  # and nobody has been disturbed


def test_the_same_init_pair_again_changes_nothing(stage: Stage) -> None:
    trainer, inference = stage.puppet("trainer", 0, 1), stage.puppet("inference", 0, 1)
    meet([trainer, inference], 1)
    assert trainer.do(init) == 1
    move([trainer], [inference], version=1, seq=1)


# ---- an inference server on its own loop --------------------------------------------------------


def serve(me: SimpleNamespace, epochs: int) -> list[Any]:
    return asyncio.run(_serve(me, epochs))


async def _serve(me: SimpleNamespace, epochs: int) -> list[Any]:
    """Receives until the pair is lost, then forms it again: what a server does all day."""
    seen: list[Any] = []
    target = torch.zeros(7, 6)
    async with etha.AsyncTensorBusClient(timeout=20) as client:
        for _ in range(epochs):
            pair = await client.init_pair(me.pair, "inference", "trainer", 1, (1,), [Replicate()], rank=0)
            handle = await client.register_tensors("b", {"w": target}, pair_name=me.pair)
            try:
                while True:
                    result = await handle.transfer("recv")
                    assert torch.equal(target, whole((7, 6), result.version))
                    seen.append((pair.epoch, result.seq, result.version))
                    tell("received", seen[-1])
            except etha.PeerLostError as error:
                assert await pair.lost == error.reason
                seen.append(error.reason)
                tell("lost", error.reason)
    return seen


def test_an_async_server_outlives_its_trainers(stage: Stage) -> None:
    server = stage.puppet("inference", 0, 1).begin(serve, 3)
    for epoch in (1, 2, 3):
        trainers = stage.side("trainer", 1 + epoch % 2)
        meet(trainers, epoch)
        assert together(trainers, send, epoch) == [epoch] * len(trainers)
        assert server.worker.expect("received") == (epoch, epoch, epoch)
        trainers[-1].kill()
        assert server.worker.expect("lost") == "died"
        for puppet in trainers[:-1]:
            puppet.kill()
    assert server.ends() == [(1, 1, 1), "died", (2, 2, 2), "died", (3, 3, 3), "died"]


# ---- replicas -----------------------------------------------------------------------------------


def replica(name: str, pair: str) -> int:
    """An inference job of one worker that receives until it is killed."""
    target = torch.zeros(7, 6)
    with etha.TensorBusClient(timeout=20) as client:
        client.init_pair(pair, name, "trainer", 1, (1,), [Replicate()], rank=0)
        with client.register_tensors(f"for-{name}", {"w": target}, pair_name=pair) as handle:
            for version in (1, 2):
                assert handle.transfer("recv").version == version
                assert torch.equal(target, whole((7, 6), version))
                tell("received", version)
    return version


def feed(to: dict[str, str]) -> list[Any]:
    """A trainer with one pair for each replica, {name: pair}; the first of them dies between the versions."""
    names = list(to)
    with etha.TensorBusClient(timeout=20) as client:
        pairs = {n: client.init_pair(to[n], "trainer", n, 1, (1,), [Replicate()], rank=0) for n in names}
        source = torch.zeros(7, 6)
        handles = {n: client.register_tensors(f"for-{n}", {"w": source}, pair_name=to[n]) for n in names}
        ends: list[Any] = []
        for version in (1, 2):
            source.copy_(whole((7, 6), version))
            futures = {n: handles[n].transfer("send", version=version, blocking=False) for n in names}
            for name, future in futures.items():
                try:
                    ends.append((name, future.result(20).seq))
                except etha.PeerLostError as error:
                    ends.append((name, error.reason))
            if version == 1:
                tell("sent one")
                assert pairs[names[0]].lost.wait(20)
                assert not pairs[names[1]].lost.is_set()
    return ends


def test_replicas_with_a_pair_each_live_and_die_on_their_own(guests: Job, pair: str) -> None:
    pairs = {name: f"{name}.{pair}"[:100] for name in ("replica0", "replica1")}
    trainer = guests.start(feed, pairs, at=("trainer", 0))
    first, second = (guests.start(replica, name, to, at=(name, 0)) for name, to in pairs.items())
    assert first.expect("received") == second.expect("received") == 1
    trainer.expect("sent one")
    first.kill()
    assert trainer.result() == [("replica0", 1), ("replica1", 1), ("replica0", "died"), ("replica1", 2)]
    assert second.result() == 2


def experiment(pair: str, side: str, remote: str) -> tuple[str, str]:
    """One worker of a job that torchrun has started: how its registration ended after the others had their turn."""
    with etha.TensorBusClient(timeout=60) as client:
        client.init_pair(pair, side, remote, 1, (1,), [Replicate()], rank=0)
        tell("formed")
        wait_for("go on")
        try:
            client.register_tensors("b", {"w": torch.zeros(2)}, pair_name=pair)
        except PeerLostError as error:
            return error.reason, error.message
    return "", ""


@pytest.mark.ways("local", reason="launches are told apart in Redis")
def test_a_second_experiment_is_refused_and_with_takeover_displaces_the_first(guests: Job, pair: str) -> None:
    def start(run: str, **more: str) -> list[Worker]:
        env = {"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": "0", **more}
        sides = (("trainer", "inference"), ("inference", "trainer"))
        return [guests.start(experiment, pair, one, two, at=(one, 0), env=env) for one, two in sides]

    first = start("one")
    for worker in first:
        worker.expect("formed")
    for worker in start("two"):
        with pytest.raises(ConfigError, match=r"launch one\.0 of side \w+ lives .*ETHA_TAKEOVER=1") as caught:
            worker.result()
        assert any(f"pid {living.pid}" in caught.value.message for living in first)
    second = start("two", ETHA_TAKEOVER="1")
    for worker in second:
        worker.expect("formed")
    for worker in second:
        worker.kill()
        with pytest.raises(WorkerFailed):
            worker.result()
    for worker in first:
        worker.go("go on")
        reason, text = worker.result()
        assert reason == "relaunched", text
