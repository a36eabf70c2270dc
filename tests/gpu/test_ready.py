"""Without a GPU nothing pretends to have measured one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    "command", [["tests/gpu/ready.py"], ["bench/transfer.py", "--device", "cuda"]], ids=["tests", "benchmark"]
)
def test_without_a_gpu_one_sentence_and_no_success(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stdout == ""
    assert "sees no GPU" in done.stderr or "lacks" in done.stderr
    assert "nothing was" in done.stderr.lower() and "Traceback" not in done.stderr
