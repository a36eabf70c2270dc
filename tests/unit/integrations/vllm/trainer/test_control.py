"""Pause and resume of an engine by a client's own methods."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from etha.errors import ConfigError
from etha.integrations.vllm.trainer.control import Control


class Client:
    def __init__(self, *fails: str) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._fails = fails

    def _call(self, name: str, **arguments: Any) -> None:
        self.calls.append((name, arguments))
        if name in self._fails:
            raise RuntimeError(name)

    def pause_generation(self, mode: str) -> None:
        self._call("pause", mode=mode)

    def resume_generation(self) -> None:
        self._call("resume")

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self._call("reset", running=reset_running_requests)


def test_requests_that_were_kept_are_computed_anew_before_they_go_on() -> None:
    client = Client()
    control = Control(client, "keep")
    control.pause()
    control.resume()
    assert client.calls == [("pause", {"mode": "keep"}), ("reset", {"running": True}), ("resume", {})]


def test_an_engine_is_resumed_although_its_cache_could_not_be_reset() -> None:
    client = Client("reset")
    control = Control(client, "keep")
    control.pause()
    with pytest.raises(RuntimeError, match="reset"):
        control.resume()
    assert client.calls[-1] == ("resume", {})


def test_what_somebody_else_has_paused_stays_so() -> None:
    client = Client()
    Control(client, "wait").resume()
    assert client.calls == []


def test_a_pause_that_failed_half_way_is_undone() -> None:
    client = Client("pause")
    control = Control(client, "abort")
    with pytest.raises(RuntimeError, match="pause"):
        control.pause()
    control.resume()
    assert client.calls[-1] == ("resume", {})


def test_a_new_trainer_resumes_what_one_before_it_may_have_paused() -> None:
    client = Client()
    Control(client, "wait").recover()
    Control(client, None).recover()
    assert client.calls == [("resume", {})]


def test_a_client_that_cannot_pause_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Control(object(), "wait").pause()
    assert "pause_generation" in caplog.text


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="'soon'"):
        Control(Client(), "soon")  # type: ignore[arg-type]
