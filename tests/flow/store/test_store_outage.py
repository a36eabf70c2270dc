"""The store through restarts, freezes and losses of its server, and what wakes a watcher."""

from __future__ import annotations

import asyncio
import math
import re
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from etha.errors import ConfigError, RedisUnavailableError
from etha.store.registry import Store, identify
from tests.unit.store.server import Server, agent, agent_record, dead, fresh_namespace, here, served, sleeping


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with served(tmp_path) as running:
        yield running


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etha.store.lease.AGENT_BEAT", 0.3)


@pytest.fixture
async def store(server: Server) -> AsyncIterator[Store]:
    async with agent(server.url, fresh_namespace(), "a") as opened:
        yield opened


async def until(store: Store, key: str, condition: object, within: float = 8) -> None:
    """Wait as the agent does: subscribe, read, wait for a change, read again."""
    async with asyncio.timeout(within):
        async with store.changes(key) as changed:
            while not await condition():  # type: ignore[operator]
                await changed()


async def test_a_change_wakes_a_watcher_at_once(server: Server, store: Store) -> None:
    async with agent(server.url, store.keys.namespace, "b") as other:
        key = store.keys.pair("w")
        async with other.changes(key) as changed:
            await changed()  # the subscription stands
            began = time.monotonic()
            await store.pairs.join("w", "t", "i", rank=0, world_size=1, member=here(), launch=None)
            await changed()
            assert time.monotonic() - began < 1


async def test_every_watcher_of_a_key_is_called_once_subscribed_and_at_ticks(store: Store) -> None:
    calls = [0, 0]

    def count(which: int) -> None:
        calls[which] += 1

    key = store.keys.pair("w")
    with store.watch(key, lambda: count(0)):
        await until(store, key, lambda: _true(calls[0] >= 1))
        with store.watch(key, lambda: count(1)):
            assert calls[1] == 1, "the key is subscribed already: read now"
            before = list(calls)
            async with store.changes(key) as changed:
                await changed()  # subscribed already
                began = time.monotonic()
                await changed()  # nobody changed anything: a tick
            assert time.monotonic() - began < 4 and calls[0] > before[0] and calls[1] > before[1]
    before = list(calls)
    await store._session.connection.call("publish", lambda client: client.publish(key, "x"), 5)
    assert calls == before


async def _true(value: bool) -> bool:
    return value


