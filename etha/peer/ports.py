"""An agent's two TCP ports: links on PORT, data on PORT+1, both held from the moment they are known.

Both sockets listen at once, because Linux lets two sockets bind one port as long as neither listens. Connections to the
data port wait in its backlog until the tcp transport accepts them.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
from dataclasses import dataclass

from etha.addresses import format_address, parse_address
from etha.errors import ConfigError

log = logging.getLogger(__name__)

BACKLOG = 512
#: Free ports tried until the port after one is free, too.
ATTEMPTS = 256
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Two listening, non-blocking sockets on ``host`` (numeric): ``links`` on ``port``, ``data`` on the next port."""

    host: str
    port: int
    links: socket.socket
    data: socket.socket
    #: What may be wrong with the requested address; empty if nothing.
    warning: str = ""

    @classmethod
    def bind(cls, listen: str | None = None, *, advertised: bool = False) -> Ports:
        """Bind the ports of HOST:PORT, or any two free ones for port 0. None: any two of the loopback.

        ConfigError if they are taken, or for an address that means nothing to other hosts, unless another address is
        ``advertised`` to them.
        """
        name, port = (LOOPBACK, 0) if listen is None else parse_address(listen, what="ETHA_LISTEN=")
        asked = "" if listen is None else f" (ETHA_LISTEN={listen})"
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise ConfigError(f"ETHA_LISTEN={listen}: {name!r} has no address here: {error}") from error
        family, host = found[0][0], str(found[0][4][0])
        if ipaddress.ip_address(host.partition("%")[0]).is_unspecified and not advertised:
            raise ConfigError(
                f"ETHA_LISTEN={listen} names no one address: give the one by which other hosts reach this host, or "
                f"ETHA_ADVERTISE=HOST:PORT[,DATAPORT] beside it"
            )
        for _ in range(1 if port else ATTEMPTS):
            try:
                links = _listen(family, host, port, fixed=port != 0)
            except OSError as error:
                raise ConfigError(f"cannot listen on {format_address(host, port)}{asked}: {error.strerror}") from error
            taken = int(links.getsockname()[1])
            try:
                data = _listen(family, host, taken + 1, fixed=port != 0)
            except (OSError, OverflowError) as error:  # OverflowError: there is no port after the last one
                links.close()
                if port or (isinstance(error, OSError) and error.errno != errno.EADDRINUSE):
                    where = format_address(host, taken + 1)
                    raise ConfigError(f"cannot listen on {where}{asked}, where data arrives: {error}") from error
                continue
            warning = "" if advertised else _loopback(name, host)
            if warning:
                log.warning("%s", warning)
            return cls(host=host, port=taken, links=links, data=data, warning=warning)
        raise ConfigError(f"no two free ports in a row on {host} in {ATTEMPTS} attempts: name one by ETHA_LISTEN")

    @property
    def address(self) -> str:
        """HOST:PORT of the links for this host, and for all others unless another address is advertised."""
        return format_address(self._reached, self.port)

    @property
    def data_address(self) -> str:
        """HOST:PORT+1, where data connections arrive."""
        return format_address(self._reached, self.port + 1)

    @property
    def _reached(self) -> str:
        """The host to which a connection can be made."""
        bound = ipaddress.ip_address(self.host.partition("%")[0])
        if not bound.is_unspecified:
            return self.host
        return LOOPBACK if bound.version == 4 else "::1"

    def close(self) -> None:
        """Close both. Idempotent."""
        for listener in (self.links, self.data):
            with contextlib.suppress(OSError):
                listener.close()


def _loopback(name: str, host: str) -> str:
    """A warning if a host's name leads to its loopback, as in Debian's /etc/hosts; "" if that was intended."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
        return ""
    except ValueError:
        pass
    if name == "localhost" or not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return ""
    return (
        f"ETHA_LISTEN names {name}, which is {host} on this host, its loopback: no other host can connect there. Give "
        f"an address of this host's network (`etha doctor --redis URL` lists them)"
    )


def _listen(family: int, host: str, port: int, *, fixed: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if fixed:  # a restarted agent need not wait for the connections of its former life
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
