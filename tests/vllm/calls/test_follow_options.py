"""What an engine that follows a publication may be told, and what vLLM's own options must be with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from etha.errors import ConfigError
from etha.integrations.vllm.engine.follow_options import FollowOptions, follow_options


def config(given: Any = None, load: str = "etha", backend: str | None = "etha", executor: Any = "mp") -> Any:
    return SimpleNamespace(
        additional_config={} if given is None else {"etha": given},
        load_config=SimpleNamespace(load_format=load),
        weight_transfer_config=None if backend is None else SimpleNamespace(backend=backend),
        parallel_config=SimpleNamespace(distributed_executor_backend=executor),
    )


def test_options_have_defaults_and_are_taken_as_they_are() -> None:
    assert follow_options(config({"publication": "policy"})) == FollowOptions(publication="policy")
    given = {
        "publication": "policy", "subscriber": "engine-7", "redis_url": "redis://h:6379", "namespace": "n",
        "pause": "keep", "serve": False, "timeout": 5,
    }  # fmt: skip
    assert follow_options(config(given)) == FollowOptions(**given)


def test_an_engine_that_was_told_nothing_follows_nothing() -> None:
    assert follow_options(config(load="auto")) is None
    assert follow_options(config(load="dummy", backend="nccl")) is None
    assert follow_options(config(load="auto", backend=None, executor="ray")) is None
    hashed = SimpleNamespace(**{**vars(config(load="auto")), "additional_config": object()})
    assert follow_options(hashed) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"publication": "p", "pauze": "wait"}, "no option 'pauze': do you mean 'pause'"),
        ({"publication": "p", "xyz": 1}, "no option 'xyz': it has publication, subscriber"),
        ({}, "does not say which publication"),
        ({"subscriber": "a"}, "does not say which publication"),
        ("policy", "is no object with options"),
        ({"publication": None}, "publication name None is not allowed"),
        ({"publication": "a b"}, "publication name 'a b' is not allowed"),
        ({"publication": "p", "subscriber": "a/b"}, "subscriber name 'a/b' is not allowed"),
        ({"publication": "p", "namespace": 3}, "namespace name 3 is not allowed"),
        ({"publication": "p", "pause": None}, "pause=None: give one of 'wait', 'abort', 'keep'"),
        ({"publication": "p", "serve": "no"}, "serve='no': give true or false"),
        ({"publication": "p", "timeout": 0}, "timeout=0: give seconds, more than 0"),
        ({"publication": "p", "timeout": True}, "timeout=True: give seconds"),
        ({"publication": "p", "timeout": float("inf")}, "timeout=inf: give seconds"),
        ({"publication": "p", "redis_url": "http://h"}, "redis_url"),
        ({"publication": "p", "redis_url": 7}, "redis_url=7: give the URL"),
    ],
)
def test_wrong_options_are_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        follow_options(config(given))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (config(), "--load-format etha takes the weights from a publication: give --additional-config"),
        (config({"publication": "p"}, load="auto"), "starts with its weights: give --load-format etha"),
        (config({"publication": "p"}, backend=None), "needs --weight-transfer-config"),
        (config({"publication": "p"}, backend="nccl"), "not 'nccl'"),
        (config({"publication": "p"}, executor="ray"), "mp or uni, and not with 'ray'"),
    ],
)
def test_vllms_other_options_must_go_with_them(others: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        follow_options(others)
    assert message in str(raised.value)
