"""Pauses and resumes the engine around vLLM's four calls, so that it generates nothing while a version comes in.

Over HTTP (any client with a ``base_url``) it uses vLLM's own routes. On other clients it calls methods of the same
names. If there are none, the caller is responsible.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal, get_args

from etha.errors import ConfigError
from etha.integrations.vllm.engine.lease import SECONDS

log = logging.getLogger(__name__)
#: Characters of an answer that are shown.
_MOST = 2000
#: Around what a worker of vLLM has raised, in the answer of the API server.
_AROUND = re.compile(r".*?Worker failed with error '(.*)', please check the stack trace above for the root cause", re.S)
#: What happens to running requests: they finish first, are cut off, or continue with the new version.
Pause = Literal["wait", "abort", "keep"]


class Control:
    """Pause and resume of the engine behind ``client``; all calls block."""

    def __init__(self, client: Any, mode: Pause | None, *, lease: float = SECONDS, in_place: bool = False) -> None:
        if mode is not None and mode not in get_args(Pause):
            raise ConfigError(f"pause={mode!r}: give 'wait', 'abort', 'keep', or None")
        self._client, self._mode, self._lease, self._in_place = client, mode, lease, in_place
        self._paused = False
        self._claimed = ""
        #: The name by which the engine knows the holder of the pause; new for each meeting with the trainer.
        self.holder = ""

    def pause(self) -> None:
        """Stop new requests, and clear what is cached of the old version."""
        if self._mode is not None:
            self._paused = True
            if self.holder and isinstance(getattr(self._client, "base_url", None), str):
                self._claimed = self.holder
                claim = {"claim": self.holder, "seconds": self._lease, "in_place": self._in_place}
                self._client.update_weights(claim)
            self._say("pause", "pause_generation", mode=self._mode)

    def resume(self) -> None:
        """Resume requests; kept ones are computed again with the new weights.

        An engine that knows the holder of its pause resumes only if nobody else has paused it, too.
        """
        if not self._paused:
            return
        if self._claimed:  # vLLM clears its caches when it pauses, also for kept requests
            self._client.update_weights({"release": self._claimed})
            self._paused, self._claimed = False, ""
            return
        try:
            if self._mode == "keep":
                self._say("reset_prefix_cache", "reset_prefix_cache", reset_running_requests=True)
        finally:
            self._say("resume", "resume_generation")
            self._paused = False

    def recover(self) -> None:
        """Resume an engine that an earlier trainer may have left paused. Over HTTP the engine does that by itself.

        Over HTTP the pause may be somebody else's, or that of a model of two versions, and only the engine knows
        (lease.py).
        """
        if self._mode is not None and not isinstance(getattr(self._client, "base_url", None), str):
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
        else:
            log.warning(
                "%s has neither base_url nor %s: nothing pauses the engine while a version comes in, nor clears its "
                "prefix cache; do both around send_weights and give pause=None",
                type(self._client).__name__,
                method,
            )


def call_engine(call: Callable[..., None], *arguments: Any) -> None:
    """Call the client. An HTTP error is raised with what the engine says."""
    import requests

    try:
        call(*arguments)
    except requests.HTTPError as error:
        answer = error.response
        if answer is None:
            raise
        text = f"HTTP status {answer.status_code} of {answer.url}: {said(answer.status_code, answer.text)}"
        raise requests.HTTPError(text, response=answer) from None


def said(status: int, body: str) -> str:
    """What an engine says with an HTTP error: the cause without what vLLM puts around it, or the remedy for a route
    that it does not have."""
    if status == HTTPStatus.NOT_FOUND:
        return (
            "the engine has no such route: start it with VLLM_SERVER_DEV_MODE=1, which opens vLLM's routes for "
            "weights, and give the client its address without a path, such as http://127.0.0.1:8000"
        )
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):  # of another server, or of a proxy
        message = None
    text = message if isinstance(message, str) else body
    found = _AROUND.fullmatch(text)
    return (text if found is None else found[1])[:_MOST]


def unreachable(error: BaseException) -> bool:
    """Whether no engine answers at the address, mostly because it is restarting."""
    import requests

    return isinstance(error, (ConnectionError, requests.ConnectionError))
