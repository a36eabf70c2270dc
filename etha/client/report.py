"""``on_error="report"``: a transfer that failed is a result that says so, and what follows it is skipped.

So a training loop needs no error handling around each transfer: it goes on, and forms the pair again where
that fits (``docs/recovery.md``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, cast

from etha.client.arguments import shown
from etha.client.results import Pair, TransferResult
from etha.errors import AgentLostError, AgentUnavailableError, ConfigError, EthaError, TransferError

OnError = Literal["raise", "report"]

#: What says how a transfer failed. All others are mistakes of the caller, which are raised whatever was asked for.
FAILURES = (TransferError, AgentLostError, AgentUnavailableError)


def check_on_error(value: Any) -> OnError:
    """``value`` itself; ConfigError when it is none of the two."""
    if not isinstance(value, str) or value not in ("raise", "report"):
        raise ConfigError(f"on_error={shown(value)} must be 'raise' or 'report'")
    return cast(OnError, value)


async def reported(
    on_error: OnError,
    pairs: Sequence[Pair],
    verb: Literal["send", "recv"],
    move: Callable[[], Awaitable[TransferResult]],
) -> TransferResult:
    """The result of ``move()``, or of its failure; without calling it where one of the pairs has failed already."""
    if on_error == "report":
        for pair in pairs:
            if (earlier := pair.errored) is not None:
                return TransferResult.failed(verb, earlier, skipped=True)
    try:
        return await move()
    except FAILURES as error:
        kept = _bare(error)
        for pair in pairs:
            pair.fail(kept)
        if on_error == "raise":
            raise
    return TransferResult.failed(verb, kept)


def _bare(error: EthaError) -> EthaError:
    """The same error without its traceback: whoever keeps it does not keep the frames, and the tensors in them."""
    bare = type(error)(error.message, **error.data())
    bare.remote_traceback = error.remote_traceback
    return bare
