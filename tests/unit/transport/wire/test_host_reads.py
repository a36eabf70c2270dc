"""host: another agent's workers read in place; what they claim is checked, slots are reduced where they are wanted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed.tensor import Shard

from etha.client.memory import tensors
from etha.errors import RegistrationError
from etha.memory import shared
from etha.memory.handles import TensorHandle, describe
from etha.memory.mapping import WorkerMemory
from etha.memory.process import Beacon, start_time
from etha.memory.reach import FaultError, ReachError, WorkerGoneError
from etha.transport.copy.host import Claim, Exhibit, HostMemory, claim, prove
from tests.examples import examples
from tests.unit.transport.agents import agents, bits, run_here, same, transfer
from tests.unit.transport.tcp.test_transport import partial, random_job, rows


@pytest.fixture
def memory() -> Iterator[WorkerMemory]:
    """This process as a worker of another agent, its segments mapped there."""
    found = WorkerMemory(os.getpid(), start_time(os.getpid()))
    yield found
    found.close()


def shown(memory: WorkerMemory, **held: torch.Tensor) -> Exhibit:
    for segment in shared.segments():
        memory.attach(segment.id, os.dup(segment.fd), segment.nbytes)
    return Exhibit.of(memory, {name: describe(t) for name, t in held.items()})


def test_a_claim_is_proven_by_the_token_in_memory() -> None:
    beacon = Beacon()
    word = claim(beacon)
    prove(word)
    assert beacon.echoed
    with pytest.raises(ReachError, match="other bytes"):
        prove(replace(word, token=b"x" * 32))
    with pytest.raises(WorkerGoneError):
        prove(replace(word, started=word.started + 1))
    with pytest.raises(FaultError):
        prove(Claim(pid=word.pid, started=word.started, address=8, token=word.token))


def test_tensors_are_seen_through_their_segments_and_in_private_memory(memory: WorkerMemory) -> None:
    a, b, empty = tensors.empty((5, 7)).fill_(3.0), torch.arange(12.0).view(3, 4).t(), torch.empty(0, 3)
    opened = HostMemory(shown(memory, a=a, b=b, empty=empty))
    views = opened.views(["a", "b", "empty", "unknown"])
    assert sorted(views) == [0, 1, 2]
    flat = views[0].flat
    assert flat is not None and flat.tolist() == [3.0] * 35 and flat.data_ptr() != a.data_ptr()
    a[0, 0] = 4.0
    assert float(flat[0]) == 4.0  # the same pages, not a copy
    assert views[1].private and views[1].strides == (1, 4) and views[2].nbytes == 0
    opened.close()


def test_a_worker_that_is_another_process_is_refused(memory: WorkerMemory) -> None:
    a = tensors.empty(4)
    exhibit = shown(memory, a=a)
    with pytest.raises(WorkerGoneError):
        HostMemory(replace(exhibit, started=exhibit.started + 1))


@pytest.mark.parametrize("change", ["inode", "device"])
def test_a_segment_that_the_worker_does_not_hold_is_refused(change: str, memory: WorkerMemory) -> None:
    a = tensors.empty(4)
    exhibit = shown(memory, a=a)
    (segment,) = exhibit.segments
    wrong = replace(segment, **{change: getattr(segment, change) + 1000003})
    with pytest.raises(ReachError, match="no descriptor"):
        HostMemory(replace(exhibit, segments=(wrong,)))


def test_a_segment_of_another_size_or_without_seals_is_refused(memory: WorkerMemory) -> None:
    a = tensors.empty(4)
    exhibit = shown(memory, a=a)
    (segment,) = exhibit.segments
    with pytest.raises(RegistrationError, match="bytes"):
        HostMemory(replace(exhibit, segments=(replace(segment, nbytes=segment.nbytes * 2),)))
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 4096)
    info = os.fstat(fd)
    unsealed = replace(segment, nbytes=4096, device=info.st_dev, inode=info.st_ino)
    with pytest.raises(RegistrationError, match="sealed"):
        HostMemory(replace(exhibit, segments=(unsealed,)))
    os.close(fd)


def test_a_tensor_outside_of_its_segment_is_refused(memory: WorkerMemory) -> None:
    a = tensors.empty(4)
    exhibit = shown(memory, a=a)
    handle = exhibit.tensors["a"]
    for wrong in (msgspec.structs.replace(handle, offset=1 << 40), msgspec.structs.replace(handle, segment="ab" * 8)):
        with pytest.raises(RegistrationError):
            HostMemory(replace(exhibit, tensors={"a": wrong}))


def test_private_memory_that_is_not_there_is_found_out_at_once(memory: WorkerMemory) -> None:
    a = torch.empty(4)
    exhibit = shown(memory, a=a)
    unreadable = TensorHandle(segment=None, offset=4096, shape=(4,), strides=(1,), dtype="float32")
    with pytest.raises(FaultError):
        HostMemory(replace(exhibit, tensors={"a": unreadable}))


def test_no_descriptor_is_left_open(memory: WorkerMemory) -> None:
    a, b = tensors.empty(1 << 20), torch.empty(4)
    exhibit = shown(memory, a=a, b=b)
    before = len(list(Path("/proc/self/fd").iterdir()))
    HostMemory(exhibit).close()
    (segment,) = exhibit.segments
    with pytest.raises(ReachError):
        HostMemory(replace(exhibit, segments=(segment, replace(segment, id="ab", inode=segment.inode + 1000003))))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ---- who copies what --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(examples(40)))
async def test_local_host_and_tcp_mixed_equal_simulate(seed: int) -> None:
    """Any pairs of agents read each other, the others send."""
    job = random_job(500 + seed, partial=0.5, hosts=True)
    job.streams, job.staging = 2, 256 << 20
    expected = job.expected()
    async with agents("abc", streams=2) as at:
        await transfer(job, at)
    same(job.target, expected)


def test_the_receiver_does_it_all_and_nothing_is_sent() -> None:
    job = rows(2, 2, (128, 64), Shard(1), "ab", "ab", reads=frozenset({("a", "b"), ("b", "a")}))
    expected = job.expected()
    for name in "ab":
        assert job.wire(name).empty
        run_here(job.here(name))
    same(job.target, expected)


def test_every_agent_that_reads_all_contributions_reduces_for_its_own_targets() -> None:
    both = frozenset({("a", "b"), ("b", "a")})
    job = partial(3, (65, 33), "ab", "ab", reads=both)
    expected = job.expected()
    for name in "ab":
        assert job.wire(name).empty
        run_here(job.here(name))
    same(job.target, expected)
    assert bits(job.target[0]["t00"]) == bits(job.target[1]["t00"])


async def test_an_agent_that_cannot_read_everything_gets_results_from_the_owner() -> None:
    """c reads nobody: a reduces, reading b in place, and sends to c once; b reduces for itself."""
    job = partial(2, (64, 64), "ab", "bcc", reads=frozenset({("a", "b"), ("b", "a")}))
    expected = job.expected()
    async with agents("abc") as at:
        await transfer(job, at)
        nbytes = 2 * 64 * 64 * 4
        assert at["c"].plane.traffic["a"].received + at["c"].plane.traffic["b"].received == nbytes
        assert at["a"].plane.traffic["b"].sent == at["b"].plane.traffic["a"].sent == 0
    same(job.target, expected)
