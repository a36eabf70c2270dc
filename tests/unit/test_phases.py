"""The seconds of a transfer by phase."""

from __future__ import annotations

import pickle

from etha.errors import TransferTimeoutError, from_wire
from etha.phases import NO_PHASES, PHASES, Phases


def test_phases_are_named_summed_and_compared() -> None:
    phases = Phases(wait=1.0, move=2.0, copy_out=0.5)
    assert phases.total == 3.5 and phases.longest == "move"
    assert tuple(name for name, _ in phases) == PHASES
    assert pickle.loads(pickle.dumps(phases)) == phases and hash(phases) == hash(pickle.loads(pickle.dumps(phases)))
    assert NO_PHASES.total == 0.0


def test_an_error_carries_them_across_a_socket() -> None:
    error = TransferTimeoutError("late", outcome="withdrawn", culprits=[("inference", 1)])
    error.phases = Phases(wait=5.0)
    other = from_wire(error.to_wire())
    assert isinstance(other, TransferTimeoutError)
    assert other.phases == Phases(wait=5.0) and other.culprits == (("inference", 1),)
    plain = TransferTimeoutError("late").data()
    assert plain == {"outcome": "aborted", "torn": False, "quiesced": True}
