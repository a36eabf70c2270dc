"""Deadlines of calls: seconds that users give, and what is left of them."""

from __future__ import annotations

import asyncio
import math


class Deadline:
    """Seconds that are left of a call made of several."""

    def __init__(self, seconds: float) -> None:
        self._at = math.inf if seconds == math.inf else asyncio.get_running_loop().time() + seconds

    @property
    def left(self) -> float:
        """Seconds, 0 or more; ``math.inf`` when there is no deadline."""
        return self._at if self._at == math.inf else max(0.0, self._at - asyncio.get_running_loop().time())
