"""What every process of these tests has loaded when it is forked: seconds each, that are spent once."""

import importlib
import multiprocessing
import sys

from tests.vllm import cpu_paths

cpu_paths.take()
# Linux lets a process use AMX only once it has asked. vLLM leaves that to whichever kernel of oneDNN or torch comes
# first, but one that was forked with those loaded may reach vLLM's own attention before them: SIGILL. Forks inherit it.
importlib.import_module("torch").cpu._init_amx()
for name in (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers",
    "transformers.models.qwen3.modeling_qwen3",
    "safetensors.torch",
    "requests",
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.distributed.weight_transfer",
    "etha.client.sync",
    "etha.integrations.vllm.trainer.trainer_engine",
):
    importlib.import_module(name)

# On a CPU vLLM starts its processes anew, whatever VLLM_WORKER_MULTIPROC_METHOD says: each would load all of this again
# and take the CPU's best path, whatever was asked for here.
for name in ("vllm.utils.system_utils", "vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
    sys.modules[name].get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]
