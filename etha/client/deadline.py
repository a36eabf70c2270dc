"""Deadlines of calls: seconds that users give, and what is left of them."""

from __future__ import annotations

import asyncio
import math

from etha.errors import ConfigError


class Deadline:
    """Seconds that are left of a call made of several."""

    def __init__(self, seconds: float) -> None:
        self._at = math.inf if seconds == math.inf else asyncio.get_running_loop().time() + seconds

    @property
    def left(self) -> float:
        """Seconds, 0 or more; ``math.inf`` when there is no deadline."""
        return self._at if self._at == math.inf else max(0.0, self._at - asyncio.get_running_loop().time())


def check_timeout(value: float, what: str) -> float:
    """``value`` in seconds, ``math.inf`` allowed; ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value < 0:
        raise ConfigError(f"{what}={value!r} must be seconds, 0 or more (math.inf: no deadline)")
    return float(value)
