"""Settings: every environment variable that Etha reads, read once, here.

Arguments win over the environment. There are no configuration files.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etha.addresses import Advertised, check_redis_url, parse_address
from etha.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
#: Names that a namespace cannot have, because its directory is in the runtime directory.
RESERVED = frozenset({".", "..", "redis.sock", "redis.lock", "redis.start"})
MAX_TENSOR_NAME = 500
#: A GPU's agent is named by this and the GPU's uuid.
CUDA_AGENT = "cuda-"
#: Whether versions of a publication travel as their difference to the version before; "auto": where that is faster.
DIFFERENCES = ("auto", "always", "never")
#: Default of an agent's staging memory, in bytes.
STAGING = 256 << 20
#: The least: some copy slots and streams.
MIN_STAGING = 16 << 20
#: Size in bytes at which the log of an autostarted agent is set aside. One older log is kept.
MAX_LOG = 1 << 20
#: Values of ETHA_LOG and ETHA_LOG_FORMAT; the defaults are LOG and the first format.
LOG_LEVELS = ("debug", "info", "warning")
LOG_FORMATS = ("text", "json")
LOG = "info"
#: Most characters of a variable that names something.
MAX_TEXT = 500
#: Most characters of a zone.
MAX_ZONE = 100
#: Most ranks of one side.
MAX_WORLD = 1 << 20
#: Longest path that fits sockaddr_un (108 bytes with the terminating zero).
MAX_SOCKET_PATH = 107

#: name -> what it means; shown by ``etha --help``.
ENVIRONMENT: dict[str, str] = {
    "ETHA_AGENT": "address of a running agent, ipc:///run/user/1000/etha/default/cpu.sock",
    "ETHA_REDIS_URL": "Redis for rendezvous; default: the embedded server of this host",
    "ETHA_NAMESPACE": "nothing crosses namespaces; default: default",
    "ETHA_RUNTIME_DIR": "where sockets and locks lie; default: $XDG_RUNTIME_DIR/etha, else /tmp/etha-UID ($TMPDIR)",
    "ETHA_HOST_ID": "what counts as one host; default: boot id + pid namespace",
    "ETHA_LISTEN": "HOST:PORT on which an agent takes links (data on PORT+1); default: loopback, any free",
    "ETHA_ADVERTISE": "HOST:PORT[,DATAPORT] where other hosts reach ETHA_LISTEN (NAT, port maps); default: the same",
    "ETHA_ZONE": "where this host is, as a rack: subscribers prefer holders of their own zone; default: none",
    "ETHA_ENCRYPT": "1: data connections between agents are encrypted (TLS 1.3); both sides need it; default: 0",
    "ETHA_LAUNCH_ID": "one life of a side; default: torchrun's run id and restart count",
    "ETHA_TAKEOVER": "1: a torchrun job with a run id takes over from a launch that lives; default: it is refused",
    "ETHA_REPLICA": "this worker's replica in elastic groups; default: torchrun's run id, or a name of this process",
    "ETHA_STAGING": "most memory of an agent besides the workers' own, 256MiB or bytes; default: 256MiB",
    "ETHA_DIFFERENCES": "auto, always or never: send only what changed since the version before; default: auto",
    "ETHA_PASS_ON": "0: a subscriber is read only once it holds a version, not while it receives it; default: 1",
    "ETHA_IDLE": "seconds after its last worker that an autostarted agent leaves; default: 60",
    "ETHA_METRICS": "HOST:PORT where an agent shows its metrics to Prometheus (cuda:N: PORT+1+N); default: nowhere",
    "ETHA_LOG": "what agents and commands log: debug, info or warning; default: info",
    "ETHA_LOG_FORMAT": "how they log: text, or json with one object a line; default: text",
    "ETHA_NATIVE": "0: inner loops run in Python, torch and NumPy instead of the compiled library; default: 1",
    "ETHA_TRACE": "directory in which clients and agents write what happens, for `etha trace`; default: nothing",
}


def check_name(kind: str, name: str) -> str:
    """``name`` itself, or ConfigError. Namespaces, sides, pairs and batches share one alphabet."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise ConfigError(f"{kind} name {name!r} is not allowed: use 1 to 100 of A-Z a-z 0-9 . _ -")
    if kind == "namespace" and name in RESERVED:
        raise ConfigError(f"{kind} name {name!r} is not allowed: it is a directory beside the embedded Redis's files")
    return name


