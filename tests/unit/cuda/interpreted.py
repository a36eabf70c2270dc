"""The Triton kernels on the CPU, by Triton's interpreter: ``TRITON_INTERPRET=1 python -m tests.unit.cuda.interpreted``.

Random strided copies and every pair of dtypes that Triton casts, into memory that must be touched nowhere else; to the
bit as torch on the CPU has it, but for what a NaN looks like (0x7FFF as bfloat16 here, as torch has it on GPUs).
"""

from __future__ import annotations

import random

import torch

from etha.cuda.triton_kernels import PAIRS, TritonKernels
from etha.transport.copy.device import Copier
from etha.transport.geometry.boxes import BoxAxis
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.tiles import Ends, Path, Tile
from tests.fakes.cuda import GPU0, FakeDriver
from tests.unit.transport.on_device import card_view

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the bit; any NaN for a NaN."""
    equal = found.view(torch.uint8).view(-1, found.itemsize) == expected.view(torch.uint8).view(-1, found.itemsize)
    ok = equal.all(1)
    if found.is_floating_point():
        ok |= found.isnan() & expected.isnan()
    return bool(ok.all())


def values(dtype: torch.dtype) -> torch.Tensor:
    """All of 16 bits or less, else random bits and what is near the ends and ties of narrower formats."""
    if dtype.itemsize <= 2:
        n = 1 << (8 * dtype.itemsize)
        return torch.arange(n, dtype=torch.int64).to(BITS[dtype.itemsize]).view(dtype)
    gen = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (1 << 15,), dtype=torch.uint8, generator=gen).view(dtype)
    if not dtype.is_floating_point:
        return noise
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    ties = torch.cat([high, high | 0x8000, high | 0x7FFF, high | 0x8001]).to(torch.int32).view(torch.float32)
    return torch.cat([noise, ties.to(dtype), torch.randn(1000, generator=gen).to(dtype) * 1e-7])


def tile(axes: list[BoxAxis], source: torch.dtype, target: torch.dtype) -> Tile:
    ends = Ends(source=source, target=target, source_private=False, target_private=False, device=True)
    return Tile(path=Path.DEVICE, axes=tuple(axes), ends=ends)


def casts(driver: FakeDriver, copier: Copier) -> None:
    """Every pair, one long row each."""
    for source, target in sorted(PAIRS, key=str):
        given = values(source)
        here, there = driver.empty(GPU0, given.shape, source), driver.empty(GPU0, (given.numel() + 1,), target)
        here.copy_(given)
        there.view(BITS[target.itemsize]).fill_(77)
        copier.run_ops(
            [Op(tile([BoxAxis(given.numel(), 1, 1)], source, target), card_view(here), card_view(there), 0, 0)]
        )
        assert same(there[:-1], given.to(target)), (source, target)
        assert there.view(BITS[target.itemsize])[-1] == 77
        print(f"{source} -> {target}: {given.numel()} values")


def strides(driver: FakeDriver, copier: Copier, rng: random.Random) -> None:
    """Some boxes of up to seven axes at odd places, bits and casts in one batch."""
    ops, checks = [], []
    for _ in range(8):
        source = rng.choice([torch.uint8, torch.int16, torch.float32, torch.float64, torch.complex128])
        target = torch.bfloat16 if source is torch.float32 and rng.random() < 0.5 else source
        counts = [rng.choice([1, 2, 3, 5, 16, 40]) for _ in range(rng.randint(0, 4))] + [1, 2, 2, 3][
            : rng.randint(0, 3)
        ]
        orders = [rng.sample(range(len(counts)), len(counts)) for _ in range(2)]
        steps = [[0] * len(counts) for _ in range(2)]
        extents = []
        for end in range(2):
            at = rng.choice([1, 1, 1, 2])
            for i in orders[end]:
                steps[end][i] = at
                at = at * counts[i] + rng.choice([0, 0, 1, 8])
            extents.append(at)
        offsets = [rng.choice([0, 1, 3, 16]) for _ in range(2)]
        here, there = driver.empty(GPU0, (extents[0] + 16,), source), driver.empty(GPU0, (extents[1] + 16,), target)
        noise = torch.randint(0, 100, here.shape, generator=torch.Generator().manual_seed(rng.getrandbits(30)))
        here.copy_(noise.to(source))
        there.fill_(7)
        expected = there.clone()
        expected.as_strided(counts, steps[1], offsets[1]).copy_(here.as_strided(counts, steps[0], offsets[0]))
        axes = [BoxAxis(*axis) for axis in zip(counts, *steps, strict=True)]
        ops.append(Op(tile(axes, source, target), card_view(here), card_view(there), *offsets))
        checks.append((there, expected))
    before = driver.calls["launch"]
    copier.run_ops(ops)
    assert driver.calls["launch"] - before <= 2, "bits in one launch, casts in another"
    for there, expected in checks:
        assert torch.equal(there, expected)


def main() -> None:
    driver = FakeDriver()
    copier = Copier(driver, GPU0, kernels=TritonKernels())
    try:
        for seed in range(8):
            strides(driver, copier, random.Random(seed))
        casts(driver, copier)
        copier.close()
        driver.check()
    finally:
        driver.shut()
    print("all is well")


if __name__ == "__main__":
    main()
