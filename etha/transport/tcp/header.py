"""What a stream says before a run's bytes, so that both ends know that they mean the same; pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from etha.errors import ProtocolError
from etha.transport.wire.flows import Flow

_MAGIC = b"etha-w1\0"
#: magic, key, digest of the flow, seq, lane, lanes, payload of the flow, bytes that follow here.
_HEADER = struct.Struct("<8s32s32sQIIQQ")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a stream says before a run's bytes, for the other end to agree with."""

    key: bytes
    digest: bytes
    seq: int
    lane: int
    lanes: int
    nbytes: int
    wire: int

    @classmethod
    def of(cls, flow: Flow, lane: int, label: tuple[bytes, int]) -> Header:
        """Of one lane of a flow."""
        return cls(
            key=label[0], digest=flow.digest, seq=label[1], lane=lane, lanes=len(flow.lanes), nbytes=flow.nbytes,
            wire=sum(span.wire for span in flow.lanes[lane]),
        )  # fmt: skip

    def pack(self) -> bytes:
        """As bytes."""
        return _HEADER.pack(_MAGIC, self.key, self.digest, self.seq, self.lane, self.lanes, self.nbytes, self.wire)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Header:
        """The inverse; ProtocolError for anything else."""
        magic, key, digest, seq, lane, lanes, nbytes, wire = _HEADER.unpack(data)
        if magic != _MAGIC:
            raise ProtocolError(f"the other agent's data begin with {magic!r}: use one version of etha")
        return cls(key=key, digest=digest, seq=seq, lane=lane, lanes=lanes, nbytes=nbytes, wire=wire)
