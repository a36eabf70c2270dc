"""Every key that Etha keeps in Redis, in one table; pure.

``python -m etha.store.keys`` prints ``docs/redis.md``. All keys begin with ``etha:{NAMESPACE}:``, braces included, so
that a namespace lives in one slot of a Redis Cluster. Each key has a lease, renewed by whoever needs the key, so
nothing is left behind for ever.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from etha.config import check_name

#: Lease of an agent's record, and how often it is renewed, in seconds.
AGENT_LEASE = 10.0
AGENT_BEAT = 3.0
#: Lease of what a registration needs while it lasts (layouts, manifests, rosters), in seconds.
REGISTRATION_LEASE = 3600.0
#: Lease of what outlives its agents (pairs, batches, events), in seconds after the last change.
HISTORY_LEASE = 7 * 86400.0
#: Lease of a batch that all ranks have closed, in seconds after that.
CLOSED_LEASE = 86400.0
#: Lease of a claim of a publication, and how often the subscriber's agent renews it, in seconds.
CLAIM_LEASE = 10.0
CLAIM_BEAT = 3.0
#: How many of a publication's newest versions are remembered with the time at which they were announced.
MAX_VERSIONS = 256
#: Names of subscribers that are kept with the newest version that each has received.
MAX_RECEIVED = 10_000
#: Approximate number of entries that the stream of events keeps.
MAX_EVENTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyKind:
    """One row of the key table. ``pattern`` is without the namespace; its upper-case parts are variables.

    ``lease`` is the number of seconds that the key lives after it was last renewed; ``kept`` says what renews it.
    """

    pattern: str
    type: str
    owner: str
    lease: float
    kept: str
    fields: Mapping[str, str]
    doc: str

    @property
    def lease_text(self) -> str:
        """The column "lease or owner" of the table."""
        return f"{self.owner}; leased for {_duration(self.lease)}, {self.kept}"


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "day"), (3600, "hour"), (1, "s")):
        if seconds >= unit:
            count = f"{seconds / unit:g}"
            return f"{count} {name}{'s' if name != 's' and count != '1' else ''}"
    raise ValueError(f"a lease of {seconds} s")


_CHANGED = "from its last change"
_HELD = "from its last change, renewed while a living agent's workers hold it"
_WAITED = "renewed by every agent that waits for the registration"
_BEAT = f"renewed by every agent every {AGENT_BEAT:g} s"

TABLE: tuple[KeyKind, ...] = (
    KeyKind(
        pattern="server",
        type="hash",
        owner="the namespace",
        lease=HISTORY_LEASE,
        kept=_BEAT,
        fields={"id": "random hex; two URLs that show the same id are one Redis"},
        doc="Which Redis this is. Written by the first agent, restored by the others after data loss.",
    ),
    KeyKind(
        pattern="agent:ID",
        type="hash",
        owner="that agent",
        lease=AGENT_LEASE,
        kept=f"renewed every {AGENT_BEAT:g} s",
        fields={
            "host": "what counts as one host (ETHA_HOST_ID)",
            "host_name": "its name, for people",
            "device": "`cpu` or `cuda-GPU-<uuid>`",
            "log": "the file to which it logs, on its host; `-`: its terminal or its service",
            "metrics": "HOST:PORT of its metrics, or why it has none; empty if nobody asked for them",
            "pid": "process id on its host",
            "address": "HOST:PORT of its links, for other hosts (ETHA_ADVERTISE, else where it listens)",
            "data_address": "HOST:PORT of its data port, for other hosts",
            "bound": "HOST:PORT of its links for agents of its own host (data on PORT+1)",
            "public_key": "CURVE public key, z85 text",
            "certificate": "SHA-256 of what its data port shows (ETHA_ENCRYPT), in hex; empty if it does not encrypt",
            "started_at": "seconds since 1970",
            "version": "version of Etha",
            "beats": "how often the lease was renewed",
        },
        doc="One agent. An agent whose record is gone is dead.",
    ),
    KeyKind(
        pattern="agents",
        type="set",
        owner="each agent adds itself; readers remove ids whose record is gone",
        lease=HISTORY_LEASE,
        kept=_BEAT,
        fields={},
        doc="Ids of agents.",
    ),
    KeyKind(
        pattern="pair:PAIR",
        type="hash",
        owner="the pair's members",
        lease=HISTORY_LEASE,
        kept=_HELD,
        fields={
            "state": "`forming` (never formed), `formed`, `lost` (waits for its members to call init_pair again), "
            "or `closed` (lost because all its members have left in order)",
            "epoch": "number of the last forming, 0 before the first; never goes back",
            "sides": "JSON list of the two side names",
            "world_sizes": "JSON object side -> ranks of its current launch",
            "launches": "JSON object side -> id of its current launch",
            "formed_launches": "JSON object side -> launch of the last epoch",
            "retired": "JSON object side -> ids of launches that were superseded, at most 16",
            "autos": "JSON object side -> how many launches without an id it has had, named `auto-NUMBER`",
            "reason": "of a lost pair: `relaunched`, `closed` or `died`",
            "error": "of a lost pair: who and why, for people",
            "culprits": "of a pair that was lost because agents have lost each other: JSON list of [side, rank], whose "
            "agents are gone",
        },
        doc="A link between two sides. That by which a newcomer of an elastic group loads its state is "
        "`GROUP.epoch-EPOCH.member-RANK`; it is removed with its batch once a later epoch has formed.",
    ),
    KeyKind(
        pattern="pair:PAIR:SIDE",
        type="hash",
        owner="the side's workers, through their agents",
        lease=HISTORY_LEASE,
        kept=_HELD,
        fields={
            "RANK": "JSON object: agent, host, name (of the host, for people), pid, start (clock ticks after boot), "
            "launch, epoch (which epoch this member waits for or is in)"
        },
        doc="Who holds which rank of a side.",
    ),
    KeyKind(
        pattern="pairs",
        type="set",
        owner="whoever joins a pair; readers remove names whose hash is gone",
        lease=HISTORY_LEASE,
        kept=_HELD,
        fields={},
        doc="Names of pairs.",
    ),
    KeyKind(
        pattern="batch:PAIR:BATCH",
        type="hash",
        owner="the pair's agents",
        lease=HISTORY_LEASE,
        kept=f"{_HELD}; {_duration(CLOSED_LEASE)} once all ranks have closed it",
        fields={
            "state": "`registering`, `registered` (also while it moves), `closed` (also if it was refused)",
            "generation": "number of the registration, from 1; grows with each registration",
            "epoch": "epoch of the pair when the generation began",
            "seq": "number of the last transfer, over all generations and epochs",
            "version": "what the tensors hold: the label of the last transfer",
            "tensors": "number of tensors",
            "bytes": "bytes that the last transfer moved to all targets; before it, those of the larger direction",
            "digest": "SIDE:HEX of the plan for each source side, joined by +; SIDE:none where it cannot send",
            "transport": "the ways that its transfers take: `local`, `host`, `tcp`, `nccl`",
            "last_seconds": "duration of the last transfer",
            "last_error": "error of the last transfer, empty if it worked",
        },
        doc="A batch on one pair. Of a batch over several pairs only the first one's hash has generation and `closed`.",
    ),
    KeyKind(
        pattern="batch:PAIR:BATCH:ranks:GENERATION",
        type="hash",
        owner="the registering ranks",
        lease=REGISTRATION_LEASE,
        kept=_WAITED,
        fields={
            "SIDE/RANK": "what that rank registered, short JSON",
            "token:SIDE/RANK": "the call that wrote it, so that a repeated call changes nothing",
            "closed:SIDE/RANK": "that rank has closed the batch",
            "agent:ID": "digest of the plan that this agent computed, and what it offers (JSON)",
            "entries": "number of ranks that are there",
            "verdicts": "number of agents that have computed a plan",
            "closed": "number of them that have closed the batch",
        },
        doc="The roster of one registration. Deleted once all ranks have come to the next one, or in a later epoch.",
    ),
    KeyKind(
        pattern="batches",
        type="set",
        owner="whoever registers; readers remove names whose hash is gone",
        lease=HISTORY_LEASE,
        kept=_HELD,
        fields={},
        doc="PAIR/BATCH of every batch.",
    ),
    KeyKind(
        pattern="manifest:DIGEST",
        type="hash",
        owner="the agents that registered it",
        lease=REGISTRATION_LEASE,
        kept=_WAITED,
        fields={
            "t:NAME": "short JSON: one tensor's pair, dtype, layout digest, global and local shape",
            "m:NAME": "of a tensor that has several names: the first name of the same memory",
            "r:NUMBER": "why a tensor cannot be moved",
        },
        doc="What one or many ranks registered, stored once; named `manifest:DIGEST:part:TOKEN` while it is written.",
    ),
    KeyKind(
        pattern="layout:DIGEST",
        type="hash",
        owner="the agents that registered it",
        lease=REGISTRATION_LEASE,
        kept=_WAITED,
        fields={"json": "the layout: mesh and placements"},
        doc="One layout, stored once, whatever the number of ranks and tensors that have it.",
    ),
    KeyKind(
        pattern="group:GROUP",
        type="hash",
        owner="the group's members",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={
            "state": "`forming` (no epoch yet), `formed`, or `changing` (somebody waits for the next epoch)",
            "epoch": "number of the last epoch; never goes back",
            "world": "ranks of each replica",
            "members": "JSON list of the last epoch's replicas in the order of their ranks: replica, launch, step, "
            "committed, last (epoch whose state it has), counts (whether it is not behind), at (its ranks' processes)",
            "base": "epoch whose state the first of the last epoch's replicas brought",
            "replicas": "JSON list of the replicas that have a key",
            "retired": "JSON list of [REPLICA/LAUNCH, why] of launches that are over, at most 64",
            "suspects": "JSON object of replicas that others have waited for in vain",
            "broken": "1 if a replica of the last epoch has left, died, or could not reach another",
            "opened": "ms since 1970 at which the first asked for the next epoch; 0 if nobody has",
            "timeout": "ms that the next epoch waits for a member whose agent answers",
            "grace": "ms that it waits for others",
            "serial": "number of launches so far",
        },
        doc="An elastic group, whose replicas come and go.",
    ),
    KeyKind(
        pattern="group:GROUP:REPLICA",
        type="hash",
        owner="the replica's ranks, through their agents",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={
            "launch": "id of this life of the replica; `auto-NUMBER-PID-START` of its first process if it has no other",
            "since": "which launch of the group it is; ranks that are equal otherwise go to the first",
            "not_before": "ms since 1970 before which it enters no epoch, because it could not reach an older member",
            "pause": "ms of its last such pause; 0 once a step has counted",
            "apart": "JSON list of the replicas that it could not reach before that pause",
            "RANK": "JSON object: agent, host, name, pid, start, epoch (that it was admitted to), last (whose state it "
            "has), step, committed, least (fewest replicas), wants (the next epoch), asked (token of the call)",
        },
        doc="One replica of a group. The key is removed when the replica loses a rank.",
    ),
    KeyKind(
        pattern="group:GROUP:epoch:EPOCH",
        type="hash",
        owner="the epoch's members",
        lease=REGISTRATION_LEASE,
        kept="from its last change",
        fields={"KEY": "= and base64, or a number that members add to"},
        doc="What the members of one epoch tell each other while they meet.",
    ),
    KeyKind(
        pattern="groups",
        type="set",
        owner="whoever enters a group",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={},
        doc="Names of elastic groups.",
    ),
    KeyKind(
        pattern="publication:NAME",
        type="hash",
        owner="the publication's sides",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={
            "state": "`open`, `closed` since the publisher has left in order, `lost` since it has died",
            "seq": "number of the newest version, 0 before the first; never goes back",
            "version": "its label as JSON",
            "description": "digest of the publisher's tensors",
            "publisher": "side that has published last",
            "launch": "its launch",
            "serial": "last number given to a launch or a claim: the time in ms, or one more than the last, so that a "
            "Redis that has lost its data gives no number again",
            "order": "last number given in the queue",
            "holder": "the publisher as a holder, empty since it has left",
            "orphans": "JSON list of holders whose publisher has ended, and which keep its newest version until "
            "another holder has it",
            "draining": "JSON list of subscribers that are to receive next and wait for those who read their buffers",
            "avoiding": "JSON list of those in the queue that avoid holders",
            "retired": "JSON list of [SIDE/LAUNCH, why, serial] of launches that are over, at most 64",
            "swept": "ms since 1970 at which sides without agents were forgotten last",
        },
        doc="Versions of named tensors, from one publisher to subscribers that come and go.",
    ),
    KeyKind(
        pattern="publication:NAME:side:SIDE",
        type="hash",
        owner="the side's ranks, through their agents",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={
            "role": "`publisher` or `subscriber`",
            "launch": "id of this launch; `auto-SERIAL` if it has no other",
            "serial": "its number; SIDE/SERIAL is the holder",
            "world": "number of its ranks",
            "digest": "digest of its tensors",
            "zone": "zone of its agents",
            "slots": "versions that it keeps at once",
            "places": "subscribers that it serves at once, 0: it does not serve",
            "passes": "1: a subscriber whose agents pass on what it is still receiving",
            "copies": "of the publisher: copies of one version that it gives while another holder has it; 0: no limit",
            "held": "seq of the version that it holds, 0 for none",
            "version": "its label as JSON",
            "call": "last call that has asked for a version",
            "asked": "what it has asked for: pinned version, and the lowest newer_than of its ranks",
            "refused": "last call that was refused, because no holder has its pinned version any more, or because its "
            "tensors are not those that are published",
            "over": "last call that has ended",
            "claim": "number of its claim, 0 for none",
            "protect": "1: a put has ended its last hop, so that the next one is protected",
            "source": "holder that the last hop has read",
            "seconds": "duration of the last hop that has committed",
            "error": "error of the last hop or why the last call was refused, empty after a hop that has committed",
            "unfit": "while it waits: why no holder of a newer version can feed it; empty if one can",
            "puts": "of the publisher: versions that this launch has announced",
            "announced": "of the publisher: seq of the last of them",
            "silent": "ms since 1970 at which a rank was seen first that is missing, or whose agent is silent; 0: none",
            "pending": "JSON list of what its buffers hold, put back while ranks are missing after Redis has lost "
            "them, or empty",
            "put": "of the publisher: JSON object of the put that runs: put, seq, slot, labels of the ranks that have "
            "set it aside, kept (the version that its slot held), given (a rank may write there)",
            "RANK": "JSON object: agent, host, name, pid, start",
        },
        doc="The publisher or one subscriber. A wake-up means that a claim was granted, that readers of its buffers "
        "have ended, that all ranks have come or have put, that a subscriber has committed, or that no holder fits.",
    ),
    KeyKind(
        pattern="publication:NAME:sides",
        type="set",
        owner="whoever enters the publication",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={},
        doc="Names of its sides.",
    ),
    KeyKind(
        pattern="publication:NAME:holders",
        type="hash",
        owner="the publication's sides",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={
            "SIDE/SERIAL": "JSON object: side, serial, launch, world, digest, zone, hosts, agents, publisher, orphan "
            "(its workers have ended), draining, places, passes, used, copies, slots (for each seq, version, "
            "description, used, children: holders that have got it here, from: who gave it, arrival: what it passes on "
            "while it is receiving that)",
        },
        doc="Buffers that hold versions, and how many subscribers read them.",
    ),
    KeyKind(
        pattern="publication:NAME:free",
        type="sorted set",
        owner="the publication's sides",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={},
        doc="Holders that have a free place, by the newest seq that can be had there.",
    ),
    KeyKind(
        pattern="publication:NAME:offers",
        type="sorted set",
        owner="the publication's sides",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={},
        doc="Holders by the newest seq that they hold, whether or not a place is free.",
    ),
    KeyKind(
        pattern="publication:NAME:held",
        type="sorted set",
        owner="the publication's subscribers",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={},
        doc="Subscribers by the seq that they hold.",
    ),
    KeyKind(
        pattern="publication:NAME:received",
        type="sorted set",
        owner="the publication's subscribers",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={},
        doc=f"Names of subscribers by the newest seq that they have received, also of those that have left since: what "
        f"put(wait=n) counts. The last {MAX_RECEIVED:,}.",
    ),
    KeyKind(
        pattern="publication:NAME:queue",
        type="sorted set",
        owner="the publication's subscribers",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={},
        doc="Subscribers that wait for a version, as SIDE/SERIAL, in the order in which they have asked.",
    ),
    KeyKind(
        pattern="publication:NAME:wanted",
        type="sorted set",
        owner="the publication's subscribers",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={},
        doc="The same subscribers by the seq that a version must exceed for them; 0 for a pinned version.",
    ),
    KeyKind(
        pattern="publication:NAME:asks",
        type="hash",
        owner="the publication's subscribers",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={
            "SIDE/SERIAL": "JSON object: subscriber, serial, call, newer_than, version, links, avoid, digest, zone, "
            "hosts, protected",
        },
        doc="What those in the queue have asked for.",
    ),
    KeyKind(
        pattern="publication:NAME:claims",
        type="hash",
        owner="the subscribers that receive",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={
            "NUMBER": "JSON object: number, call, subscriber, serial, source, source_serial, source_world, "
            "source_launch, slot, seq, version, description, protected, upstream (the claim by which the source is "
            "receiving it, 0 if it has it whole), passed",
        },
        doc="Running hops. Each claim is leased for "
        f"{CLAIM_LEASE:g} s and renewed every {CLAIM_BEAT:g} s by the subscriber's agent.",
    ),
    KeyKind(
        pattern="publication:NAME:leases",
        type="sorted set",
        owner="the subscribers that receive",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={},
        doc="Claims by the time in ms since 1970 at which they lapse.",
    ),
    KeyKind(
        pattern="publication:NAME:versions",
        type="hash",
        owner="the publication's publishers",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={"SEQ": "JSON object: version (label), at (ms since 1970 at which it was announced)"},
        doc=f"The newest {MAX_VERSIONS} versions.",
    ),
    KeyKind(
        pattern="publication:NAME:table:DIGEST",
        type="hash",
        owner="the publication's sides",
        lease=HISTORY_LEASE,
        kept="from when a rank with these tensors entered last, and from each put",
        fields={"NAME": "dtype, global shape, and `*` or the digest of the set of elements that the side has of it"},
        doc="The tensors of a side, stored once for all sides that have the same.",
    ),
    KeyKind(
        pattern="publication:NAME:sets",
        type="hash",
        owner="the publication's sides",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={
            "DIGEST": "JSON: for the first dim groups of indices [start, stop, ...] at which the same set of the other "
            "dims is held, and that set, in the same form",
        },
        doc="Sets of elements of tensors that some side holds in part.",
    ),
    KeyKind(
        pattern="publication:NAME:feeds",
        type="hash",
        owner="the publication's sides",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={
            "SOURCE>TARGET@DESCRIPTION": "empty: tables of these digests fit; otherwise why not",
            "SOURCE>=TARGET": "1 if a side of table SOURCE has all elements that one of table TARGET has, otherwise 0",
        },
        doc="Which tables may feed which, computed once.",
    ),
    KeyKind(
        pattern="publication:NAME:ranks:SIDE",
        type="hash",
        owner="the side's ranks that enter, through their agents",
        lease=REGISTRATION_LEASE,
        kept=_CHANGED,
        fields={
            "RANK": "JSON object: world, launch, manifest (digest of what the rank has registered), pid, token "
            "(another one whenever it comes), company (digest of the tokens of all ranks that it has seen together)",
        },
        doc="Ranks that wait for the others of their side to enter a publication, because only all of them together "
        "know the side's tensors.",
    ),
    KeyKind(
        pattern="publications",
        type="set",
        owner="whoever enters a publication",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={},
        doc="Names of publications.",
    ),
    KeyKind(
        pattern="events",
        type="stream",
        owner=f"the namespace; capped at about {MAX_EVENTS} entries",
        lease=HISTORY_LEASE,
        kept=_CHANGED,
        fields={
            "kind": "what happened: `joined`, `formed`, `lost`, `registered`, ..., and of agents' records "
            "`transfers` (those of a batch in ten seconds), `transfer_aborted`, `transfer_unknown`, "
            "`transfer_withdrawn`, `rendezvous_failed`, `registration_failed`, `worker_died`, `link_lost`, `killed`, "
            "`warning`, `error`, `records_dropped`",
            "at, on, device": "of agents' records: seconds since 1970, and which agent wrote it",
            "text": "one sentence",
            "...": "pair, side, rank, batch, epoch, seq, code, reason: those that apply",
        },
        doc="One line for each thing that happened, for `XRANGE`, `etha events` and `etha status --watch`. Each agent "
        "has more in its own files. Who writes it also publishes on its name.",
    ),
)


#: The commands that a Redis user must be allowed to run, in the words of ``ACL SETUSER``.
COMMANDS = (
    *("+evalsha", "+eval", "+script|load", "+multi", "+exec", "+ping", "+subscribe", "+unsubscribe", "+publish"),
    *("+hget", "+hgetall", "+hlen", "+hmget", "+hset", "+hsetnx", "+hdel", "+hexists", "+hincrby", "+exists", "+del"),
    *(
        "+pexpire",
        "+pttl",
        "+rename",
        "+sadd",
        "+srem",
        "+smembers",
        "+xadd",
        "+zadd",
        "+zcard",
        "+zcount",
        "+zrange",
        "+zrangebyscore",
        "+zrem",
        "+hkeys",
        "+zrevrangebyscore",
        "+zscore",
        "+xrevrange",
        "+info",
        "+client|setinfo",
        "+select",
        "+time",
    ),
)


def access(user: str, password: str, namespace: str) -> list[str]:
    """The words after ``ACL`` that make a user who can do in ``namespace`` what Etha does, and nothing else."""
    prefix = RedisKeys(namespace).prefix
    return ["SETUSER", user, "reset", "on", f">{password}", f"~{prefix}*", f"&{prefix}*", *COMMANDS]


@dataclass(frozen=True, slots=True)
class RedisKeys:
    """Full key names of one namespace."""

    namespace: str

    def __post_init__(self) -> None:
        check_name("namespace", self.namespace)

    @property
    def prefix(self) -> str:
        return f"etha:{{{self.namespace}}}:"

    @property
    def server(self) -> str:
        return f"{self.prefix}server"

    @property
    def agents(self) -> str:
        return f"{self.prefix}agents"

    @property
    def pairs(self) -> str:
        return f"{self.prefix}pairs"

    @property
    def batches(self) -> str:
        return f"{self.prefix}batches"

    @property
    def events(self) -> str:
        return f"{self.prefix}events"

    def agent(self, agent: str) -> str:
        return f"{self.prefix}agent:{check_name('agent', agent)}"

    def pair(self, pair: str) -> str:
        return f"{self.prefix}pair:{check_name('pair', pair)}"

    def side(self, pair: str, side: str) -> str:
        return f"{self.pair(pair)}:{check_name('side', side)}"

    def batch(self, pair: str, batch: str) -> str:
        return f"{self.prefix}batch:{check_name('pair', pair)}:{check_name('batch', batch)}"

    def roster(self, pair: str, batch: str, generation: int) -> str:
        return f"{self.batch(pair, batch)}:ranks:{generation}"

    @property
    def groups(self) -> str:
        return f"{self.prefix}groups"

    def group(self, group: str) -> str:
        return f"{self.prefix}group:{check_name('group', group)}"

    def replica(self, group: str, replica: str) -> str:
        return f"{self.group(group)}:{check_name('replica', replica)}"

    def group_values(self, group: str, epoch: int) -> str:
        return f"{self.group(group)}:epoch:{epoch}"

    @property
    def publications(self) -> str:
        return f"{self.prefix}publications"

    def publication(self, publication: str) -> str:
        return f"{self.prefix}publication:{check_name('publication', publication)}"

    def publication_part(self, publication: str, part: str) -> str:
        """``holders``, ``claims``, ``queue`` and the like."""
        return f"{self.publication(publication)}:{part}"

    def publication_side(self, publication: str, side: str) -> str:
        return f"{self.publication(publication)}:side:{check_name('side', side)}"

    def publication_ranks(self, publication: str, side: str) -> str:
        return f"{self.publication(publication)}:ranks:{check_name('side', side)}"

    def publication_table(self, publication: str, digest: str) -> str:
        return f"{self.publication(publication)}:table:{check_name('digest', digest)}"

    def manifest(self, digest: str) -> str:
        return f"{self.prefix}manifest:{check_name('digest', digest)}"

    def layout(self, digest: str) -> str:
        return f"{self.prefix}layout:{check_name('digest', digest)}"


def markdown() -> str:
    """The key table as markdown, as in ``docs/redis.md``."""
    lines = [
        "# What Etha keeps in Redis",
        "",
        "Generated by `python -m etha.store.keys > docs/redis.md`; edit the table in `etha/store/keys.py`.",
        "",
        "Every key begins with `etha:{NAMESPACE}:`. The braces belong to it: they are a hash tag, by which a namespace",
        "lives in one slot of a Redis Cluster. Values are readable: numbers, names, short JSON, ids as hex. Whenever a",
        "key changes, a wake-up is published on the channel of the same name. A wake-up that is lost costs latency,",
        "never correctness.",
        "",
        "```sh",
        "redis-cli hgetall 'etha:{default}:pair:weights'",
        "redis-cli hgetall 'etha:{default}:group:dp'              # an elastic group: state, epoch, members, retired",
        "redis-cli hgetall 'etha:{default}:group:dp:replica-0'    # one replica of it: its ranks and their processes",
        "redis-cli -s $ETHA_RUNTIME_DIR/redis.sock xrevrange 'etha:{default}:events' + - COUNT 10   # embedded server",
        "```",
        "",
        "Where `ETHA_RUNTIME_DIR` is not set, the embedded server's socket is `$XDG_RUNTIME_DIR/etha/redis.sock`.",
        "Without that variable, it is `/tmp/etha-UID/redis.sock` (in `$TMPDIR` instead of `/tmp` if set).",
        "`etha status` shows the path.",
        "",
        "| key | type | lease or owner | holds |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{k.pattern}` | {k.type} | {k.lease_text} | {k.doc} |" for k in TABLE]
    for kind in TABLE:
        if kind.fields:
            lines += ["", f"## `{kind.pattern}`", "", kind.doc, "", "| field | meaning |", "|---|---|"]
            lines += [f"| `{name}` | {doc} |" for name, doc in kind.fields.items()]
    words = [f"'{word}'" if set(word) & set("~&>*|{") else word for word in access("etha", "PASSWORD", "default")]
    lines += [
        "",
        "## Access",
        "",
        "To give Etha a Redis user of its own, allow that user these commands, and the keys *and the channels* of its",
        "namespace, because Redis gives a new user no channel. The URL is then `redis://etha:PASSWORD@HOST:6379`.",
        "`INFO` may be left out; agents then notice a little later that a server has lost its data.",
        "",
        "```sh",
        *(f"{line} \\" for line in textwrap.wrap("redis-cli ACL " + " ".join(words), 110)[:-1]),
        textwrap.wrap("redis-cli ACL " + " ".join(words), 110)[-1],
        "```",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
