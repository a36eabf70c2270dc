"""How the members of an epoch meet: addresses through a store, descriptors through Unix sockets, streams between hosts.

    every rank  ->  store: its record (rank, size, host, address of its socket, a token)
    every rank  ->  the sockets of all lower ranks of its host: hello (its rank, their token), its memfd, its pidfd
                <-  welcome, memfd, pidfd
    every rank  ->  the TCP ports of all lower ranks of other hosts: hello;  <-  welcome; this connection is the stream

Unix sockets serve the meeting only and are closed at its end. Nobody learns of a death from them, because a forked
child of a dead trainer can hold them open for seconds; a pidfd becomes readable at once. A member listens on a TCP port
only if members of other hosts will call, and no longer than the meeting lasts. Whoever does not know its token is
refused.

Every rank reads the records in the order of ranks and compares each with its own, so a rank that was configured with
another size is found even though it waits for somebody who will never come.
"""

from __future__ import annotations

import atexit
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from etha.addresses import format_address, parse_address
from etha.decoders import decoder, made_alone
from etha.errors import (
    EthaError,
    GroupAbortedError,
    GroupError,
    GroupLostError,
    GroupMismatchError,
    GroupTimeoutError,
)
from etha.groups.host import endpoints
from etha.groups.host.windows import BlockLayout, SharedBlock, new_block
from etha.groups.store_client import ended_by
from etha.interruptible import Latch
from etha.memory.pages import is_sealed

_HELLO_BYTES = 256
#: Seconds that the interpreter's end waits for questions to stores.
_ENDING = 2.0
#: What members of two hosts say first: a word that names this language and its version, the speaker's rank, and the
#: token of whom it speaks to.
_FAR_HELLO = struct.Struct("<8sI32s")
_LANGUAGE = b"ETHAGRP1"
#: Seconds in which a host must answer. Longer than the kernel needs to send what was lost three times.
_CONNECT_SECONDS = 10.0
#: What the kernel says if there is no way to a host. (One that refuses the connection has been reached.)
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL)
#: Callers from other hosts that may have said nothing yet; if there are more, the oldest is dropped.
_MOST_STRANGERS = 64


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a member writes into the store for the others."""

    rank: int
    size: int
    window: int
    ring: int
    host: str
    pid: int
    address: str
    token: str
    name: str
    #: Of a release that knew only one order there is none.
    order: str = "rank"


class MemberHello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First message on a connection, in both directions: who speaks, and the token of whom it speaks to."""

    rank: int
    token: str


_record_decoder = made_alone(lambda: msgspec.json.Decoder(MemberRecord))
_hello_decoder = decoder(MemberHello)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPeer:
    """Another member of the group: its block, and a descriptor that becomes readable when its process ends."""

    rank: int
    name: str
    pid: int
    block: SharedBlock
    pidfd: int
    #: A member of another host: the connection to it. Its block is a mirror then, and its pidfd an eventfd that becomes
    #: readable when the connection has ended.
    stream: socket.socket | None = None

    def close(self) -> None:
        """Unmap the block and close the descriptors."""
        os.close(self.pidfd)
        self.block.close()
        if self.stream is not None:
            self.stream.close()


def host_identity() -> str:
    """Equal for processes that can share memory and reach each other's abstract sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{Path('/proc/self/ns/net').stat().st_ino}"


def _far_hello(rank: int, token: str) -> bytes:
    return _FAR_HELLO.pack(_LANGUAGE, rank, token.encode())


def _is_far_hello(data: bytes, rank: int, token: str) -> bool:
    return hmac.compare_digest(data, _far_hello(rank, token))


class MeetingDeadline:
    """A point in time, from the seconds that a caller gave."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self.at - time.monotonic())

    @property
    def spent(self) -> float:
        """Seconds that have passed of it."""
        return self.seconds - self.left

    @property
    def ns(self) -> int:
        """On CLOCK_MONOTONIC."""
        return int(self.at * 1e9)


