"""Dummies of both clients, for tests of code that uses them: no agent, no Redis, no other side.

    client = DummyTensorBusClient(on_error="report")
    client.init_pair("weights", "trainer", "inference", device_mesh=(1,), placements=[Replicate()])
    client.register_tensors("policy", {"w": torch.zeros(4)}, pair_name="weights")
    client.fail_next(etha.TransferAbortedError("somebody has failed"))
    assert not client.transfer("policy", "send").ok

They are the real clients over an agent that is simulated in this process, so arguments are checked as usual. Every call
completes at once, as if the other side were there with one rank that fits. Nothing moves: tensors that are received
into do not change.
"""

from __future__ import annotations

from typing import Literal, get_args

from etha.client.aio import AsyncTensorBusClient
from etha.client.connection import AgentConnection
from etha.client.sync import TensorBusClient
from etha.config import check_name
from etha.errors import ConfigError, EthaError
from etha.testing.bus import Bus
from etha.testing.connection import DummyConnection

__all__ = ["AsyncDummyTensorBusClient", "DummyTensorBusClient"]

#: Why a pair is lost, as in PeerLostError.
Reason = Literal["died", "closed", "relaunched"]


class AsyncDummyTensorBusClient(AsyncTensorBusClient):
    """An AsyncTensorBusClient without agent, Redis and other side. Constructor and methods are the same.

    ``init_pair`` forms epoch 1 at once, and the next one after a loss. ``transfer`` returns a result with the next
    ``seq``, its label, the bytes of the registered local tensors, and no peers. ``recv`` does not change the tensors;
    its label is the given one, or else that of the last ``send``.

    ``subscribe`` follows a publication of this client alone: ``next`` waits for a ``put`` of it, or for ``announce``.
    """

    _bus: Bus | None = None

    async def _open(self, timeout: float) -> AgentConnection:
        return DummyConnection(self._played, self._hearing(), self._served or "cpu")

    @property
    def _played(self) -> Bus:
        if self._bus is None:
            self._bus = Bus()
        return self._bus

    def fail_next(self, error: EthaError) -> None:
        """Let the next transfer fail with ``error``. Several errors are used in order.

        A PeerLostError also loses the batch's pairs, an AgentLostError every pair. As with the real clients,
        ``init_pair`` and ``register_tensors`` come next.
        """
        if not isinstance(error, EthaError):
            raise ConfigError(f"fail_next({error!r}): a transfer fails with an EthaError")
        self._played.faults.append(error)

    def announce(self, publication: str, version: int | str | None = None) -> None:
        """Let somebody else put the next version of a publication."""
        self._pushed(self._played.announce(check_name("publication", publication), version))

    def lose(self, pair_name: str, reason: Reason = "died") -> None:
        """Let the other side of a formed pair die, close or be relaunched, while no call is made."""
        if reason not in get_args(Reason):
            raise ConfigError(f"reason={reason!r} must be one of {get_args(Reason)}")
        if pair_name not in self._played.pairs:
            raise ConfigError(f"pair {pair_name!r} is not formed in this client: call init_pair first")
        self._pushed(self._played.lose(pair_name, reason))


class DummyTensorBusClient(TensorBusClient):
    """A TensorBusClient without agent, Redis and other side; see ``AsyncDummyTensorBusClient``."""

    _inner = AsyncDummyTensorBusClient

    def fail_next(self, error: EthaError) -> None:
        """Let the next transfer fail with ``error``; see ``AsyncDummyTensorBusClient.fail_next``."""
        self._dummy.fail_next(error)

    def announce(self, publication: str, version: int | str | None = None) -> None:
        """Let somebody else put the next version of a publication."""

        async def announce() -> None:
            self._dummy.announce(publication, version)

        self._run(announce())

    def lose(self, pair_name: str, reason: Reason = "died") -> None:
        """Let the other side of a formed pair die, close or be relaunched, while no call is made."""

        async def lose() -> None:
            self._dummy.lose(pair_name, reason)

        self._run(lose())

    @property
    def _dummy(self) -> AsyncDummyTensorBusClient:
        assert isinstance(self._aio, AsyncDummyTensorBusClient)
        return self._aio
