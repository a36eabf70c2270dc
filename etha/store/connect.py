"""The edge to Redis: client options, retries until a deadline, and Etha's own errors.

``from_url`` retries nothing and sets no keep-alive, so both are explicit here, and every try has its limit. A password
never leaves this file: whatever is shown or logged is ``redact(url)``.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import random
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio as aioredis
from redis import exceptions as redis_errors
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from etha.addresses import bad_redis_url, redact
from etha.errors import (
    ConfigError,
    EthaError,
    GroupLostError,
    PeerLostError,
    ProtocolError,
    RedisUnavailableError,
    RegistrationError,
)
from etha.store.keys import (
    AGENT_LEASE,
    CLAIM_LEASE,
    CLOSED_LEASE,
    HISTORY_LEASE,
    MAX_EVENTS,
    MAX_RECEIVED,
    MAX_VERSIONS,
    REGISTRATION_LEASE,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
#: redis-py's own annotations differ from version to version, and mix str and bytes.
Client = Any

#: Seconds: to connect, for one try, and of the longest pause between tries.
CONNECT_TIMEOUT = 3.0
TRY_TIMEOUT = 8.0
MAX_PAUSE = 0.5
MAX_CONNECTIONS = 4
#: How often a cluster may send one try from node to node.
MAX_MOVES = 5
#: Scripts that start with group.lua or publication.lua.
_PRELUDES = {
    **dict.fromkeys(("enter", "depart"), "group"),
    **dict.fromkeys(
        ("claim", "publication_enter", "publication_leave", "publication_put", "publication_release"), "publication"
    ),
}
#: Said of a server that accepts data and does not answer, or of a network that drops it.
NO_ANSWER = "no answer: is it stopped or overloaded, or does a firewall drop what it is sent?"


def with_host(url: str, host: str, port: int) -> str:
    """``url`` with another host and port. "" keeps the host."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    host = host or parts.hostname or "localhost"
    host = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{user}{at}{host}:{port}"))


def _options(url: str, **options: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "protocol": 2,  # plain replies in every version of redis-py; 3 turns pub/sub into push messages
        "decode_responses": True,
        "encoding_errors": "replace",  # ``records`` refuses foreign bytes; the parser must not fail on them
        "socket_connect_timeout": CONNECT_TIMEOUT,
        # With a number, redis-py sends under asyncio.wait_for, which swallows cancellations on Python 3.11. Every try
        # has its limit here (``RedisConnection.call``) and in ``watch``.
        "socket_timeout": None,
        # If a server wants a password, redis-py before 7 recurses in its own health check. The lease's renewal every 3
        # s, keep-alive and the limit of each try notice the same outages.
        "health_check_interval": 0,
        "retry": Retry(ExponentialBackoff(cap=0.2, base=0.01), 1),
        **options,
    }
    if not url.startswith("unix:"):
        common["socket_keepalive"] = True
        # A dead host is noticed after 10 + 3 x 3 s if the platform has these options.
        wanted = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
        common["socket_keepalive_options"] = {
            getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)
        }
    return common


def make_pool(url: str, **options: Any) -> Any:
    """A pool of connections to ``url`` with explicit options. ConfigError if the URL cannot be read."""
    try:
        pool = aioredis.ConnectionPool.from_url(url, max_connections=2 * MAX_CONNECTIONS, **_options(url, **options))
        pool.connection_class(**pool.connection_kwargs)  # connects to nothing, but refuses unknown options
    except (TypeError, ValueError) as error:
        raise bad_redis_url(url, f"cannot be read ({error})") from None
    _check_certificates(url, pool.connection_kwargs)
    return pool