class MeetingEnd:
    """Ends a configure from another thread: whatever it waits for then, it stops waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes: list[Callable[[], None]] = []
        self._set = False

    def set(self) -> None:
        """End it, now or as soon as it waits again."""
        with self._lock:
            self._set, wakes = True, list(self._wakes)
            for wake in wakes:
                wake()

    def check(self) -> None:
        """Raise GroupAbortedError if it is ended."""
        if self._set:
            raise GroupAbortedError("configure was ended by abort(), shutdown() or another configure()")

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """``wake`` is called if this is set within, on the thread that does; afterwards this has been checked."""
        with self._lock:
            self._wakes.append(wake)
            if self._set:
                wake()
        try:
            yield
        finally:
            with self._lock:
                self._wakes.remove(wake)
            self.check()


def meet(
    store: Any,
    *,
    rank: int,
    layout: BlockLayout,
    block_fd: int,
    name: str,
    deadline: MeetingDeadline,
    end: MeetingEnd | None = None,
    order: str = "host",
) -> tuple[dict[int, GroupPeer], tuple[int, ...]]:
    """Meet all other ranks; returns them by rank, and the number of each rank's host. ``order``: that of reductions.

    ``end`` ends it with GroupAbortedError. GroupTimeoutError names the ranks that did not come, GroupMismatchError the
    ranks that were configured otherwise, GroupLostError a rank that died on the way.
    """
    meeting = _Meeting(store, rank, layout, block_fd, name, deadline, end or MeetingEnd(), order)
    try:
        return meeting.run()
    finally:
        meeting.close()


#: Threads that ask a store, and what ends them.
_asking: dict[threading.Thread, MeetingEnd] = {}


def _end_asking() -> None:
    """When the interpreter ends: a thread that it meets inside torch's store would abort the process."""
    until = time.monotonic() + _ENDING
    for thread, end in list(_asking.items()):
        end.set()
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_end_asking)
os.register_at_fork(after_in_child=_asking.clear)


def ask_store(
    question: Callable[[], Any], deadline: MeetingDeadline, place: str = "", end: MeetingEnd | None = None
) -> Any:
    """The answer of a store, asked on a thread of its own, because a store whose process is stopped never answers.

    Raises GroupTimeoutError then, GroupError if it cannot be reached or fails, and GroupAbortedError at ``end``.
    """
    answer: list[Any] = []
    failure: list[BaseException] = []
    done = Latch()
    end = end or MeetingEnd()

    def run() -> None:
        try:
            answer.append(question())
        except BaseException as error:
            failure.append(error)
        finally:
            _asking.pop(thread, None)
            done.open()

    thread = threading.Thread(target=run, name="etha-group-store", daemon=True)
    _asking[thread] = end
    thread.start()
    with end.waking(done.open):
        in_time = done.wait(time.monotonic() + deadline.left + 0.5)
    if not in_time:
        raise GroupTimeoutError(
            f"the store{place} did not answer within {deadline.seconds:g} s: its process may have ended, or be stopped",
            waiting_for=(),
        )
    thread.join()
    if failure:
        error = failure[0]
        if isinstance(error, EthaError):
            raise error
        text = str(error).partition("\nException raised from")[0]
        raise GroupError(f"the store{place} failed: {text}: is the process that serves it alive?") from error
    return answer[0]


