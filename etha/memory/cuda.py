"""GPU memory shared by a worker with its agent, by CUDA IPC. ``signals.py`` orders the work between them.

    worker: Exports  allocation -> header --(descriptor socket)--> agent: Mappings  header -> mapping

Nothing that comes from a socket is trusted. A worker keeps its memory until its agent has closed it.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import threading
from collections.abc import Callable
from collections.abc import Mapping as Table
from dataclasses import dataclass
from typing import Any

import torch

from etha.cuda.driver import DeviceError, Driver
from etha.errors import RegistrationError
from etha.memory.signals import HANDLE_BYTES, Process, Signals, Waits

log = logging.getLogger(__name__)

_SEGMENT_ID = re.compile(r"[0-9a-f]{1,64}")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_HANDLE = re.compile(rf"[0-9a-f]{{{2 * HANDLE_BYTES}}}")
_MOST_BYTES = 1 << 50

__all__ = ["Exports", "Mapping", "Mappings", "Signals", "Waits"]


class Exports:
    """In a worker: exports the allocations that its tensors lie in, each once.

    An allocation is never mistaken for a later one at the same address.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._salt = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._ids: dict[tuple[str, int], tuple[int, str]] = {}
        self._headers: dict[str, dict[str, Any]] = {}

    def find(self, tensor: torch.Tensor) -> tuple[str, int]:
        """(segment id, byte offset) of a device tensor that has elements. Unexportable if it has no IPC handle.

        Memory that was freed and allocated again gets another id, even at the same address with the same handle.
        """
        uuid = self._driver.holds(tensor)
        if uuid is None or not tensor.numel():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} lies in no GPU's memory")
        address = tensor.data_ptr()
        base, nbytes = self._driver.extent(address)
        serial = self._driver.serial(address)
        with self._lock:
            known = self._ids.get((uuid, base))
            if known is None or known[0] != serial:
                handle = self._driver.export(base)
                if known is not None:
                    del self._headers[known[1]]
                known = serial, self._id(uuid, base, nbytes, serial, handle)
                self._ids[uuid, base] = known
                self._headers[known[1]] = {
                    "segment": known[1],
                    "nbytes": nbytes,
                    "device": uuid,
                    "handle": handle.hex(),
                }
        return known[1], address - base

    def _id(self, uuid: str, base: int, nbytes: int, serial: int, handle: bytes) -> str:
        digest = hashlib.blake2b(f"{uuid} {base} {nbytes} {serial}".encode(), digest_size=16, key=self._salt)
        digest.update(handle)
        return digest.hexdigest()

    def header(self, segment: str) -> dict[str, Any]:
        """The header that the agent is sent: segment, nbytes, device (uuid) and handle (hex). RegistrationError if it
        is gone."""
        with self._lock:
            found = self._headers.get(segment)
        if found is None:
            raise RegistrationError(f"segment {segment} is gone: its memory was freed and allocated again")
        return dict(found)


@dataclass(slots=True)
class _Opened:
    """One open allocation; ``holders`` counts its Mappings."""

    address: int
    header: dict[str, Any]
    holders: int = 0
    closed: bool = False


class Mapping:
    """One holder's share of an open allocation. Call ``close()`` when nothing on the device uses it any more."""

    def __init__(self, owner: Mappings, key: tuple[Process, str, str], opened: _Opened) -> None:
        self._owner, self._key, self._opened = owner, key, opened
        self._closed = False

    @property
    def address(self) -> int:
        """Address of its first byte in this process."""
        return self._opened.address

    @property
    def nbytes(self) -> int:
        """Size according to the worker. At least that much is mapped."""
        return int(self._opened.header["nbytes"])

    @property
    def device(self) -> str:
        """The uuid of the GPU that the memory is on."""
        return str(self._opened.header["device"])

    @property
    def header(self) -> dict[str, Any]:
        """The worker's header, checked. Another agent opens the allocation with it."""
        return dict(self._opened.header)

    @property
    def space(self) -> str:
        """A name that is equal for two mappings of the same memory."""
        return f"device memory at {self._opened.address:#x}"

    def close(self) -> None:
        """Release it; the last holder unmaps. Idempotent. It does not raise if the worker is gone."""
        if not self._closed:
            self._closed = True
            self._owner._release(self._key, self._opened)


