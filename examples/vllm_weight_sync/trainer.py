"""One rank of the trainer: FSDP2 in float32, a version into the engine every few steps, until the text is learned.

    torchrun --nproc-per-node 2 trainer.py MODEL_DIRECTORY http://ENGINE:PORT [wait|keep|abort]

An engine that is not there yet is waited for. The last argument is what becomes of requests that are under way when a
version comes in: they are finished first, go on with the new version, or end at once.
"""

import sys
import time

import torch
import torch.distributed as dist
from model import TEXT
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from etha.integrations.vllm import EthaTrainerInitInfo

STEPS = 10  # from a version to the next
LEARNED = 1.0  # mean loss of a token, in nats: the sentence itself is learned before


def main(directory: str, url: str, pause: str = "wait") -> None:
    """What one rank does, from its process group to the last version."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokens, targets = batch(directory)
    tokens, targets = tokens[rank::world], targets[rank::world]

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)

    engine = WeightTransferTrainerFactory.trainer_init(
        EthaTrainerInitInfo(rank=rank, pair="weights", pause=pause),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(model),
    )
    try:
        steps, loss = 0, float("inf")
        while True:
            begun = time.perf_counter()
            result = engine.send_weights(steps)
            seconds = time.perf_counter() - begun
            nbytes = int(total(torch.tensor(result.bytes)))
            if rank == 0:
                workers = len(result.peers)
                print(
                    f"version {steps}: loss {loss:.2f}; {nbytes // workers:,} bytes into each of {workers} workers in "
                    f"{result.seconds * 1e3:.0f} ms, live after {seconds:.2f} s",
                    flush=True,
                )
            if loss < LEARNED:
                if rank == 0:
                    print(f"learned in {steps} steps", flush=True)
                break
            for _ in range(STEPS):
                loss = step(model, optimizer, tokens, targets)
            steps += STEPS
    finally:
        engine.shutdown()
        dist.destroy_process_group()


def batch(directory: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of the text, a sentence a row, each of (sentences, length), int64; padding is no target."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = tokenizer([sentence + tokenizer.eos_token for sentence in TEXT], padding=True, return_tensors="pt")
    targets = rows.input_ids.masked_fill(rows.attention_mask == 0, -100)
    return rows.input_ids[:, :-1], targets[:, 1:]


def step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor
) -> float:
    """One step of the optimizer; returns the loss, the mean over all ranks."""
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(total(loss.detach())) / dist.get_world_size()


def total(value: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' ``value``, on every rank."""
    dist.all_reduce(value)
    return value


if __name__ == "__main__":
    main(*sys.argv[1:])
