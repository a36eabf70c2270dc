"""Between hosts: which addresses this host could listen on, and whether it reaches each live agent of a namespace.

It tries this as an agent would: a TCP connection to the port of links, and to the data port.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from urllib.parse import urlsplit

from etha.addresses import is_loopback, redact
from etha.config import Settings
from etha.doctor.addresses import Address, join_address, own_addresses, split_address
from etha.doctor.finding import Failing, Finding, Noteworthy
from etha.store.records import AgentRecord
from etha.store.registry import opened

REDIS_SECONDS = 5.0
#: An agent on a network answers in milliseconds; a firewall that drops packets never does.
CONNECT_SECONDS = 2.0
PORT = "PORT"


def check_listen(settings: Settings) -> str:
    """Where agents of this host take links: ETHA_LISTEN, or addresses that would do."""
    own = own_addresses()
    if settings.listen is not None:
        return _listens(settings.listen, own)
    if not own:
        raise Failing(
            "this host has loopback addresses only: no other host can reach it",
            "give it an address on a network that both hosts are in (in a container: one of the host's network)",
        )
    best = _towards_redis(settings.redis_url)
    ordered = sorted(own, key=lambda a: a.host != best)
    shown = ", ".join(f"{a}" + (", which leads to Redis" if a.host == best else "") for a in ordered)
    raise Noteworthy(
        f"ETHA_LISTEN is not set: an agent that is started here takes links on loopback, from this host only; "
        f"addresses of this host: {shown}",
        f"for other hosts give agents --listen or ETHA_LISTEN={join_address(ordered[0].host, PORT)}",
    )


def check_listen_here(settings: Settings) -> str:
    """Whether an agent could listen at ETHA_LISTEN, also if only this host reaches it there."""
    assert settings.listen is not None
    return (
        f"an agent can listen at {_bound(settings.listen, _suitable(own_addresses()))}, ETHA_LISTEN={settings.listen}"
    )


def _suitable(own: list[Address]) -> str:
    suitable = ", ".join(map(str, own)) or "none, it has loopback only"
    return f"set ETHA_LISTEN=HOST:PORT with one of this host's addresses: {suitable}"


def _listens(listen: str, own: list[Address]) -> str:
    mend = _suitable(own)
    numeric = _bound(listen, mend)
    if is_loopback(numeric):
        raise Failing(f"ETHA_LISTEN={listen} is loopback: no other host can reach an agent there", mend)
    if numeric in ("0.0.0.0", "::"):
        raise Failing(f"ETHA_LISTEN={listen} names no one address, and others must be told one", mend)
    return f"ETHA_LISTEN={listen} is an address of this host"


def _bound(listen: str, mend: str) -> str:
    """The number of the address, to which this host can bind a socket. Failing else."""
    try:
        host, _ = split_address(listen)
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        family, numeric = found[0][0], str(found[0][4][0])
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((numeric, 0))
    except (OSError, ValueError) as error:
        raise Failing(f"ETHA_LISTEN={listen}: an agent cannot listen there: {error}", mend) from None
    return numeric


def _towards_redis(url: str | None) -> str | None:
    """The address of this host from which packets leave for the Redis; None if the Redis is on this host."""
    parts = urlsplit(url or "")
    if parts.scheme == "unix" or parts.hostname is None:
        return None
    try:
        family, _, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 6379, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as unsent:
            unsent.connect(address)  # chooses the route, sends nothing
            return str(unsent.getsockname()[0])
    except OSError:
        return None


def check_redis_place(settings: Settings) -> str:
    """Whether another host could use the URL of the Redis as it is. It may have another URL for the same server."""
    parts = urlsplit(settings.redis_url or "")
    shown = redact(settings.redis_url or "")
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise Failing(f"{shown} is no URL of a Redis", "correct it: redis://HOST:PORT or unix:///PATH")
    if parts.scheme == "unix":
        raise Noteworthy(
            f"{shown} is a socket of this host", "another host needs a URL redis://HOST:PORT of the same server"
        )
    if is_loopback(parts.hostname or "localhost"):
        raise Noteworthy(
            f"{shown} is loopback: from another host it leads to that host itself",
            "another host needs a URL of the same server with an address that it can reach",
        )
    return f"another host uses the same {shown}"


async def try_agents(settings: Settings) -> list[Finding]:
    """One finding for each live agent of the namespace, this host's first. EthaError if Redis does not answer."""
    assert settings.redis_url is not None
    async with opened(settings.redis_url, settings.namespace, timeout=REDIS_SECONDS) as store:
        records = await store.agents.all()
    if not records:
        return [
            Finding(
                name="agents",
                ok=False,
                text=f"no agent is live in namespace {settings.namespace!r} at {redact(settings.redis_url)}: nothing "
                f"to try, so nobody can say whether hosts reach each other",
                mend=f"on each host: etha agent --redis URL --namespace {settings.namespace} --listen HOST:PORT, "
                f"then run the doctor on each, too",
            )
        ]
    records.sort(key=lambda record: (record.host != settings.host_id, record.host, record.device, record.id))
    async with asyncio.TaskGroup() as group:
        tries = [group.create_task(try_agent(record, settings.host_id)) for record in records]
    return [each.result() for each in tries]


