"""Point-to-point calls of a group: one thread moves all pending messages of the member, each as its own peer allows.

A message depends on its peer only. Sends and receives do not queue behind each other, nor behind collectives, because
two members that send to each other and then receive would wait for ever otherwise.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from etha import native
from etha.errors import GroupError
from etha.groups.calls import GroupCall, writing
from etha.groups.schedule import Kind
from etha.groups.work import GroupWork
from etha.interruptible import holding, join
from etha.native.structs import MESSAGE, MessageKind, RingLinks

_DTYPE_NUMBERS = {
    name: number
    for number, name in enumerate(sorted(str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)), 1)
}
_NAMES = {number: name.removeprefix("torch.") for name, number in _DTYPE_NUMBERS.items()}


class MessageOwner(Protocol):
    """The engine, as far as messages need it: who it is, and how it ends with one of them."""

    rank: int
    error: GroupError | None

    def time_out(self, text: str, ranks: tuple[int, ...] = ()) -> GroupError: ...
    def mismatch(self, text: str, calls: dict[int, str]) -> GroupError: ...
    def given_up(self, what: str, rank: int) -> GroupError: ...
    def broken(self, what: str, how: str) -> GroupError: ...


#: Messages have no place among the calls: a peer that has given up any call takes part in none of them.
_EVERY_CALL = 1 << 63


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    """One call: a message for each of its tensors. ``back``: outputs that get what their contiguous copies received."""

    call: GroupCall
    work: GroupWork
    rows: np.ndarray[Any, Any]
    tensors: list[Tensor]
    back: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Messages:
    """The point-to-point calls of one engine. ``close()`` returns when its thread has ended."""

    def __init__(self, engine: MessageOwner, library: native.NativeLibrary, memory: native.GroupMemory) -> None:
        self._engine, self._library, self._memory = engine, library, memory
        self._lock = threading.Lock()
        self._new: list[_Pending] = []
        #: Not a Semaphore: an interrupt in the middle of its ``release()`` would keep its lock for ever.
        self._wake: SimpleQueue[None] = SimpleQueue()
        #: Held while messages are moved.
        self._moving = threading.RLock()
        self._links: RingLinks | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, call: GroupCall, work: GroupWork, timeout: float) -> None:
        """Begin a call; ``work`` ends with it."""
        pending = _pending(call, work, timeout)
        with self._lock:
            if self._links is None:
                self._links = RingLinks(self._memory)
                self._thread = threading.Thread(target=self._serve, name="etha-group-messages", daemon=True)
                self._thread.start()
            self._new.append(pending)
            self._library.kick(self._links)
        self._wake.put(None)

    def settle(self, timeout: float) -> None:
        """After an error: wait until no message is moved any more."""
        holding(self._moving, lambda: None, time.monotonic() + timeout)

    def close(self) -> None:
        """End the thread. The engine has failed before, so nothing that it waits for comes any more."""
        with self._lock:
            self._closing = True
            thread = self._thread
        if thread is not None:
            self._wake.put(None)
            if thread is not threading.current_thread():
                join(thread)

    def _serve(self) -> None:
        links = self._links
        assert links is not None
        running: list[_Pending] = []
        while True:
            if not running:
                self._wake.get()
            with self._lock:
                running += self._new
                self._new.clear()
                closing = self._closing
            if self._engine.error is not None or closing:
                for pending in running:
                    pending.work.finish(self._engine.error)
                running = []
                if closing:
                    return
                continue
            if running:
                running = self._move(links, running)

    def _move(self, links: RingLinks, running: list[_Pending]) -> list[_Pending]:
        """Make progress until something has ended or begun; what is still pending."""
        messages = np.concatenate([pending.rows for pending in running])
        with self._moving:
            if self._engine.error is not None:
                return running
            self._library.progress(links, messages)
        start = 0
        for pending in running:
            pending.rows = messages[start : start + len(pending.rows)]
            start += len(pending.rows)
        return [pending for pending in running if not self._ended(pending)]

    def _ended(self, pending: _Pending) -> bool:
        status = pending.rows["status"]
        if (status == native.RunResult.DONE).all():
            with writing([given for given, _ in pending.back]):
                for given, used in pending.back:
                    given.copy_(used)
            if pending.call.kind is Kind.RECV_ANY:
                pending.call.root = int(pending.rows["source"][0])
            pending.work.finish(None)
            return True
        failed = (status != native.RunResult.DONE) & (status != native.RunResult.AGAIN)
        if not failed.any():
            return False
        self._fail(pending, pending.rows[int(failed.argmax())])
        pending.work.finish(self._engine.error)
        return True

    def _fail(self, pending: _Pending, row: Any) -> None:
        call, result = pending.call, native.RunResult(int(row["status"]))
        what = call.describe()
        peer = int(row["source"] if row["source"] != native.ALL else row["peer"])
        match result:
            case native.RunResult.TIMEOUT:
                who = () if call.kind is Kind.RECV_ANY else (int(row["peer"]),)
                name = "any rank" if not who else f"rank {who[0]}"
                self._engine.time_out(f"{what} on rank {self._engine.rank} timed out, waiting for {name}", who)
            case native.RunResult.MISMATCH:
                name = _NAMES.get(int(row["got_dtype"]), "unknown elements")
                sent = f"{int(row['got_bytes'])} bytes of {name}"
                text = f"rank {peer} sent {sent} to rank {self._engine.rank}, which called {what}"
                self._engine.mismatch(text, {peer: f"send of {sent}", self._engine.rank: what})
            case native.RunResult.GAVE_UP:
                self._engine.given_up(what, peer)
            case _:
                self._engine.broken(what, result.name)


def _pending(call: GroupCall, work: GroupWork, timeout: float) -> _Pending:
    sends = call.kind is Kind.SEND
    given = call.inputs if sends else call.outputs
    tensors, back = [], []
    for tensor in given:
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if plain:
            used = tensor
        elif sends:
            used = tensor.detach().resolve_conj().resolve_neg().contiguous()
        else:
            used = torch.empty(tensor.shape, dtype=tensor.dtype)
            back.append((tensor, used))
        tensors.append(used)
    rows = np.zeros(len(tensors), dtype=MESSAGE)
    # Plain numbers: numpy looks for attributes of a member of an enum, and a Ctrl-C that came meanwhile would be lost.
    rows["kind"] = (MessageKind.SEND if sends else MessageKind.RECEIVE).value
    rows["peer"] = native.ALL if call.kind is Kind.RECV_ANY else call.root
    rows["tag"] = call.tag
    rows["data"] = [tensor.data_ptr() for tensor in tensors]
    rows["nbytes"] = [tensor.numel() * tensor.element_size() for tensor in tensors]
    rows["dtype"] = [_DTYPE_NUMBERS[str(tensor.dtype)] for tensor in tensors]
    rows["status"] = native.RunResult.AGAIN.value
    rows["source"] = native.ALL
    rows["call_number"] = _EVERY_CALL
    rows["deadline_ns"] = time.monotonic_ns() + int(timeout * 1e9)
    return _Pending(call=call, work=work, rows=rows, tensors=tensors, back=back)
