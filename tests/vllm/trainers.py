"""Trainers of any shape that send a checkpoint's weights from where their layout has them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.vllm.checkpoints import Checkpoint
from tests.vllm.nursery import Child, kill_group, serve

#: Of one engine, or of several.
Urls = str | Sequence[str]


class Trainer:
    """The ranks of one trainer, one process each."""

    def __init__(self, shape: Sequence[int], model: Path, url: Urls, env: dict[str, str], logs: Path, **info: Any):
        """``shape``: () plain, (n,) FSDP2 over n ranks, (n, t) FSDP2 over n times tensor-parallel t.

        ``stages``: each of the n ranks has a layer of the model ("held", "iterated"), or all of it, and knows nothing
        of the others ("alone"). ``adapted``: the model is a module of peft with an adapter, that of this directory.
        ``quantizes``: the trainer sends int8 and scales of what it has.
        """
        world = torch.Size(shape).numel()
        meeting = logs / f"meeting-{os.urandom(4).hex()}"
        self.ranks = [
            Child(_train, rank, tuple(shape), str(meeting), str(model), url, info, env=env, log=logs / f"trainer{rank}")
            for rank in range(world)
        ]

    def join(self, *extra: str) -> None:
        """Meet the engine, on all ranks; a plain trainer with tensors that are none of the model's, too."""
        self._all("join", *extra)

    def send(self, model: Path, version: int | str | None = None) -> list[Any]:
        """Take ``model``'s weights and bring them in; each rank's (version, number, peak of memory).

        Of several engines, each rank's outcomes: None, or an error.
        """
        return self._all("send", str(model), version)

    def move(self) -> None:
        """All ranks have their modules' parameters in other memory from here on."""
        self._all("move")

    def _all(self, *message: Any) -> list[Any]:
        for rank in self.ranks:
            rank.send(*message)
        return [rank.hear() for rank in self.ranks]

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def end(self) -> None:
        """Leave, all ranks, in good order."""
        for rank in self.ranks:
            rank.pipe.close()
        for rank in self.ranks:
            rank.end()


def _train(
    pipe: Connection, rank: int, shape: tuple[int, ...], meeting: str, path: str, url: Urls, info: dict[str, Any]
) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from etha.integrations.vllm import EthaSource, EthaTrainerInitInfo

    torch.set_num_threads(1)
    stages, adapted = info.pop("stages", None), info.pop("adapted", None)
    quantizes = info.pop("quantizes", False)
    model = None if stages else _model(path, shape, rank, meeting, adapted)
    world = torch.Size(shape).numel()
    engines: list[Any] = []
    int8: list[Int8] = []

    def answer(what: str, *arguments: Any) -> Any:
        if what == "join late":
            _hold_back(pipe)
        if what == "dies at":
            _die_at(*arguments)
            return None
        if what.startswith("join"):
            extra = {name: torch.ones(1, 8) for name in arguments}
            plain = {**Checkpoint(Path(path)).tensors(), **extra}
            source: Any = EthaSource(plain) if model is None else ModuleSource(model)
            if stages in ("held", "iterated"):
                source = _stage(stages, plain, rank, torch.Size(shape).numel(), meeting)
            if quantizes:
                int8.append(Int8(model))
                source = EthaSource(int8[0].state)
            reported = EthaTrainerInitInfo(rank=rank, pair="weights", world_size=world, **info)
            one = isinstance(url, str)
            client: Any = HTTPVLLMWeightSyncClient(url) if one else [HTTPVLLMWeightSyncClient(each) for each in url]
            engines.append(WeightTransferTrainerFactory.trainer_init(reported, client=client, source=source))
            return None
        (engine,) = engines
        if what == "verify":
            result = engine.verify()
            return [] if isinstance(url, str) else sorted(result.failed)
        if what == "kill":
            _kill_before(engine, *arguments[2:])
            arguments = arguments[:2]
        if what == "die at":
            _die_at(*arguments[:3])
            arguments = arguments[3:]
        if what == "die in the transfer":
            _die_when_bytes_move(engine)
        if what == "send, and say when it waits":
            _say_when_it_waits(engine, pipe)
        path_of_version, version = arguments
        tensors = engine.source.weights if stages == "iterated" else engine._weights.tensors()
        _take(int8[0].plain if int8 else dict(tensors), Checkpoint(Path(path_of_version)))
        for quantized in int8:
            quantized.refresh()
        forget_peak()
        before = memory("VmRSS")
        result = engine.send_weights(version)
        if not isinstance(url, str):
            return [result.failed.get(number) for number in range(len(url))]
        return result.version, result.seq, memory("VmHWM") - before

    try:
        serve(pipe, answer)
    finally:
        for engine in engines:
            engine.shutdown()


class Int8:
    """What docs/vllm.md has a trainer do that sends int8 and scales."""

    def __init__(self, model: Any) -> None:
        from etha.integrations.vllm import EthaSource

        self.plain = dict(EthaSource(model))
        self.state: dict[str, torch.Tensor] = {}
        for name, weight in self.plain.items():
            if name.endswith("_proj.weight"):
                self.state[name], self.state[f"{name}_scale"] = self.quantized(weight)
            else:
                self.state[name] = weight

    @torch.no_grad()
    def quantized(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (weight.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12)
        return (weight.float() / scale).round().to(torch.int8), scale

    def refresh(self) -> None:
        for name, weight in self.plain.items():
            if name.endswith("_proj.weight"):
                number, scale = self.quantized(weight)
                self.state[name].copy_(number)
                self.state[f"{name}_scale"].copy_(scale)


def _stage(stages: str, plain: dict[str, torch.Tensor], rank: int, world: int, meeting: str) -> Any:
    """The source of one stage of a pipeline, a layer each; "iterated": of a class of the user's own.

    The last stage has the embeddings, too, where the head is tied to them.
    """
    from etha.integrations.vllm import EthaSource

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    mine = {}
    for name, tensor in plain.items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        if layer == rank or (layer is None and ("embed" in name or rank == world - 1)):
            mine[name] = tensor.float()
    return EthaSource(mine) if stages == "held" else _own(plain, mine)


def _own(plain: dict[str, torch.Tensor], mine: dict[str, torch.Tensor]) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Own(WeightSource):
        """Knows the whole model, holds a part of it, and gives a new tensor of each every time."""

        weights = mine

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, torch.float32, tuple(tensor.shape)) for name, tensor in plain.items()]

        def held_names(self) -> set[str]:
            return set(mine)

        def __iter__(self) -> Any:
            return ((name, mine[name].clone() if name in mine else None) for name in plain)

    return Own()


