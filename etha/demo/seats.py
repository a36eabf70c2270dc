"""Where a rank of the demo computes, and by which backends its job's process group communicates.

cpu     everything on the host, gloo
cuda    ranks round robin over the GPUs, the inference job's after the trainer's; NCCL for tensors on a GPU. NCCL
        refuses two ranks of one host on one GPU, so ranks of a job that share one say that they are hosts of their own,
        and talk over loopback. (gloo cannot stand in: with tensors on a GPU its gathering ends the process.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from etha import ConfigError
from etha.demo.options import RANKS, Options


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSeat:
    """``device`` is "cpu" or "cuda:N". ``backend`` is for ``init_process_group``; CPU tensors always use gloo.

    ``host``: the name of a host of its own for NCCL; "" if it shares no GPU with another rank of its job.
    """

    device: str
    backend: str
    host: str = ""

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda", for making meshes."""
        return self.device.partition(":")[0]

    def take(self) -> None:
        """Make it this process's device, before the process group and meshes, which would choose one themselves."""
        if self.host:
            alone = {"NCCL_HOSTID": self.host, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
            os.environ.update(alone)
        if self.kind == "cuda":
            torch.cuda.set_device(self.device)
            torch.empty(0, device=self.device)  # from here on the device counts as chosen


def seat(job: str, rank: int, options: Options) -> DemoSeat:
    if options.device == "cpu":
        return DemoSeat(device="cpu", backend="gloo")
    before = sum(RANKS[other] for other in list(RANKS)[: list(RANKS).index(job)])
    host = f"{job}-{rank}" if RANKS[job] > options.cards else ""
    return DemoSeat(device=f"cuda:{(before + rank) % options.cards}", backend="cpu:gloo,cuda:nccl", host=host)


def cards(device: str) -> int:
    """Number of GPUs that the demo takes: all for ``device`` "cuda", otherwise none. ConfigError for "cuda" without a
    GPU."""
    if device != "cuda":
        return 0
    found = torch.cuda.device_count()
    if found == 0:
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} sees no GPU here; `etha doctor` says more, "
            f"and --device cpu runs the same demo on the host"
        )
    return int(found)
