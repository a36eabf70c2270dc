"""What EthaSource makes of transformers' modules is what save_pretrained writes, and nothing of it is a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

pytest.importorskip("vllm")
from safetensors.torch import load_file

from etha.errors import ConfigError
from etha.integrations.vllm import EthaSource
from etha.plan import Layout
from tests.vllm.models import families
from tests.vllm.nursery import Child

#: Why a family is refused: the operation of transformers that shows no view.
REFUSED = {
    "Ernie4_5_VLMoeForConditionalGeneration": "e_score_correction_bias.*Concatenate",
    "Ernie4_5_VL_MoeForConditionalGeneration": "e_score_correction_bias.*Concatenate",
    "Step3p7ForConditionalGeneration": "in_proj.*Concatenate, PermuteForRope",
}


def written(model: Any, path: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(path)
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def check(model: Any, path: Path, source: EthaSource | None = None) -> None:
    """The source's tensors are the checkpoint's, and views."""
    truth = written(model, path)
    source = source or EthaSource(model)
    mine = source.tensors()
    assert mine.keys() == truth.keys()
    for name, tensor in truth.items():
        assert mine[name].shape == tensor.shape, name
        assert torch.equal(mine[name], tensor), name
    memory = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert {tensor.untyped_storage().data_ptr() for tensor in mine.values()} <= memory
    assert {meta.name: meta.shape for meta in source.metadata()} == {name: tuple(t.shape) for name, t in truth.items()}


@pytest.mark.parametrize("kind", families.kinds())
def test_every_family_with_experts(kind: str, tmp_path: Path) -> None:
    name = kind.partition(":")[2]
    if name in families.UNMADE:
        pytest.skip(families.UNMADE[name])
    model = families.make(kind)
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            EthaSource(model).tensors()
    else:
        check(model, tmp_path)


def test_a_loaded_model_goes_back_to_the_names_that_it_was_loaded_from(tmp_path: Path) -> None:
    from transformers import MixtralForCausalLM

    families.make("mixtral.modeling_mixtral:MixtralForCausalLM").save_pretrained(tmp_path)
    model = MixtralForCausalLM.from_pretrained(tmp_path)
    names = EthaSource(model).tensors().keys()
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names
    check(model, tmp_path / "again")


def test_a_model_inside_another_module_and_inside_wrappers(tmp_path: Path) -> None:
    """Names outside of transformers' model stay; rules apply to what transformers saves."""
    model = families.make("mixtral.modeling_mixtral:MixtralForCausalLM")
    whole = torch.nn.Module()
    whole.policy, whole.value = torch.compile(model), torch.nn.Linear(2, 1)
    truth = written(model, tmp_path)
    mine = EthaSource(whole, names={r"^policy\.": ""}).tensors()
    assert mine.keys() == truth.keys() | {"value.weight", "value.bias"}
    assert mine["value.weight"] is whole.value.weight, "what is not of transformers is as it is"
    assert mine["model.norm.weight"] is model.model.norm.weight, "what is not changed is the parameter itself"


def test_some_of_the_experts_as_a_plain_tensor_are_refused() -> None:
    """Of every rank they would be taken for the model's first ones."""
    model = families.make("mixtral.modeling_mixtral:MixtralForCausalLM")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach()[2:])
    with pytest.raises(ConfigError, match=r"'model\.layers\.1\.mlp\.experts\.down_proj' holds 2 experts .* has 4"):
        EthaSource(model).tensors()


def test_memory_that_views_were_given_of_and_that_has_moved_is_seen() -> None:
    model = families.make("mixtral.modeling_mixtral:MixtralForCausalLM")
    source = EthaSource(model)
    source.tensors()
    before = source.places()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    stacked = model.model.layers[1].mlp.experts.gate_up_proj
    stacked.data = stacked.data.clone()
    now = source.places()
    assert [key for key in now if now[key] != before[key]] == [name]
    assert source.tensors()["model.layers.1.block_sparse_moe.experts.0.w1.weight"].data_ptr() == stacked.data_ptr()


