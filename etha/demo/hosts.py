"""Where a job of the demo runs: here, or in a network namespace that stands for another host."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoHost:
    """One host of the demo: network namespace ``netns``, in which its agent listens on ``address`` (numeric)."""

    netns: str
    address: str

    @classmethod
    def parse(cls, text: str) -> DemoHost:
        """Read NETNS,ADDRESS. ValueError says what is wrong."""
        netns, _, address = text.partition(",")
        if _NAMESPACE.fullmatch(netns) is None:
            raise ValueError(f"{text!r}: write NETNS,ADDRESS, a name as 'ip netns list' shows it and an address in it")
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            raise ValueError(f"{text!r}: {address!r} is not an address of namespace {netns}") from None
        return cls(netns=netns, address=f"[{found}]" if found.version == 6 else str(found))

    @property
    def prefix(self) -> tuple[str, ...]:
        """The beginning of a command that runs in this place."""
        return ("ip", "netns", "exec", self.netns)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make the namespace a host: its own id, and an address where others reach its agent."""
        return {"ETHA_HOST_ID": f"netns-{self.netns}", "ETHA_LISTEN": f"{self.address}:0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoHosts:
    """The place of each job; a job that is not named runs here. ``redis`` is needed once there are two hosts."""

    places: Mapping[str, DemoHost] = field(default_factory=dict)
    redis: str | None = None

    def __post_init__(self) -> None:
        if self.places and self.redis is None:
            raise ValueError("jobs on different hosts meet in one Redis: give its URL with --redis")

    def _place(self, job: str) -> DemoHost | None:
        """Replicas are where the inference job would be."""
        return self.places.get("inference" if job.startswith("replica-") else job)

    def prefix(self, job: str) -> tuple[str, ...]:
        """The beginning of the command of ``job``."""
        place = self._place(job)
        return () if place is None else place.prefix

    def environment(self, job: str) -> dict[str, str]:
        """Additional environment variables of ``job``."""
        redis = {} if self.redis is None else {"ETHA_REDIS_URL": self.redis}
        place = self._place(job)
        return redis | ({} if place is None else place.environment)

    def folder(self, job: str) -> str:
        """The job's runtime directory. Hosts do not share one."""
        place = self._place(job)
        return "run" if place is None else place.netns
