"""What an agent says to a process that connects: whom it serves, and which of its wishes it does not meet.

Decides from settings and the process's Hello alone, so that an agent can answer before it has imported torch.
"""

from __future__ import annotations

import logging
import os

import msgspec

from etha.addresses import redact
from etha.bus.handshake import WorkerHello, WorkerWelcome
from etha.bus.sessions import Peer
from etha.config import Settings
from etha.errors import ConfigError
from etha.version import __version__

log = logging.getLogger(__name__)

LEAVING = "this agent is leaving and takes no new work"


class Greeting:
    """``redis``: the URL that this agent was given, None for the embedded server; ``store``: the one that it uses.

    ``temporary``: it was started by a client, and leaves when it is idle. ``leaving`` is set once it takes no workers
    any more.
    """

    def __init__(
        self, settings: Settings, device: str, *, redis: str | None, store: str, temporary: bool, log_file: str
    ) -> None:
        self.settings, self.device, self.redis = settings, device, redis
        self.leaving = False
        self._temporary = temporary
        self._welcome = WorkerWelcome(
            version=__version__,
            namespace=settings.namespace,
            device=device,
            redis=store,
            pid=os.getpid(),
            log=log_file,
        )

    def welcome(self, peer: Peer, hello: WorkerHello, *, alone: bool, warning: str) -> WorkerWelcome:
        """The answer; ConfigError refuses the process. ``alone``: this agent has no other worker.

        ``warning``: what every worker should hear about this agent. ``WorkerWelcome.leaving`` says that there is no
        session. ``leaving`` is set if the worker wants another agent and nobody else needs this one.
        """
        if hello.namespace != self.settings.namespace:
            raise ConfigError(
                f"this agent serves namespace {self.settings.namespace!r}, not {hello.namespace!r}: "
                f"use its own socket, or set ETHA_NAMESPACE"
            )
        if hello.redis is not None and hello.redis != self.redis:
            raise ConfigError(
                f"this host's agent runs with Redis {_shown(self.redis)}, this client asks for {_shown(hello.redis)}: "
                f"use one URL, or another ETHA_NAMESPACE"
            )
        if hello.observer:
            return self._welcome
        differs = self.settings.differ(hello.wants)
        if differs and hello.starts and self._temporary and alone and not self.leaving:
            log.info("process %d asks for another agent, and nobody needs this one (%s): leaving", peer.pid, differs)
            self.leaving = True
        if self.leaving:
            return msgspec.structs.replace(self._welcome, leaving=LEAVING)
        if "ETHA_ENCRYPT" in hello.wants and not self.settings.encrypt:
            raise ConfigError(
                f"ETHA_ENCRYPT=1 is set here, and the agent of {self.device} (process {os.getpid()}) runs without it: "
                f"end its other workers, or `etha stop --device {self.device}`, and try again"
            )
        if differs:
            differs = (
                f"The agent of {self.device} (process {os.getpid()}) runs with {differs}, and others use it: end them, "
                f"or `etha stop --device {self.device}`, and try again"
            )
        if peer.pid <= 0:
            raise ConfigError(
                f"this process runs in a PID namespace that the agent of {self.device} on host "
                f"{self.settings.host_name} cannot see: the agent could neither reach this process's memory nor notice "
                f"its death. Let both share one PID namespace (docker run --pid=host or "
                f"--pid=container:NAME, shareProcessNamespace: true in a Kubernetes pod), or give each container an "
                f"ETHA_RUNTIME_DIR of its own and all of them one ETHA_REDIS_URL: then each starts its own agent"
            )
        return msgspec.structs.replace(self._welcome, differs=". ".join(filter(None, [differs, warning])))


def _shown(url: str | None) -> str:
    return "the embedded server of this host" if url is None else redact(url)