def _check_certificates(url: str, given: dict[str, Any]) -> None:
    """Read the files that the URL names, because a missing file is a mistake, not an outage."""
    authorities = {"cafile": given.get("ssl_ca_certs"), "capath": given.get("ssl_ca_path")}
    own = {"certfile": given.get("ssl_certfile"), "keyfile": given.get("ssl_keyfile")}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for names, load in ((authorities, context.load_verify_locations), (own, context.load_cert_chain)):
        files = {name: path for name, path in names.items() if path}
        if not files:
            continue
        if names is own:
            files["password"] = given.get("ssl_password") or ""  # so that it is never asked for on a terminal
        try:
            load(**files)
        except (OSError, TypeError, ValueError) as error:
            shown = ", ".join(str(path) for name, path in files.items() if name != "password")
            raise ConfigError(f"Redis URL {redact(url)}: {shown} cannot be read as certificates: {error}") from None


#: Errors that pass when the server is back, has loaded, has failed over or has memory again.
_PASSING = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.ReadOnlyError,
    redis_errors.OutOfMemoryError,
    redis_errors.TryAgainError,
    redis_errors.ClusterDownError,
    OSError,
    TimeoutError,
)


#: How servers word a refusal to log in. redis-py raises a plain ConnectionError for some of them.
_CREDENTIALS = ("username-password", "invalid password", "authentication required", "wrongpass", "noauth")
#: How servers word that a user may not do something, also inside of a script.
_PERMISSION = ("noperm", "acl failure", "no permissions", "can't access", "has no permission")


class Unreachable(Exception):
    """This try failed, a later one may succeed. ``settled``: the server or the system refused, instead of not
    answering."""

    def __init__(self, text: str, *, settled: bool = False) -> None:
        super().__init__(text)
        self.settled = settled


class ClusterMoved(Exception):
    """Another node of a Redis Cluster holds the namespace. ``host`` "" means the same host."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"the namespace is at {host}:{port}")
        self.host, self.port = host, port


def _unreachable(url: str, error: BaseException) -> Unreachable:
    """Why no connection was made, in words that say what to look at. Other failures keep their text."""
    place = urlsplit(url)
    port = f"port {place.port or 6379}"
    text, chain = f"{error}".lower(), [error, error.__cause__, error.__context__]
    for cause in filter(None, chain):
        if isinstance(cause, socket.gaierror):
            if cause.errno == socket.EAI_AGAIN:
                return Unreachable(f"the host name {place.hostname!r} cannot be looked up now: {cause.strerror}")
            return Unreachable(f"unknown host {place.hostname!r}: is the name right?", settled=True)
    if any(isinstance(cause, FileNotFoundError) for cause in chain):
        return Unreachable("no such socket: is the server running?", settled=True)
    if any(isinstance(cause, PermissionError) for cause in chain):
        return Unreachable("this user may not open the socket", settled=True)
    # For a name with several addresses, asyncio puts all refusals into one text without an errno.
    if any(isinstance(cause, ConnectionRefusedError) for cause in chain) or f"errno {errno.ECONNREFUSED}]" in text:
        if url.startswith("unix:"):
            return Unreachable("the socket is there, but no server listens: is it running?", settled=True)
        return Unreachable(f"{place.hostname} refuses connections to {port}: is a server running there?", settled=True)
    if any(isinstance(cause, TimeoutError | redis_errors.TimeoutError) for cause in chain):
        return Unreachable(NO_ANSWER)
    return Unreachable(str(error) or type(error).__name__)


@contextmanager
def translated(url: str, what: str) -> Iterator[None]:
    """Translate foreign errors into Etha's. Those that pass with time become ``Unreachable``."""
    try:
        yield
    except EthaError:
        raise
    except redis_errors.NoPermissionError as error:
        raise _refused(url, what, error) from None
    except redis_errors.MovedError as error:
        raise ClusterMoved(str(error.host), int(error.port)) from None
    except redis_errors.AskError as error:  # its slot is moving to another node
        raise Unreachable(str(error)) from error
    except redis_errors.InvalidResponse as error:
        raise ProtocolError(f"{redact(url)} does not speak the Redis protocol: {error}") from None
    except (ssl.SSLCertVerificationError, ssl.CertificateError) as error:
        raise ConfigError(f"Redis at {redact(url)}: the certificate is not accepted: {error}") from None
    except _PASSING as error:
        text = str(error).lower()
        if isinstance(error, redis_errors.AuthenticationError) or any(words in text for words in _CREDENTIALS):
            raise _refused(url, what, error) from None
        if "certificate_verify_failed" in text:
            raise ConfigError(f"Redis at {redact(url)}: the certificate is not accepted: {error}") from None
        raise _unreachable(url, error) from error
    except redis_errors.ResponseError as error:
        if str(error).startswith(("BUSY", "MISCONF", "LOADING", "MASTERDOWN", "NOREPLICAS")):
            raise Unreachable(str(error)) from error
        if any(words in str(error).lower() for words in (*_CREDENTIALS, *_PERMISSION)):
            raise _refused(url, what, error) from None
        raise ProtocolError(f"Redis at {redact(url)} cannot {what}: {error}") from None