class Mappings:
    """In the agent of GPU ``uuid``: workers' allocations, each opened once however many hold it.

    ``on_sticky`` is called, from any thread, with an error that has broken this process's context, after which nothing
    works.
    """

    def __init__(
        self, driver: Driver, uuid: str, on_sticky: Callable[[DeviceError], None] = lambda error: None
    ) -> None:
        self._driver, self._uuid, self._on_sticky = driver, uuid, on_sticky
        self._lock = threading.Lock()
        self._opened: dict[tuple[Process, str, str], _Opened] = {}

    def attach(self, pid: int, started: int, header: Table[str, Any]) -> Mapping:
        """Open the allocation that a worker's ``header`` names, or hold it once more. RegistrationError says what is
        wrong."""
        checked = self._checked(header)
        key = (pid, started), checked["segment"], checked["handle"]
        with self._lock:
            opened = self._opened.get(key)
            if opened is None:
                opened = self._opened[key] = self._open(pid, checked)
            elif opened.header != checked:
                raise RegistrationError(f"segment {checked['segment']} was attached as {opened.header}, not {checked}")
            opened.holders += 1
        return Mapping(self, key, opened)

    def forget(self, pid: int, started: int) -> None:
        """Unmap everything that a process exported, whoever holds it, because it is dead and nothing uses its memory
        any more."""
        with self._lock:
            stale = [key for key in self._opened if key[0] == (pid, started)]
            for key in stale:
                self._unmap(self._opened.pop(key))

    def close(self) -> None:
        with self._lock:
            while self._opened:
                self._unmap(self._opened.popitem()[1])

    def __len__(self) -> int:
        return len(self._opened)

    def _checked(self, header: Table[str, Any]) -> dict[str, Any]:
        wrong = "the header of GPU memory from a worker: {} is {!r:.80}, not {}"
        for name, form, what in (
            ("segment", _SEGMENT_ID, "1 to 64 hex digits"),
            ("device", _UUID, "a GPU's uuid"),
            ("handle", _HANDLE, f"{2 * HANDLE_BYTES} hex digits"),
        ):
            value = header.get(name)
            if not isinstance(value, str) or form.fullmatch(value) is None:
                raise RegistrationError(wrong.format(name, str(value), what))
        nbytes, device = header.get("nbytes"), header["device"]
        if type(nbytes) is not int or not 0 < nbytes <= _MOST_BYTES:
            raise RegistrationError(wrong.format("nbytes", str(nbytes), f"a number of bytes from 1 to {_MOST_BYTES}"))
        if device != self._uuid and not self._reaches(device):
            raise RegistrationError(
                f"the agent of {self._uuid} has no peer access to {device}, where the tensor lies: "
                f"give the client device= of the tensor's GPU (`etha doctor` shows which GPUs reach which)"
            )
        return {name: header[name] for name in ("segment", "nbytes", "device", "handle")}

    def _reaches(self, device: str) -> bool:
        try:
            return self._driver.peers(self._uuid, device)
        except DeviceError as error:  # a GPU that this process does not see
            self._tell(error)
            return False

    def _open(self, pid: int, header: dict[str, Any]) -> _Opened:
        what = f"{header['nbytes']} bytes of process {pid} on {header['device']}"
        try:
            address = self._driver.open(self._uuid, bytes.fromhex(header["handle"]))
        except DeviceError as error:
            self._tell(error)
            raise RegistrationError(
                f"{what} cannot be mapped ({error}): they may be freed already, or agent and worker are in containers "
                f"without one IPC and PID namespace"
            ) from error
        opened = _Opened(address=address, header=header)
        try:
            base, mapped = self._driver.extent(address)
        except DeviceError as error:
            self._tell(error)
            self._unmap(opened)
            raise RegistrationError(f"{what} have no size here: {error}") from error
        # A size beyond what is mapped would let a tensor's copy run into foreign memory. Small allocations share blocks
        # of 2 MiB, and the mapping may be of the block.
        if not (base <= address and address + header["nbytes"] <= base + mapped):
            self._unmap(opened)
            raise RegistrationError(f"{what}: only {base + mapped - address} bytes are mapped")
        return opened

    def _release(self, key: tuple[Process, str, str], opened: _Opened) -> None:
        with self._lock:
            opened.holders -= 1
            if opened.holders or opened.closed:
                return
            del self._opened[key]
            self._unmap(opened)

    def _unmap(self, opened: _Opened) -> None:
        opened.closed = True
        try:
            self._driver.close(opened.address)
        except DeviceError as error:
            log.warning("unmapping %s bytes of a worker: %s", opened.header["nbytes"], error)
            self._tell(error)

    def _tell(self, error: DeviceError) -> None:
        if error.sticky:
            self._on_sticky(error)
