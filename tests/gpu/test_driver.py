"""The real driver on a real card: what the fake one is held to, and what only a card can show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from etha.config import Settings
from etha.cuda.select import driver
from etha.doctor.gpu import check_cuda
from etha.memory.cuda import Exports
from tests.unit.cuda.contract import copies_events_and_streams, memory_and_events_of_another_process

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


def test_devices_are_torchs() -> None:
    for device in driver().devices():
        found = torch.cuda.get_device_properties(device.ordinal)
        assert device.uuid == f"GPU-{found.uuid}" and device.capability == (found.major, found.minor)
    assert len(driver().devices()) == torch.cuda.device_count()


def test_copies_events_and_streams() -> None:
    copies_events_and_streams(driver())


@pytest.mark.parametrize("kill", [False, True], ids=["the exporter ends", "the exporter is killed"])
def test_memory_and_events_of_another_process(kill: bool) -> None:
    assert memory_and_events_of_another_process(driver, kill=kill) == []


def test_torchs_own_memory_is_exported_with_its_offset() -> None:
    cuda = driver()
    exports = Exports(cuda)
    a, b = (torch.full((1000,), i, device="cuda") for i in (1, 2))
    (one, at), (two, behind) = exports.find(a), exports.find(b)
    assert one == two and behind - at == b.data_ptr() - a.data_ptr()
    assert cuda.holds(a) == cuda.devices()[0].uuid and cuda.holds(a.cpu()) is None


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_that_has_no_handle_is_told(setting: str) -> None:
    program = """
import os, sys
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = sys.argv[1]
import torch
from etha.cuda.driver import Unexportable
from etha.cuda.select import driver
from etha.memory.cuda import Exports
try:
    Exports(driver()).find(torch.ones(3 << 20, device="cuda"))
except Unexportable as error:
    print(error)
"""
    answer = subprocess.run([sys.executable, "-c", program, setting], capture_output=True, text=True)
    assert setting in answer.stdout, answer.stderr


def test_the_callers_device_and_context_stay() -> None:
    program = """
import torch
from cuda.bindings import driver as cu
from etha.cuda.select import driver
cuda = driver()
last = cuda.devices()[-1]
cuda.free(cuda.allocate(last.uuid, 1 << 20))
assert int(cu.cuCtxGetCurrent()[1]) == 0
assert torch.cuda.current_device() == 0
print("ok")
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.stdout == "ok\n", answer.stderr


def test_the_doctor_finds_the_card_well(tmp_path: Path) -> None:
    text = check_cuda(Settings.from_env({"ETHA_RUNTIME_DIR": str(tmp_path)}))
    assert torch.cuda.get_device_name(0) in text and "passed to another process and back" in text
