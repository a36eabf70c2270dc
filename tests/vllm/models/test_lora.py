"""LoRA adapters that a trainer sends: a live engine answers as a fresh one that loaded the same from a directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import requests
import torch
from torch import nn

from etha.errors import ConfigError
from etha.integrations.vllm.weights.adapter import Adapter
from tests.vllm.checkpoints import make_adapter
from tests.vllm.engines import Server
from tests.vllm.replicas import Logits, Replica, different
from tests.vllm.trainers import Trainer

Checkpoints = Callable[[str, int], Path]
Env = dict[str, str]
#: One slot, and memory for one adapter: each other one that is asked for drops this one.
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 1}
POLICY = Adapter(name="policy", rank=8, alpha=16)
#: As peft's configurations tell themselves.
CONFIG = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": {"b", "a"},
    "use_rslora": True,
    "peft_type": Enum("PeftType", {"LORA": "LORA"}).LORA,  # type: ignore[attr-defined]
}
#: Longer than a block of the prefix cache.
LONG = ("the quick brown fox jumps over the lazy dog. " * 5,)


@pytest.fixture(scope="module")
def adapters(room: Path, env: Env) -> list[Path]:
    return [make_adapter(room / f"adapter{seed}", seed=seed).path for seed in (0, 1)]


def test_each_version_of_an_adapter_answers_as_one_from_a_directory(
    checkpoints: Checkpoints, adapters: list[Path], env: Env, logs: Path
) -> None:
    models = [checkpoints("llama", seed) for seed in (0, 1)]
    due: dict[tuple[int, int], tuple[Logits, Logits]] = {}
    bases: list[Logits] = []
    for number, model in enumerate(models):
        with Replica(model, env, logs / f"fresh{number}.log", **LORA) as fresh:
            bases.append(fresh.logits())
            for adapter, path in enumerate(adapters):
                due[number, adapter] = fresh.logits(adapter=path), fresh.logits(LONG, adapter=path)
    assert different(due[0, 0][0], due[0, 1][0]) and different(due[0, 0][0], bases[0])
    with Replica(models[0], env, logs / "live.log", enable_prefix_caching=True, block_size=32, **LORA) as live:
        live.join(adapters[0], adapter=POLICY)
        for version in (0, 1, 0):
            live.send(adapters[version])
            for prompts, wanted in (({}, due[0, version][0]), ({"prompts": LONG}, due[0, version][1])):
                assert different(live.logits(**prompts, adapter="policy"), wanted) is None, version
            assert different(live.logits(), bases[0]) is None, "the model is what it was"
            assert different(live.logits(adapter=adapters[1]), due[0, 1][0]) is None, "adapters from files live on"
        live.verify()
        live.join(models[0])
        for number in (1, 0):
            live.send(models[number])
            assert different(live.logits(), bases[number]) is None
            assert different(live.logits(adapter="policy"), due[number, 0][0]) is None, "added again"
        live.verify()


def refused(live: Replica, path: Path, match: str, **options: Any) -> None:
    with pytest.raises(Exception, match=match):
        live.join(path, **{"adapter": POLICY, **options})


def test_an_adapter_that_the_model_cannot_take_is_refused(
    checkpoints: Checkpoints, adapters: list[Path], room: Path, env: Env, logs: Path
) -> None:
    """vLLM would find out in the midst of a step, which ends the engine, or never."""
    model = checkpoints("llama", 0)
    wide = make_adapter(room / "wide", seed=0, rank=16).path
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with Replica(model, env, logs / "live.log", **LORA) as live:
        before = live.logits()
        refused(live, adapters[0], "rank 16 is greater than max_lora_rank 8", adapter=replaced(rank=16))
        refused(live, wide, r"has shape \(16, \d+\).* takes \(8, \d+\) of an adapter of rank 8")
        refused(
            live, adapters[0], r"no module 'model\.layers\.0\.self\.\w_proj' that takes", names={"self_attn": "self"}
        )
        refused(live, adapters[0], "takes no adapters for .*qq", names={"q_proj": "qq"})
        refused(live, adapters[0], "lora_A alone of 'model.layers.0.self_attn.q_proj'", only=[first])
        refused(live, adapters[0], "does not yet support DoRA", adapter=replaced(config={"use_dora": True}))
        refused(
            live, adapters[0], r"has shape \(128, 8\).* takes \(64, 8\)", names={"q_proj": "k_proj", "v_proj": "q_proj"}
        )
        refused(live, adapters[0], "direct=True and atomic=False", direct=True)
        refused(live, model, "no tensors of adapter 'default'|unsupported LoRA weight")
        assert different(live.logits(), before) is None
        live.join(adapters[0], adapter=POLICY)
        with pytest.raises(Exception, match="no adapter 'policy' yet"):
            live.verify()
        with pytest.raises(Exception, match="'policy': this engine has received no version of it yet"):
            live.logits(adapter="policy")
        assert different(live.logits(), before) is None, "the engine lives on"
        live.send(adapters[0])
        live.logits(adapter="policy")
        live.verify()
        live.logits(adapter="policy")  # vLLM drops adapters after every update, and after a comparison
        live.run(spoil)
        with pytest.raises(Exception, match="o_proj of adapter 'policy'"):
            live.verify()
    with Replica(model, env, logs / "without.log") as live:
        refused(live, adapters[0], "start it with --enable-lora")


def test_a_request_for_an_adapter_that_was_not_received_is_refused_alone() -> None:
    import asyncio

    from etha.integrations.vllm import lora_request
    from etha.integrations.vllm.engine import served

    class Processor:
        def _validate_lora(self, lora_request: Any) -> None: ...

    class Engine:
        def __init__(self) -> None:
            self.input_processor = Processor()

        def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> None:
            if method == "finish_weight_update" and timeout is not None:
                raise RuntimeError("a worker has died")

    class Later(Engine):
        async def collective_rpc(self, *arguments: Any) -> None:  # type: ignore[override]
            super().collective_rpc(*arguments)

    for _ in range(2):
        served._refuse_requests(Processor)
        served._know_live(Engine, awaited=False)
        served._know_live(Later, awaited=True)
    policy, file = lora_request("policy"), SimpleNamespace(lora_path="/models/adapter")
    for kind in (Engine, Later):
        engine: Any = kind()

        def call(*arguments: Any, engine: Any = engine, **options: Any) -> None:
            answer = engine.collective_rpc(*arguments, **options)
            if answer is not None:
                asyncio.run(answer)

        def refused(engine: Any = engine) -> bool:
            for other in (None, file):
                engine.input_processor._validate_lora(other)
            try:
                engine.input_processor._validate_lora(policy)
            except ConfigError as error:
                assert "no version of it yet: send one first" in str(error)
                return True
            return False

        assert refused()
        call("init_weight_transfer_engine", kwargs={"init_info": {}})
        call("finish_weight_update")
        assert refused()
        call("init_weight_transfer_engine", kwargs={"init_info": {"adapter": POLICY.to_wire()}})
        assert refused()
        with pytest.raises(RuntimeError):
            call("finish_weight_update", 1.0)
        assert refused()
        call("finish_weight_update")
        assert not refused()
        call("init_weight_transfer_engine", kwargs={"init_info": {}})
        call("finish_weight_update")
        assert not refused(), "it stays beside base weights"


@pytest.mark.parametrize(
    "config, why",
    [
        ({"use_rslorra": True}, r"config=\{'use_rslorra': True\}.*do you mean 'use_rslora'\?"),
        ({"arrow_config": {"top_k": 2}}, "vLLM reads no 'arrow_config' of an adapter"),
        ({"trainable_token_indices": [1]}, "would compute without it: it reads .*alpha_pattern"),
        ({"vllm_lora_scaling_factor": 3.0}, "leave it out"),
        ({"r": 8}, "that is what rank= of Adapter says: leave it out of config"),
        ({"lora_alpha": 32}, "what alpha= of Adapter"),
        ({"target_modules": ["q_proj"]}, "what target_modules= of Adapter"),
        ({"peft_type": "LOHA"}, "vLLM takes LoRA adapters"),
    ],
)
def test_what_vllm_would_leave_out_of_an_adapters_configuration_is_refused(config: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        replaced(config=config)


def test_a_configuration_may_have_all_that_peft_writes() -> None:
    """Of a file, and of a module, whose peft may be newer and have fields with defaults of their own."""

    @dataclass
    class Newer:
        r: int = 4
        lora_alpha: int = 8
        target_modules: str = "all-linear"
        use_rslora: bool = True
        lora_dropout: float = 0.1
        arrow_config: Any = None
        newer: int = 7
        more: list[int] = field(default_factory=lambda: [1])

        def to_dict(self) -> dict[str, Any]:
            return {"peft_type": "LORA", **asdict(self)}

    kept = {"lora_dropout": 0.1, "use_rslora": True, "peft_type": "LORA", "base_model_name_or_path": "x"}
    assert replaced(config={**kept, "arrow_config": None, "use_of_tomorrow": False}).to_wire()["config"]["r"] == 8

    def of(config: Any) -> Adapter:
        module: Any = SimpleNamespace(peft_config={"default": config})
        return Adapter.of(module, "policy")

    assert "newer" not in of(Newer()).config and of(Newer()).config["use_rslora"] is True
    with pytest.raises(ConfigError, match="vLLM reads no 'newer' of an adapter"):
        of(Newer(newer=8))


def test_what_vllm_reads_of_an_adapters_configuration_is_known() -> None:
    from vllm.lora.peft_helper import PEFTHelper

    from etha.integrations.vllm.weights import adapter

    read = {one.name for one in fields(PEFTHelper) if not one.name.startswith("vllm_")}
    assert read == {*adapter._OWN, *adapter._READ}
    assert not adapter._UNREAD & read


def replaced(**changes: Any) -> Adapter:
    from dataclasses import replace

    return replace(POLICY, **changes)


def spoil(worker: Any) -> None:
    """One element of what the engine computes with is another one."""
    model = worker.model_runner.get_model()
    model.model.layers[1].self_attn.o_proj.lora_b_stacked[0][0, 0, 3, 2] += 1


def test_requests_call_an_adapter_by_its_name(
    checkpoints: Checkpoints, adapters: list[Path], env: Env, logs: Path
) -> None:
    """Over HTTP, two workers; the trainers' modules are sharded, in float32, and have more in them than is sent."""
    models = [checkpoints("qwen3", seed) for seed in (0, 1)]
    options = ["--enable-lora", "--max-lora-rank", "8"]
    due = {}
    for number, model in enumerate(models):
        with Replica(model, env, logs / f"fresh{number}.log", workers=2, **LORA) as fresh:
            due[number] = fresh.logits(), [fresh.logits(adapter=path) for path in adapters]
    server = Server(models[0], 2, env, logs / "server.log", raw_logits=True, options=options)
    trainers = []

    def trainer(shape: tuple[int, ...], model: Path, **info: Any) -> Trainer:
        while trainers:
            trainers.pop().end()
        trainers.append(Trainer(shape, model, server.url, env, logs, **info))
        trainers[0].join()
        return trainers[0]

    try:
        server.wait()
        trainer((2,), models[0]).send(models[0])
        learner = trainer((2,), models[0], adapter=POLICY, adapted=adapters[0])
        assert "policy" not in served(server)
        for version in (0, 1, 0):
            learner.send(adapters[version], f"v{version}")
            assert server.version() == f"v{version}"
            assert served(server) == ["model", "policy"]
            assert different(server.logits("policy"), due[0][1][version]) is None
            assert different(server.logits(), due[0][0]) is None
        trainer((2,), models[0]).send(models[1])
        assert different(server.logits("policy"), due[1][1][0]) is None, "added again"
        assert different(server.logits(), due[1][0]) is None
        with pytest.raises(Exception, match=r"'model'.* serves another model by that name"):
            trainer((), adapters[0], adapter=replaced(name="model"))
    finally:
        for one in trainers:
            one.kill()
        server.kill()


