"""Whether a module of the live model computes with the weights that it should have.

A weight that the engine has packed for its processor cannot be read back, but its products can be compared: a probe is
sent through the module as requests are, and through the weight itself.

    probe     rows of the identity, whose products are columns of the weight, and one row of random numbers
    bound     of a product over n numbers in float32, rounded once to a dtype with unit roundoff u:
              u |y| + n 2**-24 |x| |w|    (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1)

Where the engine quantizes what comes in, to 8 bits a row, the probe is of integers that this leaves as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etha.integrations.vllm.weights.quantized import UNQUANTIZED

#: Columns of a weight that are compared one by one.
COLUMNS = 16
#: Rows of a weight, and experts, that are computed in float32 at once.
ROWS = 4096
#: Factor on one product's bound for a chain of products: products, an activation, products.
CHAIN = 8.0


@dataclass(slots=True)
class Comparison:
    """``compared``: number of parameters. ``differs``: a line for each parameter that is wrong.

    ``left_out``: parameters that can neither be read nor be computed with alone.
    """

    compared: int = 0
    differs: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, name: str, wrong: str | None) -> None:
        self.compared += 1
        if wrong is not None:
            self.differs.append(f"{name}: {wrong}")

    def extend(self, other: Comparison) -> None:
        self.compared += other.compared
        self.differs += other.differs
        self.left_out += other.left_out


def unequal(live: Tensor, due: Tensor) -> str | None:
    """The difference between two tensors that should hold equal numbers, as text; None if there is none. NaN equals
    NaN."""
    if live.shape != due.shape or live.dtype != due.dtype:
        return f"shape {tuple(live.shape)}, {live.dtype} instead of {tuple(due.shape)}, {due.dtype}"
    if live.dtype.itemsize == 1:  # torch does not compare float8
        live, due = live.view(torch.uint8), due.view(torch.uint8)
    wrong = (live != due) & ~((live != live) & (due != due))
    return f"{int(wrong.sum())} of {live.numel()} elements differ" if bool(wrong.any()) else None


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _off(found: Tensor, due: Tensor, bound: Tensor) -> str | None:
    """How many numbers are further from their reference than the bound, as text. NaN may only be where the reference
    has it."""
    found = found.float()
    wrong = ~((found - due).abs() <= bound) & ~(torch.isnan(found) & torch.isnan(due))
    return f"{int(wrong.sum())} of {found.numel()} products differ" if bool(wrong.any()) else None


def multiplies(module: nn.Module, weight: Tensor) -> bool:
    """Whether the module's method multiplies by this weight."""
    return weight.dim() == 2 and type(getattr(module, "quant_method", None)).__name__ in UNQUANTIZED


class Product:
    """The products of a probe with a weight of shape [out, in]. Keeps a few columns of the weight, and not the
    weight."""

    def __init__(self, weight: Tensor) -> None:
        dense = _random(1, weight.shape[1])
        self.probe = torch.cat([_units(COLUMNS, weight.shape[1]), dense]).to(weight)
        x = self.probe.float()
        due, sizes = [], []
        for start in range(0, weight.shape[0], ROWS):
            w = weight[start : start + ROWS].float()
            due.append(x @ w.T)
            sizes.append(x.abs() @ w.abs().T)
        self._due = torch.cat(due, 1)
        # A processor may add up in another order than here, which doubles the bound of one sum.
        sums = 2 * weight.shape[1] * 2.0**-24 * torch.cat(sizes, 1)
        self._bound = 2 * _unit(weight.dtype) * self._due.abs() + sums

    def wrong(self, module: Any) -> str | None:
        """The difference in the module's result for the probe, as text; None if there is none."""
        return _off(module.quant_method.apply(module, self.probe, None), self._due, self._bound)


