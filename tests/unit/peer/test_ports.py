"""The addresses that an agent takes: what is wrong with one is said when it is taken."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from etha.peer.ports import Ports


def test_a_host_name_that_is_the_loopback_here_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = socket.getaddrinfo("127.0.1.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with closing(Ports.bind("my-host:0")) as ports:
        assert ports.warning.startswith("ETHA_LISTEN names my-host, which is 127.0.1.1 on this host, its loopback")
        assert ports.warning in caplog.text
    for meant in ("127.0.1.1:0", "localhost:0"):
        with closing(Ports.bind(meant)) as ports:
            assert not ports.warning
    with closing(Ports.bind("my-host:0", advertised=True)) as ports:
        assert not ports.warning