def _model(path: str, shape: tuple[int, ...], rank: int, meeting: str, adapted: Path | None) -> nn.Module | None:
    """A Qwen3 over the mesh; None for a trainer that has plain tensors by name."""
    if not shape:
        return None
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import Qwen3ForCausalLM

    world = torch.Size(shape).numel()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    model: Any = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    if adapted is not None:
        return fully_shard(Adapted(model, Checkpoint(adapted).tensors()))  # type: ignore[return-value]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    for layer in model.model.layers:
        if len(shape) == 2:
            columns = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
            columns |= {f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
            rows = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], {**columns, **rows})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


class Adapted(nn.Module):
    """A model with an adapter in it, with the names that peft has: each layer that is adapted, its own inside."""

    def __init__(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        for name, tensor in tensors.items():
            path, _, leaf = name.removesuffix(".weight").rpartition(".")
            layer = self.get_submodule(path)
            if isinstance(layer, nn.Linear):
                layer, inner = nn.Module(), layer
                layer.base_layer = inner
                self.set_submodule(path, layer)
            linear = nn.Linear(*reversed(tensor.shape), bias=False)
            setattr(layer, leaf, nn.ModuleDict({"default": linear, "other": nn.Linear(2, 2)}))


@torch.no_grad()
def _take(tensors: dict[str, torch.Tensor], checkpoint: Checkpoint) -> None:
    """Set every tensor to the checkpoint's, each rank its own part of it."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, value in checkpoint.tensors().items():
        if name not in tensors:
            continue  # another stage's
        mine = tensors[name]
        if isinstance(mine, DTensor):
            value = distribute_tensor(value.to(mine.dtype), mine.device_mesh, mine.placements, src_data_rank=None)
        mine.copy_(value)


def _say_when_it_waits(engine: Any, pipe: Connection) -> None:
    """Tell the test when the engine has been asked to receive, and send nothing."""

    async def reported(*arguments: Any, **options: Any) -> Any:
        pipe.send("waits")
        await asyncio.Event().wait()

    engine._bus.transfer = reported


def _die_at(route: str, number: int, moment: str) -> None:
    """SIGKILL to this rank when its ``number``th request from now to ``route`` is "sent", or "answered"."""
    from urllib3.connection import HTTPConnection  # type: ignore[import-not-found]

    asked, answered = HTTPConnection.request, HTTPConnection.getresponse
    seen: list[str] = []

    def request(self: Any, method: str, url: str, *arguments: Any, **options: Any) -> Any:
        seen.append(url.partition("?")[0])
        return asked(self, method, url, *arguments, **options)

    def getresponse(self: Any, *arguments: Any, **options: Any) -> Any:
        here = seen[-1] == route and seen.count(route) == number
        if here and moment == "sent":
            os.kill(os.getpid(), 9)
        answer = answered(self, *arguments, **options)
        if here:
            os.kill(os.getpid(), 9)
        return answer

    HTTPConnection.request, HTTPConnection.getresponse = request, getresponse  # type: ignore[method-assign]


def _die_when_bytes_move(engine: Any) -> None:
    """SIGKILL to this rank as soon as its transfer reports bytes, while others still move."""
    transfer = engine._bus.transfer

    async def last(*arguments: Any, **options: Any) -> Any:
        return await transfer(*arguments, **options, progress=lambda done, total: os.kill(os.getpid(), 9))

    engine._bus.transfer = last


def _hold_back(pipe: Connection) -> None:
    """This rank tells that it is to meet the engine, as the others do, and waits for a word of the test first."""
    from etha.integrations.vllm.trainer.replica import Replica

    join = Replica._join

    async def late(self: Replica) -> Any:
        pipe.send("holds")
        await asyncio.to_thread(pipe.recv)
        return await join(self)

    Replica._join = late  # type: ignore[method-assign]


def _kill_before(engine: Any, call: str, pid: int) -> None:
    """SIGKILL to the process ``pid`` and its group, once, before the engine is asked to do ``call``."""
    killed: list[int] = []

    def kill() -> None:
        if not killed:
            killed.append(pid)
            kill_group(pid)

    control = engine._replicas._control
    say, client = control._say, engine.client
    update, finish = client.update_weights, client.finish_weight_update

    def said(route: str, method: str, **arguments: Any) -> None:
        if route == call:
            kill()
        say(route, method, **arguments)

    def updated(reported: dict[str, Any]) -> None:
        if call == ("release" if "release" in reported else "update_weights"):
            kill()
        update(reported)

    def finished(*arguments: Any) -> None:
        if call == "finish_weight_update":
            kill()
        finish(*arguments)

    control._say, client.update_weights, client.finish_weight_update = said, updated, finished


def forget_peak(pid: int | str = "self") -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def memory(field: str, pid: int | str = "self") -> int:
    """Bytes of one field of a process's status: VmRSS now, VmHWM at its peak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in the status of {pid}")
