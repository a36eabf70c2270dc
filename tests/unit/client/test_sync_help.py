"""``help`` of the blocking client says as much as that of the async one."""

from __future__ import annotations

import inspect

import pytest

import etha


@pytest.mark.parametrize("name", ["init_pair", "register_tensors", "transfer", "publish", "subscribe", "close"])
def test_a_blocking_call_says_what_the_async_one_says(name: str) -> None:
    whole = inspect.getdoc(getattr(etha.AsyncTensorBusClient, name))
    assert whole is not None and whole in (inspect.getdoc(getattr(etha.TensorBusClient, name)) or "")
