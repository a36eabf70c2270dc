"""The trainer: it trains when it is told to, and puts each version for whoever follows.

    python trainer.py MODEL_DIRECTORY < commands

Each line of the input is a number of steps to train before the next version. Each line of the output is an object about
the version that was put: steps, loss, seconds of the put.
"""

import json
import sys
import time

import torch
from torch.distributed.tensor import Replicate
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import etha

PUBLICATION = "policy"
#: Seconds for a call.
PATIENCE = 300.0


def main(directory: str, text: list[str]) -> None:
    """Publish version 0, and do as the input says."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = tokenizer([sentence + tokenizer.eos_token for sentence in text], padding=True, return_tensors="pt")
    tokens, targets = rows.input_ids, rows.input_ids.masked_fill(rows.attention_mask == 0, -100)

    # One process has all of it. With FSDP2 give the DTensors alone: publish("policy", dict(model.named_parameters())).
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    whole = {name: [Replicate()] for name in tensors}
    with (
        etha.TensorBusClient(timeout=PATIENCE) as client,
        client.publish(PUBLICATION, tensors, expected_world_size=1, device_mesh=(1,), placements=whole) as publication,
    ):
        steps = 0
        for line in sys.stdin:
            more = int(line)
            for _ in range(more):
                logits = model(tokens[:, :-1]).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            steps += more
            begun = time.perf_counter()
            publication.put(version=steps)
            seconds = time.perf_counter() - begun
            said = {"steps": steps, "loss": float(loss) if steps else None, "seconds": seconds}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    from model import TEXT

    main(sys.argv[1], TEXT)