async def try_agent(record: AgentRecord, me: str) -> Finding:
    """Connect to an agent's two ports. ``me`` is this host's id."""
    here = record.host == me
    place = "this host" if here else f"host {record.shown_host}"
    who = f"{record.device} agent of {place}, pid {record.pid}"
    name = f"agent {record.id[:8]}"

    def fails(text: str, mend: str) -> Finding:
        return Finding(name=name, ok=False, text=f"{who}: {text}", mend=mend)

    if not record.address:
        return fails("takes no links from other agents", f"start it again on {place}, {_listen_hint(here)}")
    try:
        host, port = split_address(record.address)
        data_host, data_port = split_address(record.data_address) if record.data_address else (host, port + 1)
    except ValueError:
        return fails(f"its address {record.address!r} cannot be read", "no agent of Etha wrote it: look into Redis")
    troubles, seconds = [], 0.0
    for what, there, number in (("links", host, port), ("data", data_host, data_port)):
        began = time.monotonic()
        if (error := await _knock(there, number)) is not None:
            troubles.append((what, number, error))
        seconds = max(seconds, time.monotonic() - began)
    if is_loopback(host):
        # From another machine this address would lead back to that machine, whatever answers there.
        answers = "; nothing answers there" if troubles else "; it answers, but to this machine alone"
        return fails(
            f"its address {record.address} is loopback: another host cannot reach it{answers}",
            f"start it again on {place}, {_listen_hint(here)}",
        )
    if troubles:
        text = "; ".join(f"{what} {join_address(host, number)}: {_told(error)}" for what, number, error in troubles)
        return fails(text, _mend(troubles[0][2], host, port, place))
    ports = f"links {join_address(host, port)} and data {join_address(data_host, data_port)}"
    return Finding(name=name, ok=True, text=f"{who}: {ports} answer, {seconds * 1e3:.1f} ms")


def _listen_hint(here: bool) -> str:
    if here and (own := own_addresses()):
        return f"with --listen or ETHA_LISTEN={join_address(own[0].host, PORT)}"
    return "with --listen or ETHA_LISTEN=HOST:PORT, HOST an address of its network"


async def _knock(host: str, port: int) -> OSError | None:
    """Connect and hang up. Returns why it did not work, or None."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except OSError as error:  # TimeoutError is a subclass
        return error
    writer.transport.abort()
    return None


def _told(error: OSError) -> str:
    match error:
        case TimeoutError():
            return f"no answer in {CONNECT_SECONDS:g} s"
        case socket.gaierror():
            return "this host does not know the name"
        case ConnectionRefusedError():
            return "refused"
        case _:
            return error.strerror or str(error)


def _mend(error: OSError, host: str, port: int, place: str) -> str:
    if isinstance(error, TimeoutError):
        return f"something drops the packets: let TCP to {host} ports {port} and {port + 1} through the firewalls"
    if isinstance(error, socket.gaierror):
        return f"start it again on {place} with --listen or ETHA_LISTEN=HOST:PORT, HOST a number or a name known here"
    if isinstance(error, ConnectionRefusedError):
        return (
            f"nothing listens at {host}: the agent is gone (its lease ends within 10 s), a firewall refuses, or "
            f"{host} is another machine from here: run the doctor on {place}, too"
        )
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return f"there is no way from this host to {host}: have it listen on an address of a network that both are in"
    return f"see the text; run the doctor on {place}, too"
