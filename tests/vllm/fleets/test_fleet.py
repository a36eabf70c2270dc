"""Several engines that one call brings a version to: one that is dead, hangs or refuses costs the others nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from etha import (
    ConfigError,
    EthaError,
    PeerLostError,
    RendezvousTimeoutError,
    TransferError,
    TransferTimeoutError,
)
from tests.vllm.checkpoints import Checkpoint
from tests.vllm.fakes import Fake, digest
from tests.vllm.trainers import Trainer

Checkpoints = Callable[[str, int], Path]
Env = dict[str, str]
Outcomes = list[EthaError | None]
#: Versions after which an engine that is up again must have been taken in.
MANY = 200
#: Seconds that a trainer waits where a test waits for that.
LITTLE = 12.0


@pytest.fixture(scope="module")
def versions(checkpoints: Checkpoints) -> list[Path]:
    return [checkpoints("qwen3", seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def digests(versions: list[Path]) -> list[str]:
    return [digest(Checkpoint(version).tensors()) for version in versions]


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def fakes(env: Env, logs: Path, ends: ExitStack) -> list[Fake]:
    found = [Fake(env, logs / f"fake{number}.log") for number in range(3)]
    for fake in found:
        ends.callback(fake.kill)
    return found


@pytest.fixture
def trainer(versions: list[Path], fakes: list[Fake], env: Env, logs: Path, ends: ExitStack) -> Callable[..., Trainer]:
    """A trainer of all fakes."""

    def made(shape: tuple[int, ...] = (), **info: object) -> Trainer:
        found = Trainer(shape, versions[0], [fake.url for fake in fakes], env, logs, **info)
        ends.callback(found.kill)
        return found

    return made


def failed(outcomes: list[Outcomes]) -> list[type[EthaError] | None]:
    """Of what, with each replica; alike on all ranks."""
    kinds = [[None if error is None else type(error) for error in of_rank] for of_rank in outcomes]
    assert kinds.count(kinds[0]) == len(kinds), kinds
    return kinds[0]


def until_all(sender: Trainer, version: Path, label: str | None = "again") -> int:
    """Send ``version`` until every engine takes it; how often one missed it."""
    for number in range(MANY):
        if failed(sender.send(version, label)) == [None] * 3:
            return number
    raise AssertionError(f"an engine that is up again has not taken any of {MANY} versions")


@pytest.mark.parametrize("shape", [(), (2,)])
def test_an_engine_that_is_killed_costs_the_others_nothing_and_is_taken_in_again(
    shape: tuple[int, ...],
    trainer: Callable[..., Trainer],
    fakes: list[Fake],
    versions: list[Path],
    digests: list[str],
) -> None:
    sender = trainer(shape)
    sender.join()
    assert failed(sender.send(versions[0], "all")) == [None] * 3
    fakes[1].kill()
    for number in range(3):
        assert failed(sender.send(versions[1], f"two {number}")) == [None, PeerLostError, None]
    fakes[1].start()
    missed = until_all(sender, versions[0])
    assert failed(sender.send(versions[1], "last")) == [None] * 3
    for fake in fakes:
        state = fake.state()
        assert (state["version"], state["digest"], state["paused"]) == ("last", digests[1], False)
        before = [] if fake is fakes[1] else ["all", "two 0", "two 1", "two 2", *["again"] * missed]
        assert state["versions"] == [*before, "again", "last"]


@pytest.mark.parametrize("route", ["start_weight_update", "pause", "update_weights", "finish_weight_update", "release"])
def test_an_engine_that_dies_at_any_call_is_lost_alone(
    route: str, trainer: Callable[..., Trainer], fakes: list[Fake], versions: list[Path], digests: list[str]
) -> None:
    sender = trainer((2,))
    sender.join()
    fakes[0].die(route)
    assert failed(sender.send(versions[0], "its last")) == [PeerLostError, None, None]
    fakes[0].kill()
    fakes[0].start()
    until_all(sender, versions[1])
    for fake in fakes:
        state = fake.state()
        assert (state["version"], state["digest"], state["paused"]) == ("again", digests[1], False)


def test_an_engine_that_dies_as_it_is_met_again_is_not_waited_for(
    trainer: Callable[..., Trainer], fakes: list[Fake], versions: list[Path]
) -> None:
    """It is asked twice: in the background, and when all ranks are there to meet it."""
    sender = trainer((2,))
    sender.join()
    fakes[0].kill()
    fakes[0].start()
    fakes[0].die("init_weight_transfer_engine", times=2)
    while fakes[0].child.alive:
        assert failed(sender.send(versions[0], "without it")) == [PeerLostError, None, None]
    fakes[0].kill()
    fakes[0].start()
    until_all(sender, versions[1])


def test_an_engine_that_hangs_costs_one_timeout_and_is_taken_in_when_it_answers(
    trainer: Callable[..., Trainer], fakes: list[Fake], versions: list[Path], digests: list[str]
) -> None:
    sender = trainer(timeout=LITTLE)
    sender.join()
    sender.send(versions[0], "all")
    os.killpg(fakes[2].child.pid, signal.SIGSTOP)
    assert failed(sender.send(versions[1], "one hangs")) == [None, None, TransferTimeoutError]
    begun = time.monotonic()
    for number in range(5):
        assert failed(sender.send(versions[number % 2], f"without it {number}")) == [None, None, PeerLostError]
    assert time.monotonic() - begun < LITTLE, "it is waited for once"
    os.killpg(fakes[2].child.pid, signal.SIGCONT)
    until_all(sender, versions[1])
    for fake in fakes:
        state = fake.state()
        assert (state["version"], state["digest"], state["paused"]) == ("again", digests[1], False)


@pytest.mark.parametrize("route", ["start_weight_update", "pause", "update_weights", "finish_weight_update", "release"])
def test_an_engine_that_refuses_a_version_takes_the_next(
    route: str, trainer: Callable[..., Trainer], fakes: list[Fake], versions: list[Path], digests: list[str]
) -> None:
    sender = trainer((2,))
    sender.join()
    fakes[0].fail(route)
    begins_again = route == "start_weight_update"  # which a trainer does where another has begun an update
    assert failed(sender.send(versions[0], "refused")) == [None if begins_again else TransferError, None, None]
    if route == "release":  # the trainer looks for an engine that has not answered, and releases it then
        fakes[0].answered("release", 1)
    assert fakes[0].state()["paused"] is (route == "finish_weight_update")
    assert failed(sender.send(versions[1], "next")) == [None] * 3
    for fake in fakes:
        state = fake.state()
        assert (state["version"], state["digest"], state["paused"]) == ("next", digests[1], False)


def test_where_no_engine_takes_a_version_all_ranks_are_told(
    trainer: Callable[..., Trainer], fakes: list[Fake], versions: list[Path], digests: list[str]
) -> None:
    sender = trainer((2,), timeout=LITTLE)
    sender.join()
    for fake in fakes:
        fake.kill()
    for rank in sender.ranks:
        rank.send("send", str(versions[0]), "nobody's")
    for rank in sender.ranks:
        with pytest.raises(PeerLostError, match=r"no engine has taken version nobody's: engine 0: .*; engine 2: "):
            rank.hear()
    # All are out, so the next call waits for one of them, and for no more.
    for rank in sender.ranks:
        rank.send("send", str(versions[1]), "one's")
    fakes[1].start()
    outcomes = [rank.hear() for rank in sender.ranks]
    assert failed(outcomes) == [PeerLostError, None, PeerLostError]
    assert fakes[1].state()["digest"] == digests[1]


def test_a_trainer_begins_without_an_engine_that_does_not_come(
    trainer: Callable[..., Trainer], fakes: list[Fake], versions: list[Path], digests: list[str]
) -> None:
    fakes[0].kill()
    sender = trainer((2,), timeout=LITTLE)
    sender.join()
    assert failed(sender.send(versions[0])) == [RendezvousTimeoutError, None, None]
    fakes[0].start()
    until_all(sender, versions[1], None)
    states = [fake.state() for fake in fakes]
    assert [state["digest"] for state in states] == [digests[1]] * 3
    assert len({state["version"] for state in states}) == 1, "one number for all, however many each has taken"


def test_an_engine_that_refuses_a_trainer_is_an_error_at_once(
    trainer: Callable[..., Trainer], fakes: list[Fake]
) -> None:
    fakes[0].kill()
    fakes[1].fail("init_weight_transfer_engine")
    sender = trainer((2,))
    for rank in sender.ranks:
        rank.send("join")
    for rank in sender.ranks:
        with pytest.raises(ConfigError, match=r"pair 'weights.1': the engine refuses this trainer: .*was to fail"):
            rank.hear()


def test_ranks_with_lists_of_other_lengths_are_an_error(
    fakes: list[Fake], versions: list[Path], env: Env, logs: Path, ends: ExitStack
) -> None:
    urls = [fake.url for fake in fakes]
    senders = [Trainer((2,), versions[0], urls[:n], env, logs, timeout=LITTLE, stages="alone") for n in (3, 2)]
    for sender in senders:
        ends.callback(sender.kill)
    ranks = [sender.ranks[number] for number, sender in enumerate(senders)]
    for rank in ranks:
        rank.send("join")
    with pytest.raises(RendezvousTimeoutError, match="call it on every rank"):
        ranks[0].hear()


@pytest.mark.parametrize("clients", [[], [1, 1]])
def test_a_list_has_each_engine_once(clients: list[int]) -> None:
    from etha.integrations.vllm import EthaSource, EthaTrainerInitInfo, EthaTrainerWeightTransferEngine

    info = EthaTrainerInitInfo(rank=0, world_size=1)
    with pytest.raises(ConfigError, match="client="):
        EthaTrainerWeightTransferEngine.trainer_init(info, client=clients, source=EthaSource({}))  # type: ignore[arg-type]


def test_where_no_engine_comes_there_is_no_trainer(trainer: Callable[..., Trainer], fakes: list[Fake]) -> None:
    for fake in fakes:
        fake.kill()
    sender = trainer(timeout=2)
    with pytest.raises(RendezvousTimeoutError, match="no engine was met: engine 0"):
        sender.join()


def test_verify_finds_the_engine_that_has_other_weights(
    trainer: Callable[..., Trainer], fakes: list[Fake], versions: list[Path]
) -> None:
    sender = trainer()
    (rank,) = sender.ranks
    sender.join()
    fakes[1].fail("update_weights")
    assert failed(sender.send(versions[0])) == [None, TransferError, None]
    with pytest.raises(TransferError, match=r"engine 1: .*does not compute with the trainer's weights"):
        rank.ask("verify")
    assert failed(sender.send(versions[0])) == [None] * 3
    assert rank.ask("verify") == []
    fakes[2].kill()
    assert failed(sender.send(versions[0])) == [None, None, PeerLostError]
    assert rank.ask("verify") == [2], "one that is lost is told of"


def test_a_trainer_that_ends_leaves_no_thread_and_the_next_one_goes_on(
    trainer: Callable[..., Trainer], fakes: list[Fake], versions: list[Path], digests: list[str]
) -> None:
    first = trainer()
    first.join()
    fakes[2].kill()
    assert failed(first.send(versions[0], 7)) == [None, None, PeerLostError]
    (rank,) = first.ranks
    rank.pipe.close()
    rank.ended()
    fakes[2].start()
    second = trainer((2,))
    second.join()
    assert failed(second.send(versions[1])) == [None] * 3
    states = [fake.state() for fake in fakes]
    assert [state["digest"] for state in states] == [digests[1]] * 3
    assert len({state["version"] for state in states}) == 1
