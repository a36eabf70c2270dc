"""Which tensors of a module are given, under which names; one process, at most with a fake world around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from etha.errors import ConfigError
from etha.integrations.fsdp import named_tensors

#: torch.compile's own imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class Block(nn.Module):
    """A layer, norm statistics that a checkpoint has, and a table that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) + self.mean
        return y


class Model(nn.Module):
    """Two blocks and a head tied to the embedding; ``module`` is a name like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.module = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(self.module(x))
        return y


NAMES = [
    "embedding.weight",
    "blocks.0.mean",
    "blocks.0.linear.weight",
    "blocks.1.mean",
    "blocks.1.linear.weight",
    "module.weight",
    "module.bias",
]


@contextmanager
def pretend(rank: int, ranks: int) -> Iterator[None]:
    """A world whose other ranks are not there: collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def world() -> Iterator[None]:
    with pretend(0, 2):
        yield


def test_a_plain_module_gives_its_checkpoint_each_tensor_once() -> None:
    model = Model()
    found = named_tensors(model)
    assert list(found) == NAMES
    state = model.state_dict(keep_vars=True)
    assert [name for name in state if name in found] == NAMES, "the order is that of the checkpoint"
    assert set(state) - set(found) == {"head.weight"}
    assert all(found[name] is state[name] for name in NAMES), "the module's own tensors"


def test_buffers_are_left_out_on_request() -> None:
    assert list(named_tensors(Model(), buffers=False)) == [name for name in NAMES if "mean" not in name]


def test_one_buffer_in_two_places_comes_once() -> None:
    model = Model()
    model.blocks[1].mean = model.blocks[0].mean
    assert list(named_tensors(model)) == [name for name in NAMES if name != "blocks.1.mean"]


def test_a_module_in_two_places_comes_once() -> None:
    model = Model()
    model.blocks[1] = model.blocks[0]
    assert list(named_tensors(model)) == [name for name in NAMES if "blocks.1" not in name]


def test_equal_memory_is_not_a_tie_as_other_ranks_could_not_see_it() -> None:
    model = Model()
    model.head.weight = nn.Parameter(model.embedding.weight.detach())
    assert list(named_tensors(model)) == [*NAMES, "head.weight"]


def test_prefixes_of_wrappers_are_left_out_wherever_they_are() -> None:
    model = Model()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(checkpoint_wrapper(model.blocks[1]))
    assert list(named_tensors(model)) == NAMES
    assert list(named_tensors(torch.compile(model))) == NAMES
    assert list(named_tensors(nn.DataParallel(torch.compile(model)))) == NAMES


def test_data_parallel_modules_have_the_names_of_what_they_wrap(world: None) -> None:
    wrapped = nn.parallel.DistributedDataParallel(Model())
    assert list(named_tensors(wrapped)) == NAMES
    assert list(named_tensors(torch.compile(wrapped))) == NAMES


def test_a_wrappers_name_that_hides_another_is_refused() -> None:
    model = nn.DataParallel(Block())
    model.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    model.module.bias = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match="two tensors of the module are called 'bias'"):
        named_tensors(model)


def test_names_are_mapped_after_ties_and_prefixes() -> None:
    rules = {r"^(embedding|blocks|module)\.": r"model.\1.", r"^model\.module": "model.out"}
    found = named_tensors(torch.compile(Model()), names=rules)
    assert list(found)[:2] == ["model.embedding.weight", "model.blocks.0.mean"] and "model.out.bias" in found


def test_rules_may_speak_of_the_other_name_of_a_tie_and_of_buffers_left_out() -> None:
    rules = {r"^head\.": "lm_head.", "mean$": "running_mean", "table$": "inv_freq"}
    assert list(named_tensors(Model(), names=rules, buffers=False)) == [n for n in NAMES if "mean" not in n]
    assert "blocks.0.running_mean" in named_tensors(Model(), names=rules)


def test_rules_that_match_nothing_or_make_two_names_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="'layers' -> 'blocks' matches none of the 10 names"):
        named_tensors(Model(), names={"layers": "blocks"})
    with pytest.raises(ConfigError, match=r"'blocks.0.mean' and 'blocks.1.mean' both become 'blocks.mean'"):
        named_tensors(Model(), names={r"blocks\.\d": "blocks"})


def test_only_modules_are_taken() -> None:
    with pytest.raises(ConfigError, match=r"needs a torch\.nn\.Module, not a OrderedDict"):
        named_tensors(Model().state_dict())  # type: ignore[arg-type]
    assert named_tensors(nn.Module()) == {}


def test_fsdp2_gives_its_shards_also_while_the_module_holds_whole_parameters(world: None) -> None:
    model = Model()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model)
    found = named_tensors(model)
    assert list(found) == NAMES
    assert all(isinstance(tensor, DTensor) != name.endswith("mean") for name, tensor in found.items())
    model.unshard()
    model.blocks[0].unshard()
    assert not isinstance(model.embedding.weight, DTensor) and not isinstance(model.blocks[0].linear.weight, DTensor)
    again = named_tensors(model)
    assert list(again) == NAMES and all(again[name] is found[name] for name in NAMES)
    assert named_tensors(model.module)["weight"] is found["module.weight"], "what holds it lies above this module"
    assert not isinstance(model.embedding.weight, DTensor), "looked at, not resharded"


def test_fsdp2_that_shards_to_fewer_ranks_after_a_forward_still_gives_its_shards() -> None:
    with pretend(3, 4):
        mesh = init_device_mesh("cpu", (4,))
        model = fully_shard(nn.Sequential(fully_shard(Block(), mesh=mesh, reshard_after_forward=2)), mesh=mesh)
        found = named_tensors(model)
        with torch.no_grad():
            model(torch.zeros(1, 4))
        weight = model[0].linear.weight
        assert isinstance(weight, DTensor) and weight.device_mesh.shape == (2, 2), "what the module holds now"
        again = named_tensors(model)["0.linear.weight"]
        assert again is found["0.linear.weight"] and again.placements == (Shard(0),)  # type: ignore[attr-defined]


def test_parameters_that_fsdp2_ignores_come_as_they_are(world: None) -> None:
    model = Model()
    fully_shard(model, ignored_params={model.module.bias})
    found = named_tensors(model)
    assert found["module.bias"] is model.module.bias and type(found["module.bias"]) is nn.Parameter
    assert isinstance(found["module.weight"], DTensor)


def test_a_torch_that_hides_fsdp2s_parameters_is_told_of(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    fully_shard(model.blocks[1])
    monkeypatch.setattr("torch.distributed._composable_state._module_state_mapping", {})
    with pytest.raises(ConfigError, match=r"FSDP2 module 'blocks.1'; call reshard\(\)"):
        named_tensors(model)


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_is_taken_whole_or_refused_with_the_way_out(world: None) -> None:
    model = Model()
    model.blocks[1] = FullyShardedDataParallel(model.blocks[1], device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(ConfigError, match=r"'blocks.1' is sharded by FullyShardedDataParallel.*fully_shard"):
        named_tensors(model)
    options = {"device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.NO_SHARD}
    whole = FullyShardedDataParallel(Model(), use_orig_params=True, **options)
    assert list(named_tensors(whole)) == NAMES
    assert named_tensors(whole)["blocks.0.linear.weight"].shape == (4, 4)
    with pytest.raises(ConfigError, match=r"\(root\)"):
        named_tensors(FullyShardedDataParallel(Model(), **options))