#: The batch of the pair by which a newcomer of an elastic group loads its state.
LOAD_BATCH = "state"
#: Characters of a group's name in the name of such a pair; a digest stands for the rest.
_SHOWN_OF_GROUP = 60


def load_pair(group: str, epoch: int, member: int) -> str:
    """The pair by which the replica with rank ``member`` of ``epoch`` of an elastic group loads its state."""
    return f"{_load_prefix(group)}{epoch}.member-{member}"


def load_epoch(group: str, pair: str) -> int | None:
    """The epoch of ``group`` to which a pair of ``load_pair`` belongs; None for other pairs."""
    found = re.fullmatch(rf"{re.escape(_load_prefix(group))}([0-9]{{1,15}})\.member-[0-9]+", pair)
    return int(found[1]) if found else None


def _load_prefix(group: str) -> str:
    if len(group) > _SHOWN_OF_GROUP:
        group = f"{group[:_SHOWN_OF_GROUP]}-{hashlib.sha256(group.encode()).hexdigest()[:8]}"
    return f"{group}.epoch-"


def check_device(device: str) -> str:
    """``device`` itself, as commands take it; ConfigError if it cannot be the name of a device or of its agent."""
    if re.fullmatch(rf"cpu|cuda|cuda:[0-9]+|{CUDA_AGENT}\S+", device) is None:
        raise ConfigError(f"device {device!r} is neither cpu nor cuda:N")
    return device


def parse_bytes(what: str, text: str) -> int:
    """A positive number of bytes, "268435456" or "256MiB" (KiB, MiB, GiB). ConfigError names ``what``."""
    found = re.fullmatch(r"([0-9]{1,15})\s*(|KiB|MiB|GiB)", text.strip())
    if found is None or not int(found[1]):
        raise ConfigError(f"{what}={text!r} is not a number of bytes: write 268435456 or 256MiB")
    return int(found[1]) << {"": 0, "KiB": 10, "MiB": 20, "GiB": 30}[found[2]]


def parse_staging(what: str, text: str) -> int:
    """An agent's staging memory in bytes, as ``parse_bytes``. ConfigError for too little."""
    if (found := parse_bytes(what, text)) < MIN_STAGING:
        raise ConfigError(f"{what}={text!r} is too little for transfers: give at least {MIN_STAGING >> 20}MiB")
    return found


def _text(env: Mapping[str, str], name: str) -> str | None:
    """A variable that is passed on as text between processes; None if it is unset or empty."""
    text = env.get(name) or None
    if text is not None and len(text) > MAX_TEXT:
        raise ConfigError(f"{name} has {len(text)} characters, at most {MAX_TEXT} are possible")
    if text is not None and not _is_utf8(text):
        raise ConfigError(f"{name}={text!r} is no text in UTF-8")
    return text


def _zone(env: Mapping[str, str]) -> str | None:
    """The zone in ETHA_ZONE; None if it is unset or empty."""
    zone = _text(env, "ETHA_ZONE")
    if zone is not None and len(zone) > MAX_ZONE:
        raise ConfigError(f"ETHA_ZONE has {len(zone)} characters, at most {MAX_ZONE} are possible")
    return zone


