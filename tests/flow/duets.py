"""Both sides of a pair as blocking clients of this process, each call on a thread of its own that may be waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate

import etha
from tests.flow.sites import Site

#: For every wait of a test: far beyond what a busy machine takes.
PATIENCE = 30.0


class Background:
    """A function on a daemon thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error

    def runs(self, seconds: float = 0.05) -> bool:
        """Whether it has not ended within so many seconds."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def error(self) -> BaseException | None:
        """How it failed; None when it did not."""
        assert not self.runs(PATIENCE), "it has not returned"
        return self._error

    def result(self) -> Any:
        """What it returned, or what it raised."""
        if (error := self.error()) is not None:
            raise error
        return self._value


class Duet:
    """``send`` and ``recv`` are the handles of one registered tensor, ``source`` of ones and ``target`` of zeros."""

    def __init__(self, site: Site, pair: str, *, size: int = 8, timeout: float = PATIENCE, **options: Any) -> None:
        self.pair = pair
        self.trainer = site.blocking("trainer", 0, timeout=timeout)
        self.inference = site.blocking("inference", 0, timeout=timeout)
        self.source, self.target = torch.ones(size), torch.zeros(size)
        self.send, self.recv = self._both(
            lambda client, side, remote, tensor: self._open(client, side, remote, tensor, options)
        )

    def _open(
        self, client: etha.TensorBusClient, side: str, remote: str, tensor: torch.Tensor, options: Any
    ) -> etha.BatchHandle:
        client.init_pair(self.pair, side, remote, 1, (1,), [Replicate()], rank=0, timeout=60)
        return client.register_tensors("b", {"w": tensor}, pair_name=self.pair, timeout=60, **options)

    def _both(self, function: Callable[..., Any]) -> list[Any]:
        sides = (
            (self.trainer, "trainer", "inference", self.source),
            (self.inference, "inference", "trainer", self.target),
        )
        begun = [Background(lambda args=args: function(*args)) for args in sides]  # type: ignore[misc]
        return [one.result() for one in begun]

    @property
    def holds(self) -> str:
        """What the target holds."""
        return "new" if torch.all(self.target == 1) else "old" if torch.all(self.target == 0) else "a mixture"

    def __enter__(self) -> Duet:
        return self

    def __exit__(self, *exc: object) -> None:
        for client in (self.trainer, self.inference):
            Background(client.close).result()
