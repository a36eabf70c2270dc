"""``etha.empty`` and its like for a GPU, where torch's own memory is what an agent maps; nothing here has a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from etha.client.memory.tensors import empty, empty_like, share_module
from etha.errors import ConfigError
from etha.memory.handles import describe


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
