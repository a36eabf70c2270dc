"""Addresses that users write, HOST:PORT of an agent and URLs of Redis, read and checked without I/O.

A client checks them before it starts an agent, which would find the same mistake seconds later and end.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

from etha.errors import ConfigError

_SCHEMES = ("redis", "rediss", "unix")
_HOW = (
    "use redis://, rediss:// or unix://, for example redis://user:password@host:6379/0 or "
    "unix://user:password@/path/redis.sock"
)


def parse_address(text: str, most: int = 65534, *, what: str = "address ") -> tuple[str, int]:
    """HOST:PORT or [IPv6]:PORT as (host, port), port 0 to ``most``.

    ConfigError for anything else. Its text begins with ``what``, such as "ETHA_LISTEN=".
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > most:
        why = " (PORT+1 is for data)" if most == 65534 else ""
        raise ConfigError(f"{what}{text!r} is not HOST:PORT with a port up to {most}{why}")
    host = host[1:-1] if bracketed else host
    if not host or (":" in host) is not bracketed or any(c.isspace() or c in "/;,[]" for c in host):
        raise ConfigError(f"{what}{text!r} is not HOST:PORT; an IPv6 host goes in brackets, [::1]:7000")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The inverse of ``parse_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertised:
    """Where others reach an agent. ``address`` and ``data_address`` are HOST:PORT each."""

    address: str
    data_address: str

    @classmethod
    def parse(cls, text: str, *, what: str = "ETHA_ADVERTISE=") -> Advertised:
        """Read HOST:PORT[,DATAPORT]; DATAPORT defaults to PORT+1. ConfigError for anything else."""
        address, comma, data = text.partition(",")
        host, port = parse_address(address, what=what)
        fine = not comma or (data.isascii() and data.isdigit() and len(data) <= 5 and 0 < int(data) < 65536)
        if not fine or not port:
            raise ConfigError(f"{what}{text!r} is not HOST:PORT or HOST:PORT,DATAPORT, with ports that are known")
        number = int(data) if comma else port + 1
        return cls(address=format_address(host, port), data_address=format_address(host, number))

    def after(self, ports: int) -> str:
        """The text for an agent whose own ports are ``ports`` higher, as ``parse`` reads it."""
        host, port = parse_address(self.address)
        return f"{format_address(host, port + ports)},{parse_address(self.data_address, 65535)[1] + ports}"


def check_redis_url(what: str, url: str) -> str:
    """``url`` itself. ConfigError names ``what`` (an argument or a variable), and what is wrong with the URL."""
    if why := _wrong_in(url):
        raise bad_redis_url(url, why, what=what)
    return url


def bad_redis_url(url: str, why: str, *, what: str = "") -> ConfigError:
    """The error for a URL that cannot be read. The password is not shown."""
    return ConfigError(f"{what or 'Redis URL'}{'=' if what else ' '}{redact(url)!r} {why}: {_HOW}")


def redact(url: str) -> str:
    """``url`` with the password replaced by ``***``, wherever it is."""
    if "://" not in url:  # not a URL, but what is before an @ may still be a password
        _, at, rest = url.partition("?")[0].rpartition("@")
        return f"***@{rest}" if at else rest
    try:
        parts = urlsplit(url)
        user, at, host = parts.netloc.rpartition("@")
        name, colon, _ = user.partition(":")
        secret = {"password", "ssl_password"}
        query = urlencode(
            [(k, "***" if k in secret else v) for k, v in parse_qsl(parts.query, keep_blank_values=True)], safe="*/"
        )
        netloc = (f"{name}:***" if colon else name) + at + host
        return f"{parts.scheme}://{netloc}{parts.path}" + (f"?{query}" if query else "")
    except ValueError:
        return "(malformed URL)"


def _wrong_in(url: str) -> str:
    """What is wrong with the URL of a Redis; "" if nothing."""
    if any(character.isspace() or not character.isprintable() for character in url):
        return "has a space or a character that cannot be seen"
    scheme, mark, _ = url.partition("://")
    if not mark:
        return "has no scheme"
    if scheme not in _SCHEMES:
        return f"has the scheme {scheme!r}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"cannot be read ({error})"
    if scheme == "unix":
        return "" if parts.path.strip("/") else "names no socket: its path begins with a third /"
    if port == 0:
        return "has the port 0"
    database = parts.path.strip("/")
    return f"has {database!r} where the number of a database stands" if database and not database.isdecimal() else ""


def is_loopback(host: str) -> bool:
    """Whether ``host`` (numeric or a name) means the machine that uses it. An unknown name does not."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
