"""What the launcher passes to both jobs: frozen, checked, and carried as JSON on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

#: Ranks of each job: a 2 x 2 mesh of FSDP2 x TP, and two tensor-parallel processes.
RANKS = {"trainer": 4, "inference": 2}
#: The loss after at least GOAL_STEPS steps is below GOAL nats per character (untrained about 4.5).
GOAL = 2.4
GOAL_STEPS = 160
#: Both jobs compute the same loss in float32, but with sums in another order.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run of the demo. ``synthetic``, in GiB, replaces training by that much random data.

    ``device`` is "cpu" or "cuda"; for the latter, ``cards`` is the number of GPUs.
    """

    steps: int = GOAL_STEPS
    every: int = 20
    synthetic: float | None = None
    rounds: int = 3
    timeout: float = 120.0
    device: str = "cpu"
    cards: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.every < 1 or self.rounds < 1:
            raise ValueError(f"steps {self.steps}, every {self.every} and rounds {self.rounds} must be at least 1")
        if self.synthetic is not None and not 0 < self.synthetic <= 1024:
            raise ValueError(f"synthetic {self.synthetic} GiB must be above 0 and at most 1024")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device {self.device!r} is neither cpu nor cuda")
        if (self.device == "cuda") != (self.cards > 0):
            raise ValueError(f"device {self.device} with {self.cards} cards: cuda needs one at least, cpu none")

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the versions: the steps after which the trainer sends, or 1 .. rounds of random data."""
        if self.synthetic is not None:
            return tuple(range(1, self.rounds + 1))
        return (*range(0, self.steps, self.every), self.steps)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Options:
        """The inverse of ``to_json``."""
        return cls(**json.loads(text))
