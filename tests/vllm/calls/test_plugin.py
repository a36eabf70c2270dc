"""The plugin runs in every process of every vLLM beside which the package is installed: it must not be in its way."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
with warnings.catch_warnings():  # of others' packages
    warnings.simplefilter("ignore")
    import vllm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from etha.integrations.vllm import plugin
    from etha.integrations.vllm.engine.init_info import EthaWeightTransferInitInfo
    from etha.integrations.vllm.engine.worker import EthaWeightTransferEngine


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    plugin._warn_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("vllm.etha"), "warning", lambda text, *values: found.append(text % values))
    return found


def test_it_registers_two_names_as_often_as_it_is_called(warned: list[str]) -> None:
    for _ in range(3):
        plugin.register()
    assert WeightTransferEngineFactory._registry["etha"]() is EthaWeightTransferEngine
    assert "etha" in WeightTransferTrainerFactory._registry
    assert warned == []


def test_a_vllm_of_another_release_is_told_of_once_and_goes_on(
    warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    monkeypatch.setattr(MultiprocExecutor, "collective_rpc", untouched := MultiprocExecutor.collective_rpc.__wrapped__)
    for _ in range(3):
        plugin.register()
    assert warned == ["vLLM 0.99.1 is installed; the backend 'etha' of sub-etha supports 0.32.*"]
    assert MultiprocExecutor.collective_rpc is untouched
    info = EthaWeightTransferInitInfo(
        pair="weights", local_name="inference", remote_name="trainer", batch="w", names=[], dtypes=[], shapes=[]
    )
    with pytest.raises(plugin_error(), match=r"vLLM 0\.99\.1 is installed.*install a vLLM"):
        EthaWeightTransferEngine.init_transfer_engine(SimpleNamespace(), info)  # type: ignore[arg-type]


def test_an_engine_whose_experts_change_their_places_is_refused() -> None:
    info = EthaWeightTransferInitInfo(
        pair="weights", local_name="inference", remote_name="trainer", batch="w", names=[], dtypes=[], shapes=[]
    )
    engine: Any = SimpleNamespace(subscriber=None, parallel_config=SimpleNamespace(enable_eplb=True))
    with pytest.raises(plugin_error(), match=r"pair 'weights': .*--enable-eplb.*start it without"):
        EthaWeightTransferEngine.init_transfer_engine(engine, info)


def plugin_error() -> type[Exception]:
    from etha.errors import ConfigError

    return ConfigError


def test_it_never_raises(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(WeightTransferEngineFactory, "_registry")
    for _ in range(2):
        plugin.register()
    assert len(warned) == 1
    assert "could not be registered: AttributeError" in warned[0]


@pytest.mark.parametrize(("backend", "chosen"), [("etha", True), ("nccl", False), (None, False)])
def test_only_executors_of_the_backend_are_touched(backend: str | None, chosen: bool) -> None:
    config = None if backend is None else SimpleNamespace(backend=backend)
    executor = SimpleNamespace(vllm_config=SimpleNamespace(weight_transfer_config=config))
    assert plugin.chosen(executor) is chosen
    assert not plugin.chosen(object())


def test_it_loads_neither_the_backend_nor_what_it_needs() -> None:
    """It is early in a process of somebody who may never use it."""
    code = (
        "import sys; import vllm.v1.executor.multiproc_executor; before = set(sys.modules);"
        "from etha.integrations.vllm.plugin import register; register();"
        "print(*(set(sys.modules) - before))"
    )
    reported = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    loaded = reported.stdout.splitlines()[-1].split()
    assert "etha.integrations.vllm.engine.answers" in loaded
    assert [
        name for name in loaded if name.startswith(("etha.client", "etha.agent", "etha.plan", "redis", "zmq"))
    ] == []
