"""``etha.empty`` and its like for a GPU, where torch's own memory is what an agent maps; nothing here has a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from etha.client.memory.cuda import exportable
from etha.client.memory.tensors import empty, empty_like, share_module
from etha.cuda.reaper import reaper
from etha.errors import ConfigError
from etha.memory.handles import describe
from tests.fakes.cuda import GPU0, FakeDriver


def test_zeroed_memory_of_torch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def zeros(size: Any, **options: Any) -> torch.Tensor:
        asked.append((size, options))
        return torch.ones(1)

    monkeypatch.setattr("etha.client.memory.tensors.torch.zeros", zeros)
    assert (empty((2, 3), torch.bfloat16, "cuda:1") == 1).all()
    empty(4, device="cuda")
    assert asked == [
        ((2, 3), {"dtype": torch.bfloat16, "device": torch.device("cuda:1")}),
        ((4,), {"dtype": torch.float32, "device": torch.device("cuda")}),
    ]
    with pytest.raises(ConfigError, match="size 1 is -1"):
        empty((2, -1), device="cuda")


def test_memory_of_a_gpu_that_no_agent_can_map_is_replaced() -> None:
    driver = FakeDriver()
    for strides in ((1, 5), (3, 1)):
        given = driver.empty(GPU0, (15,), torch.bfloat16, exportable=False).as_strided((5, 3), strides)
        made = exportable(driver, given)
        assert made.dtype == given.dtype and made.shape == given.shape and made.stride() == given.stride()
        extent = driver.extent(made.data_ptr())
        assert driver.export(extent.base) and extent.nbytes == 2 << 20 and not made.any()
        part = made[1:]
        del made
        assert reaper.drain() and len([leak for leak in driver.leaks() if "memory" in leak]) == 1
        part.fill_(3)
        del part
    assert reaper.drain()
    kept = driver.empty(GPU0, (15,))
    assert exportable(driver, kept) is kept
    del given, kept
    driver.check()


def test_the_like_of_a_tensor_on_a_gpu() -> None:
    with FakeTensorMode():
        source = torch.empty(5, 7, dtype=torch.float16, device="cuda:0").t()
        made = empty_like(source)
    assert (made.device, made.dtype) == (source.device, source.dtype)
    assert made.shape == source.shape and made.stride() == source.stride()


def test_parameters_on_a_gpu_stay_where_they_are() -> None:
    class Half(nn.Module):
        """One parameter here, one on a GPU."""

        def __init__(self) -> None:
            super().__init__()
            self.here = nn.Parameter(torch.ones(3))

        def named_buffers(self, *_: Any, **__: Any) -> Any:
            yield "far", far

    far = SimpleNamespace(data=torch.ones(3), layout=torch.strided, device=torch.device("cuda:0"), numel=lambda: 3)
    far.is_quantized = far.is_nested = far.is_mkldnn = False
    before = far.data
    module = share_module(Half())
    assert describe(module.here.data).segment is not None and far.data is before
