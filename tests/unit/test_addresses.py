"""Addresses that users write: what is wrong with one is said with the name of the argument or variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from etha.addresses import check_redis_url, redact
from etha.config import LaunchEnv, Settings
from etha.errors import ConfigError

GOOD = [
    "redis://host",
    "redis://",
    "redis://user:p%40ss@host:6379/3",
    "rediss://[::1]:6379/0?ssl_cert_reqs=none",
    "unix:///run/redis.sock?db=2",
    "unix://u:p@/run/my%20dir/r.sock",
]
BAD = {
    "host:6379": "'host:6379' has no scheme",
    "me:secret@host:6379/0": r"'\*\*\*@host:6379/0' has no scheme",
    "http://me:secret@host": r"'http://me:\*\*\*@host' has the scheme 'http'",
    "REDIS://host": "has the scheme 'REDIS'",
    "redis://host:port": "cannot be read .*port",
    "redis://host:99999": "cannot be read .*[Pp]ort",
    "redis://host:0": "has the port 0",
    "redis://[half": "cannot be read",
    "redis://host/production": "has 'production' where the number of a database stands",
    " redis://host": "has a space",
    "redis://ho\x00st": "a character that cannot be seen",
    "unix://redis.sock": "names no socket",
}


@pytest.mark.parametrize("url", GOOD)
def test_urls_that_can_be_read(url: str) -> None:
    assert check_redis_url("redis_url", url) == url


@pytest.mark.parametrize("url", BAD)
def test_what_is_wrong_with_a_url_is_said_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=rf"^redis_url=.*{BAD[url]}.*: use redis://, rediss:// or unix://") as caught:
        check_redis_url("redis_url", url)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("url", ["me:secret@host:1/0", "me@secret@host:1/0?password=secret", "host?password=secret"])
def test_passwords_of_what_is_no_url_are_not_shown(url: str) -> None:
    assert "secret" not in redact(url) and "host" in redact(url)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"ETHA_LISTEN": "nonsense"}, "ETHA_LISTEN='nonsense' is not HOST:PORT"),
        ({"ETHA_LISTEN": "::1:7000"}, "ETHA_LISTEN='::1:7000' is not HOST:PORT; an IPv6 host goes in brackets"),
        ({"ETHA_LISTEN": "h:65535"}, "ETHA_LISTEN='h:65535' is not HOST:PORT with a port up to 65534"),
        ({"ETHA_LISTEN": "h:1", "ETHA_ADVERTISE": "h"}, "ETHA_ADVERTISE='h' is not HOST:PORT"),
        (
            {"ETHA_LISTEN": "h:1", "ETHA_ADVERTISE": "h:0"},
            "ETHA_ADVERTISE='h:0' is not HOST:PORT or HOST:PORT,",
        ),
        ({"ETHA_ADVERTISE": "h:1"}, "ETHA_ADVERTISE=h:1 says where others reach ETHA_LISTEN=HOST:PORT: set both"),
        ({"ETHA_HOST_ID": "x" * 501}, "ETHA_HOST_ID has 501 characters, at most 500"),
        ({"ETHA_HOST_ID": "\udc80"}, "ETHA_HOST_ID='.udc80' is no text in UTF-8"),
        ({"ETHA_AGENT": "ipc:///\udcff"}, "ETHA_AGENT='ipc:///.udcff' is no text in UTF-8"),
        ({"ETHA_RUNTIME_DIR": "/\udcff"}, "path '/.udcff' of .*no text in UTF-8: set ETHA_RUNTIME_DIR"),
        ({"ETHA_RUNTIME_DIR": "", "XDG_RUNTIME_DIR": "/\udcff"}, "'/.udcff/etha' of sockets and locks is no text"),
        ({"ETHA_LAUNCH_ID": "x" * 501}, "ETHA_LAUNCH_ID has 501 characters, at most 500"),
        ({"TORCHELASTIC_RUN_ID": "x" * 501}, "TORCHELASTIC_RUN_ID has 501 characters, at most 500"),
        ({"ETHA_TAKEOVER": "yes"}, "ETHA_TAKEOVER='yes' is neither 0 nor 1"),
    ],
)
def test_variables_are_named(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Settings.from_env(variables).check_agent()
        LaunchEnv.from_env(variables)


def test_a_relative_path_in_a_directory_whose_path_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "\udcff"
    odd.mkdir()
    monkeypatch.chdir(odd)
    for name in ("ETHA_RUNTIME_DIR", "ETHA_TRACE"):
        with pytest.raises(ConfigError, match=r"/.udcff/d'.* is no text in UTF-8"):
            Settings.from_env({"ETHA_RUNTIME_DIR": str(tmp_path), name: "d"})