def served(server: Server) -> list[str]:
    return [model["id"] for model in requests.get(f"{server.url}/v1/models", timeout=60).json()["data"]]


def test_of_a_module_of_peft_the_adapters_tensors_are_sent() -> None:
    from etha.integrations.vllm import EthaSource
    from etha.integrations.vllm.trainer.source import AdapterSource

    class Module(nn.Module):
        peft_config: ClassVar[Any] = {"default": SimpleNamespace(to_dict=lambda: {**CONFIG})}

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.layer.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1, bias=False), "old": nn.Linear(2, 1)})
            self.layer.lora_embedding_B = nn.ParameterDict({"default": torch.ones(2), "default2": torch.ones(2)})
            self.score = nn.Module()
            self.score.modules_to_save = nn.ModuleDict({"default": nn.Linear(2, 1, bias=False)})

    module = Module()
    adapter = Adapter.of(module, "policy")
    assert list(AdapterSource(EthaSource(module), adapter).tensors()) == [
        "layer.lora_A.weight", "layer.lora_embedding_B", "score.weight",
    ]  # fmt: skip
    assert [*AdapterSource(EthaSource(module), replaced(part="old")).tensors()] == [
        "layer.lora_A.weight", "layer.lora_A.bias",
    ]  # fmt: skip
    assert json.loads(json.dumps(adapter.to_wire())) == {
        "name": "policy",
        "config": {"r": 4, "lora_alpha": 8, "target_modules": ["a", "b"], "use_rslora": True, "peft_type": "LORA"},
    }
    with pytest.raises(ConfigError, match=r"no tensors of adapter 'other'"):
        AdapterSource(EthaSource(module), replaced(part="other"))
    with pytest.raises(ConfigError, match=r"no adapter 'other' of peft, but \['default'\]"):
        Adapter.of(module, "policy", part="other")
    with pytest.raises(ConfigError, match=r"Linear has no adapter"):
        Adapter.of(module.layer, "policy")
    kinds = {**CONFIG, "peft_type": "ADALORA"}
    other: Any = SimpleNamespace(peft_config={"default": SimpleNamespace(to_dict=lambda: kinds)})
    with pytest.raises(ConfigError, match="one of ADALORA: vLLM takes LoRA"):
        Adapter.of(other, "policy")
    for wrong in ({"name": ""}, {"rank": 0}, {"config": None}):
        with pytest.raises(ConfigError, match="give the"):
            replaced(**wrong)
