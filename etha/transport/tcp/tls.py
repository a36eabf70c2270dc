"""Encrypted data connections: TLS 1.3 with a certificate that an agent makes for its life and tells over its links.

    opener   handshake; is the certificate the one that the link told?  -> token -> ...
    stream  == AF_UNIX pair == a thread == TLS == TCP ==>  == TLS == a thread == AF_UNIX pair ==  stream

There is no authority: a peer's certificate is compared with the fingerprint that it gave over the authenticated link,
before the token is shown. A stream reads and writes its end of a pair of sockets, so it knows nothing of TLS; the
thread between is what the encryption costs, beside the arithmetic.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from etha.errors import ConfigError

T = TypeVar("T")

#: Descriptors of an encrypted stream: its connection, and both ends of the pair.
DESCRIPTORS = 3
#: Bytes of one read, and of the pair's buffers.
CHUNK = 1 << 18
_BUFFER = 1 << 20


class Untrusted(OSError):
    """The other end's certificate is not the one that its agent has told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """This agent's certificate; ``fingerprint`` is what others are told over the links: SHA-256 of its DER."""

    fingerprint: bytes
    context: ssl.SSLContext

    @classmethod
    def fresh(cls) -> Identity:
        """A new key and certificate; ConfigError where the package cryptography is missing."""
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise ConfigError(
                "ETHA_ENCRYPT=1 needs the package cryptography: pip install 'sub-etha[encrypt]'"
            ) from error
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "etha agent")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            # It is judged by its fingerprint alone, so clocks need not agree.
            .not_valid_before(now - datetime.timedelta(days=365))
            .not_valid_after(now + datetime.timedelta(days=3650))
            .sign(key, hashes.SHA256())
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + certificate.public_bytes(serialization.Encoding.PEM)
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # data goes one way, and nothing comes back
        memory = os.memfd_create("etha-certificate", os.MFD_CLOEXEC)  # ssl reads keys from files only
        try:
            os.write(memory, pem)
            context.load_cert_chain(f"/proc/self/fd/{memory}")
        finally:
            os.close(memory)
        der = certificate.public_bytes(serialization.Encoding.DER)
        return cls(fingerprint=hashlib.sha256(der).digest(), context=context)


def _context(kind: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # see ``opened``: the fingerprint is compared
    return context


class Secured:
    """A connection after its handshake; then ``outward`` or ``inward`` gives the end that a stream uses."""

    def __init__(self, tls: ssl.SSLSocket) -> None:
        self._tls = tls

    @classmethod
    async def accepted(cls, conn: socket.socket, identity: Identity) -> Secured:
        """The accepting end; takes ``conn``, also when it fails: OSError."""
        return await cls._shake(conn, identity.context, server_side=True)

    @classmethod
    async def opened(cls, conn: socket.socket, fingerprint: bytes) -> Secured:
        """The opening end; takes ``conn``, also when it fails: OSError, Untrusted for another than ``fingerprint``."""
        made = await cls._shake(conn, _context(ssl.PROTOCOL_TLS_CLIENT), server_side=False)
        shown = made._tls.getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(hashlib.sha256(shown).digest(), fingerprint):
            made.close()
            raise Untrusted("its certificate is not the one that its agent has told: somebody is in between")
        return made

    @classmethod
    async def _shake(cls, conn: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> Secured:
        try:
            tls = context.wrap_socket(conn, server_side=server_side, do_handshake_on_connect=False)
        except BaseException:
            conn.close()
            raise
        made = cls(tls)
        try:
            await made._step(tls.do_handshake)
        except BaseException:
            made.close()
            raise
        return made

    async def read_exactly(self, nbytes: int) -> bytes:
        """``nbytes``; EOFError when it ends before."""
        data = b""
        while len(data) < nbytes:
            more = await self._step(lambda: self._tls.recv(nbytes - len(data)))  # noqa: B023
            if not more:
                raise EOFError
            data += more
        return data

    async def send_all(self, data: bytes) -> None:
        """All of ``data``, which is short."""
        await self._step(lambda: self._tls.send(data))

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._tls.close()

    def outward(self) -> socket.socket:
        """An end into which a stream writes what is to be sent; the connection ends with it."""
        return self._end(_send, "etha-encrypt")

    def inward(self) -> socket.socket:
        """An end from which a stream reads what has been received; the connection ends with it."""
        return self._end(_receive, "etha-decrypt")

    def _end(self, work: Callable[[ssl.SSLSocket, socket.socket], None], name: str) -> socket.socket:
        try:
            mine, theirs = socket.socketpair()
        except OSError:
            self.close()
            raise
        for end in (mine, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        tls = self._tls
        made = _End(theirs, tls)

        def run() -> None:
            # A reset, a bad record, a stream that was shut: whatever it is, both ends close.
            with contextlib.suppress(OSError), mine, tls:
                work(tls, mine)

        threading.Thread(target=run, name=name, daemon=True).start()
        return made

    async def _step(self, act: Callable[[], T]) -> T:
        while True:
            try:
                return act()
            except ssl.SSLWantReadError:
                await self._ready(asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader)
            except ssl.SSLWantWriteError:
                await self._ready(asyncio.get_running_loop().add_writer, asyncio.get_running_loop().remove_writer)

    async def _ready(self, add: Callable[..., Any], remove: Callable[..., Any]) -> None:
        ready, fd = asyncio.Event(), self._tls.fileno()
        add(fd, ready.set)
        try:
            await ready.wait()
        finally:
            remove(fd)


class _End(socket.socket):
    """A stream's end of the pair; what it sets on TCP is set on the connection behind it."""

    def __init__(self, end: socket.socket, behind: ssl.SSLSocket) -> None:
        super().__init__(end.family, end.type, end.proto, fileno=end.detach())
        self._behind = behind

    def setsockopt(self, level: int, option: int, *value: Any) -> None:
        """As of any socket; options of TCP, and to be kept alive, go to the connection."""
        if level == socket.IPPROTO_TCP or (level, option) == (socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            with contextlib.suppress(OSError):  # it has gone before
                self._behind.setsockopt(level, option, *value)
        else:
            super().setsockopt(level, option, *value)


def _send(tls: ssl.SSLSocket, pair: socket.socket) -> None:
    """What comes out of the pair goes to the network, until either ends."""
    memory = memoryview(bytearray(CHUNK))
    idle, full = select.poll(), select.poll()
    idle.register(pair, select.POLLIN)
    idle.register(tls, select.POLLIN)
    full.register(tls, select.POLLOUT)
    full.register(pair, 0)  # tells when its stream is shut
    while True:
        events = dict(idle.poll())
        if tls.fileno() in events:  # nothing is ever said there: it has ended, or an alert says why it does
            try:
                tls.recv(1)
                return
            except ssl.SSLWantReadError:
                pass
        if events.get(pair.fileno(), 0) & (select.POLLHUP | select.POLLERR):
            return
        if pair.fileno() not in events:
            continue
        n = pair.recv_into(memory)
        if n == 0:
            return
        while True:
            try:
                tls.send(memory[:n])  # all of it, or the same again
                break
            except ssl.SSLWantWriteError:
                if any(fd == pair.fileno() for fd, _ in full.poll()):
                    return
            except ssl.SSLWantReadError:  # a key update: rare, and soon over
                idle_tls = select.poll()
                idle_tls.register(tls, select.POLLIN)
                idle_tls.register(pair, 0)
                if any(fd == pair.fileno() for fd, _ in idle_tls.poll()):
                    return


def _receive(tls: ssl.SSLSocket, pair: socket.socket) -> None:
    """What comes from the network goes into the pair, until either ends."""
    memory = memoryview(bytearray(CHUNK))
    idle = select.poll()
    idle.register(tls, select.POLLIN)
    idle.register(pair, 0)
    ended = False
    while not ended:
        have, dry = 0, False
        while have < CHUNK and not dry and not ended:  # a record has 16 KiB at most: several are passed on at once
            try:
                n = tls.recv_into(memory[have:])
                have, ended = have + n, n == 0
            except ssl.SSLWantReadError:
                dry = True
            except OSError:  # what came before is passed on all the same
                ended = True
        pair.sendall(memory[:have])  # ends with an error when its stream is shut
        if dry and any(fd == pair.fileno() for fd, _ in idle.poll()):
            return
