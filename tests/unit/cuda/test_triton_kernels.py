"""The Triton kernels, interpreted on the CPU, and the choice between them and torch's."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from etha.cuda.select import choose_kernels
from tests.fakes.cuda import GPU0, FakeDriver

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@triton
def test_the_kernels_make_the_bits_that_torch_makes() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.cuda.interpreted"],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout


def test_torch_copies_where_its_memory_is_no_gpus() -> None:
    driver = FakeDriver()
    try:
        assert choose_kernels(driver, GPU0).name == "torch"
    finally:
        driver.shut()


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


@triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "pair", [*itertools.permutations((torch.float64, torch.float32, torch.float16, torch.bfloat16), 2)], ids=str
)
def test_on_a_gpu_every_cast_is_torchs_own_to_the_bit(pair: tuple[torch.dtype, torch.dtype]) -> None:
    """NaNs included: all 2^32 float32, all values of the 16-bit floats, those and random bits of float64."""
    from etha.cuda.select import driver
    from etha.transport.copy.device import Copier
    from etha.transport.geometry.boxes import BoxAxis
    from etha.transport.geometry.iovec import Op
    from tests.unit.cuda.interpreted import tile
    from tests.unit.transport.on_device import card_view

    source, target = pair
    cuda = driver()
    uuid = cuda.devices()[0].uuid
    copier = Copier(cuda, uuid)
    step = 1 << 28
    for first in range(0, 1 << 32 if source.itemsize > 2 else 1 << 16, step):
        if source.itemsize == 2:
            given = torch.arange(1 << 16, device="cuda").to(torch.int16).view(source)
        else:
            given = torch.arange(first - (1 << 31), first - (1 << 31) + step, device="cuda").to(torch.int32)
            given = given.view(torch.float32)
            if source is torch.float64:
                low = torch.randint(0, 1 << 29, given.shape, device="cuda")
                given = (given.double().view(torch.int64) | low).view(torch.float64)
        there = torch.empty_like(given, dtype=target)
        expected = given.to(target)
        torch.cuda.synchronize()
        here_view, there_view = (card_view(t, uuid) for t in (given, there))
        copier.run_ops([Op(tile([BoxAxis(given.numel(), 1, 1)], source, target), here_view, there_view, 0, 0)])
        assert torch.equal(bits(there), bits(expected))
    copier.close()


@triton
@pytest.mark.parametrize("capability", [80, 100])
def test_the_kernels_compile_for_gpus_with_wide_accesses_and_torchs_own_instructions(capability: int) -> None:
    """Down to PTX; no GPU is needed for that. In a process of its own, for Triton keeps what it was imported as."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.cuda.compiling", str(capability)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
