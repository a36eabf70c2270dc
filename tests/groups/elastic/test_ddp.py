"""DDP with BatchNorm over 3 -> 2 -> 3 replicas, the third a new process: what one process computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.groups.elastic.ddp import gradients, load_buffers, model, one_process, train_replicated
from tests.groups.elastic.history import CommittedStep
from tests.groups.elastic.job import ElasticJob, elastic_job

NAMES = "abc"

pytestmark = pytest.mark.usefixtures("agents")


@pytest.fixture
def job() -> Iterator[ElasticJob]:
    with elastic_job(train_replicated, 1) as found:
        yield found


@pytest.mark.parametrize("lost", ["the first", pytest.param("another", marks=pytest.mark.more)])
def test_a_replica_is_lost_and_a_new_process_takes_its_place(job: ElasticJob, lost: str) -> None:
    for name in NAMES:
        job.start(name)
    job.until(3, 5)
    first = job.ranks["a"][0].logs[-1].members[0]
    name = first if lost == "the first" else next(each for each in NAMES if each != first)
    job.lose(name, [0])
    job.until(2, 5)
    job.start(name)
    job.until(3, 5)
    witness = job.ranks[next(each for each in NAMES if each != name)][0]
    steps = job.finish()
    tries = [log for log in witness.logs if not log.committed and log.step > 5]
    assert len(tries) <= 2, f"a death and a join cost a step each at most: {tries}"
    weights, buffers = one_process(steps)
    for each in NAMES:
        found = torch.load(job.directory / f"{each}.whole")
        # Three gradients are summed in another order, by bucket.
        for mine, expected in zip(found["weights"], weights, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)
        for mine, expected in zip(found["buffers"], buffers[each], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)
    check_steps_with_one_behind(job, steps)


def check_steps_with_one_behind(job: ElasticJob, steps: list[CommittedStep]) -> None:
    """In such a step the gradients are those of the members that count, and so are their buffers."""
    seen = 0
    for step in steps:
        files = {path.stem.rpartition("-")[2]: path for path in job.directory.glob(f"behind-{step.step}-*.pt")}
        if not files:
            continue
        # Replicas that start one after the other have such a step, too.
        seen += set(files) == set(NAMES)
        assert set(files) > set(step.members), step
        found = {name: torch.load(path) for name, path in files.items()}
        one = found[step.members[0]]
        for name in files:
            for mine, others in zip(found[name]["gradients"], one["gradients"], strict=True):
                assert torch.equal(mine, others), "the one that is behind receives the gradients of the others"
        net = model()
        with torch.no_grad():
            for parameter, weight in zip(net.parameters(), one["weights"], strict=True):
                parameter.copy_(weight)
        load_buffers(net, one["buffers"])
        mean, left = gradients(net, list(step.batches), one["buffers"])
        for mine, expected in zip(one["gradients"], mean, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)
        for name, buffers in zip(step.members, left, strict=True):
            for mine, expected in zip(found[name]["after"], buffers, strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)
    assert seen, "nobody was behind in a step that counted"