def _refused(url: str, what: str, error: Exception) -> ConfigError:
    text = str(error).lower()
    if isinstance(error, redis_errors.NoPermissionError) or any(words in text for words in _PERMISSION):
        way = "give this user the commands, keys and channels that docs/redis.md lists under 'Access'"
    else:
        way = "check user and password"
    return ConfigError(f"Redis at {redact(url)} refuses to {what}: {error}: {way}")


class RedisConnection:
    """Commands to one Redis. Each is tried until its deadline, through outages.

    ``revive`` is called before a try that follows a failed one (the embedded server may have to be started).
    ``on_trouble`` is called with the cause of a failed try. While it is not ``patient``, a refusal is an error at once.
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        revive: Callable[[], Awaitable[None]] | None = None,
        *,
        patient: bool = True,
        on_trouble: Callable[[EthaError], None] | None = None,
    ) -> None:
        self.url = url
        self.patient = patient
        #: Why the last try failed; "" once one has succeeded since.
        self.trouble = ""
        self._on_trouble = on_trouble
        self._prefix = prefix
        self._revive = revive
        self._reviving = asyncio.Lock()
        #: By URL: the user's own, and those of a cluster's nodes to which it has redirected us.
        self._clients: dict[str, Client] = {}
        self._use(url)
        # Calls queue here, in order, and not in the pool, because a try's limit begins when it has a connection.
        self._turn = asyncio.Semaphore(MAX_CONNECTIONS)

    def _use(self, url: str) -> None:
        """Talk to ``url`` from now on. Commands that run elsewhere end there."""
        self._at = url
        if url not in self._clients:
            self._clients[url] = aioredis.Redis(connection_pool=make_pool(url))
        self._client: Client = self._clients[url]

    async def call(self, what: str, work: Callable[[Client], Awaitable[T]], timeout: float) -> T:
        """Call ``work`` with the client again and again until it gets through. It must be repeatable.

        ``timeout`` is in seconds; ``math.inf`` waits for ever. After that, RedisUnavailableError.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        pause = 0.02
        cause, moves = "", 0
        while True:
            began = math.inf
            try:
                async with asyncio.timeout_at(None if deadline == math.inf else deadline), self._turn:
                    began = loop.time()
                    async with asyncio.timeout(TRY_TIMEOUT):
                        with translated(self._at, what):
                            found = await work(self._client)
                self.trouble = ""
                return found
            except ClusterMoved as moved:
                cause, moves = str(moved), moves + 1
                self._use(with_host(self._at, moved.host, moved.port))
                if moves <= MAX_MOVES:
                    continue  # at once, because the cluster has said where
            except Unreachable as error:
                cause = str(error)
                self._use(self.url)  # the user's own node knows which node has taken over
                if error.settled and not self.patient:
                    raise RedisUnavailableError(f"Redis at {redact(self.url)}: {cause}") from error
            except TimeoutError:
                # A try that was cut short tells less than the cause that an earlier one met.
                if loop.time() - began >= TRY_TIMEOUT or not cause:
                    cause = NO_ANSWER
                self._use(self.url)
            left = deadline - loop.time()
            if cause != NO_ANSWER or loop.time() - began >= TRY_TIMEOUT:
                self.trouble = cause
            if left <= 0:
                raise RedisUnavailableError(
                    f"Redis at {redact(self.url)} could not be reached within {timeout:g} s to {what}: {cause}"
                )
            if self._on_trouble is not None:
                self._on_trouble(RedisUnavailableError(f"Redis at {redact(self.url)} cannot be reached: {cause}"))
            await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(MAX_PAUSE, pause * 2)
            await self._try_to_revive(deadline)

    def settle(self) -> None:
        """The server has been reached: from now on calls wait through outages, without reporting them."""
        self.patient, self._on_trouble = True, None

    async def _try_to_revive(self, deadline: float) -> None:
        if self._revive is None or self._reviving.locked():
            return  # one of the waiting calls is enough
        try:
            async with self._reviving, asyncio.timeout_at(None if deadline == math.inf else deadline):
                await self._revive()
        except (EthaError, TimeoutError) as error:
            why = str(error) or "not before the deadline of the call that needed it"
            log.warning("the Redis server at %s could not be started again: %s", redact(self.url), why)

    async def script(self, name: str, keys: Sequence[str], request: dict[str, Any], timeout: float) -> Any:
        """Run ``name``.lua. Returns its answer without the envelope, or raises the error that it describes."""
        text = await self.raw_script(name, keys, request, timeout)
        answer = json.loads(text)
        if "error" in answer:
            raise ScriptRefused(answer)
        return answer["ok"]

    async def raw_script(self, name: str, keys: Sequence[str], request: dict[str, Any], timeout: float) -> Any:
        """Run ``name``.lua and return what Redis answers."""
        argument = json.dumps(
            {
                **request,
                "prefix": self._prefix,
                "history": int(HISTORY_LEASE * 1000),
                "registration": int(REGISTRATION_LEASE * 1000),
                "closed": int(CLOSED_LEASE * 1000),
                "claim_lease": int(CLAIM_LEASE * 1000),
                "agent_lease": int(AGENT_LEASE * 1000),
                "max_events": MAX_EVENTS,
                "max_received": MAX_RECEIVED,
                "max_versions": MAX_VERSIONS,
            }
        )
        script = self._client.register_script(script_text(name))
        return await self.call(name.replace("_", " "), lambda c: script(keys=keys, args=[argument], client=c), timeout)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()
            await client.connection_pool.disconnect()


class ScriptRefused(Exception):
    """A script's refusal. ``held`` are members that the caller must look at before it tries again."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(answer["text"])
        held = answer.get("held")
        self.held: list[dict[str, Any]] = held if isinstance(held, list) else []
        self.code, self.text, self.reason = str(answer["error"]), str(answer["text"]), str(answer.get("reason", ""))

    def as_error(self) -> EthaError:
        """The error to raise to the caller."""
        if self.code == "config":
            return ConfigError(self.text)
        if self.code == "unfit":
            return RegistrationError(self.text)
        if self.code == "peer_lost":
            return PeerLostError(self.text, reason=self.reason, outcome="aborted")
        if self.code in ("group_lost", "forgotten"):  # forgotten: Redis knows nothing of that launch
            return GroupLostError(self.text, reason="ended")
        return ProtocolError(self.text)


@cache
def script_text(name: str) -> str:
    """The text of ``name``.lua, after the functions that all scripts share."""
    here = Path(__file__).parent
    parts = ("common", _PRELUDES[name], name) if name in _PRELUDES else ("common", name)
    return "".join((here / f"{part}.lua").read_text() for part in parts)
