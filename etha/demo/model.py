"""A character GPT of about a million parameters in plain torch.nn, and how the two jobs shard it.

Nothing here knows Etha. An *axis* belongs to the mesh, a *dim* to the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of the model; ``heads`` must be a multiple of the tensor-parallel axis."""

    vocabulary: int
    context: int = 64
    width: int = 160
    layers: int = 3
    heads: int = 4


class Attention(nn.Module):
    """Causal self-attention; the heads are those of this tensor-parallel rank."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.q = nn.Linear(shape.width, shape.width)
        self.k = nn.Linear(shape.width, shape.width)
        self.v = nn.Linear(shape.width, shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [batch, length, width] to the same shape."""
        q, k, v = (linear(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a skip connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [batch, length, width] to the same shape."""
        x = x + self.attention(self.norm_1(x))
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return y


class GPT(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """int64 [batch, length] to float32 logits [batch, length, vocabulary]; length is at most ``context``."""
        x = self.embedding(characters) + self.position(torch.arange(characters.shape[1], device=characters.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats per character; both int64 [batch, length]."""
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.05)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def tensor_parallel(model: GPT, axis: DeviceMesh) -> GPT:
    """Shard the linear layers of every block over ``axis``. Norms and embeddings stay plain, one copy per rank."""
    for block in model.blocks:
        parallelize_module(
            block,
            axis,
            {
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            },
        )
    return model


def fsdp_by_tensor_parallel(model: GPT, mesh: DeviceMesh) -> GPT:
    """FSDP2 over the axis "dp" of a model that is tensor-parallel over "tp".

    Afterwards linear layers lie on the whole mesh, norms and embeddings on this rank's row ``mesh["dp"]``.
    """
    tensor_parallel(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


@contextmanager
def evaluating(model: GPT) -> Iterator[None]:
    """No gradients in this context. Afterwards the parameters of an FSDP2 model are sharded again.

    A forward pass without gradients leaves the root's parameters unsharded, and those cannot be sent.
    """
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
        reshard = getattr(model, "reshard", None)
        if reshard is not None:
            reshard()


def write(model: GPT, prompt: torch.Tensor, length: int, *, seed: int) -> torch.Tensor:
    """Sample ``length`` characters after ``prompt`` (int64 [n]). Returns int64 [length].

    The result is the same on every tensor-parallel rank, because logits and random numbers are equal there. Characters
    are drawn on the CPU, where a seed gives the same ones whatever device the model computes on.
    """
    generator = torch.Generator().manual_seed(seed)
    row = prompt
    with evaluating(model):
        for _ in range(length):
            logits = model(row[-model.shape.context :][None].to(model.position.weight.device))[0, -1]
            chances = F.softmax(logits.cpu() / 0.8, dim=-1)
            row = torch.cat((row, torch.multinomial(chances, 1, generator=generator)))
    return row[len(prompt) :]
