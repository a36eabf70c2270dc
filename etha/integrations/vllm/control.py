"""The engine's control plane beside vLLM's four calls: generation stands still while a version comes in.

Over HTTP (any client with a ``base_url``) by vLLM's own routes; by methods of the same names on any other client that
has them; where neither is, the caller sees to it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal, get_args

from etha.errors import ConfigError

#: What becomes of requests that are under way: they end first, are cut off, or go on and are computed anew.
Pause = Literal["wait", "abort", "keep"]


class Control:
    """Pause and resume of the engine behind ``client``; all calls block."""

    def __init__(self, client: Any, mode: Pause | None) -> None:
        if mode is not None and mode not in get_args(Pause):
            raise ConfigError(f"pause={mode!r}: give 'wait', 'abort', 'keep', or None")
        self._client, self._mode = client, mode

    def pause(self) -> None:
        """No new request begins; what is cached of the old version is forgotten."""
        if self._mode is not None:
            self._say("pause", "pause_generation", mode=self._mode)

    def resume(self) -> None:
        """Requests go on; those that were kept are computed anew, with the weights there are now."""
        if self._mode == "keep":
            self._say("reset_prefix_cache", "reset_prefix_cache", reset_running_requests=True)
        if self._mode is not None:
            self._say("resume", "resume_generation")

    def _say(self, route: str, method: str, **arguments: Any) -> None:
        address = getattr(self._client, "base_url", None)
        if isinstance(address, str):
            import requests

            timeout = getattr(self._client, "timeout", 300)
            answer = requests.post(f"{address}/{route}", params=arguments, timeout=timeout)
            if answer.status_code == HTTPStatus.NOT_FOUND:
                raise ConfigError(f"{address} has no /{route}: start vllm serve with VLLM_SERVER_DEV_MODE=1")
            answer.raise_for_status()
        elif callable(call := getattr(self._client, method, None)):
            call(**arguments)


def unreachable(error: BaseException) -> bool:
    """Whether nobody answers where the engine should be: one that is restarting, mostly."""
    import requests

    return isinstance(error, (ConnectionError, requests.ConnectionError))
