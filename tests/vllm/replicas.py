"""An engine and its trainer in one process: every version is brought in live, and its logits are told.

Logits, not checksums of parameters: an engine computes with what it has packed of them, and keeps that elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.vllm.checkpoints import Checkpoint
from tests.vllm.engines import PROMPTS, STEPS, environment
from tests.vllm.nursery import Child, serve

Logits = list[list[dict[int, float]]]


class Replica:
    """A process with an in-process `LLM`; ``dummy`` weights, else those of ``model``'s file.

    ``before``: is called in it before the engine is made.
    ``core``: the first of its workers' cores, counted from the first that there is; a machine with one has but that.
    """

    def __init__(
        self,
        model: Path,
        env: Mapping[str, str],
        log: Path,
        *,
        workers: int = 1,
        dummy: bool = False,
        before: Callable[[], None] | None = None,
        core: int = 0,
        **options: Any,
    ) -> None:
        # Functions go to the workers, by pickle.
        env = {**environment(workers, core), **env, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        self.log = log
        self._child = Child(_live, str(model), workers, dummy, before, options, env=env, log=log)

    def logits(self, prompts: Sequence[Any] = PROMPTS, *, adapter: str | Path | None = None) -> Logits:
        """Of each of ``prompts``, the logits of every token at each of STEPS.

        ``adapter``: with one that a trainer has sent, by its name, or with that of a directory.
        """
        found: Logits = self._child.ask("logits", prompts, adapter)
        return found

    def join(self, metas: Path, **info: Any) -> list[dict[str, Any]]:
        """A trainer of the tensors of ``metas`` meets the engine; each worker's report.

        ``module``: it has them as a module of transformers, in bfloat16 ("bf16") or as FSDP2 has it ("fsdp2").
        """
        found: list[dict[str, Any]] = self._child.ask("join", str(metas), info)
        return found

    def send(self, version: Path) -> None:
        """Bring ``version``'s tensors into the engine."""
        self._child.ask("send", str(version))

    def verify(self) -> None:
        """Compare the live model with what the trainer has."""
        self._child.ask("verify")

    def move(self) -> None:
        """The trainer has its weights in other memory from here on."""
        self._child.ask("move")

    def sleep(self, level: int) -> None:
        self._child.ask("sleep", level)

    def wake_up(self, *tags: str) -> None:
        """Wake up what ``tags`` say, or everything."""
        self._child.ask("wake up", tags)

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """``work(worker, *arguments)`` in each of the engine's workers."""
        return self._child.ask("run", work, arguments)

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()  # in good order it takes 6 s to end
        print(self._child.tail())  # shown where a test has failed: an engine's death says nothing of why


def reference(
    model: Path, env: Mapping[str, str], log: Path, workers: int = 1, *, adapter: Path | None = None, **options: Any
) -> Logits:
    """Logits of an engine that loaded ``model``, and an ``adapter``, from its file."""
    with Replica(model, env, log, workers=workers, **options) as fresh:
        return fresh.logits(adapter=adapter)


