"""Which driver, which NCCL and which kernels this process uses.

The real ones are imported when they are first asked for, so that a process that never meets a GPU loads none of them.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from etha.cuda.driver import Driver
from etha.cuda.nccl import Nccl

if TYPE_CHECKING:  # kernels.py imports torch
    from etha.cuda.kernels import Kernels

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Choice(Generic[T]):
    """One object that the whole process uses: the one that was installed, or else the real one, made when it is first
    asked for."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self.one = make, cast("T | None", None)

    def get(self) -> T:
        if self.one is None:
            self.one = self._make()
        return self.one


def _runtime() -> Driver:
    from etha.cuda.runtime import Runtime

    return Runtime()


def _bindings() -> Nccl:
    from etha.cuda.nccl4py import Bindings

    return Bindings()


_driver, _nccl = _Choice(_runtime), _Choice(_bindings)


def driver() -> Driver:
    """This process's driver: the installed one, or else the real one, which is made by the first call."""
    return _driver.get()


def install_driver(one: Driver | None) -> None:
    """Use ``one`` from now on in this process; None: the real one again."""
    _driver.one = one


def installed_driver() -> Driver | None:
    """The driver in use, if any. Asking loads nothing."""
    return _driver.one


def nccl() -> Nccl:
    """This process's NCCL: the installed one, or else the real one, which the first call makes. ConfigError without
    it."""
    return _nccl.get()


def install_nccl(one: Nccl | None) -> None:
    """Use ``one`` from now on in this process; None: the real one again."""
    _nccl.one = one


def installed_nccl() -> Nccl | None:
    """The NCCL in use, if any. Asking loads nothing."""
    return _nccl.one


def choose_kernels(driver: Driver, uuid: str) -> Kernels:
    """Triton's kernels if they can be built on this machine, otherwise torch's. DeviceError if there is no device."""
    kind = driver.tensor(uuid, 0, 0).device.type
    return _kernels(f"memory of {uuid} is {kind} memory for torch" if kind != "cuda" else None)


@cache
def _kernels(reason: str | None) -> Kernels:
    missing = reason or _missing()
    if missing is None:
        from etha.cuda.triton_kernels import TritonKernels

        return TritonKernels()
    log.warning("strided copies on a GPU are made one by one, for Triton is missing: %s", missing)
    from etha.cuda.torch_kernels import TorchKernels

    return TorchKernels()


def _missing() -> str | None:
    """What Triton lacks here; None if nothing. It builds its launchers with a C compiler and Python's headers."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if shutil.which("gcc") is None and shutil.which("clang") is None:
        return "there is no C compiler (gcc or clang)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python's C headers are not installed"
    return None
