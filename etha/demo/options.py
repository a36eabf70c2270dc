"""What the launcher passes to both jobs: frozen, checked, and carried as JSON on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

#: Ranks of each job: a 2 x 2 mesh of FSDP2 x TP, and two tensor-parallel processes.
RANKS = {"trainer": 4, "inference": 2}
#: What the trainer publishes under, with replicas.
PUBLICATION = "model"
#: Most replicas: each is one or two processes.
MAX_REPLICAS = 16
#: The loss after at least GOAL_STEPS steps is below GOAL nats per character (untrained about 4.5).
GOAL = 2.4
GOAL_STEPS = 160
#: Both jobs compute the same loss in float32, but with sums in another order.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLayout:
    """How a replica has the model: "tensor-parallel", "whole", or all tensors cut by "rows" or by "columns"."""

    name: str
    ranks: int


#: Replica number n has the layout n modulo their number.
LAYOUTS = (
    ReplicaLayout(name="tensor-parallel", ranks=2),
    ReplicaLayout(name="whole", ranks=1),
    ReplicaLayout(name="rows", ranks=2),
    ReplicaLayout(name="columns", ranks=2),
)


def layout_of(job: str) -> ReplicaLayout:
    """That of replica-N."""
    return LAYOUTS[int(job.removeprefix("replica-")) % len(LAYOUTS)]


def ranks_of(job: str) -> int:
    """Ranks of a job: "trainer", "inference" or replica-N."""
    return layout_of(job).ranks if job.startswith("replica-") else RANKS[job]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run of the demo. ``synthetic``, in GiB, replaces training by that much random data. ``replicas``: so many
    subscribers take the place of the inference job; 0: none.

    ``device`` is "cpu" or "cuda"; for the latter, ``cards`` is the number of GPUs.
    """

    steps: int = GOAL_STEPS
    every: int = 20
    synthetic: float | None = None
    rounds: int = 3
    timeout: float = 120.0
    device: str = "cpu"
    cards: int = 0
    replicas: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.every < 1 or self.rounds < 1:
            raise ValueError(f"steps {self.steps}, every {self.every} and rounds {self.rounds} must be at least 1")
        if self.synthetic is not None and not 0 < self.synthetic <= 1024:
            raise ValueError(f"synthetic {self.synthetic} GiB must be above 0 and at most 1024")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device {self.device!r} is neither cpu nor cuda")
        if (self.device == "cuda") != (self.cards > 0):
            raise ValueError(f"device {self.device} with {self.cards} cards: cuda needs one at least, cpu none")

        if not 0 <= self.replicas <= MAX_REPLICAS:
            raise ValueError(f"replicas {self.replicas} must be 1 to {MAX_REPLICAS}")
        if self.replicas and (self.synthetic is not None or self.device != "cpu"):
            raise ValueError("replicas follow the training demo on the CPU: leave out --synthetic and --device")

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
