"""URLs without their passwords, and errors of our own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions as redis_errors

from etha.addresses import redact
from etha.errors import ConfigError, ProtocolError, RedisUnavailableError
from etha.store.connect import RedisConnection, Unreachable, make_pool, script_text, translated
from etha.store.process import alive, start_ticks


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://u:p%40ss@host", "redis://u:***@host"),
        ("rediss://:secret@host:1/2?ssl_cert_reqs=none", "rediss://:***@host:1/2?ssl_cert_reqs=none"),
        ("unix:///run/redis.sock?password=secret&db=1", "unix:///run/redis.sock?password=***&db=1"),
        ("unix://u:secret@/run/r.sock", "unix://u:***@/run/r.sock"),
        ("redis://[half", "(malformed URL)"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize(
    "url", ["http://u:secret@host", "host:6379", "redis://h?socket_timeout=x", "redis://h?foo=1", "redis://h:port"]
)
def test_a_url_that_cannot_be_read_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="use redis://, rediss:// or unix://") as caught:
        make_pool(url)
    assert "secret" not in str(caught.value)


def test_options_are_explicit() -> None:
    tcp = make_pool("redis://u:p@h:7/3").connection_kwargs
    assert (tcp["host"], tcp["port"], tcp["db"], tcp["username"], tcp["password"]) == ("h", 7, 3, "u", "p")
    assert (
        tcp["socket_keepalive"] and tcp["socket_connect_timeout"] == 3.0 and tcp["retry"].get_retries() == 1
        if hasattr(tcp["retry"], "get_retries")
        else tcp["retry"]._retries == 1
    )
    unix = make_pool("unix://u:p@/run/my%20dir/r.sock").connection_kwargs
    assert (unix["path"], unix["username"], unix["password"]) == ("/run/my dir/r.sock", "u", "p")
    assert "socket_keepalive" not in unix


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        (redis_errors.ConnectionError("refused"), Unreachable),
        (redis_errors.TimeoutError("t"), Unreachable),
        (redis_errors.BusyLoadingError("loading"), Unreachable),
        (redis_errors.ReadOnlyError("replica"), Unreachable),
        (redis_errors.ResponseError("MISCONF disk full"), Unreachable),
        (OSError("net"), Unreachable),
        (redis_errors.AuthenticationError("invalid"), ConfigError),
        (redis_errors.ConnectionError("invalid username-password pair or user is disabled."), ConfigError),
        (redis_errors.NoPermissionError("no"), ConfigError),
        (redis_errors.ConnectionError("[SSL: CERTIFICATE_VERIFY_FAILED]"), ConfigError),
        (redis_errors.ResponseError("WRONGTYPE Operation"), ProtocolError),
        (redis_errors.InvalidResponse("HTTP/1.1"), ProtocolError),
        (ProtocolError("ours"), ProtocolError),
    ],
)
def test_foreign_errors_become_ours(foreign: Exception, ours: type[Exception]) -> None:
    with pytest.raises(ours):
        with translated("redis://h", "read"):
            raise foreign


def test_scripts_are_shipped_beside_the_code() -> None:
    for name in ("join", "leave", "restore", "agent", "agents", "enroll", "unenroll", "batch"):
        assert "cjson.decode(ARGV[1])" in script_text(name)


def test_a_process_is_its_pid_and_its_start() -> None:
    start = start_ticks(os.getpid())
    assert start is not None and alive(os.getpid(), start) and not alive(os.getpid(), start + 1)
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    start = start_ticks(child.pid)
    assert start is not None and alive(child.pid, start)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(child.pid, start), "a zombie is dead"
    child.communicate()
    assert start_ticks(child.pid) is None


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
def test_a_certificate_that_cannot_be_read_is_a_config_error(tmp_path: Path, option: str) -> None:
    (tmp_path / "junk.pem").write_text("no certificate")
    for name in ("missing.pem", "junk.pem"):
        with pytest.raises(ConfigError, match=name):
            make_pool(f"rediss://h:6379?{option}={tmp_path / name}")


async def test_a_last_try_without_time_does_not_hide_what_the_tries_before_met() -> None:
    connection = RedisConnection("redis://127.0.0.1:1", "etha:{t}:")

    async def work(_: Any) -> None:
        if not tries:
            tries.append(1)
            raise redis_errors.ConnectionError("Connection refused")
        await asyncio.Event().wait()

    tries: list[int] = []
    with pytest.raises(RedisUnavailableError, match="Connection refused"):
        await connection.call("read", work, 0.3)
    with pytest.raises(RedisUnavailableError, match="no answer"):
        await connection.call("read", work, 0.1)
    await connection.close()
