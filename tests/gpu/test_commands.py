"""The commands on a card: the demo, and agents of all cards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from . import ON_A_CARD

pytestmark = ON_A_CARD
ETHA = [sys.executable, "-c", "from etha.cli import main; main()"]


@pytest.mark.parametrize(
    "words", [["--steps", "160"], ["--synthetic", "1"]], ids=["a training", "a GiB of random data"]
)
def test_the_demo(directory: Path, words: list[str]) -> None:
    env = {**os.environ, "TMPDIR": str(directory)}
    done = subprocess.run(
        [*ETHA, "demo", "--device", "cuda", *words], capture_output=True, text=True, timeout=380, env=env
    )
    print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr
    assert "every element equal" in done.stdout


def test_agents_of_all_cards(directory: Path) -> None:
    env = {**os.environ, "ETHA_RUNTIME_DIR": str(directory)}
    command = [sys.executable, "-m", "etha.agent", "--device", "all"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stderr is not None
            served: set[str] = set()
            for line in process.stderr:
                if " serves cuda-GPU-" in line:
                    served.add(line.partition(" serves ")[2].split()[0])
                if len(served) == torch.cuda.device_count():
                    break
            assert len(served) == torch.cuda.device_count(), f"only {served} served"
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(80) == 0
            ended = time.monotonic() - begun
            process.stderr.read()
            print(f"\nSIGTERM to the end: {ended:.1f} s, of the error stream {time.monotonic() - begun:.1f} s")
        finally:
            process.kill()
