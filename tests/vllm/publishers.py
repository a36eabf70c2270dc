"""A trainer that publishes a checkpoint's tensors, as a process that a test tells what to put."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.vllm.checkpoints import Checkpoint
from tests.vllm.nursery import Child, serve

PUBLICATION = "policy"


class Publisher:
    """One process that publishes the tensors of ``model``; versions are checkpoints with the same tensors."""

    def __init__(self, model: Path, env: dict[str, str], log: Path, name: str = PUBLICATION, **how: Any) -> None:
        """``dtype``: of all tensors, that of the file if it is not given. ``cut``: a tensor that loses its last row.
        ``without``: a tensor that is not published."""
        self.child = Child(_publish, name, str(model), how, env=env, log=log)
        self.child.hear()

    def put(self, model: Path, version: int | str | None = None, **how: Any) -> int:
        """Set ``model``'s tensors aside as the next version; its seq."""
        return int(self.child.ask("put", str(model), version, how))

    def subscribers(self) -> dict[str, Any]:
        """name -> (state, version), by name."""
        return dict(self.child.ask("subscribers"))

    def kill(self) -> None:
        self.child.kill()


def _tensors(path: str, dtype: str | None = None, cut: str | None = None, without: str | None = None) -> dict[str, Any]:
    import torch

    found = Checkpoint(Path(path)).tensors()
    if dtype is not None:
        found = {name: tensor.to(getattr(torch, dtype)) for name, tensor in found.items()}
    if cut is not None:
        found[cut] = found[cut][:-1].clone()
    if without is not None:
        del found[without]
    return found


def _publish(pipe: Connection, name: str, path: str, how: dict[str, Any]) -> None:
    import torch
    from torch.distributed.tensor import Replicate

    from etha import TensorBusClient

    torch.set_num_threads(1)
    client = TensorBusClient(device="cpu", timeout=120.0)
    tensors = _tensors(path, **how)
    whole = {one: [Replicate()] for one in tensors}
    publication = client.publish(name, tensors, expected_world_size=1, rank=0, device_mesh=(1,), placements=whole)
    pipe.send("publishes")

    def answer(what: str, *arguments: Any) -> Any:
        if what == "subscribers":
            return [(one.name, (one.state, one.version)) for one in publication.subscribers()]
        model, version, options = arguments
        for tensor_name, tensor in _tensors(model, **how).items():
            tensors[tensor_name].copy_(tensor)
        return publication.put(version, **options).seq

    try:
        serve(pipe, answer)
    finally:
        client.close()
