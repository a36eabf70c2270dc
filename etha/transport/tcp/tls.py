"""Encrypted data connections: TLS 1.3 with a certificate that an agent makes once and tells over its links.

    opener   handshake; is the certificate the one that the link told?  -> token -> ...
    stream  == AF_UNIX pair == a thread == TLS == TCP ==>  == TLS == a thread == AF_UNIX pair ==  stream

There is no certificate authority. A peer's certificate is compared with the fingerprint that it gave over the
authenticated link, before the token is shown. A stream reads and writes its end of a socket pair, so it knows nothing
of TLS. The thread in between is the cost of encryption, beside the arithmetic.
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
#: Bytes of one read, and of the pair's socket buffers.
CHUNK = 1 << 18
_BUFFER = 1 << 20


class Untrusted(OSError):
    """The other end's certificate is not the one that its agent told over the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """This agent's certificate. ``fingerprint``, the SHA-256 of its DER, is what other agents are told over the
    links."""

    fingerprint: bytes
    context: ssl.SSLContext

    @classmethod
    def fresh(cls) -> Identity:
        """Make a new key and certificate. ConfigError if the package cryptography is missing."""
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
    context.verify_mode = ssl.CERT_NONE  # ``opened`` compares the fingerprint
    return context


class Secured:
    """A connection after its handshake. ``outward`` or ``inward`` then gives the socket that a stream uses."""

    def __init__(self, tls: ssl.SSLSocket) -> None:
        self._tls = tls

    @classmethod
    async def accepted(cls, conn: socket.socket, identity: Identity) -> Secured:
        """The accepting end. Takes over ``conn``, even if it fails with OSError."""
        return await cls._shake(conn, identity.context, server_side=True)

    @classmethod
    async def opened(cls, conn: socket.socket, fingerprint: bytes) -> Secured:
        """The opening end. Takes over ``conn``, even if it fails: OSError, or Untrusted if the fingerprint is not
        ``fingerprint``."""
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
        """Read ``nbytes``. EOFError if the connection ends before."""
        data = b""
        while len(data) < nbytes:
            more = await self._step(lambda: self._tls.recv(nbytes - len(data)))  # noqa: B023
            if not more:
                raise EOFError
            data += more
        return data

    async def send_all(self, data: bytes) -> None:
        """Send all of ``data``, which is short."""
        await self._step(lambda: self._tls.send(data))

    def close(self) -> None:
        self._tls.close()

    def outward(self) -> socket.socket:
        """A socket into which a stream writes what is to be sent. Closing it ends the connection."""
        return self._end(_send, "etha-encrypt")

    def inward(self) -> socket.socket:
        """A socket from which a stream reads what was received. Closing it ends the connection."""
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
            # Both ends close whatever happened: a reset, a bad record, a stream that was shut.
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
    """A stream's end of the pair. TCP options set on it are set on the connection behind it."""

    def __init__(self, end: socket.socket, behind: ssl.SSLSocket) -> None:
        super().__init__(end.family, end.type, end.proto, fileno=end.detach())
        self._behind = behind

    def setsockopt(self, level: int, option: int, *value: Any) -> None:
        """Set a socket option. TCP and keepalive options go to the connection behind the pair."""
        if level == socket.IPPROTO_TCP or (level, option) == (socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            with contextlib.suppress(OSError):  # the connection has closed before
                self._behind.setsockopt(level, option, *value)
        else:
            super().setsockopt(level, option, *value)


def _send(tls: ssl.SSLSocket, pair: socket.socket) -> None:
    """Send what comes out of the pair to the network, until either ends."""
    memory = memoryview(bytearray(CHUNK))
    idle, full = select.poll(), select.poll()
    idle.register(pair, select.POLLIN)
    idle.register(tls, select.POLLIN)
    full.register(tls, select.POLLOUT)
    full.register(pair, 0)  # tells when its stream is shut
    while True:
        events = dict(idle.poll())
        if tls.fileno() in events and not _answer(tls, pair):
            return
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
            except ssl.SSLWantReadError:  # a key update: rare and short
                idle_tls = select.poll()
                idle_tls.register(tls, select.POLLIN)
                idle_tls.register(pair, 0)
                if any(fd == pair.fileno() for fd, _ in idle_tls.poll()):
                    return


def _answer(tls: ssl.SSLSocket, pair: socket.socket) -> bool:
    """Hand the stream what the other end answers, which is short. False if that has ended the connection."""
    while True:
        try:
            data = tls.recv(CHUNK)
        except ssl.SSLWantReadError:
            return True
        if not data:
            return False
        pair.sendall(data)


def _receive(tls: ssl.SSLSocket, pair: socket.socket) -> None:
    """Put what comes from the network into the pair, until either ends, and send what the stream answers."""
    memory = memoryview(bytearray(CHUNK))
    idle, full = select.poll(), select.poll()
    idle.register(tls, select.POLLIN)
    idle.register(pair, select.POLLIN)
    full.register(tls, select.POLLOUT)
    ended = False
    while not ended:
        have, dry = 0, False
        while have < CHUNK and not dry and not ended:  # a record has 16 KiB at most, so pass several on at once
            try:
                n = tls.recv_into(memory[have:])
                have, ended = have + n, n == 0
            except ssl.SSLWantReadError:
                dry = True
            except OSError:  # pass on what came before
                ended = True
        pair.sendall(memory[:have])  # raises when its stream is shut
        if dry and pair.fileno() in dict(idle.poll()):
            answer = pair.recv(CHUNK)
            if not answer:
                return
            while answer:
                try:
                    answer = answer[tls.send(answer) :]
                except ssl.SSLWantWriteError:
                    full.poll()