def _is_utf8(text: str) -> bool:
    """Whether ``text`` of the environment was UTF-8. Addresses and messages can hold nothing else."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _directory(env: Mapping[str, str], name: str) -> Path | None:
    """The absolute path in a variable; None if it is unset or empty."""
    if (text := _text(env, name)) is None:
        return None
    path = Path(text).absolute()
    if not _is_utf8(str(path)):  # that of the working directory
        raise ConfigError(f"{name}={text} is {str(path)!r}, which is no text in UTF-8")
    return path


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text!r} is neither 0 nor 1")
    return text == "1"


def _one_of(env: Mapping[str, str], name: str, values: tuple[str, ...], default: str) -> str:
    """A variable with few values; ConfigError for any other."""
    text = env.get(name) or default
    if text not in values:
        raise ConfigError(f"{name}={text!r} is not {', '.join(values[:-1])} or {values[-1]}")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What is logged, and how."""

    level: str = LOG
    format: str = LOG_FORMATS[0]

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> LogSettings:
        """Read ``env`` (default: the process's). ConfigError names the variable that is wrong."""
        env = os.environ if env is None else env
        return cls(
            level=_one_of(env, "ETHA_LOG", LOG_LEVELS, LOG),
            format=_one_of(env, "ETHA_LOG_FORMAT", LOG_FORMATS, LOG_FORMATS[0]),
        )


def native_allowed(env: Mapping[str, str] | None = None) -> bool:
    """Whether inner loops may use the compiled library. ConfigError if ETHA_NATIVE is neither 0 nor 1."""
    env = os.environ if env is None else env
    return _flag("ETHA_NATIVE", env.get("ETHA_NATIVE") or "1")


def check_proc(proc: Path = Path("/proc")) -> None:
    """ConfigError unless /proc shows this process, by which agents and workers know each other."""
    try:
        shown = os.readlink(proc / "self")  # noqa: PTH115 - a Path would take longer than the call
    except OSError:
        raise ConfigError(
            "/proc is not mounted here, and Etha knows processes by it: mount it (mount -t proc proc /proc; container "
            "runtimes do unless they are told not to)"
        ) from None
    if shown != str(os.getpid()):
        raise ConfigError(
            f"/proc shows another PID namespace: this process is {os.getpid()} here and {shown} there. Mount /proc of "
            f"this namespace (unshare --pid --fork --mount-proc)"
        )


