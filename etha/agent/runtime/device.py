"""A GPU agent's card: the memory that workers have shared there, and the device work that their calls wait for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable

import torch

from etha.agent.runtime.lane import WorkspacePool
from etha.agent.runtime.sessions import WorkerSession
from etha.config import CUDA_AGENT
from etha.cuda.driver import Device, DeviceError, Driver
from etha.cuda.reaper import reaper
from etha.cuda.select import driver, nccl
from etha.errors import ConfigError, EthaError, TransferError
from etha.memory.cuda import Mappings
from etha.memory.signals import Waits
from etha.memory.views import View
from etha.transport.copy.cpu import Buffer, Workspace
from etha.transport.copy.device import Copier
from etha.transport.copy.device_memory import CardError, PinnedMemory
from etha.transport.copy.device_warmup import prepare
from etha.transport.copy.program import Program
from etha.transport.copy.staging import Budget, StagingMemory
from etha.transport.nccl.plane import NcclPlane

log = logging.getLogger(__name__)


class CardMemory(StagingMemory):
    """Staging that a card reaches: pinned buffers, and copiers for threads that copy."""

    def __init__(self, driver: Driver, uuid: str) -> None:
        self._driver, self._uuid = driver, uuid

    def buffer(self, nbytes: int) -> Buffer:
        return PinnedBuffer(PinnedMemory(self._driver, self._uuid, nbytes))

    def view(self, buffer: Buffer, dtype: torch.dtype) -> View:
        return buffer.memory.view(dtype) if isinstance(buffer, PinnedBuffer) else super().view(buffer, dtype)

    def workspace(self) -> Workspace:
        """A workspace with its own stream."""
        return Workspace(Copier(self._driver, self._uuid))


class PinnedBuffer(Buffer):
    """A buffer over page-locked memory, which it keeps. It does not grow."""

    def __init__(self, memory: PinnedMemory) -> None:
        super().__init__(0)
        self.memory = memory
        self._bytes = memory.flat


class GpuDevice:
    """One GPU. ``spoilt(text)`` is called on the loop when its context is lost, and the agent has to be restarted."""

    def __init__(self, driver: Driver, device: Device, spoilt: Callable[[str], None]) -> None:
        self.driver, self.device = driver, device
        self._loop = asyncio.get_running_loop()
        self._spoilt = spoilt
        self.lost = False
        self._preparing = threading.Lock()
        self._copier: Copier | None = None
        self._numbers: dict[str, int] = {}
        self._count = itertools.count(1)
        self.mappings = Mappings(driver, device.uuid, self._sticky)
        self.memory = CardMemory(driver, device.uuid)
        self.workspaces = WorkspacePool(driver, device.uuid)
        self._waits = Waits(driver, device.uuid, self._sticky)

    @property
    def agent(self) -> str:
        """The name of its agent."""
        return f"{CUDA_AGENT}{self.device.uuid}"

    def nccl_plane(self, me: str, budget: Budget) -> NcclPlane | None:
        """The NCCL plane of agent ``me``, within ``budget``; None without NCCL."""
        try:
            found = nccl()
        except ConfigError as error:
            log.info("no NCCL here, bytes for cards of other hosts go by tcp: %s", error.message)
            return None
        return NcclPlane(me, self.device, driver=self.driver, nccl=found, budget=budget)

    def reached(self, session: WorkerSession, mark: bytes) -> bool:
        """Whether the work before a call is done. RegistrationError for an invalid mark."""
        try:
            return self._waits.reached(session.peer.pid, self._number(session), mark)
        except DeviceError as error:
            text = f"the GPU of process {session.peer.pid} failed before the call: {error}"
            raise TransferError(text, outcome="withdrawn") from error

    def follow(self, session: WorkerSession, mark: bytes, then: Callable[[str], None]) -> None:
        """Call ``then(why)`` on the loop once the work before a call is done (``why`` is ""), or will never be done.

        Each such call has a thread, because the kernel of a training step may take seconds, and no lane may wait for
        it.
        """
        number = self._number(session)

        def wait() -> None:
            why = ""
            try:
                self._waits.wait(session.peer.pid, number, mark)
            except (DeviceError, EthaError) as error:
                why = str(error)
            try:
                self._loop.call_soon_threadsafe(then, why)
            except RuntimeError:
                log.debug("the agent ended while it waited for the device work of process %d", session.peer.pid)

        threading.Thread(target=wait, name=f"etha-mark-{session.peer.pid}", daemon=True).start()

    def release(self, session: WorkerSession) -> None:
        """A session is over: release its events. Threads that wait for one get an error."""
        if (number := self._numbers.pop(session.key, None)) is not None:
            self._waits.release(session.peer.pid, number)

    def _number(self, session: WorkerSession) -> int:
        """A number per session, because a process may have several clients, whose events live as long as each of
        them."""
        return self._numbers.setdefault(session.key, next(self._count))

    def prepare(self, program: Program) -> None:
        """Compile a program for this card and load its kernels, before other agents wait for its first run.
        Thread-safe.

        Each lane thread allocates its own scratch memory for reductions when it first needs it. TransferError if the
        card refuses.
        """
        try:
            with self._preparing:
                if self._copier is None:
                    self._copier = self.workspaces.make().device
                prepare(program, self._copier)
        except CardError as error:
            if error.sticky:
                self._loop.call_soon_threadsafe(self.spoil, str(error))
            raise TransferError(f"the card of this agent refused: {error}") from error

    def close(self) -> None:
        """Release everything that workers have shared. No lane may use it any more. Blocking."""
        self._waits.close()
        self.mappings.close()
        reaper.drain()

    def spoil(self, text: str) -> None:
        """The context is lost. Call it on the loop's thread."""
        if not self.lost:
            self.lost = True
            self._spoilt(text)

    def _sticky(self, error: DeviceError) -> None:
        try:
            self._loop.call_soon_threadsafe(self.spoil, str(error))
        except RuntimeError:
            log.debug("the agent ended before its card's context was found to be lost: %s", error)


def cards(driver: Driver) -> tuple[Device, ...]:
    """All GPUs of this host that this process sees. ConfigError if there are none."""
    found = driver.devices()
    if not found:
        versions = ", ".join(f"{what} {version}" for what, version in driver.versions().items())
        raise ConfigError(f"no GPU is visible here ({versions}): `etha doctor` says more; --device cpu serves")
    return found


def any_visible() -> bool:
    """Whether this process sees a GPU."""
    try:
        return bool(driver().devices())
    except (ConfigError, DeviceError):
        return False


def name_of(wanted: str) -> str:
    """The name of the agent of "cuda:N" of this process. ConfigError for a GPU that is not here."""
    try:
        return f"{CUDA_AGENT}{find(driver(), wanted).uuid}"
    except DeviceError as error:
        raise ConfigError(f"device {wanted!r}: {error}") from error


def find(driver: Driver, wanted: str) -> Device:
    """The GPU "cuda:N", "cuda" (the first) or "cuda-GPU-<uuid>". ConfigError lists the existing ones."""
    found = cards(driver)
    for device in found:
        if wanted in (f"cuda:{device.ordinal}", f"{CUDA_AGENT}{device.uuid}") or wanted == "cuda":
            return device
    listed = ", ".join(f"cuda:{d.ordinal} ({d.name}, {d.uuid})" for d in found)
    raise ConfigError(f"device {wanted!r} is not among this process's GPUs: {listed}")