def _random(*shape: int) -> Tensor:
    """Random numbers, the same every time. The dtype is given, because vLLM changes the default dtype while it
    loads."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def _units(count: int, wide: int) -> Tensor:
    """Rows of the identity of size ``wide``, which would be too large as a whole: up to ``count``, evenly."""
    at = torch.linspace(0, wide - 1, min(count, wide), dtype=torch.float64).round().long()
    rows = torch.zeros(len(at), wide, dtype=torch.float32)
    rows[torch.arange(len(at)), at] = 1
    return rows


class Integers:
    """The same for int8: a weight of shape [out, in] with a scale for each row of it, or of each part of its rows.

    ``dtype``: of what comes in and goes out. ``scale``: of what comes in, where it is no row's own. ``shifted``: rows
    have a zero point.
    """

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        widths: list[int],
        dtype: torch.dtype,
        scale: Tensor | None,
        shifted: bool,
    ) -> None:
        wide = weight.shape[1]
        dense = torch.randint(-127, 128, (1, wide), generator=torch.Generator().manual_seed(0)).float()
        dense[0, 0], dense[0, -1] = 127, -128 if shifted else -127
        rows = torch.cat([127 * _units(COLUMNS, wide), dense])
        unit = torch.ones((), dtype=torch.float32) if scale is None else scale.float().max()
        # Rounded to half of a number of 8 bits at most, which leaves the integer.
        self.probe = (rows * unit).to(dtype)
        if scales.numel() != weight.shape[0]:
            scales = scales.flatten().repeat_interleave(torch.tensor(widths))
        each = scales.flatten().double() * unit.double()
        self._due = torch.empty(len(rows), weight.shape[0], dtype=torch.float32)
        self._bound = torch.empty_like(self._due)
        for start in range(0, weight.shape[0], ROWS):
            part = slice(start, start + ROWS)
            w = weight[part].double()
            due = (rows.double() @ w.T) * each[part]
            # What a zero point adds to the sums, and is taken off again.
            sums = (rows.abs().double() @ w.abs().T + (256 * w.abs().sum(1) if shifted else 0)) * each[part]
            self._due[:, part] = due.float()
            self._bound[:, part] = (2 * _unit(dtype) * due.abs() + 4 * 2.0**-24 * sums).float()

    def expect(self, products: Tensor) -> None:
        """Take ``products`` for those that are due, where the processor's own are not exact."""
        self._due = products.float()

    def wrong(self, module: Any) -> str | None:
        """The difference in the module's result for the probe, as text; None if there is none."""
        return _off(module.quant_method.apply(module, self.probe, None), self._due, self._bound)


#: Activations of experts: from gate and up projections, as [..., 2n], to [..., n].
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "gelu": lambda h: F.gelu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "gelu_tanh": lambda h: F.gelu(h.chunk(2, -1)[0], approximate="tanh") * h.chunk(2, -1)[1],
}


class Experts:
    """The same for experts: w13 of shape [experts, 2 inner, hidden], w2 of [experts, hidden, inner].

    Each expert of this worker is given a row of random numbers for itself.
    """

    def __init__(self, module: Any, w13: Tensor, w2: Tensor) -> None:
        self.probe = _random(w13.shape[0], w13.shape[2]).to(w13)
        act = _ACTIVATIONS[module.activation.value]
        due, bound = [], []
        for x, up, down in zip(self.probe.float(), w13, w2, strict=True):
            h = up.float() @ x
            inner = act(h)
            gate, rest = h.chunk(2)
            due.append(down.float() @ inner)
            # The hidden numbers are rounded before they are added up again.
            bound.append(down.float().abs() @ (inner.abs() + (gate * rest).abs()))
        self._due = torch.stack(due)
        self._bound = CHAIN * _unit(w13.dtype) * torch.stack(bound)

    @staticmethod
    def possible(module: Any, leaves: Mapping[str, Tensor]) -> bool:
        """Whether this computes what ``module`` does with parameters of these names."""
        method = getattr(module, "quant_method", None)
        return (
            set(leaves) == {"w13_weight", "w2_weight"}
            and getattr(getattr(module, "activation", None), "value", None) in _ACTIVATIONS
            and getattr(module, "expert_map", None) is None
            and getattr(method, "moe_kernel", None) is not None
            and not getattr(method, "is_monolithic", False)
        )

    def wrong(self, module: Any) -> str | None:
        """The difference in the module's result for the probe, as text; None if there is none."""
        ids = torch.arange(len(self.probe), device=self.probe.device, dtype=torch.int32)[:, None]
        ones = torch.ones(len(self.probe), 1, device=self.probe.device)
        found = module.quant_method.apply(
            layer=module, x=self.probe, topk_weights=ones, topk_ids=ids, shared_experts=None, shared_experts_input=None
        )
        return _off(found, self._due, self._bound)


@dataclass(slots=True)
class ProbeOutcome:
    """A module whose products are to be compared once the model is whole again."""

    name: str
    module: nn.Module
    product: Product | Integers | Experts
