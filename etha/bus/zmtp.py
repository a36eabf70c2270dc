"""ZMTP 3.0 with the NULL mechanism, as far as the agent's end of a worker's DEALER needs it, and that of a worker's
direct connection. Pure.

    worker   greeting, READY, messages ...
    agent    greeting, READY, messages ...

The agent speaks ZMTP itself because libzmq accepts connections without a bound and ends the process when it has no
descriptor for the next one. See https://rfc.zeromq.org/spec/23.
"""

from __future__ import annotations

from collections.abc import Iterator

_MORE, _LONG, _COMMAND = 1, 2, 4
_MECHANISM = b"NULL".ljust(20, b"\0")
_GREETING_BYTES = 64
#: Largest command in bytes; READY carries a socket type and an identity.
_MAX_COMMAND = 1024


class NotZmtp(Exception):
    """The other end does not speak ZMTP 3 as a worker does."""


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame with this body."""
    if len(body) > 255:
        return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body
    return bytes((flags, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def opening(socket_type: bytes) -> bytes:
    """What an end sends first: version 3.0, no encryption (the kernel authenticates the peer), READY."""
    ready = b"\x05READY" + _property(b"Socket-Type", socket_type) + _property(b"Identity", b"")
    return b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00" + _MECHANISM + bytes(32) + frame(ready, _COMMAND)


def _header(data: memoryview | bytearray, at: int, allowed: int) -> tuple[int, int, int] | None:
    """(flags, bytes of the body, where it begins) of the frame at ``at``; None if that has not come yet."""
    if len(data) < at + 2:
        return None
    flags = data[at]
    if flags & ~allowed:
        raise NotZmtp(f"a frame with flags {flags:#x}")
    if not flags & _LONG:
        return flags, data[at + 1], at + 2
    if len(data) < at + 9:
        return None
    return flags, int.from_bytes(data[at + 1 : at + 9], "big"), at + 9


def frame_at(data: memoryview, at: int) -> tuple[bytes, int] | None:
    """The body of the frame at ``at`` of what an agent sends after READY, and where the next begins; None if it has not
    come whole. NotZmtp for anything but messages of one frame."""
    header = _header(data, at, _LONG)
    if header is None:
        return None
    _, size, start = header
    return (bytes(data[start : start + size]), start + size) if len(data) >= start + size else None


class Parser:
    """Turns the bytes of one connection into whole messages. ``ready``: its greeting and its READY were valid."""

    def __init__(self, max_message: int) -> None:
        self._max = max_message
        self._data = bytearray()
        self._parts: list[bytes] = []
        self._greeted = False
        self.ready = False

    def feed(self, data: bytes | memoryview) -> Iterator[list[bytes]]:
        """Yield each message that is complete now, as its parts. NotZmtp ends the connection."""
        self._data += data
        at = 0
        try:
            if not self._greeted:
                if not self._greets():
                    return
                at = _GREETING_BYTES
            while (found := self._frame(at)) is not None:
                flags, body, at = found
                if flags & _COMMAND:
                    self._command(body)
                    continue
                if not self.ready:
                    raise NotZmtp("a message before READY")
                self._parts.append(body)
                if not flags & _MORE:
                    parts, self._parts = self._parts, []
                    yield parts
        finally:
            del self._data[:at]

    def _greets(self) -> bool:
        data = self._data
        # Fails at the first wrong byte and does not wait for all 64.
        if (data and data[0] != 0xFF) or (len(data) > 9 and not data[9] & 1):
            raise NotZmtp("no greeting of ZMTP")
        if (len(data) > 10 and data[10] < 3) or (len(data) > 31 and data[12:32] != _MECHANISM):
            raise NotZmtp("another version or mechanism than ZMTP 3 NULL")
        self._greeted = len(data) >= _GREETING_BYTES
        return self._greeted

    def _frame(self, at: int) -> tuple[int, bytes, int] | None:
        data = self._data
        header = _header(data, at, _MORE | _LONG | _COMMAND)
        if header is None:
            return None
        flags, size, start = header
        if size + sum(map(len, self._parts)) > (_MAX_COMMAND if flags & _COMMAND else self._max):
            raise NotZmtp(f"a frame of {size} bytes")
        if len(self._parts) > 64:
            raise NotZmtp("a message of too many parts")
        if len(data) < start + size:
            return None
        return flags, bytes(data[start : start + size]), start + size

    def _command(self, body: bytes) -> None:
        if not self.ready:
            if not body.startswith(b"\x05READY"):
                raise NotZmtp("another command than READY")
            self.ready = True
