"""Tokens that open data connections: given over an authenticated link, then shown first on a bare socket.

Pure; the caller passes the time. A token is a selector, by which it is found, and a secret, which is compared in
constant time. Each opens one connection, once, within its life.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from etha.errors import ProtocolError

_SELECTOR = 8
_SECRET = 32
#: Bytes of a token, which the accepting end reads before anything else.
TOKEN_BYTES = _SELECTOR + _SECRET
#: Seconds for which a token is valid.
LIFE = 30.0
#: Most tokens outstanding at once, over all agents.
MAX_TOKENS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """Whom a token was given to, and what for."""

    agent: str
    use: str


@dataclass(frozen=True, slots=True)
class _Issued:
    secret: bytes
    purpose: Purpose
    expires: float


class Tokens:
    """The tokens that one agent has given out and not seen again."""

    def __init__(self, *, life: float = LIFE, random: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._life = life
        self._random = random
        self._issued: dict[bytes, _Issued] = {}
        self._nobody = random(_SECRET)

    def __len__(self) -> int:
        return len(self._issued)

    def issue(self, agent: str, use: str, now: float) -> bytes:
        """TOKEN_BYTES that let ``agent`` open one connection for ``use``. ProtocolError if too many are outstanding."""
        self.expire(now)
        if len(self._issued) >= MAX_TOKENS:
            raise ProtocolError(f"{MAX_TOKENS} data connections are announced and not opened: are agents stopped?")
        selector, secret = self._random(_SELECTOR), self._random(_SECRET)
        self._issued[selector] = _Issued(secret, Purpose(agent=agent, use=use), now + self._life)
        return selector + secret

    def redeem(self, token: bytes, now: float) -> Purpose | None:
        """What ``token`` was given for; then it is used up. None for a wrong, used or expired token."""
        if len(token) != TOKEN_BYTES:
            return None
        selector, secret = bytes(token[:_SELECTOR]), bytes(token[_SELECTOR:])
        issued = self._issued.get(selector)
        # An unknown selector is compared with something, too, so that both cases take the same time.
        right = hmac.compare_digest(secret, issued.secret if issued is not None else self._nobody)
        if issued is None or not right:
            return None
        del self._issued[selector]
        return issued.purpose if now < issued.expires else None

    def revoke(self, agent: str, use: str | None = None) -> None:
        """Forget what was given to ``agent``, for ``use`` or for any use."""
        self._keep(lambda issued: issued.purpose.agent != agent or use not in (None, issued.purpose.use))

    def expire(self, now: float) -> None:
        """Forget tokens that were not used in time."""
        # All lives are equally long, so the oldest token comes first, and only expired ones and one more are examined.
        while self._issued and (oldest := next(iter(self._issued))) and self._issued[oldest].expires <= now:
            del self._issued[oldest]

    def _keep(self, stays: Callable[[_Issued], bool]) -> None:
        self._issued = {selector: issued for selector, issued in self._issued.items() if stays(issued)}