def _host_id() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot}-{namespace}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings from the environment. ``ensure_runtime_dir`` creates ``runtime_dir`` (0700)."""

    agent: str | None
    redis_url: str | None
    namespace: str
    runtime_dir: Path
    host_id: str
    listen: str | None
    launch_id: str | None
    idle: float
    staging: int = STAGING
    advertise: str | None = None
    encrypt: bool = False
    log: LogSettings = LogSettings()
    trace: Path | None = None
    metrics: str | None = None
    differences: str = DIFFERENCES[0]
    pass_on: bool = True
    zone: str | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read ``env`` (default: the process's). ConfigError names the variable that is wrong."""
        env = os.environ if env is None else env
        check_proc()
        if env.get("ETHA_RUNTIME_DIR"):
            runtime_dir = Path(env["ETHA_RUNTIME_DIR"]).absolute()
        elif env.get("XDG_RUNTIME_DIR"):
            runtime_dir = Path(env["XDG_RUNTIME_DIR"]) / "etha"
        else:
            try:
                runtime_dir = Path(tempfile.gettempdir()) / f"etha-{os.getuid()}"
            except OSError as error:
                raise ConfigError(f"{error.strerror}: set ETHA_RUNTIME_DIR or TMPDIR to a directory of yours") from None
        if not _is_utf8(str(runtime_dir)):
            raise ConfigError(
                f"the path {str(runtime_dir)!r} of sockets and locks is no text in UTF-8: set ETHA_RUNTIME_DIR to "
                f"another directory"
            )
        idle = env.get("ETHA_IDLE") or "60"
        try:
            seconds = float(idle)
        except ValueError:
            raise ConfigError(f"ETHA_IDLE={idle!r} is not a number of seconds") from None
        if not seconds >= 0:  # nan is neither
            raise ConfigError(f"ETHA_IDLE={idle!r}: an agent cannot leave before its last worker has, give 0 or more")
        return cls(
            agent=_text(env, "ETHA_AGENT"),
            redis_url=env.get("ETHA_REDIS_URL") or None,
            namespace=check_name("namespace", env.get("ETHA_NAMESPACE") or "default"),
            runtime_dir=runtime_dir,
            host_id=_text(env, "ETHA_HOST_ID") or _host_id(),
            listen=_text(env, "ETHA_LISTEN"),
            advertise=_text(env, "ETHA_ADVERTISE"),
            encrypt=_flag("ETHA_ENCRYPT", env.get("ETHA_ENCRYPT") or "0"),
            trace=_directory(env, "ETHA_TRACE"),
            launch_id=_text(env, "ETHA_LAUNCH_ID"),
            idle=seconds,
            staging=parse_staging("ETHA_STAGING", env.get("ETHA_STAGING") or str(STAGING)),
            log=LogSettings.from_env(env),
            metrics=_text(env, "ETHA_METRICS"),
            differences=_one_of(env, "ETHA_DIFFERENCES", DIFFERENCES, DIFFERENCES[0]),
            pass_on=_flag("ETHA_PASS_ON", env.get("ETHA_PASS_ON") or "1"),
            zone=_zone(env),
        )

    def check_agent(self) -> None:
        """Raise ConfigError, naming the variable, if an agent could not start with these settings.

        Only the agent itself can find out whether an address is this host's, and whether a port is free.
        """
        if self.listen is not None:
            parse_address(self.listen, what="ETHA_LISTEN=")
        if self.metrics is not None:
            parse_address(self.metrics, 65535, what="ETHA_METRICS=")
        if self.advertise is not None:
            Advertised.parse(self.advertise)
            if self.listen is None:
                raise ConfigError(
                    f"ETHA_ADVERTISE={self.advertise} says where others reach ETHA_LISTEN=HOST:PORT: set both"
                )

    def redis_of(self, argument: str | None) -> str | None:
        """The URL of Redis that a client uses; None for the embedded server. ``argument`` is the client's
        ``redis_url``."""
        if argument:
            return check_redis_url("redis_url", argument)
        return None if self.redis_url is None else check_redis_url("ETHA_REDIS_URL", self.redis_url)

    @property
    def host_name(self) -> str:
        """This host's name for people: its node name, or the ETHA_HOST_ID that the user gave it."""
        return os.uname().nodename if self.host_id == _host_id() else self.host_id

    @property
    def wishes(self) -> dict[str, str]:
        """What was explicitly set among an agent's settings, by variable. Defaults are left out."""
        found = {
            "ETHA_LISTEN": self.listen,
            "ETHA_ADVERTISE": self.advertise,
            "ETHA_ZONE": self.zone,
            "ETHA_ENCRYPT": "1" if self.encrypt else None,
            "ETHA_STAGING": str(self.staging) if self.staging != STAGING else None,
            "ETHA_DIFFERENCES": self.differences if self.differences != DIFFERENCES[0] else None,
            "ETHA_PASS_ON": None if self.pass_on else "0",
            "ETHA_LOG": self.log.level if self.log.level != LOG else None,
            "ETHA_LOG_FORMAT": self.log.format if self.log.format != LOG_FORMATS[0] else None,
            "ETHA_TRACE": None if self.trace is None else str(self.trace),
            "ETHA_METRICS": self.metrics,
        }
        return {name: value for name, value in found.items() if value is not None}

    def differ(self, wishes: Mapping[str, str]) -> str:
        """Which ``wishes`` of others these settings do not meet; "" if they meet all."""
        own = {
            "ETHA_LISTEN": self.listen or "no ETHA_LISTEN",
            "ETHA_ADVERTISE": self.advertise or "no ETHA_ADVERTISE",
            "ETHA_ZONE": self.zone or "no ETHA_ZONE",
            "ETHA_ENCRYPT": "1" if self.encrypt else "no ETHA_ENCRYPT",
            "ETHA_STAGING": str(self.staging),
            "ETHA_DIFFERENCES": self.differences,
            "ETHA_PASS_ON": "1" if self.pass_on else "0",
            "ETHA_LOG": self.log.level,
            "ETHA_LOG_FORMAT": self.log.format,
            "ETHA_TRACE": "no ETHA_TRACE" if self.trace is None else str(self.trace),
            "ETHA_METRICS": self.metrics or "no ETHA_METRICS",
        }
        return ", ".join(
            f"{own[name] if own[name].startswith('no ') else f'{name}={own[name]}'} instead of {name}={value}"
            for name, value in sorted(wishes.items())
            if name in own and value != own[name]
        )

    def ensure_runtime_dir(self) -> Path:
        """Create the runtime directory and the namespace's, mode 0700, and check that they are ours."""
        make_private(self.runtime_dir, parents=True)
        make_private(self.runtime_dir / self.namespace)
        return self.runtime_dir

    def socket_path(self, device: str) -> Path:
        """``$ETHA_RUNTIME_DIR/{namespace}/{device}.sock``, checked to fit a socket address."""
        return check_socket_path(self.runtime_dir / self.namespace / f"{device.replace(':', '-')}.sock")


