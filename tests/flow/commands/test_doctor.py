"""``etha doctor --redis``: agents in a real Redis, real ports, and what it says of each."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from etha.addresses import is_loopback
from etha.agent_session import look
from etha.bus.process import Credentials
from etha.config import Settings
from etha.doctor import Failing, Finding, examine, hosts, machine
from etha.doctor.addresses import own_addresses, split_address
from etha.doctor.finding import Noteworthy, found
from etha.observe.records import Incident
from etha.observe.ring import read_ring
from etha.peer.ports import Ports
from etha.store.embedded import embedded_path, ensure_embedded, stop_embedded
from etha.store.records import AgentRecord
from etha.store.registry import Store
from tests.flow.commands.running import agent, etha
from tests.processes import send_signal
from tests.unit.store.server import Server, fresh_namespace, served

FAR = "another-host"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def settings(server: Server, runtime: Path) -> Settings:
    return replace(Settings.from_env(), redis_url=server.url, namespace=fresh_namespace())


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take loopback addresses for addresses of a network: a machine without one can try these, too."""
    monkeypatch.setattr(hosts, "is_loopback", lambda host: False)


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[Ports]:
    """The two ports of an agent."""
    ports = Ports.bind(f"{host}:0")
    try:
        yield ports
    finally:
        ports.close()


@asynccontextmanager
async def published(settings: Settings, address: str, host: str = FAR, agent: str = "a1") -> AsyncIterator[None]:
    """An agent that says it takes links at ``address``."""
    assert settings.redis_url is not None
    record = AgentRecord(
        id=agent, host=host, device="cpu", pid=4711, address=address, public_key="", started_at=1.0, version="test"
    )
    async with await Store.open(settings.redis_url, settings.namespace, timeout=10) as store:
        await store.agents.publish(record)
        yield
        await store.agents.withdraw()


async def the_one(settings: Settings) -> Finding:
    (finding,) = await hosts.try_agents(settings)
    return finding


