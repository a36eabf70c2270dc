"""The doctor's look at GPUs, over fake ones whose memory really passes to a child."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from etha.config import Settings
from etha.cuda.driver import DeviceError, Unexportable
from etha.cuda.select import install_nccl
from etha.doctor import Failing
from etha.doctor import gpu as doctor
from etha.doctor.examination import CHECKS
from etha.errors import ConfigError
from tests.fakes.cuda import GPU0, GPU1, FakeDriver
from tests.processes import CONTEXT, preload

preload("tests.fakes.cuda", "etha.doctor.gpu")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_env({"ETHA_RUNTIME_DIR": str(tmp_path)})


class Nccl:
    """As much of it as is asked."""

    def version(self) -> str:
        return "2.99.1"


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_nccl(Nccl())  # type: ignore[arg-type]
    # A child that is forked from a server which has torch already; the doctor's own loads it anew, for seconds.
    monkeypatch.setattr(doctor, "_CONTEXT", CONTEXT)
    yield
    install_nccl(None)


class Maker:
    """Gives this process one driver and a child its own; pickled it forgets the first."""

    def __init__(self, driver: FakeDriver, child: type[FakeDriver] = FakeDriver) -> None:
        self.driver: FakeDriver | None = driver
        self.child = child

    def __getstate__(self) -> dict[str, object]:
        return {"driver": None, "child": self.child}

    def __call__(self) -> FakeDriver:
        return self.driver or self.child((GPU0, GPU1))


@pytest.mark.slow
def test_cards_versions_peers_and_ipc_are_told(settings: Settings) -> None:
    gpu = FakeDriver((GPU0, GPU1), nbytes=80 << 30, peers=set())
    text = doctor.check_cuda(settings, Maker(gpu))
    assert f"cuda:0 Fake GPU, 80 GiB, sm_90, {GPU0}" in text and f"cuda:1 Fake GPU, 80 GiB, sm_90, {GPU1}" in text
    assert "CUDA driver 13.0, runtime 13.0" in text and "NCCL 2.99.1" in text
    assert "cuda:0 reaches no other; cuda:1 reaches no other" in text
    assert "1 MiB of each passed to another process and back by CUDA IPC" in text
    gpu.check()


def test_one_card_has_no_peers_and_nccl_may_be_missing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Nccl:
        raise ConfigError("nccl4py is missing")

    monkeypatch.setattr(doctor, "nccl", missing)
    gpu = FakeDriver((GPU0,))
    text = doctor.check_cuda(settings, Maker(gpu))
    assert "reaches" not in text and "no NCCL, which GPUs of different hosts need: nccl4py is missing" in text
    gpu.check()
    two = FakeDriver((GPU0, GPU1))
    assert "cuda:0 reaches cuda:1; cuda:1 reaches cuda:0" in doctor.check_cuda(settings, Maker(two))
    two.check()


class Blind(FakeDriver):
    """Cannot open what others export: another IPC namespace."""

    def open(self, uuid: str, handle: bytes) -> int:
        raise DeviceError("cudaErrorMapBufferObjectFailed", "open")


class Elsewhere(FakeDriver):
    """Opens something else."""

    def open(self, uuid: str, handle: bytes) -> int:
        return self.allocate(uuid, doctor.NBYTES)

    def close(self, address: int) -> None:
        self.free(address)


class Dying(FakeDriver):
    """Its process does not live long enough."""

    def open(self, uuid: str, handle: bytes) -> int:
        sys.exit(3)


class Deaf(FakeDriver):
    """Writes into nothing."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if target not in self.mapped:
            super().copy(target, source, nbytes, stream)


@pytest.mark.parametrize(
    ("child", "match"),
    [
        (Blind, "cudaErrorMapBufferObjectFailed"),
        (Elsewhere, "it sees other bytes"),
        (Dying, "that process died"),
        (Deaf, "what another process wrote by IPC is not there"),
    ],
)
def test_memory_that_does_not_pass_fails_with_the_cure(settings: Settings, child: type[FakeDriver], match: str) -> None:
    gpu = FakeDriver((GPU0, GPU1))
    with pytest.raises(Failing, match=match) as caught:
        doctor.check_cuda(settings, Maker(gpu, child))
    assert "--ipc=host" in caught.value.mend
    gpu.check()


def test_a_card_that_does_not_work_fails(settings: Settings) -> None:
    gpu = FakeDriver((GPU0,))
    gpu.fail("allocate", DeviceError("cudaErrorECCUncorrectable", "allocate"))
    with pytest.raises(Failing, match=r"CUDA does not work.*ECC") as caught:
        doctor.check_cuda(settings, Maker(gpu))
    assert "nvidia-smi" in caught.value.mend
    gpu.fail("export", Unexportable("cudaErrorNotSupported", "export"))
    with pytest.raises(Failing, match="has no IPC handle"):
        doctor.check_cuda(settings, Maker(gpu))
    gpu.check()


def test_no_gpu_is_one_line_and_no_failure(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    none = partial(FakeDriver, ())
    text = doctor.check_cuda(settings, none)
    assert text.startswith("no GPU is visible: tensors of the CPU only") and "\n" not in text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Failing, match="torch has a GPU, cuda-bindings find none") as caught:
        doctor.check_cuda(settings, none)
    assert "driver is too old" in caught.value.mend


def test_without_the_bindings_it_depends_on_torch(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> FakeDriver:
        raise ConfigError("pip install 'sub-etha[nccl]'")

    assert "tensors of the CPU only" in doctor.check_cuda(settings, missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Failing, match=r"sub-etha\[nccl\]"):
        doctor.check_cuda(settings, missing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_this_machine_passes(settings: Settings) -> None:
    assert doctor.check_cuda(settings).startswith("no GPU is visible")
    assert ("cuda", doctor.check_cuda) in CHECKS
