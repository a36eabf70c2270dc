"""A mesh with one more dim: replicas that come and go."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from etha.errors import GroupError
from etha.groups.base import ProcessGroup


def extend_device_mesh(mesh: DeviceMesh, pg: ProcessGroup, name: str = "dp", dim: int = 0) -> DeviceMesh:
    """``mesh`` with a dim ``name`` at ``dim`` whose group is ``pg``; ``pg`` is registered if it is not.

    The new dim has size 1 whatever the size of the group, because the group's members change. So DTensor does nothing
    along it: ``Partial`` to ``Replicate`` along it is local. FSDP2 and DDP call the group itself and are right.
    """
    names = list(mesh.mesh_dim_names or ())
    if mesh.ndim and len(names) != mesh.ndim:
        raise GroupError("the mesh needs names of its dims: init_device_mesh(..., mesh_dim_names=(...))")
    if name in names:
        raise GroupError(f"the mesh has a dim {name!r} already")
    if not pg.group_name:
        pg.register(name)
    groups: list[Any] = list(mesh.get_all_groups())
    groups.insert(dim, pg)
    names.insert(dim, name)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh.unsqueeze(dim), mesh_dim_names=tuple(names))
