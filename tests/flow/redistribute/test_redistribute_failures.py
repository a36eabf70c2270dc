"""A rank dies while others redistribute: they hear of it from the process group, long before its timeout."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import etha
from tests.flow.jobs import Job, WorkerFailed, tell, wait_for

RANKS = 3
TIMEOUT = 300.0


def rank_of(rank: int, store: str, size: int, source: Placement, target: Placement) -> tuple[str, float]:
    """Redistributes once with all ranks, and once more when the last one is dead: (error, seconds until it came)."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),  # type: ignore[attr-defined]
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT),
    )
    mesh = DeviceMesh("cpu", torch.arange(RANKS))
    shape = (RANKS, size) if source == Partial() else (1, size)
    given = DTensor.from_local(torch.ones(shape), mesh, [source], run_check=False)
    etha.redistribute(given, placements=[target])
    tell("moved")
    wait_for("again")
    began = time.monotonic()
    try:
        etha.redistribute(given, placements=[target])
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


@pytest.mark.parametrize("size", [16, 1 << 20], ids=["collective", "in-place"])
@pytest.mark.parametrize(("source", "target"), [(Partial(), Replicate()), (Shard(0), Replicate())], ids=str)
def test_a_rank_that_dies_is_an_error_for_the_others(
    tmp_path: Path, size: int, source: Placement, target: Placement
) -> None:
    with Job({"GLOO_SOCKET_IFNAME": "lo"}) as job:
        workers = [job.start(rank_of, rank, str(tmp_path / "store"), size, source, target) for rank in range(RANKS)]
        for worker in workers:
            worker.expect("moved")
        workers[-1].kill()
        with pytest.raises(WorkerFailed):
            workers[-1].result()
        for worker in workers[:-1]:
            worker.go("again")
        for worker in workers[:-1]:
            error, seconds = worker.result()
            assert error and seconds < TIMEOUT / 10, (error, seconds)
