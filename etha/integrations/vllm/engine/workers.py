"""An engine's workers agree on dtypes while each prepares itself, and fail together."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_world_group

from etha.errors import ConfigError
from etha.integrations.vllm.weights.received import Dtypes, widest


class WorkerAgreement:
    """``with``: all workers of an engine prepare themselves.

    Without it the others would wait for a failed worker until their deadline, here or in registration.
    """

    def __enter__(self) -> WorkerAgreement:
        self._failed = False
        return self

    def agree(self, mine: Dtypes) -> Dtypes:
        """The widest dtype of each tensor; ConfigError with the error of a worker that failed."""
        return widest(self._gather(mine))

    def _gather(self, mine: Dtypes | str) -> list[Dtypes]:
        """The values of all workers. A text is an error, which is raised if it is another worker's."""
        group = get_world_group()
        found: list[Any] = [mine]
        if group.world_size > 1:
            found = [None] * group.world_size
            torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
        errors = [(rank, said) for rank, said in enumerate(found) if isinstance(said, str)]
        self._failed = bool(errors)
        if errors and not isinstance(mine, str):
            raise ConfigError("worker {} of the engine: {}".format(*errors[0]))
        return found

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self._failed:
            self._gather({} if error is None else str(error))


def from_first(value: Any) -> Any:
    """What the engine's first worker gives."""
    return get_world_group().broadcast_object(value)
