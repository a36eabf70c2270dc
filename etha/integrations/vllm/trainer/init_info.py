"""The arguments with which a trainer rank joins the pair through vLLM's factory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo

from etha.integrations.vllm.engine.lease import SECONDS
from etha.integrations.vllm.trainer.control import Pause
from etha.integrations.vllm.weights.adapter import Adapter


@dataclass
class EthaTrainerInitInfo(TrainerInitInfo):
    """A trainer rank's part in the pair ``pair``. Every rank passes the same values except for ``rank``.

    ``world_size``: ranks of the trainer (default: torch.distributed's, else $WORLD_SIZE, else 1). ``names``: ordered
    regex replacements from the model's names to the checkpoint's. ``direct``: write engine parameters that need no
    change without the loaders. ``atomic=False``, with ``direct``: write into the live parameters without a copy. The
    engine is paused meanwhile, and its model is half-written if a transfer fails. ``pause``: what happens to running
    requests while a version comes in: "wait" (they finish first), "abort" (they end with finish_reason "abort"), "keep"
    (they stop, and continue with the new version), or None (the caller is responsible). ``lease``: seconds after which
    an engine that this trainer has paused resumes by itself if the trainer has died. ``adapter``: send a LoRA adapter
    under this name, and nothing of the model. ``timeout``: seconds for meeting, and for each version. ``redis_url``,
    ``namespace``: for both sides if given, else each side's environment.
    """

    backend: ClassVar[str] = "etha"

    pair: str = "weights"
    world_size: int | None = None
    names: Mapping[str, str] | None = None
    direct: bool = False
    atomic: bool = True
    pause: Pause | None = "wait"
    lease: float = SECONDS
    timeout: float = 300.0
    local_name: str = "trainer"
    remote_name: str = "inference"
    batch: str = "weights"
    adapter: Adapter | None = None
    redis_url: str | None = field(default=None, repr=False)
    namespace: str | None = None