def _hang_up(sock: socket.socket) -> None:
    """Have whoever reads from it hear its end."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class _Meeting:
    def __init__(
        self,
        store: Any,
        rank: int,
        layout: BlockLayout,
        block_fd: int,
        name: str,
        deadline: MeetingDeadline,
        end: MeetingEnd,
        order: str,
    ) -> None:
        self._store = ended_by(store, deadline.seconds, end.check)
        self._rank, self._layout, self._block_fd = rank, layout, block_fd
        self._deadline, self._end = deadline, end
        self._peers: dict[int, GroupPeer] = {}
        self._records: dict[int, MemberRecord] = {}
        self._done = False
        #: For members of other hosts, once it is known that there are any.
        self._port: socket.socket | None = None
        with ExitStack() as stack:
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            token = secrets.token_hex(16)
            address = f"etha-group-{secrets.token_hex(16)}"
            self._listener.bind("\0" + address)
            self._listener.listen(layout.size)
            self._pidfd = os.pidfd_open(os.getpid())
            stack.callback(os.close, self._pidfd)
            self._own = MemberRecord(
                rank=rank,
                size=layout.size,
                window=layout.window,
                ring=layout.ring,
                host=host_identity(),
                pid=os.getpid(),
                address=address,
                token=token,
                name=name,
                order=order,
            )
            self._stack = stack.pop_all()

    def run(self) -> tuple[dict[int, GroupPeer], tuple[int, ...]]:
        self._ask(self._publish)
        self._read_records()
        far = self._far_ranks()
        if any(other > self._rank for other in far):
            self._open_port()
        for other in range(self._rank):
            if other in far:
                self._call_far(self._records[other])
            else:
                self._call_on(self._records[other])
        self._receive_calls()
        self._done = True
        names = [(self._own if r == self._rank else self._records[r]).host for r in range(self._layout.size)]
        return self._peers, tuple(names.index(name) for name in names)

    def close(self) -> None:
        self._stack.close()
        if not self._done:
            for peer in self._peers.values():
                peer.close()

    # -- the store ---------------------------------------------------------------------------------------------------

    def _ask(self, question: Callable[[], Any]) -> Any:
        return ask_store(question, self._deadline, end=self._end)

    def _publish(self) -> None:
        mine = msgspec.json.encode(self._own).decode()
        found = bytes(self._store.compare_set(str(self._rank), "", mine)).decode()
        if found != mine:
            raise GroupMismatchError(
                f"rank {self._rank} was configured twice under this store address: every configure of a group needs an "
                "address of its own, and every member a rank of its own",
                calls={self._rank: f"configure(rank={self._rank}, world_size={self._layout.size})"},
            )

    def _read(self, key: str) -> bytes:
        """A value of the store once it is there; empty if the deadline passes."""

        def read() -> bytes:
            try:
                self._store.wait([key], timedelta(seconds=max(0.001, self._deadline.left)))
            except Exception:
                if not self._deadline.left:
                    return b""
                raise
            return bytes(self._store.get(key))

        return self._ask(read)  # type: ignore[no-any-return]

    def _read_records(self) -> None:
        """Read the records of all other ranks, those that are there together."""
        missing = [r for r in range(self._layout.size) if r != self._rank]
        while missing:
            found: dict[int, bytes] = self._ask(partial(self._arrived, missing))
            if not found:
                raise GroupTimeoutError(
                    f"configure of rank {self._rank} ended after {self._deadline.seconds:g} s: "
                    f"{'ranks' if len(missing) > 1 else 'rank'} {', '.join(map(str, missing))} did not come",
                    waiting_for=tuple(missing),
                )
            for other, data in found.items():
                self._records[other] = self._checked(other, data)
            missing = [r for r in missing if r not in self._records]

    def _arrived(self, ranks: list[int]) -> dict[int, bytes]:
        """What the store has of ranks, once the first of them is there or the deadline has passed."""
        try:
            self._store.wait([str(ranks[0])], timedelta(seconds=max(0.001, self._deadline.left)))
        except Exception:
            if self._deadline.left:
                raise
        found = self._store.present([str(rank) for rank in ranks])
        return {int(key): value for key, value in found.items()}

    def _checked(self, other: int, found: bytes) -> MemberRecord:
        """The record of a rank, whose group must be like the own one."""
        record: MemberRecord = _record_decoder.decode(found)
        both = (self._own, record)
        if self._own.size != record.size:
            raise GroupMismatchError(
                f"rank {other} was configured with world size {record.size}, rank {self._rank} with {self._own.size}",
                calls={r.rank: f"configure(rank={r.rank}, world_size={r.size})" for r in both},
            )
        for what in ("order", "window", "ring"):
            own, its = getattr(self._own, what), getattr(record, what)
            if own != its:
                raise GroupMismatchError(
                    f"the group of rank {other} has {what}={its!r}, that of rank {self._rank} {own!r}: "
                    f"all members must give the same",
                    calls={r.rank: f"ProcessGroupEtha({what}={getattr(r, what)!r})" for r in both},
                )
        return record

    # -- the sockets -------------------------------------------------------------------------------------------------

    def _call_on(self, record: MemberRecord) -> None:
        """Meet a lower rank."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            self._limit(sock, record.rank)
            try:
                sock.connect("\0" + record.address)
                with self._end.waking(lambda: _hang_up(sock)):
                    self._send(sock, record.token)
                    answer = self._receive(sock)
            except TimeoutError:
                raise self._late([record.rank]) from None
            except OSError as error:
                raise self._lost(record, error) from None
            if answer is None:
                raise self._lost(record, None)
            self._admit(record, *answer)

    def _receive_calls(self) -> None:
        """Meet all higher ranks."""
        waiting = set(range(self._rank + 1, self._layout.size))
        far = self._far_ranks()
        # They have all written their records, so they call soon, or have given up because they cannot reach somebody.
        give_up = time.monotonic() + 2 * _CONNECT_SECONDS
        wake = os.eventfd(0, os.EFD_CLOEXEC)
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            stack.callback(os.close, wake)
            stack.enter_context(self._end.waking(lambda: os.eventfd_write(wake, 1)))
            selector.register(wake, selectors.EVENT_READ)
            for listener in (self._listener, self._port):
                if listener is not None:
                    listener.setblocking(False)
                    selector.register(listener, selectors.EVENT_READ)
            callers: set[socket.socket] = set()
            strangers: dict[socket.socket, bytes] = {}  # what they have said so far, the oldest first
            try:
                while waiting:
                    limits = [self._deadline.at, give_up] if waiting & far else [self._deadline.at]
                    ready = selector.select(max(0.0, min(limits) - time.monotonic()))
                    self._end.check()
                    if not ready and time.monotonic() >= min(limits):
                        raise self._late(sorted(waiting))
                    give_up = time.monotonic() + 2 * _CONNECT_SECONDS
                    for key, _ in ready:
                        if key.fileobj is self._port:
                            self._accept_stranger(selector, strangers)
                            continue
                        if key.fileobj in strangers:
                            waiting.discard(self._hear_stranger(selector, strangers, key.fileobj))
                            continue
                        if key.fileobj is self._listener:
                            caller, _address = self._listener.accept()
                            caller.settimeout(1.0)
                            callers.add(caller)
                            selector.register(caller, selectors.EVENT_READ)
                            continue
                        caller = key.fileobj  # type: ignore[assignment]
                        selector.unregister(caller)
                        callers.discard(caller)
                        with caller:
                            waiting.discard(self._welcome(caller))
            finally:
                for caller in (*callers, *strangers):
                    caller.close()

    # -- members of other hosts --------------------------------------------------------------------------------------

    def _far_ranks(self) -> set[int]:
        return {r for r, record in self._records.items() if record.host != self._own.host}

    def _open_port(self) -> None:
        self._port, host, port = endpoints.listen(self._store, self._layout.size)
        self._stack.callback(self._port.close)
        self._ask(lambda: self._store.set(f"{self._rank}/tcp", format_address(host, port)))

    def _call_far(self, record: MemberRecord) -> None:
        """Meet a lower rank of another host."""
        place = self._read(f"{record.rank}/tcp").decode()
        if not place:
            raise self._late([record.rank])
        host, port = parse_address(place, 65535)
        if not (left := self._deadline.left):
            raise self._late([record.rank])
        try:
            sock = socket.create_connection((host, port), timeout=min(left, _CONNECT_SECONDS))
        except OSError as error:
            text = (
                f"rank {record.rank} ({record.name!r}) of another host cannot be reached at {place}: {error}; "
                f"ETHA_LISTEN=HOST:0 on its host names the address by which others reach it"
            )
            if isinstance(error, TimeoutError):
                raise GroupTimeoutError(text, waiting_for=(record.rank,)) from None
            reason = "not reached" if error.errno in _NO_WAY else "died"
            raise GroupLostError(text, ranks=(record.rank,), reason=reason) from None
        try:
            sock.sendall(_far_hello(self._rank, record.token))
            answer = b""
            with self._end.waking(lambda: _hang_up(sock)):
                while len(answer) < _FAR_HELLO.size:
                    sock.settimeout(max(0.001, self._deadline.left))
                    more = sock.recv(_FAR_HELLO.size - len(answer))
                    if not more:
                        self._end.check()
                        raise self._lost(record, None)
                    answer += more
            if not _is_far_hello(answer, record.rank, self._own.token):
                raise GroupError(f"what answers at {place} is not rank {record.rank} of this group")
            self._admit_far(record, sock)
        except TimeoutError:
            sock.close()
            raise self._late([record.rank]) from None
        except OSError as error:
            sock.close()
            raise self._lost(record, error) from None
        except BaseException:
            sock.close()
            raise

    def _accept_stranger(self, selector: selectors.BaseSelector, strangers: dict[socket.socket, bytes]) -> None:
        assert self._port is not None
        try:
            stranger, _address = self._port.accept()
        except OSError:
            return  # it has hung up already
        stranger.setblocking(False)
        strangers[stranger] = b""
        selector.register(stranger, selectors.EVENT_READ)
        if len(strangers) > self._layout.size + _MOST_STRANGERS:
            first = next(iter(strangers))
            selector.unregister(first)
            del strangers[first]
            first.close()

    def _hear_stranger(
        self, selector: selectors.BaseSelector, strangers: dict[socket.socket, bytes], caller: socket.socket
    ) -> int:
        """Take what a caller says; the rank that was met, or -1."""
        try:
            said = caller.recv(_FAR_HELLO.size - len(strangers[caller]))
        except BlockingIOError:
            return -1
        except OSError:
            said = b""
        whole = strangers[caller] = strangers[caller] + said
        if said and len(whole) < _FAR_HELLO.size:
            return -1
        selector.unregister(caller)
        del strangers[caller]
        rank = _FAR_HELLO.unpack(whole)[1] if len(whole) == _FAR_HELLO.size else -1
        record = self._records.get(rank)
        if (
            record is None
            or rank in self._peers
            or record.host == self._own.host
            or not _is_far_hello(whole, rank, self._own.token)
        ):
            caller.close()
            return -1
        try:
            caller.sendall(_far_hello(self._rank, record.token))  # fits into the empty buffer of a new connection
            self._admit_far(record, caller)
        except OSError as error:
            caller.close()
            raise self._lost(record, error) from None
        return record.rank

    def _admit_far(self, record: MemberRecord, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd, mirror = new_block(self._layout)
        os.close(fd)
        try:
            ended = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError:
            mirror.close()
            raise
        self._peers[record.rank] = GroupPeer(
            rank=record.rank, name=record.name, pid=record.pid, block=mirror, pidfd=ended, stream=sock
        )

    # -- members of this host ----------------------------------------------------------------------------------------

    def _welcome(self, caller: socket.socket) -> int:
        """Answer whoever calls; the rank that was met, or -1 for somebody who is none of ours."""
        try:
            answer = self._receive(caller)
        except OSError:
            return -1
        if answer is None:
            return -1
        hello, fds = answer
        record = self._records.get(hello.rank)
        if record is None or not hmac.compare_digest(hello.token, self._own.token) or hello.rank in self._peers:
            for fd in fds:
                os.close(fd)
            return -1
        try:
            self._send(caller, record.token)
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise self._lost(record, error) from None
        self._admit(record, hello, fds)
        return record.rank

    def _send(self, sock: socket.socket, token: str) -> None:
        hello = msgspec.msgpack.encode(MemberHello(rank=self._rank, token=token))
        socket.send_fds(sock, [hello], [self._block_fd, self._pidfd])

    def _receive(self, sock: socket.socket) -> tuple[MemberHello, list[int]] | None:
        """A hello and its two descriptors; None if the other side has closed or speaks another language."""
        data, fds, _flags, _address = socket.recv_fds(sock, _HELLO_BYTES, 2)
        try:
            hello: MemberHello = _hello_decoder.decode(data)
            if len(fds) == 2:
                return hello, list(fds)
        except msgspec.MsgspecError:
            pass
        for fd in fds:
            os.close(fd)
        return None

    def _admit(self, record: MemberRecord, hello: MemberHello, fds: list[int]) -> None:
        memfd, pidfd = fds
        try:
            if hello.token != self._own.token or hello.rank != record.rank:
                raise self._lost(record, None)
            if not is_sealed(memfd) or os.fstat(memfd).st_size != self._layout.nbytes:
                raise GroupError(f"rank {record.rank} sent memory that is not sealed or of another size")
            block = SharedBlock(memfd, self._layout)
        except BaseException:
            os.close(pidfd)
            raise
        finally:
            os.close(memfd)
        self._peers[record.rank] = GroupPeer(
            rank=record.rank, name=record.name, pid=record.pid, block=block, pidfd=pidfd
        )

    def _limit(self, sock: socket.socket, rank: int) -> None:
        if not (left := self._deadline.left):
            raise self._late([rank])
        sock.settimeout(left)

    def _late(self, ranks: list[int]) -> GroupTimeoutError:
        who = ", ".join(str(r) for r in ranks)
        return GroupTimeoutError(
            f"configure of rank {self._rank} ended after {self._deadline.spent:.3g} s: it waits for rank {who}",
            waiting_for=tuple(ranks),
        )

    def _lost(self, record: MemberRecord, error: OSError | None) -> GroupLostError:
        why = f" ({error.strerror})" if error is not None else ""
        return GroupLostError(
            f"rank {record.rank} ({record.name!r}, process {record.pid}) ended while the group was configured{why}",
            ranks=(record.rank,),
            reason="died",
        )
