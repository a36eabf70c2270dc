"""The CURVE key pair of an agent: fresh in every life, its public half in the agent's Redis record.

Whoever holds the secret half *is* the agent, so it never leaves the process. Both halves are z85 text.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from etha.errors import ProtocolError

_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """``public``: 40 characters of z85, as published. ``secret`` is left out of the repr."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def fresh(cls) -> Keys:
        """A new pair from the system's randomness."""
        public, secret = zmq.curve_keypair()
        return cls(public=public.decode(), secret=secret.decode())


def check_public_key(text: str) -> str:
    """``text`` itself. ProtocolError if it is not the z85 text of 32 bytes."""
    if _Z85.fullmatch(text) is not None:
        try:
            if len(z85.decode(text)) == 32:
                return text
        except (ValueError, struct.error):  # five characters that stand for more than four bytes
            pass
    raise ProtocolError(f"{text[:60]!r} is not a public key: 40 characters of z85 are")


def public_key_text(raw: bytes) -> str:
    """The z85 text of a public key's 32 bytes."""
    return z85.encode(raw).decode()