def test_a_frozen_embedded_server_is_found(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That there is a binary says nothing about the server that runs."""
    settings = Settings.from_env()
    assert "none runs now" in machine.check_redis(settings)
    asyncio.run(ensure_embedded(settings, 20))
    try:
        assert "answers" in machine.check_redis(settings)
        with socket.socket(socket.AF_UNIX) as trial:
            trial.connect(str(embedded_path(settings)))
            pid = Credentials.of_socket(trial).pid
        send_signal(pid, signal.SIGSTOP)
        monkeypatch.setattr(machine, "REDIS_SECONDS", 0.5)
        with pytest.raises(Failing, match=f"process {pid}, does not answer") as failing:
            machine.check_redis(settings)
        assert f"kill -CONT {pid}" in failing.value.mend
        os.kill(pid, signal.SIGCONT)
        monkeypatch.setattr(machine, "REDIS_SECONDS", 20.0)
        assert "answers" in machine.check_redis(settings)
    finally:
        asyncio.run(stop_embedded(settings, 10))


async def test_an_agent_takes_no_offence_at_the_doctor(runtime: Path) -> None:
    """It warned of four connections that did not speak as agents do, each time."""
    settings = Settings.from_env()
    with agent():
        [found] = await look(settings, timeout=30)
        record = AgentRecord(
            id="a1",
            host=FAR,
            device="cpu",
            pid=4711,
            address=found["agent"]["address"],
            public_key="",
            started_at=1.0,
            version="test",
        )
        assert "nothing answers" not in (await hosts.try_agent(record, "me")).text
        for _ in range(5):
            await look(settings, timeout=30)
    kinds = [one.what for _, one in read_ring(runtime / settings.namespace) if isinstance(one, Incident)]
    assert "started" in kinds and "warning" not in kinds


@pytest.mark.usefixtures("anywhere")
async def test_an_agent_whose_ports_both_answer_is_reached(settings: Settings) -> None:
    with listening() as ports:
        async with published(settings, ports.address):
            finding = await the_one(settings)
    assert finding.ok and finding.mend == ""
    assert f"host {FAR}" in finding.text and "pid 4711" in finding.text
    assert ports.address in finding.text and ports.data_address in finding.text


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("missing", ["links", "data"])
async def test_a_port_that_refuses_is_named(settings: Settings, missing: str) -> None:
    with listening() as ports:
        getattr(ports, missing).close()
        async with published(settings, ports.address):
            finding = await the_one(settings)
    assert not finding.ok and "run the doctor on host another-host" in finding.mend
    refused = ports.address if missing == "links" else ports.data_address
    assert f"{missing} {refused}: refused" in finding.text
    assert finding.text.count("refused") == 1


@pytest.mark.usefixtures("anywhere")
async def test_silence_is_a_matter_for_the_firewall(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first:
        host, port = full.getsockname()
        first.connect((host, port))  # nobody accepts it, and one more does not fit: the kernel drops what comes
        async with published(settings, f"{host}:{port}"):
            finding = await the_one(settings)
    assert not finding.ok and f"links {host}:{port}: no answer in 0.2 s" in finding.text
    assert "firewall" in finding.mend and f"{port} and {port + 1}" in finding.mend


@pytest.mark.parametrize(("answers", "says"), [(True, "it answers"), (False, "nothing answers")])
async def test_a_loopback_address_is_no_way_between_hosts(settings: Settings, answers: bool, says: str) -> None:
    with listening() as ports:
        if not answers:
            ports.close()
        async with published(settings, ports.address):
            finding = await the_one(settings)
    assert not finding.ok and "is loopback: another host cannot reach it" in finding.text and says in finding.text
    assert f"on host {FAR}" in finding.mend and "ETHA_LISTEN=HOST:PORT" in finding.mend


async def test_an_agent_of_this_host_on_loopback_is_told_an_address(settings: Settings) -> None:
    with listening() as ports:
        async with published(settings, ports.address, host=settings.host_id):
            finding = await the_one(settings)
    assert not finding.ok and "this host" in finding.text
    own = own_addresses()
    assert f"ETHA_LISTEN={own[0].host}:PORT" in finding.mend or not own or ":" in own[0].host


async def test_an_agent_without_an_address_takes_no_links(settings: Settings) -> None:
    async with published(settings, ""):
        finding = await the_one(settings)
    assert not finding.ok and "takes no links" in finding.text and "ETHA_LISTEN" in finding.mend


@pytest.mark.usefixtures("anywhere")
async def test_every_agent_has_a_line_this_hosts_first(settings: Settings) -> None:
    with listening() as near, listening() as far:
        async with (
            published(settings, far.address, agent="a1"),
            published(settings, near.address, host=settings.host_id, agent="b2"),
            published(settings, "", agent="c3"),
        ):
            found = await hosts.try_agents(settings)
    assert [(f.name, f.ok) for f in found] == [("agent b2", True), ("agent a1", True), ("agent c3", False)]


async def test_without_agents_nothing_can_be_said(settings: Settings) -> None:
    finding = await the_one(settings)
    assert not finding.ok and settings.namespace in finding.text and "--listen" in finding.mend


# ---- where this host could listen ---------------------------------------------------------------


def test_addresses_to_listen_on_are_no_loopback_and_can_be_bound() -> None:
    for address in own_addresses():
        assert not is_loopback(address.host)
        with socket.create_server((address.host, 0), family=socket.AF_INET6 if ":" in address.host else socket.AF_INET):
            pass


def test_loopback_is_known_under_all_its_names() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("192.0.2.2", "fd00::2", "gpu-7.example.org")))
    assert split_address("[fd00::2]:7000") == ("fd00::2", 7000)


@pytest.mark.parametrize(
    ("listen", "reason"),
    [
        ("127.0.0.1:7000", "is loopback"),
        ("0.0.0.0:7000", "names no one address"),
        ("203.0.113.77:7000", "cannot listen there"),
        ("nonsense", "cannot listen there"),
    ],
)
def test_a_listen_address_that_cannot_serve_others_is_told(settings: Settings, listen: str, reason: str) -> None:
    with pytest.raises(Failing, match=reason) as caught:
        hosts.check_listen(replace(settings, listen=listen))
    assert "ETHA_LISTEN=HOST:PORT" in caught.value.mend


def test_without_a_listen_address_the_suitable_ones_are_listed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = own_addresses()
    if own:
        with pytest.raises(Noteworthy, match="on loopback") as note:
            hosts.check_listen(settings)
        assert all(address.host in str(note.value) for address in own) and "ETHA_LISTEN=" in note.value.mend
    monkeypatch.setattr(hosts, "own_addresses", list)
    with pytest.raises(Failing, match="loopback addresses only"):
        hosts.check_listen(settings)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("unix:///run/redis.sock", "is a socket of this host"),
        ("redis://:secret@localhost:6379/0", "is loopback"),
    ],
)
def test_a_redis_that_others_cannot_reach_by_this_url_is_noted(settings: Settings, url: str, says: str) -> None:
    finding = found("Redis from elsewhere", lambda: hosts.check_redis_place(replace(settings, redis_url=url)))
    assert finding.ok and finding.verdict == "note", "this host may well use it"
    assert says in finding.text and "another host needs a URL" in finding.mend
    assert "secret" not in finding.text + finding.mend


def test_a_redis_that_others_can_reach_is_told(settings: Settings) -> None:
    text = hosts.check_redis_place(replace(settings, redis_url="redis://:secret@10.1.2.3:6379/0"))
    assert "another host uses the same" in text and "secret" not in text


# ---- the command --------------------------------------------------------------------------------


async def command(settings: Settings) -> subprocess.CompletedProcess[str]:
    """Run it, in a thread: the agents' leases go on being renewed."""
    words = ("doctor", "--redis", str(settings.redis_url), "--namespace", settings.namespace)
    return await asyncio.to_thread(etha, *words)


async def test_the_command_names_agents_and_cures_and_fails(settings: Settings) -> None:
    with listening() as ports:
        async with published(settings, ports.address):
            shown = await command(settings)
    assert shown.returncode == 1 and "Traceback" not in shown.stderr
    text = " ".join(shown.stdout.split())
    assert "agent a1" in text and "is loopback" in text and "agent a1: start it again on host another-host" in text
    assert "listen address" in text


async def test_the_command_succeeds_where_every_agent_is_reached(settings: Settings) -> None:
    own = [address.host for address in own_addresses() if ":" not in address.host]
    if not own:
        pytest.skip("this machine has loopback addresses only")
    with listening(own[0]) as ports:
        async with published(settings, ports.address):
            shown = await command(settings)
    assert shown.returncode == 0, shown.stdout
    assert "fails" not in shown.stdout and "agent a1" in shown.stdout


def test_without_redis_the_agents_are_not_tried(runtime: Path) -> None:
    shown = etha("doctor", "--redis", "redis://:secret@127.0.0.1:1/0")
    assert shown.returncode == 1 and "secret" not in shown.stdout + shown.stderr
    assert "not tried" in shown.stdout and "mend Redis first" in shown.stdout


@pytest.mark.parametrize("listen", ["203.0.113.77:7000", "nonsense"])
def test_a_plain_doctor_tries_the_listen_address_that_is_set(settings: Settings, listen: str) -> None:
    said = [one for one in examine(replace(settings, listen=listen)) if one.name == "listen address"]
    assert [one.verdict for one in said] == ["fails"] and "one of this host's addresses" in said[0].mend
    said = [one for one in examine(replace(settings, listen="127.0.0.1:0")) if one.name == "listen address"]
    assert [one.verdict for one in said] == ["ok"]
    assert not [one for one in examine(replace(settings, listen=None)) if one.name == "listen address"]


def test_a_url_that_cannot_be_read_is_to_be_corrected_and_not_to_be_started(settings: Settings) -> None:
    found = {one.name: one for one in examine(replace(settings, redis_url="foo://x"), between_hosts=True)}
    assert found["Redis"].mend == "correct the URL foo://x: redis://HOST:PORT or unix:///PATH"
    assert found["Redis from elsewhere"].verdict == "fails"


def test_the_doctor_says_which_library_process_groups_run_on(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = tmp_path / "executor.so"
    monkeypatch.setattr("etha.native.build.LIBRARY", missing)
    [line] = [one for one in examine(settings) if one.name == "process groups"]
    assert line.verdict == "note" and f"Python, which is slower: {missing} is not there" in line.text
    assert "python -m etha.native.build" in line.mend
    monkeypatch.setenv("ETHA_NATIVE", "0")
    [line] = [one for one in examine(settings) if one.name == "process groups"]
    assert line.verdict == "ok" and line.text.endswith("ETHA_NATIVE=0 asks for it")