def make_private(path: Path, *, parents: bool = False) -> None:
    """Create a directory of mode 0700 if it is not there. ConfigError if that fails, or if others may use it."""
    try:
        path.mkdir(mode=0o700, parents=parents, exist_ok=True)
        info = path.lstat()
    except OSError as error:  # a file in the way, no permission to write, or a full file system
        raise ConfigError(
            f"the directory {path} for sockets and locks cannot be made: {error.strerror}; mount it writable, "
            f"or set ETHA_RUNTIME_DIR to a directory of yours"
        ) from None
    if info.st_uid != os.getuid() or info.st_mode & 0o077 or not path.is_dir():
        raise ConfigError(
            f"{path} belongs to uid {info.st_uid} with mode {info.st_mode & 0o777:o}; "
            f"it must be yours with mode 700: set ETHA_RUNTIME_DIR to another directory"
        )


def make_private_again(directory: Path) -> bool:
    """Create a namespace's directory and the runtime directory that it is in, if somebody has removed them.

    Whether they were removed and are there again. Nothing else is made: if the directory around them has gone, too,
    somebody has cleared up and wants none of it.
    """
    if directory.is_dir():
        return False
    try:
        make_private(directory.parent)
        make_private(directory)
    except ConfigError:
        return False
    return True


def check_socket_path(path: Path) -> Path:
    """``path`` itself. ConfigError if it is longer than an AF_UNIX address can be."""
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH:
        raise ConfigError(
            f"socket path of {size} bytes, at most {MAX_SOCKET_PATH} fit: shorten ETHA_RUNTIME_DIR ({path})"
        )
    return path


def agent_path(address: str) -> Path:
    """The socket that ``address`` names. ConfigError if it is not "ipc:///path"."""
    if not address.startswith("ipc:///"):
        raise ConfigError(f"agent address {address!r} must look like ipc:///run/user/1000/etha/default/cpu.sock")
    return Path(address.removeprefix("ipc://"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnv:
    """What a launcher set for this worker: rank and world size of its job, and the launch's id."""

    rank: int | None
    world_size: int | None
    launch_id: str | None
    #: torchrun's run id if the launch's id is made from it; None for an explicit id.
    run_id: str | None = None
    takeover: bool = False
    #: This worker's replica in elastic groups.
    replica: str | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> LaunchEnv:
        """Read ``env`` (default: the process's): Etha's own variable first, then torchrun's."""
        env = os.environ if env is None else env

        def number(name: str) -> int | None:
            text = env.get(name)
            if text is None or text == "":
                return None
            if not text.isdecimal():
                raise ConfigError(f"{name}={text!r} is not a rank or a number of ranks")
            return int(text)

        launch = _text(env, "ETHA_LAUNCH_ID")
        run_id = _text(env, "TORCHELASTIC_RUN_ID")
        # Plain torchrun sets the run id to "none", which is no id, because it is the same for every launch.
        torchrun = launch is None and bool(run_id) and run_id != "none"
        if torchrun:
            launch = f"{run_id}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return cls(
            rank=number("RANK"),
            world_size=number("WORLD_SIZE"),
            launch_id=launch,
            run_id=run_id if torchrun else None,
            takeover=_flag("ETHA_TAKEOVER", env.get("ETHA_TAKEOVER") or "0"),
            replica=_text(env, "ETHA_REPLICA") or (run_id if torchrun else None),
        )