async def test_a_failing_callback_does_not_stop_the_others(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    key = store.keys.pair("w")
    with store.watch(key, lambda: 1 // 0):  # type: ignore[arg-type,return-value]
        async with asyncio.timeout(5), store.changes(key) as changed:
            await changed()
            await changed()
    assert "a callback of" in caplog.text


async def test_calls_wait_through_an_outage(server: Server, store: Store) -> None:
    server.stop()
    waiting = asyncio.ensure_future(store.event("after the outage", timeout=math.inf))
    with pytest.raises(RedisUnavailableError, match=r"could not be reached within 0\.3 s to read"):
        await store.pairs.get("w", timeout=0.3)
    assert not waiting.done() and "no server listens" in store.trouble
    server.start()
    async with asyncio.timeout(5):
        await waiting
    assert store.trouble == ""
    assert "after the outage" in [fields["kind"] for _, fields in await store.events()]


async def test_a_frozen_server_is_an_outage(server: Server, store: Store) -> None:
    server.signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RedisUnavailableError):
        await store.pairs.get("w", timeout=0.5)
    assert time.monotonic() - began < 2
    server.signal(signal.SIGCONT)
    assert await store.pairs.get("w") is None


async def test_subscriptions_survive_a_restart(server: Server, store: Store) -> None:
    key = store.keys.pair("w")
    async with store.changes(key) as changed:
        await changed()
        server.restart()
        async with asyncio.timeout(5):
            await changed()  # subscribed again
        async with agent(server.url, store.keys.namespace, "b") as other, asyncio.timeout(1.5):
            for _ in range(3):
                await other._session.connection.call("publish", lambda client: client.publish(key, "x"), 5)
                await changed()


async def test_a_frozen_server_loses_the_subscription_and_a_thawed_one_gets_it_again(
    server: Server, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etha.store.watch.TICK", 0.2)
    monkeypatch.setattr("etha.store.watch.PONG_TIMEOUT", 0.6)
    key = store.keys.pair("w")
    server.restart()  # so that the watches begin anew, with these times
    await until(store, key, lambda: _true(key in store._session.watches._acknowledged))
    with store.watch(key, lambda: None):
        server.signal(signal.SIGSTOP)
        await until(store, key, lambda: _true(not store._session.watches._connected))
        server.signal(signal.SIGCONT)
        await until(store, key, lambda: _true(key in store._session.watches._acknowledged))


async def test_what_an_agent_owns_is_put_back_after_data_loss(server: Server, store: Store) -> None:
    namespace, identity = store.keys.namespace, store.identity
    with sleeping() as worker:
        async with agent(server.url, namespace, "b") as other:
            far = replace(worker, agent="b")
            await store.pairs.join("w", "t", "i", rank=0, world_size=1, member=here(), launch="old")
            await store.pairs.join("w", "t", "i", rank=0, world_size=1, member=here(), launch="run")
            formed = await other.pairs.join("w", "i", "t", rank=0, world_size=1, member=far, launch=None)
            assert formed.state == "formed"
            await store.pairs.get("w")  # this agent, too, has seen that it formed
            assert await store.batches.enroll("w", "b", 1, "t", 0, "{}", expected=1) == 1
            await store.batches.set_fields("w", "b", {"seq": 41, "version": "v41"})
            server.restart()

            async def back() -> bool:
                view = await store.pairs.get("w")
                return view == formed and [record.id for record in await store.agents.all()] == ["a", "b"]

            await until(store, store.keys.pair("w"), back)
            batch = await store.batches.get("w", "b")
            assert batch is not None and (batch.seq, batch.version, batch.generation) == (41, "v41", 1)
            assert await store.batches.enroll("w", "b", 1, "t", 0, "{}", expected=1) == 2, "generations go on"
            assert await identify(server.url, namespace, timeout=5) == identity
            assert store.identity == other.identity == identity
            await store.pairs.join("w", "t", "i", rank=0, world_size=1, member=here(), launch="next")
            view = await other.pairs.join("w", "i", "t", rank=0, world_size=1, member=far, launch=None)
            assert view.epoch == 2


async def test_a_rank_that_was_waiting_joins_again_after_data_loss(server: Server, store: Store) -> None:
    await store.pairs.join("w", "t", "i", rank=0, world_size=1, member=here(), launch=None)
    server.restart()

    async def back() -> bool:
        view = await store.pairs.get("w")
        return view is not None and view.member("t", 0) is not None

    await until(store, store.keys.pair("w"), back)
    view = await store.pairs.join("w", "i", "t", rank=0, world_size=1, member=here(), launch=None)
    assert (view.state, view.epoch) == ("formed", 1)


async def test_a_rank_that_left_is_not_put_back(server: Server, store: Store) -> None:
    await store.pairs.join("w", "t", "i", rank=0, world_size=1, member=here(), launch=None)
    await store.pairs.join("v", "t", "i", rank=0, world_size=1, member=here(), launch=None)
    await store.pairs.leave("w", "t", 0, here(), "closed")
    server.restart()

    async def back() -> bool:
        return await store.pairs.get("v") is not None

    await until(store, store.keys.pair("v"), back)
    assert await store.pairs.get("w") is None


async def test_newer_state_is_not_overwritten_by_an_agent_that_was_away(server: Server) -> None:
    namespace = fresh_namespace()
    async with agent(server.url, namespace, "a") as store, agent(server.url, namespace, "b") as other:
        await store.pairs.join("w", "t", "i", rank=0, world_size=1, member=dead(), launch=None)
        await other.pairs.join("w", "i", "t", rank=0, world_size=1, member=here("b"), launch=None)
        await store.pairs.get("w")
        # "a" sleeps: its lease ends, its rank goes to another, the pair forms again.
        store._session.owned.agent = None
        await store._session.connection.call("expire", lambda client: client.delete(store.keys.agent("a")), 5)
        await other.pairs.join("w", "t", "i", rank=0, world_size=1, member=here("b"), launch=None)
        await other.pairs.join("w", "i", "t", rank=0, world_size=1, member=here("b"), launch=None)
        before = await other.pairs.get("w")
        assert before is not None and (before.state, before.epoch) == ("formed", 2)
        store._session.owned.agent = agent_record("a")  # it wakes up

        async def back() -> bool:
            return len(await other.agents.all()) == 2

        await until(other, other.keys.agent("a"), back)
        await store.agents._beat(5)
        assert await other.pairs.get("w") == before


async def test_who_joined_while_redis_had_forgotten_waits_for_the_right_epoch(server: Server) -> None:
    namespace = fresh_namespace()
    async with agent(server.url, namespace, "a") as store:
        await store.pairs.join("w", "t", "i", rank=0, world_size=1, member=here(), launch=None)
        for _ in range(2):
            await store.pairs.join("w", "i", "t", rank=0, world_size=1, member=dead(), launch=None)
            await store.pairs.join("w", "t", "i", rank=0, world_size=1, member=here(), launch=None)
        await store.pairs.get("w")
        known = store.pairs._known_epoch("w")
        record, store._session.owned.agent = store._session.owned.agent, None  # not yet back
        await store._session.connection.call("flush", lambda client: client.flushall(), 5)
        async with agent(server.url, namespace, "b") as other:
            view = await other.pairs.join("w", "i", "t", rank=0, world_size=1, member=here("b"), launch=None)
            assert view.epoch == 0
            store._session.owned.agent = record
            await store.agents._beat(5)
            view = await other.pairs.get("w") or view
            assert (view.state, view.epoch) == ("lost", known)
            view = await store.pairs.join("w", "t", "i", rank=0, world_size=1, member=here(), launch=None)
            assert (view.state, view.epoch) == ("formed", known + 1)


async def test_identity_tells_one_redis_from_another(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    namespace = fresh_namespace()
    first = await identify(server.url, namespace, timeout=5)
    assert first == await identify(server.url + "?db=0", namespace, timeout=5)
    with served(tmp_path_factory.mktemp("other")) as another:
        assert first != await identify(another.url, namespace, timeout=5)


async def test_a_missing_server_is_unavailable_and_the_password_is_not_told(tmp_path: Path) -> None:
    with pytest.raises(RedisUnavailableError) as caught:
        await Store.open(f"unix://etha:geheim@{tmp_path}/none.sock", "x", timeout=0.2)
    assert "geheim" not in str(caught.value) and "etha:***@" in str(caught.value)


async def test_user_and_password_are_given_and_wrong_ones_refused(tmp_path: Path) -> None:
    acl = ["--requirepass", "s3cret"]
    with served(tmp_path, *acl) as server:
        path = str(server.path)
        for url in (f"unix://default:s3cret@{path}", f"unix://:s3cret@{path}", f"unix://{path}?password=s3cret"):
            async with await Store.open(url, "x", timeout=5) as store:
                assert store.identity and "s3cret" not in store.url
        for url in (f"unix://default:wr0ng@{path}", f"unix://{path}"):
            began = time.monotonic()
            with pytest.raises(ConfigError, match="check user and password") as caught:
                await Store.open(url, "x", timeout=30)
            assert "wr0ng" not in str(caught.value) and time.monotonic() - began < 5


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_tcp_with_a_password(tmp_path: Path) -> None:
    port = free_port()
    with served(tmp_path, "--port", str(port), "--bind", "127.0.0.1", "--requirepass", "s3cret"):
        async with agent(f"redis://:s3cret@127.0.0.1:{port}/1", "x", "a") as store:
            assert [record.id for record in await store.agents.all()] == ["a"]
            async with asyncio.timeout(5), store.changes(store.keys.agent("a")) as changed:
                await changed()


@pytest.mark.needs("openssl", "redis-server")  # the shipped server has no TLS
async def test_tls_checks_the_certificate(tmp_path: Path) -> None:
    port, key, certificate = free_port(), tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)  # noqa: ASYNC221
    tls = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    tls += ["--tls-auth-clients", "no", "--bind", "127.0.0.1", "--requirepass", "pw"]
    try:
        server = Server(tmp_path, *tls, binary="redis-server")
    except RuntimeError:
        pytest.skip("this server was built without TLS")
    try:
        url = f"rediss://:pw@127.0.0.1:{port}/0"
        async with agent(f"{url}?ssl_ca_certs={certificate}", "x", "a") as store:
            assert [record.id for record in await store.agents.all()] == ["a"]
            async with asyncio.timeout(5), store.changes(store.keys.agent("a")) as changed:
                await changed()
        began = time.monotonic()
        with pytest.raises(ConfigError, match="certificate is not accepted"):
            await Store.open(url, "x", timeout=30)
        assert time.monotonic() - began < 5
    finally:
        server.stop()


async def test_a_user_without_info_still_has_a_store(tmp_path: Path) -> None:
    with served(tmp_path, "--user", *["etha", "on", ">pw", "~etha:*", "&etha:*", "+@all", "-info", "-@admin"]):
        async with agent(f"unix://etha:pw@{tmp_path}/r.sock", "x", "a") as store:
            await store.agents._beat(5)
            assert not store.agents._may_ask_run_id
            assert [record.id for record in await store.agents.all()] == ["a"]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://:pw@127.0.0.1:{port}/0", "127.0.0.1 refuses connections to port {port}: is a server running there?"),
        ("redis://localhost:{port}/0", "localhost refuses connections to port {port}: is a server running there?"),
        ("redis://nobody.invalid:{port}", "unknown host 'nobody.invalid': is the name right?"),
        ("unix://{path}/none.sock", "no such socket: is the server running?"),
    ],
)
async def test_who_comes_first_hears_at_once_why_redis_is_not_there(tmp_path: Path, url: str, why: str) -> None:
    port = free_port()
    text = url.format(port=port, path=tmp_path)
    with pytest.raises(RedisUnavailableError, match=re.escape(why.format(port=port))) as caught:
        await Store.open(text, "x", timeout=math.inf, patient=False)
    assert "pw@" not in caught.value.message


async def test_later_a_refusal_is_waited_for_and_a_silent_server_is_told_apart(tmp_path: Path) -> None:
    reported: list[str] = []
    with pytest.raises(RedisUnavailableError, match="refuses connections"):
        await Store.open(
            f"redis://127.0.0.1:{free_port()}",
            "x",
            timeout=1.0,
            on_trouble=lambda error: reported.append(error.message),
        )
    assert reported and all("refuses connections" in text for text in reported)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(RedisUnavailableError, match="no answer: is it stopped"):
            await Store.open(f"redis://127.0.0.1:{silent.getsockname()[1]}", "x", timeout=1.0, patient=False)