def _live(
    pipe: Connection,
    model: str,
    workers: int,
    dummy: bool,
    before: Callable[[], None] | None,
    options: dict[str, Any],
) -> None:
    from vllm import LLM, SamplingParams

    if before is not None:
        before()
    engine: Any = LLM(
        model, tensor_parallel_size=workers, dtype="bfloat16", max_model_len=128, max_num_seqs=8,
        disable_log_stats=True, max_logprobs=-1, logprobs_mode="raw_logits",
        load_format="dummy" if dummy else "auto", weight_transfer_config={"backend": "etha"},
        **{"enforce_eager": True, "enable_prefix_caching": False, **options},
    )  # fmt: skip
    how = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=-1)
    trainers: list[Any] = []
    tensors: dict[str, torch.Tensor] = {}
    models: list[torch.nn.Module] = []

    def logits(prompts: Sequence[Any], adapter: str | Path | None) -> Logits:
        # One after another: a batch may be computed in another order.
        asked = None if adapter is None else _request(adapter)
        answers = [
            engine.generate([prompt], how, use_tqdm=False, lora_request=asked)[0].outputs[0] for prompt in prompts
        ]
        return [[{k: v.logprob for k, v in step.items()} for step in answer.logprobs] for answer in answers]

    def join(metas: str, info: dict[str, Any]) -> list[dict[str, Any]]:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from etha.integrations.vllm import EthaSource, EthaTrainerInitInfo, LLMClient

        only = info.pop("only", None)
        tensors.clear()
        models.clear()
        dtype = info.pop("dtype", None)
        found = Checkpoint(Path(metas)).tensors()
        tensors.update((k, v if dtype is None else v.to(dtype)) for k, v in found.items() if only is None or k in only)
        source = EthaSource(tensors)
        if (module := info.pop("module", None)) is not None:
            models.append(_module(Path(metas)) if module == "bf16" else _fsdp2(Path(metas)))
            source = EthaSource(models[0])
        reported = EthaTrainerInitInfo(rank=0, world_size=1, **{"pair": "weights", **info})
        while trainers:
            trainers.pop().shutdown()
        trainers.append(WeightTransferTrainerFactory.trainer_init(reported, client=LLMClient(engine), source=source))
        return list(engine.collective_rpc(_report))

    def send(version: str) -> None:
        for model in models:
            _take(model, _module(Path(version)))
        if not models:
            found = Checkpoint(Path(version)).tensors()
            for name, tensor in tensors.items():
                tensor.copy_(found[name])
        trainers[-1].send_weights()

    def verify() -> None:
        trainers[-1].verify()

    def run(work: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        return list(engine.collective_rpc(partial(work), args=tuple(arguments)))

    def move() -> None:
        for model in models:
            model._apply(torch.clone)
        for tensor in tensors.values():
            tensor.data = tensor.data.clone()

    def wake_up(tags: Sequence[str]) -> None:
        engine.wake_up(list(tags) or None)

    calls = {"logits": logits, "join": join, "send": send, "verify": verify, "run": run}
    calls |= {"move": move, "sleep": engine.sleep, "wake up": wake_up}

    def answer(what: str, *arguments: Any) -> Any:
        return calls[what](*arguments)

    try:
        serve(pipe, answer)
    finally:
        for trainer in trainers:
            trainer.shutdown()


def compared(worker: Any) -> tuple[int, list[str], list[str]]:
    """What a worker finds when it compares its live model with what it received: how much, what differs, what not."""
    found = worker.weight_transfer_engine._received.compare()
    return found.compared, found.differs, found.left_out


def kind_of(worker: Any) -> str:
    """The class that vLLM computes the model with."""
    return type(worker.get_model()).__name__


def _request(adapter: str | Path) -> Any:
    from vllm.lora.request import LoRARequest

    from etha.integrations.vllm import lora_request

    if isinstance(adapter, str):
        return lora_request(adapter)
    number = sum(str(adapter).encode())  # differs from directory to directory of a test
    return LoRARequest(lora_name=adapter.name, lora_int_id=number, lora_path=str(adapter))


def _module(path: Path, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model


def _fsdp2(path: Path) -> torch.nn.Module:
    """In float32, and sharded, by the one rank that this trainer has."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = _module(path, torch.float32)
    mesh = init_device_mesh("cpu", (1,))
    for layers in [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@torch.no_grad()
def _take(model: torch.nn.Module, version: torch.nn.Module) -> None:
    """Set all that the trainer's module has to what another of its kind has."""
    from torch.distributed.tensor import DTensor

    found = version.state_dict()
    for name, tensor in model.state_dict().items():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(found[name])


def settle_nothing(worker: Any) -> None:
    """Take from a worker what packs a tied head anew, as an engine without Etha's repair."""
    from etha.integrations.vllm.weights.loading import Reload

    setattr(Reload, "settle", lambda *_: None)  # noqa: B010


def _report(worker: Any) -> dict[str, Any]:
    return dict(worker.weight_transfer_engine.report())


def different(one: Logits, other: Logits) -> str | None:
    """Where two engines' logits differ first, None where they are equal to the bit."""
    for prompt, (steps, others) in enumerate(zip(one, other, strict=True)):
        for number, (step, known) in enumerate(zip(steps, others, strict=True)):
            if step != known:
                worst = max((abs(step[k] - known[k]), k) for k in step)
                return f"prompt {prompt}, step {number}: token {worst[1]} by {worst[0]}"
    return None
