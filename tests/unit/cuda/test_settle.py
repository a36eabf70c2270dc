"""What a worker asks before it writes into live tensors: the real driver, over stand-ins."""

from __future__ import annotations

from typing import Any

import pytest

from etha.cuda.driver import DeviceError
from etha.cuda.runtime import Runtime
from tests.fakes import bindings
from tests.fakes.bindings import Machine, real_driver

GPU1 = "GPU-01010101-0101-0101-0101-010101010101"


class Bindings(bindings.Driver):
    """``mapped``: what the attribute says of an address."""

    mapped = True

    def cuCtxSynchronize(self) -> Any:
        return (self._m.call("cuCtxSynchronize"),)

    def cuPointerGetAttribute(self, attribute: Any, ptr: int) -> Any:
        assert attribute is real_driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MAPPED
        return self._m.call("cuPointerGetAttribute", attribute, ptr), self.mapped


def test_settling_waits_for_the_context_of_that_device() -> None:
    machine = Machine()
    cuda = Runtime((Bindings(machine), bindings.Runtime(machine)))
    cuda.settle(GPU1)
    assert [c for c in machine.calls if c[0] == "cuCtxSynchronize"] == [("cuCtxSynchronize", 1, ())]
    assert machine.contexts == []
    machine.errors["cuCtxSynchronize"] = "CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(DeviceError, match=f"all work on {GPU1}: cudaErrorIllegalAddress") as lost:
        cuda.settle(GPU1)
    assert lost.value.sticky


def test_an_address_without_memory() -> None:
    machine = Machine()
    driver = Bindings(machine)
    cuda = Runtime((driver, bindings.Runtime(machine)))
    assert cuda.backed(0x7000)
    driver.mapped = False  # reserved only
    assert not cuda.backed(0x7000)
    machine.errors["cuPointerGetAttribute"] = "CUDA_ERROR_INVALID_VALUE"
    assert not cuda.backed(0x7000)
    machine.errors["cuPointerGetAttribute"] = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(DeviceError, match="memory at 0x7000: cudaErrorLaunchFailure"):
        cuda.backed(0x7000)