def _as_rank(pipe: Connection, rank: int, world: int, work: Callable[..., EthaSource], *arguments: Any) -> None:
    """This process as one rank of ``world``, whose collectives do nothing: what it holds, and what it announces."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        source = work(*arguments)
        held = [
            (name, tuple(t.shape), t.device_mesh.mesh.tolist(), t.placements, t._local_tensor.detach().float().numpy())
            for name, t in source.tensors().items()
            if isinstance(t, DTensor)
        ]
        pipe.send((held, source.metadata()))
    except ConfigError as error:
        pipe.send(error)


def _assemble(world: int, env: dict[str, str], log: Path, work: Any, *arguments: Any) -> dict[str, torch.Tensor]:
    """Each tensor of what every rank of ``world`` holds of it; all ranks announce all of them."""
    found: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    announced: list[list[Any]] = []
    for rank in range(world):
        child = Child(_as_rank, rank, world, work, *arguments, env=env, log=log / f"rank{rank}")
        try:
            held, metas = child.hear()
        finally:
            child.end()
        announced.append(metas)
        for name, shape, mesh, placements, local in held:
            runs = Layout(mesh, placements).owned(shape, rank)
            assert runs is not None, f"rank {rank} gives {name!r}, which its layout says that it does not hold"
            whole = found.setdefault(name, torch.zeros(shape))
            seen = filled.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            indices = [torch.tensor([i for a, b in dim for i in range(a, b)], dtype=torch.int64) for dim in runs]
            assert local.shape == tuple(len(of) for of in indices)
            where = torch.meshgrid(*indices, indexing="ij")
            whole[where] = torch.from_numpy(local)
            seen[where] = True
    assert all(reported == announced[0] for reported in announced)
    assert {meta.name for meta in announced[0]} == found.keys()
    assert all(bool(seen.all()) for seen in filled.values())
    return found


MIXTRAL = "mixtral.modeling_mixtral:MixtralForCausalLM"


def _fsdp2(kind: str, shape: tuple[int, ...]) -> EthaSource:
    model = families.make(kind)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.model, mesh=mesh)  # FSDP2 makes a class of its own of it, that transformers does not know
    fully_shard(model, mesh=mesh)
    return EthaSource(model, buffers=False)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (MIXTRAL, (1,)),
        (MIXTRAL, (3,)),
        ("deepseek_v3.modeling_deepseek_v3:DeepseekV3ForCausalLM", (4,)),
        (MIXTRAL, (5,)),
        ("deepseek_v3.modeling_deepseek_v3:DeepseekV3ForCausalLM", (2, 2)),
    ],
)
def test_experts_of_a_sharded_module(
    kind: str, shape: tuple[int, ...], env: dict[str, str], tmp_path: Path, logs: Path
) -> None:
    """FSDP2 shards the dim of the experts, evenly or not, over more ranks than experts, or in replicas (HSDP)."""
    truth = written(families.make(kind), tmp_path)
    found = _assemble(torch.Size(shape).numel(), env, logs, _fsdp2, kind, shape)
    assert found.keys() <= truth.keys()
    missing = truth.keys() - found.keys()
    assert all(name.endswith("e_score_correction_bias") for name in missing), "a buffer, which FSDP2 does not shard"
    for name, tensor in found.items():
        assert torch.equal(tensor, truth[name].float()), name


def _by(placements: Sequence[Shard], world: tuple[int, ...]) -> EthaSource:
    model = families.make(MIXTRAL)
    mesh = init_device_mesh("cpu", world)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            at = placements if parameter.ndim == 3 else [Shard(0)] * len(world)
            shard = distribute_tensor(parameter.detach(), mesh, at, src_data_rank=None)
            module.register_parameter(name, torch.nn.Parameter(shard))
    return EthaSource(model)


@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (0, 2), (2, 1), (1, 2)])
def test_experts_over_two_axes(dims: tuple[int, int], env: dict[str, str], tmp_path: Path, logs: Path) -> None:
    """Stacked experts over 2 x 2 ranks, by any dims: the experts', that of gate and up, and the third."""
    truth = written(families.make(MIXTRAL), tmp_path)
    found = _assemble(4, env, logs, _by, [Shard(dim) for dim in dims], (2, 2))
    assert found.keys() == truth.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, truth[name].float()), name


def test_halves_that_no_placement_describes_are_refused(env: dict[str, str], logs: Path) -> None:
    """Over three ranks, gate and up of an expert lie in uneven pieces: no Shard has these."""
    with pytest.raises(ConfigError, match=r"experts\.0\.w1\.weight'.* of dim 1 .*no placement describes"):
        _assemble(3, env, logs, _by, [Shard(1)], (3,))
