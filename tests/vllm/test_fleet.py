"""Several engines that one call brings a version to: one that is dead, hangs or refuses costs the others nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from etha import EthaError, PeerLostError
from tests.vllm.checkpoints import Checkpoint
from tests.vllm.fakes import Fake, digest
from tests.vllm.trainers import Trainer

Checkpoints = Callable[[str, int], Path]
Env = dict[str, str]
Outcomes = list[EthaError | None]
#: Versions after which an engine that is up again must have been taken in.
MANY = 200


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
    for number in range(MANY):
        if failed(sender.send(versions[0], f"again {number}")) == [None] * 3:
            break
    last = f"again {number}"
    assert failed(sender.send(versions[1], "last")) == [None] * 3
    for fake in fakes:
        state = fake.state()
        assert (state["version"], state["digest"], state["paused"]) == ("last", digests[1], False)
        had = [*(f"again {n}" for n in range(number + 1)), "last"]
        assert state["versions"] == ([last, "last"] if fake is fakes[1] else ["all", "two 0", "two 1", "two 2", *had])
