"""Two jobs, their agents and a card: a real one (marker ``gpu``, `make gpu`) and, for most of it, a played one."""

from __future__ import annotations

import pytest
import torch

#: For what only a card can show.
ON_A_CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: torch.cuda.is_available() is false"),
    pytest.mark.timeout(400),
]
#: For what runs on a played card with the other tests, and on a real one by `make gpu`.
STAGES = [pytest.param(True, id="played"), pytest.param(False, id="card", marks=ON_A_CARD)]
