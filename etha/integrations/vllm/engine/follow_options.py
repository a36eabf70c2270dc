"""What an engine that follows a publication was told: ``--additional-config '{"etha": {...}}'``; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from etha.addresses import check_redis_url
from etha.config import check_name
from etha.errors import ConfigError
from etha.integrations.vllm.engine.refusals import REBALANCED
from etha.integrations.vllm.engine.versions import NAME

#: What an update does to requests that are under way: the modes of vLLM's pause.
PAUSES = ("wait", "abort", "keep")
_WHERE = f"--additional-config, {NAME!r}"
_EXAMPLE = f'--additional-config \'{{"{NAME}": {{"publication": "policy"}}}}\''


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """The options of an engine that follows a publication.

    ``subscriber``: this engine's name, which is its own; None takes one of the host, the process and chance. ``pause``:
    what an update does to requests that are under way. ``serve``: its agents give what it has received to other
    subscribers. ``timeout``: seconds for the first version, and for entering the publication again. ``redis_url``,
    ``namespace``: None takes what the environment says.
    """

    publication: str
    subscriber: str | None = None
    redis_url: str | None = None
    namespace: str | None = None
    pause: str = "wait"
    serve: bool = True
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for option in ("publication", "subscriber", "namespace"):
            if (value := getattr(self, option)) is not None or option == "publication":
                check_name(option, value)
        if self.redis_url is not None:
            if not isinstance(self.redis_url, str):
                raise ConfigError(f"{_WHERE}: redis_url={self.redis_url!r}: give the URL of a Redis as text")
            check_redis_url(f"{_WHERE}: redis_url", self.redis_url)
        if self.pause not in PAUSES:
            raise ConfigError(f"{_WHERE}: pause={self.pause!r}: give one of {', '.join(map(repr, PAUSES))}")
        if not isinstance(self.serve, bool):
            raise ConfigError(f"{_WHERE}: serve={self.serve!r}: give true or false")
        if type(self.timeout) not in (int, float) or not 0 < self.timeout < float("inf"):
            raise ConfigError(f"{_WHERE}: timeout={self.timeout!r}: give seconds, more than 0")

    @classmethod
    def of(cls, given: object) -> FollowOptions:
        """From the value of ``etha`` in the additional configuration; ConfigError names a key that does not exist."""
        if not isinstance(given, Mapping):
            raise ConfigError(f"{_WHERE}={given!r} is no object with options: give {_EXAMPLE}")
        known = [one.name for one in fields(cls)]
        for key in given:
            if key not in known:
                close = get_close_matches(str(key), known, 1)
                meant = f"do you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
                raise ConfigError(f"{_WHERE}: there is no option {key!r}: {meant}")
        if "publication" not in given:
            raise ConfigError(f"{_WHERE}: it does not say which publication to follow: give {_EXAMPLE}")
        return cls(**dict(given))


def follow_options(vllm_config: Any) -> FollowOptions | None:
    """The options of an engine that follows a publication; None for an engine that does not.

    ConfigError for options that vLLM's other options do not go with.
    """
    additional = getattr(vllm_config, "additional_config", None)
    given = additional.get(NAME) if isinstance(additional, Mapping) else None
    loads = getattr(getattr(vllm_config, "load_config", None), "load_format", None) == NAME
    backend = getattr(getattr(vllm_config, "weight_transfer_config", None), "backend", None)
    if given is None and not loads:
        return None
    if given is None:
        raise ConfigError(f"--load-format {NAME} takes the weights from a publication: give {_EXAMPLE}")
    options = FollowOptions.of(given)
    if not loads:
        raise ConfigError(
            f"{_WHERE}: an engine that follows a publication starts with its weights: give --load-format {NAME}"
        )
    if backend != NAME:
        raise ConfigError(
            f'--load-format {NAME} needs --weight-transfer-config \'{{"backend": "{NAME}"}}\', and not {backend!r}: '
            f"later versions come in by it"
        )
    parallel = getattr(vllm_config, "parallel_config", None)
    if getattr(parallel, "enable_eplb", False):
        raise ConfigError(f"--load-format {NAME}: {REBALANCED}")
    executor = getattr(parallel, "distributed_executor_backend", None)
    if executor not in (None, "mp", "uni"):
        raise ConfigError(
            f"--load-format {NAME} works with --distributed-executor-backend mp or uni, and not with {executor!r}: "
            f"the engine hears from workers of its own host"
        )
    return options
