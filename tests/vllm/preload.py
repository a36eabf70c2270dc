"""What every process of these tests has loaded when it is forked: seconds each, that are spent once."""

import importlib

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
    "vllm.v1.worker.cpu_worker",
    "vllm.distributed.weight_transfer",
    "etha.client.sync",
    "etha.integrations.vllm.trainer",
):
    importlib.import_module(name)
