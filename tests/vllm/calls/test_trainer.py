"""Rank 0's errors: what the client raises of an engine that has died or refuses is told as the documented errors."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import requests

pytest.importorskip("vllm")
with warnings.catch_warnings():  # of others' packages
    warnings.simplefilter("ignore")
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from etha.integrations.vllm.trainer import replica
    from etha.integrations.vllm.trainer.control import said
    from etha.integrations.vllm.trainer.init_info import EthaTrainerInitInfo
    from etha.integrations.vllm.trainer.replica import Replica

from etha.errors import HELD_HERE, ConfigError, PeerLostError, TransferError

CALLS = ("start_weight_update", "pause_generation", "update_weights", "finish_weight_update", "resume_generation")


class Client:
    """An engine that answers until the call ``at``."""

    def __init__(self, at: str, error: Exception | Callable[[], object]) -> None:
        self.made: list[str] = []
        self._at, self._error = at, error

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)

        def call(*_: Any, **__: Any) -> None:
            self.made.append(name)
            if self._at in self.made and isinstance(self._error, Exception):
                raise self._error
            if self._at in self.made:
                self._error()

        return call


class Bus:
    async def transfer(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(seq=1, version=None)


def send(client: Client, lost: Lost | None = None) -> None:
    """One version, by rank 0 of a trainer whose pair has heard that the engine's workers have died, or is as told."""

    async def round_() -> None:
        info = EthaTrainerInitInfo(rank=0, world_size=1)
        engine: Any = Replica(info, client, Bus(), None)  # type: ignore[arg-type]
        engine.pair = SimpleNamespace(lost=lost or Lost())
        await engine.round("seven")

    asyncio.run(round_())


@pytest.mark.parametrize("at", CALLS)
def test_an_engine_that_never_answers_after_its_pair_was_lost_is_a_lost_peer(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As several engines behind one URL, of which one has died: vLLM answers none of the calls under way."""
    monkeypatch.setattr(replica, "_NEWS", 0.01)
    ended = Event()
    try:
        with pytest.raises(PeerLostError):
            send(Client(at, ended.wait))
    finally:
        ended.set()


def test_an_engine_in_the_place_of_the_one_that_was_met_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `vllm serve` that is killed can leave workers behind, which hold the pair; a new one answers at its URL."""
    monkeypatch.setattr(replica, "_NEWS", 0.01)
    client = Client("start_weight_update", requests.HTTPError("500: this worker has met no trainer: call init"))
    with pytest.raises(TransferError, match="whose workers still live") as reported:
        send(client, Stands())
    assert (type(reported.value), reported.value.outcome) == (TransferError, "withdrawn")
    with pytest.raises(PeerLostError, match="has left") as lost:
        send(client)
    assert lost.value.outcome == "withdrawn"


class Lost:
    """A pair's ``lost``, of one that is."""

    text = "inference rank 0 died"

    def is_set(self) -> bool:
        return True

    async def wait(self) -> str:
        return "died"

    def __await__(self) -> Any:
        return asyncio.sleep(0).__await__()


class Stands(Lost):
    """Of one that is not."""

    def is_set(self) -> bool:
        return False

    def __await__(self) -> Any:
        return asyncio.Event().wait().__await__()

    async def wait(self) -> str:
        await asyncio.Event().wait()
        return ""


@pytest.mark.parametrize("at", CALLS)
def test_an_engine_that_dies_at_any_call_is_a_lost_peer(at: str) -> None:
    client = Client(at, requests.ConnectionError("refused"))
    with pytest.raises(PeerLostError) as reported:
        send(client)
    assert reported.value.reason == "died"
    assert reported.value.outcome == ("withdrawn" if at == "start_weight_update" else "unknown")


@pytest.mark.parametrize("at", CALLS[1:])
def test_an_engine_that_refuses_is_a_failed_transfer(at: str) -> None:
    client = Client(at, requests.HTTPError("500: no"))
    with pytest.raises(TransferError, match=r"version seven.*500: no") as reported:
        send(client)
    assert type(reported.value) is TransferError
    paused_for_good = at == "finish_weight_update"
    assert ("resume_generation" in client.made) is not paused_for_good
    assert reported.value.torn is paused_for_good


CAUSE = "the engine's model does not take 'w'"
AROUND = (
    "Call to collective_rpc method failed: Worker failed with error '{}', please check the stack trace above for the"
)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (500, json.dumps({"error": {"message": AROUND.format(CAUSE) + " root cause", "code": 500}}), CAUSE),
        (400, json.dumps({"error": {"message": "Field required"}}), "Field required"),
        (502, "<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (503, "[]", "[]"),
        (500, "x" * 5000, "x" * 2000),
    ],
)
def test_what_an_engine_says_is_shown_without_what_vllm_puts_around_it(status: int, body: str, says: str) -> None:
    assert said(status, body) == says


def test_an_engine_without_the_routes_is_told_how_to_start() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(
                ConfigError, match=r"pair 'weights': .*/init_weight_transfer_engine: .*VLLM_SERVER_DEV_MODE=1"
            ):
                join(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "http://"])
def test_an_address_that_is_none_is_an_error_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match=r"pair 'weights': .*: give the client an address such as http://"):
        join(url)


def join(url: str) -> None:
    """Ask the engine at ``url`` to join."""

    async def ask() -> None:
        info = EthaTrainerInitInfo(rank=0, world_size=1)
        engine: Any = Replica(info, HTTPVLLMWeightSyncClient(url), Bus(), None)  # type: ignore[arg-type]
        assert await engine.ask_to_join() is None

    asyncio.run(ask())


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_trainer_engine_of_a_process_is_told_of_the_first(world: int) -> None:
    """Of several ranks they meet on a pair of which the user knows nothing; one alone meets the engine itself."""
    error = ConfigError("")

    class Refusing(Bus):
        async def init_pair(self, *_: Any, **__: Any) -> Any:
            raise error

    async def begin() -> None:
        info = EthaTrainerInitInfo(rank=0, world_size=world)
        engine: Any = Replica(info, Client("", ValueError()), Refusing(), None)  # type: ignore[arg-type]
        await (engine.meet() if world == 1 else engine.begin())

    error = ConfigError(f"rank 0 of side first on pair weights.ranks {HELD_HERE}, pid 1: close that one")
    with pytest.raises(ConfigError, match=r"engine of pair 'weights' lives in this process: call shutdown\(\)"):
        asyncio.run(begin())
    error = ConfigError("no")
    with pytest.raises(ConfigError, match=r"^no$"):
        asyncio.run(begin())
