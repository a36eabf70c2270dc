"""This worker's place in its side: rank, world size, launch, and the ranks of its torch world.

Explicit arguments win, then ``torch.distributed``, then the launcher's environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from etha.client.arguments.checks import check_rank, check_ranks, shown
from etha.config import LaunchEnv
from etha.errors import ConfigError, LayoutError
from etha.plan import Layout

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """This worker in one side. ``ranks`` maps torch world ranks to side ranks; None is the identity."""

    rank: int
    world_size: int
    launch: str | None
    ranks: Mapping[int, int] | None
    #: torchrun's run id, if the launch's id is made of it.
    run: str | None = None
    #: ETHA_TAKEOVER.
    takeover: bool = False

    @classmethod
    def of(
        cls, *, world_size: int | None, rank: int | None, ranks: Mapping[int, int] | None, env: LaunchEnv
    ) -> RankInfo:
        """Fill in missing arguments; ConfigError names what does not fit."""
        world = dist.is_available() and dist.is_initialized()
        if world_size is None:
            world_size = dist.get_world_size() if world else (1 if env.world_size is None else env.world_size)
        if rank is None:
            rank = dist.get_rank() if world else (0 if env.rank is None else env.rank)
        check_rank(rank, world_size)
        check_ranks(ranks)
        if ranks is None and world and (shift := rank - dist.get_rank()) != 0:
            ranks = {r: r + shift for r in range(dist.get_world_size())}
        return cls(
            rank=rank, world_size=world_size, launch=env.launch_id, ranks=ranks, run=env.run_id, takeover=env.takeover
        )

    def layout_of(self, mesh: DeviceMesh | torch.Tensor | tuple[int, ...], placements: Sequence[Placement]) -> Layout:
        """A layout over ``mesh``: a mesh or table of torch world ranks, or a plain shape over side ranks."""
        if isinstance(mesh, tuple):
            return self.check(Layout(mesh, tuple(placements)))
        table: Any = mesh.mesh if isinstance(mesh, DeviceMesh) else check_mesh(mesh)
        return self.translate(Layout(table.tolist(), tuple(placements)))

    def translate(self, layout: Layout) -> Layout:
        """``layout`` in ranks of the side instead of the torch world."""
        return self.check(layout if self.ranks is None else layout.translate(self.ranks))

    def check(self, layout: Layout) -> Layout:
        """``layout`` itself; LayoutError if it names ranks outside the side."""
        strangers = sorted(r for r in layout.ranks.reshape(-1).tolist() if r >= self.world_size)
        if strangers:
            raise LayoutError(
                f"the mesh names ranks {strangers[:8]} outside the side's {self.world_size}; give "
                f"expected_world_size= (or set WORLD_SIZE) if the side has more ranks, or "
                f"ranks={{torch world rank: rank in the side}} if they are numbered otherwise"
            )
        return layout


def check_takeover(takeover: object) -> bool:
    """``takeover`` itself; ConfigError if it is not a bool."""
    if not isinstance(takeover, bool):
        raise ConfigError(f"takeover={takeover!r} is neither True nor False")
    return takeover


def device_of(device: torch.device | str | None) -> torch.device:
    """The device: the given one, else the current CUDA device, else the CPU. ConfigError if it is not a device."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"device={shown(device)}: {str(error).splitlines()[0]}") from None


def check_mesh(mesh: Any) -> Any:
    """``mesh`` itself, or ConfigError: a DeviceMesh, a shape as a tuple, or ranks as a tensor or an array."""
    if not isinstance(mesh, DeviceMesh | torch.Tensor | np.ndarray | tuple):
        raise ConfigError(
            f"device_mesh={shown(mesh)} must be a DeviceMesh, a tensor of ranks such as torch.tensor([0, 1]), or the "
            f"shape of a mesh over ranks 0 to n-1 as a tuple such as (2,)"
        )
    return mesh
