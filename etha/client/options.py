"""What ``transfer`` takes beside batch and direction, for the signatures of both clients and their handles."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypedDict

from etha.client.report import OnError
from etha.client.results import Version

#: Called after COMMIT, before this worker's tensors change.
OnCommit = Callable[[], Awaitable[None] | None]
#: (bytes done, bytes total) of this worker.
OnProgress = Callable[[int, int], None]


class Options(TypedDict, total=False):
    """See ``AsyncTensorBusClient.transfer``."""

    version: Version
    on_commit: OnCommit | None
    timeout: float | None
    progress: OnProgress | None
    on_error: OnError | None
