"""Elastic membership for a training loop: who takes part in a step, and one vote on whether it counts.

    members = Members("dp")
    group = ManagedProcessGroup(members)
    while training:
        quorum = members.begin()        # forms a new epoch if the membership must change; otherwise does nothing
        loss().backward()               # calls of ``group``; their errors are swallowed
        if members.commit():            # one vote over all ranks of all replicas
            optimizer.step()

``begin`` asks the agent only if the epoch must change, and the vote is one small all-reduce (two, if replicas have
several ranks). So a step without a change sends nothing but its calls and its vote.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from etha.bus.messages import (
    AskGroupProgress,
    DepartGroup,
    EnterGroup,
    GroupChanging,
    GroupFormed,
    GroupNoted,
    GroupProgress,
    GroupSeat,
)
from etha.bus.process import check_not_forked, start_time
from etha.client.arguments.world import RankInfo
from etha.config import LaunchEnv, Settings, check_name, load_pair
from etha.errors import (
    ConfigError,
    EthaError,
    GroupError,
    GroupLostError,
    GroupTimeoutError,
    LayoutError,
    ProtocolError,
    RegistrationError,
)
from etha.groups.agent_link import EpochStore, GroupAgentLink
from etha.groups.managed import carrier
from etha.groups.plain_ddp import newcomer_refusal
from etha.groups.recovery.handover import Place, StateHandover
from etha.groups.recovery.state import MOST_BYTES, MemberState, StateFrame
from etha.groups.vote import AddAcross, AddInside, Ballot, Decided, EndReplica, Vote

log = logging.getLogger(__name__)

#: Errors that say that a state does not fit this replica.
_MISFITS = ConfigError | LayoutError | RegistrationError
#: How often this process has left a group, by namespace, group, replica, rank and launch.
_LEFT: Counter[tuple[str, str, str, int, str | None]] = Counter()
#: Seconds that ``begin`` waits for members whose agents do not answer.
GRACE = 3.0
#: So often a step is begun by a loop that seems to have no ``commit``: a Sampler and an Optimizer begin it, too.
_MANY_BEGINS = 10
#: Seconds that a member waits at most until others can read, or until it has read, why a load has failed.
_NEWS = 2.0
#: Seconds after which a member that has voted no ends the calls of the step, in which others may wait for it.
RELEASE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """Who takes part in a step.

    ``rank`` and ``size`` count the replicas that take part; a replica that is still behind has a ``rank`` of ``size``
    or more: it receives every result and contributes nothing. ``step`` is the number of steps committed before this
    one, ``batches_committed`` the number of batches in them. ``recovered``: this member has just loaded its state from
    another. ``changed``: the epoch is new.
    """

    epoch: int
    rank: int
    size: int
    step: int
    batches_committed: int
    recovered: bool
    changed: bool


class ConfigurableGroup(Protocol):
    """What is asked of a process group by its members: see `etha.groups.ProcessGroup`."""

    def configure(self, store_addr: Any, replica_id: str, rank: int, world_size: int, quorum_id: int, /) -> None: ...
    def allreduce(self, tensors: list[torch.Tensor], /) -> Any: ...
    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any: ...
    def abort(self) -> None: ...
    def shutdown(self) -> None: ...
    def errored(self) -> Exception | None: ...
    def set_timeout(self, timeout: Any, /) -> None: ...


class ManagedGroup(Protocol):
    """A group that follows the epochs of a `Members`; see `ManagedProcessGroup`."""

    def enter_epoch(self, store: EpochStore, replica: str, rank: int, members: int, epoch: int) -> None: ...
    def set_participants(self, count: int) -> None: ...
    def break_off(self) -> None: ...
    def abort(self) -> None: ...
    def step_error(self) -> Exception | None: ...
    def shutdown(self) -> None: ...


class Members:
    """This rank's membership in the elastic group ``name``.

    ``replica`` names the replica (default: ETHA_REPLICA, torchrun's run id, or a name of this process if the
    replica has one rank); ``rank`` and ``world_size`` are those in the replica (default: torch.distributed's, else
    the launcher's). ``min_replicas``: an epoch has at least so many. ``timeout``: seconds that a call, a vote and
    forming a group take at most, and that an epoch waits for a member whose agent answers. ``max_failures``:
    ``commit`` raises after so many steps in a row that did not count. ``group``: makes the process groups of the
    votes (default: `ProcessGroupEtha`).
    """

    def __init__(
        self,
        name: str = "default",
        *,
        replica: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        min_replicas: int = 1,
        timeout: float = 60.0,
        grace: float = GRACE,
        max_failures: int | None = None,
        launch: str | None = None,
        redis_url: str | None = None,
        namespace: str | None = None,
        agent: str | None = None,
        group: Callable[[float], ConfigurableGroup] | None = None,
    ) -> None:
        settings, env = Settings.from_env(), LaunchEnv.from_env()
        if namespace is not None:
            settings = replace(settings, namespace=check_name("namespace", namespace))
        place = RankInfo.of(world_size=world_size, rank=rank, ranks=None, env=env)
        self.name = check_name("group", name)
        self.rank, self.world_size = place.rank, place.world_size
        self.replica = check_name("replica", (replica if replica is not None else env.replica) or self._own_name())
        self.min_replicas, self.timeout, self.max_failures = min_replicas, _seconds("timeout", timeout), max_failures
        if not isinstance(min_replicas, int) or min_replicas < 1:
            raise ConfigError(f"min_replicas={min_replicas!r}: an epoch has at least one replica")
        if max_failures is not None and (not isinstance(max_failures, int) or max_failures < 0):
            raise ConfigError(f"max_failures={max_failures!r}: a number of steps, or None, is needed")
        grace = _seconds("grace", grace)
        self._grace, self._pid = grace, os.getpid()
        self._step = self._batches = 0
        self._epoch = self._last = 0
        launch = launch if launch is not None else place.launch
        self._turn = (settings.namespace, self.name, self.replica, self.rank, launch)
        turns = _LEFT[self._turn]
        # Whoever has left is refused under the launch's name from then on; all ranks of a replica come again together.
        self._launch = f"{launch}#{turns}" if launch is not None and turns else launch
        self._quorum: Quorum | None = None
        self._seats: tuple[GroupSeat, ...] = ()
        self._mine, self._size = 0, 1
        self._behind = False
        self._state: MemberState | None = None
        #: A load was begun and its end is not known, so the state here is worth nothing.
        self._half_loaded = False
        self._failures = 0
        self._begun = self._left = self._recovered = False
        #: This is the first step beside members that train already.
        self._joins = False
        #: Calls of ``begin`` since the last ``commit``.
        self._begins = 0
        self._ended: GroupLostError | None = None
        #: Replicas of the epoch before that are not in this one.
        self._lost: tuple[str, ...] = ()
        #: A vote or an error says that the epoch must change.
        self._must_change = True
        #: The last epoch of which the agent has said that it must change. Set by the loop's thread.
        self._heard = 0
        #: The last epoch of which the agent has said that a member of it has ended.
        self._broken = 0
        #: A member that is behind counts the steps of the others, until it has their state.
        self._target = (0, 0)
        self._configuring: int | None = None
        #: The group inside this replica is that of the epoch.
        self._inside_stands = False
        #: Loads in which this rank takes part now.
        self._handovers: set[StateHandover] = set()
        #: Rank in torch's world -> rank in the replica; None without such a world.
        self._torch_ranks: dict[int, int] | None = None
        self._suspects: tuple[str, ...] = ()
        self._unmet: tuple[str, ...] = ()
        self._asked: EnterGroup | None = None
        self._groups: list[weakref.ref[Any]] = []
        make = group or _etha_group
        self._across = make(timeout)
        self._inside = make(timeout) if self.world_size > 1 else None
        self._words = torch.zeros(2, dtype=torch.int64)
        self._settings, self._redis_url, self._agent = settings, redis_url, agent or settings.agent
        self._link = GroupAgentLink(
            settings,
            redis_url=redis_url,
            agent=self._agent,
            on_push=self._pushed,
            attend=self._attendance,
            heard=self._noted,
        )

    def _own_name(self) -> str:
        if self.world_size > 1:
            raise ConfigError(
                "a replica of several ranks needs a name that all its ranks know: give Members(replica=...), or set "
                "ETHA_REPLICA"
            )
        return f"{os.uname().nodename}-{os.getpid()}-{start_time()}"[-100:].lstrip("-.")

    # ---- what a training loop calls ------------------------------------------------------------

    def begin(self, timeout: float | None = None) -> Quorum:
        """Who takes part in the next step. Returns at once if nothing has changed since the last one, and the same
        until ``commit``.

        Otherwise it waits until the next epoch has formed, forms the process groups, and loads the state if this member
        is behind. Raises GroupTimeoutError, which names whom it waits for, or AgentUnavailableError, if no agent was
        there in time; it may be called again then. GroupLostError: this replica is over, because it has lost a rank or
        was launched again. GroupError: torch's own DistributedDataParallel cannot join members that train already.
        """
        self._check()
        # An epoch waits for a busy member up to ``self.timeout``; then its groups have to be formed.
        patience = 2 * self.timeout + self._grace if timeout is None else _seconds("timeout", timeout)
        if self._begun and self._quorum is not None:
            # A Sampler or an Optimizer has begun this step. An error since then is the vote's affair.
            self._begins += 1
            if self._begins == _MANY_BEGINS:
                log.warning(
                    "group %s: step %d was begun %d times and never committed, so it goes on, and a Sampler gives its "
                    "batch again: call commit() once in each step",
                    self.name,
                    self._quorum.step,
                    self._begins,
                )
            return self._quorum
        changed, self._recovered = False, False
        # A wish that only this member has heard of must be voted on first, so that all change at the same step.
        if self._changes():
            if not self._must_change:
                self._break_off()  # others may be in the step already, and would wait there for this member
            if not self._epoch and self._state is not None:
                self._state.check()  # now, and not when somebody joins whom this member could not serve
            self._change(time.monotonic() + patience)
            changed = True
        self._begun, self._begins = True, 1
        self._quorum = Quorum(
            epoch=self._epoch,
            rank=self._mine,
            size=self._size,
            step=self._target[0] if self._behind else self._step,
            batches_committed=self._target[1] if self._behind else self._batches,
            recovered=self._recovered,
            changed=changed,
        )
        return self._quorum

    def commit(self, ok: bool = True) -> bool:
        """Vote on the step: True if all ranks of all replicas say ``ok`` and none of their groups has failed.

        All ranks of a replica get the same answer, or GroupLostError, which ends the replica. GroupLostError is also
        raised after ``max_failures`` steps in a row that did not count.
        """
        self._check()
        if not self._begun:
            raise GroupError("commit() without begin(): call begin() before each step")
        if not isinstance(ok, bool | np.bool_ | torch.Tensor):
            raise GroupError(f"commit({ok!r}): True or False is needed")
        ok = bool(ok)
        self._begun, self._begins = False, 0
        refusal = self._plain_ddp() if self._joins else None  # one that was made after begin()
        self._joins = False
        error = refusal or self._step_error()
        ballot = Ballot(
            nays=int(not ok or error is not None),
            behind=0,
            changes=int(self._heard >= self._epoch or error is not None),
        )
        if isinstance(error, GroupLostError | GroupTimeoutError):
            # Nobody needs to wait for this ballot, and this member for none: somebody is known not to come.
            self._suspect(error)
            self._across.abort()
        # After an error of its own this rank may have left out calls in which others wait for it.
        release = threading.Timer(RELEASE, self._end_calls) if not ok and error is None else None
        if release is not None:
            release.daemon = True
            release.start()
        try:
            decided = self._vote(ballot)
        finally:
            if release is not None:
                release.cancel()
        self._apply(decided)
        if refusal is not None:
            self.leave()
            raise refusal
        return decided.committed

    def _plain_ddp(self) -> GroupError | None:
        """Why this process may not train beside members that train already."""
        texts = [newcomer_refusal(group) for group in self._managed()]
        return GroupError(next(filter(None, texts))) if any(texts) else None

    def _end_calls(self) -> None:
        """Let the others' calls of this step end. They would find nobody in the vote, so the epoch ends with it."""
        log.warning("group %s: step %d does not count, and others still wait in its calls", self.name, self._step)
        for group in self._managed():
            group.abort()

    def leave(self) -> None:
        """Leave the group in order; the others go on without this replica. Idempotent."""
        if self._left or os.getpid() != self._pid:
            return
        self._left = True
        _LEFT[self._turn] += 1
        self._end_handovers("this member leaves")
        try:
            self._link.call(DepartGroup(group=self.name, replica=self.replica, rank=self.rank), 5.0)
        except EthaError as error:
            log.debug("the agent will find out that this member has left: %s", error)
        self._link.close()
        for group in self._managed():
            group.shutdown()
        self._across.shutdown()
        if self._inside is not None:
            self._inside.shutdown()

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.leave()

    @property
    def lost(self) -> tuple[str, ...]:
        """The replicas of the epoch before that are not in this one."""
        return self._lost

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint must keep: ``step`` and ``batches_committed``, because sometimes all replicas die."""
        return {"step": self._step, "batches_committed": self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where a checkpoint stood; before the first ``begin``."""
        if self._epoch:
            raise GroupError("load_state_dict() after begin(): a member that has begun loads its state from the others")
        try:
            self._step, self._batches = int(state["step"]), int(state["batches_committed"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"load_state_dict: step and batches_committed are needed, as state_dict() has: {state!r}"
            ) from None

    def state(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        *,
        extra: tuple[Callable[[], Any], Callable[[Any], None]] | None = None,
    ) -> None:
        """What a newcomer must have: it loads this from a member that is ahead, in its first ``begin()``.

        ``extra``: (get, set) for what is neither model nor optimizer: scheduler, RNG, data position; ``get`` returns
        numbers, text, bytes, tensors, and lists, tuples and dicts of these. All replicas name the same, before the
        first ``begin()``. They may shard DTensors differently. A tensor that is plain at both is each rank's own, from
        the same rank of the other replica. Replicas that begin together without any state of the group load the first
        one's, so that all begin with the same weights.
        """
        if self._epoch:
            raise GroupError("members.state() after begin(): call it before the first begin()")
        self._state = MemberState(model, optimizer, extra)

    def manage(self, group: ManagedGroup) -> None:
        """Let a group follow the epochs: for `ManagedProcessGroup`. It is formed by the next ``begin``."""
        if self._epoch:
            raise GroupError("a ManagedProcessGroup must be made before the first begin()")
        self._groups.append(weakref.ref(group))

    # ---- a change of the epoch -------------------------------------------------------------------

    def _changes(self) -> bool:
        """Whether the epoch must change before the next step; the same on all ranks of this replica.

        A death between two steps is noticed by one rank sooner than by another. Each alone would leave the others in a
        step in which they wait for it.
        """
        found = self._must_change or self._across.errored() is not None or self._step_error() is not None
        if self._inside is None or not self._inside_stands:
            return found
        try:
            return self._add(self._inside, Ballot(changes=int(found))).changes > 0
        except GroupError as error:
            log.warning("group %s: a rank of this replica was lost: %s", self.name, error)
            return True

    def _change(self, deadline: float) -> None:
        """Enter epochs until one stands."""
        self._end_handovers("the epoch has changed")
        while True:
            left = deadline - time.monotonic()
            self._must_change = True
            try:
                formed = self._enter(max(0.0, left))
            except GroupLostError as error:
                self._ended = error
                raise
            if self._form(formed, deadline):
                self._must_change = False
                return

    def _enter(self, timeout: float) -> GroupFormed:
        message = EnterGroup(
            group=self.name,
            replica=self.replica,
            rank=self.rank,
            world=self.world_size,
            wants=True,
            launch=self._launch,
            epoch=self._epoch,
            last=self._last,
            step=self._step,
            committed=self._batches,
            least=self.min_replicas,
            patience=self.timeout,
            grace=self._grace,
            suspects=self._suspects,
            unmet=self._unmet,
            asked=uuid.uuid4().hex,
        )
        self._suspects = self._unmet = ()
        formed = self._link.call(message, timeout)
        assert isinstance(formed, GroupFormed)
        self._launch = formed.launch
        self._asked = _attending(message, formed.launch, formed.epoch)
        return formed

    def _form(self, formed: GroupFormed, deadline: float) -> bool:
        """Form the process groups of an epoch, and load if this member is behind. False if that failed, so that the
        members must meet again; then all ranks of this replica say so."""
        self._configuring = formed.epoch
        before = {seat.replica for seat in self._seats}
        names = [seat.replica for seat in formed.seats]
        self._epoch, self._seats = formed.epoch, formed.seats
        self._mine = names.index(self.replica)
        self._lost = tuple(sorted(before - set(names)))
        mine = formed.seats[self._mine]
        self._behind = not mine.counts
        if self._half_loaded and mine.counts:
            raise self._end("it has loaded half a state, and nobody is left who has the other half")
        loads = _loads(formed.seats) if self._state is not None else []
        newcomer = any(target == self._mine for _, target in loads)
        self._joins = formed.seats[0].last > 0 and (newcomer or self._behind)
        if self._joins and (refusal := self._plain_ddp()) is not None:
            self._configuring = None
            self.leave()  # the others form another epoch
            raise refusal
        self._target = (formed.seats[0].step, formed.seats[0].committed)
        if mine.counts and not newcomer:
            self._last = formed.epoch
        self._inside_stands = False
        failed: GroupError | None = None
        met = False
        try:
            self._configure(formed, deadline)
            met = True
            if loads:
                self._find_torch_ranks()
            if self._state is not None:
                self._hand_over(self._state, loads)
        except GroupError as error:
            failed = error
        except Exception:  # the other ranks of this replica must not go on without this one
            self._agree(False)
            self._break_off()
            raise
        except BaseException:
            self._break_off()
            if self._inside is not None:
                self._inside.abort()
            raise
        finally:
            self._configuring = None
        if not self._agree(failed is None):
            failed = failed or GroupLostError("another rank of this replica has failed", epoch=formed.epoch)
        if failed is None:
            if newcomer:
                self._half_loaded, self._behind, self._recovered = False, False, True
                self._step, self._batches = self._target
                self._last = formed.epoch
            # A newcomer watches its first step: the others do not know yet whether it has everything.
            self._set_size(sum(seat.counts for seat in formed.seats))
            return True
        log.warning("group %s: epoch %d could not be formed: %s", self.name, formed.epoch, failed)
        self._break_off()  # nobody needs to wait for this member
        self._report_loads(loads)
        if met:
            self._suspect(failed)
        else:
            self._blame(failed, names)
        if time.monotonic() >= deadline:
            raise failed
        return False

    def _agree(self, fine: bool) -> bool:
        """Whether all ranks of this replica are ready for the epoch; else all of them enter another one."""
        if self._inside is None or not self._inside_stands:
            return fine
        try:
            return self._add(self._inside, Ballot(nays=int(not fine))).nays == 0
        except GroupError as error:
            log.warning("group %s: a rank of this replica was lost: %s", self.name, error)
            return False

    def _break_off(self) -> None:
        """End the groups across the replicas, so that the others do not wait for this rank."""
        for group in (self._across, *self._managed()):
            group.abort()

    # ---- loading a state -------------------------------------------------------------------------

    def _hand_over(self, state: MemberState, loads: list[tuple[int, int]]) -> None:
        """Serve members that are behind, or load. Raises GroupError if the members have to meet again for it."""
        for source, target in loads:
            try:
                if source == self._mine:
                    self._serve(state, target)
                elif target == self._mine:
                    self._load(state, source)
            except Exception as error:
                if isinstance(error, _MISFITS):  # who sees the end of this epoch is to find out why
                    news = self._news_store(target, _NEWS)
                    self._link.loop_thread.call(_said(news, self._failure(error)))
                else:
                    self._say_failed(target, error)
                raise

    def _report_loads(self, loads: list[tuple[int, int]]) -> None:
        """Log why others could not load, as far as they have said so."""
        for _, target in loads:
            if target == self._mine:
                continue
            with suppress(EthaError):
                found = self._link.loop_thread.call(self._news_store(target).peek("failed", _NEWS))
                if found:
                    name = self._seats[target].replica
                    log.warning("group %s: %s could not load: %s", self.name, name, found.decode(errors="replace"))

    def _serve(self, state: MemberState, target: int) -> None:
        """Let ``target`` have the state as it is now. Returns as soon as it may change."""
        try:
            frame, tensors = state.take(self._step, self._batches)
            packed = frame.packed()
        except Exception as error:  # the newcomer cannot join; whoever trains goes on
            name = self._seats[target].replica
            log.exception("group %s: the state here cannot be handed over, so %s cannot join", self.name, name)
            why = f"replica {self.replica} cannot hand over its state: {type(error).__name__}: {error}"
            refused = StateFrame(values=None, parts=[], step=0, batches_committed=0, refusal=why[:4000])
            self._send_bytes(refused.packed(), target)
            return
        self._send_bytes(packed, target)
        sharded = set(msgspec.msgpack.decode(self._receive_bytes(target), type=list[str]))
        handover = self._new_handover(target, sends=True)
        loop_thread = self._link.loop_thread
        try:
            loop_thread.call(handover.open(tensors, sharded))
            loop_thread.call(handover.begin_send(handover.mark()))
        except Exception as error:
            # The newcomer hears it by the pair, and ends this epoch. The state here is as good as before.
            log.warning("group %s: %s cannot load from here: %s", self.name, self._seats[target].replica, error)
            self._say_failed(target, error)
        finally:
            loop_thread.spawn(self._finish(handover))

    def _load(self, state: MemberState, source: int) -> None:
        """Load from ``source``: everything, on all ranks of this replica, or nothing."""
        failed: Exception | None = None
        landing = None
        try:
            frame = StateFrame.unpacked(self._receive_bytes(source))
            if frame.refusal:
                raise ConfigError(frame.refusal)
            landing = state.expect(frame)
        except Exception as error:
            failed = error
        if not self._agree(failed is None) or landing is None:
            raise failed or GroupLostError("another rank of this replica cannot load", epoch=self._epoch)
        self._send_bytes(msgspec.msgpack.encode(landing.sharded), source)
        there = {part.name for part in frame.parts if part.sharded}
        handover = self._new_handover(self._mine, sends=False)
        loop_thread = self._link.loop_thread
        try:
            loop_thread.call(handover.open(landing.tensors, there))
            loop_thread.call(handover.receive(handover.mark()))
        except Exception as error:
            if not isinstance(error, EthaError) or isinstance(error, _MISFITS | GroupError):
                raise  # another source has nothing else
            text = f"the state of {self._seats[source].replica} has not arrived: {error.message}"
            raise GroupLostError(text, epoch=self._epoch) from error
        finally:
            loop_thread.call(self._finish(handover))
        self._half_loaded = True
        state.load(landing)
        self._target = (frame.step, frame.batches_committed)

    def _new_handover(self, target: int, *, sends: bool) -> StateHandover:
        place = Place(
            settings=self._settings,
            redis_url=self._redis_url,
            agent=self._agent,
            rank=self.rank,
            world=self.world_size,
            ranks=self._torch_ranks,
            timeout=self.timeout,
        )
        news = _LoadNews(self._news_store(target))
        handover = StateHandover(place, pair=load_pair(self.name, self._epoch, target), sends=sends, news=news)
        self._handovers.add(handover)
        if self._broken >= self._epoch:
            handover.give_up("a member of the epoch has ended")
        return handover

    def _news_store(self, target: int, seconds: float | None = None) -> EpochStore:
        """Where the ranks of a load say to each other that they have failed."""
        seconds = self.timeout if seconds is None else seconds
        return self._store(self._epoch, f"load/{target}", seconds, everywhere=True)

    def _say_failed(self, target: int, error: Exception) -> None:
        self._link.loop_thread.spawn(_said(self._news_store(target), self._failure(error)))

    def _failure(self, error: Exception) -> str:
        return f"{self.replica} rank {self.rank}: {error}"

    def _end_handovers(self, why: str) -> None:
        """From any thread: no state of an older epoch is sent any more."""
        if self._handovers:
            self._link.loop_thread.call(self._all_given_up(why))

    async def _all_given_up(self, why: str) -> None:
        self._give_up(why)

    def _give_up(self, why: str) -> None:
        for handover in tuple(self._handovers):
            handover.give_up(why)

    async def _finish(self, handover: StateHandover) -> None:
        try:
            await handover.finish()
        finally:
            self._handovers.discard(handover)

    def _find_torch_ranks(self) -> None:
        """Learn the ranks of this replica in torch's world, which the meshes of DTensors name. On all its ranks."""
        if dist.is_available() and dist.is_initialized():
            ranks = torch.zeros(self.world_size, dtype=torch.int64)
            ranks[self.rank] = dist.get_rank()
            if self._inside is not None:
                self._inside.allreduce([ranks]).wait()
            self._torch_ranks = {int(one): number for number, one in enumerate(ranks)}

    def _send_bytes(self, data: bytes, rank: int) -> None:
        self._across.send([torch.tensor([len(data)])], rank, 0).wait()
        self._across.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], rank, 0).wait()

    def _receive_bytes(self, rank: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self._across.recv([length], rank, 0).wait()
        if not 0 < int(length) <= MOST_BYTES + 4:
            raise ProtocolError(f"rank {rank} announces a state of {int(length)} bytes")
        data = torch.empty(int(length), dtype=torch.uint8)
        self._across.recv([data], rank, 0).wait()
        return bytes(data.numpy())

    def _configure(self, formed: GroupFormed, deadline: float) -> None:
        epoch, size = formed.epoch, len(formed.seats)
        # Time is left to form another epoch, without a member that does not come because it is stopped.
        seconds = max(0.001, min(self.timeout, deadline - time.monotonic()))
        for group in (self._across, self._inside):
            if group is not None:
                group.set_timeout(seconds)
        try:
            place = (self.replica, self._mine, size, epoch)
            self._across.configure(self._store(epoch, "votes", seconds), *place)
            if self._inside is not None:
                store = self._store(epoch, f"replica/{self.replica}", seconds, everywhere=True)
                self._inside.configure(store, self.replica, self.rank, self.world_size, epoch)
                self._inside_stands = True
            for number, managed in enumerate(self._managed()):
                managed.enter_epoch(self._store(epoch, f"group/{number}", seconds), *place)
        finally:
            for group in (self._across, self._inside):
                if group is not None:
                    group.set_timeout(self.timeout)

    def _store(self, epoch: int, prefix: str, seconds: float, *, everywhere: bool = False) -> EpochStore:
        prefix = prefix if everywhere else f"{prefix}/{self.rank}"
        return EpochStore(self._link, self.name, epoch, prefix, seconds)

    def _blame(self, error: GroupError, names: list[str]) -> None:
        """Remember who could not be reached, for the next attempt."""
        ranks = getattr(error, "waiting_for", ()) or getattr(error, "ranks", ())
        blamed = tuple(names[rank] for rank in ranks if rank < len(names) and names[rank] != self.replica)
        if isinstance(error, GroupTimeoutError) or getattr(error, "reason", "") == "not reached":
            self._unmet = blamed

    def _set_size(self, count: int) -> None:
        self._size = count
        for group in self._managed():
            group.set_participants(count)

    def _managed(self) -> list[Any]:
        found = [reference() for reference in self._groups]
        return [group for group in found if group is not None]

    # ---- the vote --------------------------------------------------------------------------------

    def _step_error(self) -> Exception | None:
        for group in self._managed():
            if (error := group.step_error()) is not None:
                return error  # type: ignore[no-any-return]
        return None

    def _vote(self, ballot: Ballot) -> Decided:
        vote = Vote(self.world_size)
        effect = vote.cast(ballot, broken=self._across.errored() is not None)
        while True:
            match effect:
                case AddAcross(ballot=sent):
                    try:
                        effect = vote.across(self._add(self._across, sent))
                    except GroupError as error:
                        log.warning("group %s: no vote on step %d: %s", self.name, self._step, error)
                        self._suspect(error)
                        effect = vote.across_failed()
                case AddInside(ballot=sent):
                    assert self._inside is not None
                    try:
                        effect = vote.inside(self._add(self._inside, sent))
                    except GroupError as error:
                        effect = vote.inside_failed(str(error))
                case EndReplica(reason=reason):
                    raise self._end(reason)
                case Decided():
                    return effect

    def _add(self, group: ConfigurableGroup, ballot: Ballot) -> Ballot:
        words = self._words.numpy()
        words[:] = ballot.words()
        group.allreduce([self._words]).wait()
        return Ballot.of((int(words[0]), int(words[1])))

    def _suspect(self, error: Exception) -> None:
        """Others were waited for in vain: the next epoch does not wait for them as long again."""
        if isinstance(error, GroupTimeoutError):
            names = [seat.replica for seat in self._seats]
            late = {names[rank] for rank in error.waiting_for if rank < len(names) and rank != self._mine}
            self._suspects = tuple(sorted({*self._suspects, *late}))

    def _end(self, reason: str) -> GroupLostError:
        """This replica is over: its ranks may have voted differently."""
        text = (
            f"replica {self.replica} of group {self.name} is over: a rank of it was lost in the vote on step "
            f"{self._step}, so its ranks may not agree: start the replica again ({reason})"
        )
        self._ended = GroupLostError(text, reason="died", epoch=self._epoch)
        self.leave()
        return self._ended

    def _apply(self, decided: Decided) -> None:
        if decided.committed:
            self._failures = 0
            self._target = (self._target[0] + 1, self._target[1] + self._size)
            if not self._behind:
                self._step, self._batches = self._step + 1, self._batches + self._size
        else:
            self._failures += 1
        if decided.change:
            self._must_change = True
        elif not decided.behind and self._size < len(self._seats):
            self._set_size(len(self._seats))
        if self._behind and decided.committed:
            # Without ``state`` there is nothing that this class could load: the program has taken care of it.
            self._behind, self._last = False, self._epoch
            self._step, self._batches = self._target
        if self.max_failures is not None and self._failures > self.max_failures:
            raise GroupLostError(
                f"{self._failures} steps in a row of group {self.name} did not count, max_failures is "
                f"{self.max_failures}",
                reason="failures",
                epoch=self._epoch,
            )

    # ---- what the agent says, on the loop's thread -------------------------------------------------

    def _pushed(self, push: Any) -> None:
        if isinstance(push, AskGroupProgress) and push.group == self.name:
            self._link.say(
                GroupProgress(group=self.name, replica=self.replica, rank=self.rank, epoch=self._epoch, step=self._step)
            )
        if not isinstance(push, GroupChanging) or push.group != self.name:
            return
        self._heard = max(self._heard, push.epoch)
        if not push.broken or push.epoch < self._epoch:
            return
        self._broken = push.epoch
        self._link.end_exchanges(push.epoch)
        if self._configuring is not None:
            self._across.abort()
            # Ranks of this replica that have not come so far any more must not be waited for.
            if self._inside is not None and not self._inside_stands:
                self._inside.abort()
        self._give_up("a member of the epoch has ended, or could not reach another")
        for group in self._managed():
            group.break_off()

    def _attendance(self) -> list[EnterGroup]:
        return [] if self._asked is None or self._left else [self._asked]

    def _noted(self, noted: Any) -> None:
        if isinstance(noted, GroupNoted) and noted.changing:
            self._heard = max(self._heard, noted.epoch)

    def _check(self) -> None:
        check_not_forked(self._pid, "Members")
        if self._ended is not None:
            raise self._ended
        if self._left:
            raise GroupError("this member has left its group: create another Members")


def _loads(seats: tuple[GroupSeat, ...]) -> list[tuple[int, int]]:
    """Who loads from whom, as ranks of the epoch; the same list on all members.

    If nobody has a state of the group, all load the first one's.
    """
    ahead = [rank for rank, seat in enumerate(seats) if seat.counts]
    if seats[0].last == 0:
        ahead = ahead[:1]
    behind = [rank for rank in range(len(seats)) if rank not in ahead]
    return [(ahead[number % len(ahead)], rank) for number, rank in enumerate(behind)]


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, int | float) and 0 <= value < float("inf"):
        return float(value)
    raise ConfigError(f"{name}={value!r}: a finite number of seconds, at least 0, is needed")


def _attending(message: EnterGroup, launch: str, epoch: int) -> EnterGroup:
    """What a new agent of this host is to hear of a rank that is in ``epoch``."""
    return EnterGroup(
        group=message.group,
        replica=message.replica,
        rank=message.rank,
        world=message.world,
        wants=False,
        launch=launch,
        epoch=epoch,
        last=message.last,
        step=message.step,
        committed=message.committed,
        least=message.least,
        patience=message.patience,
        grace=message.grace,
    )


class _LoadNews:
    """What ranks of a load have said about their failure."""

    def __init__(self, store: EpochStore) -> None:
        self._store = store

    async def failure(self) -> str:
        return (await self._store.heard("failed")).decode(errors="replace")


async def _said(store: EpochStore, text: str) -> None:
    with suppress(EthaError):  # the others find out by their deadline
        await store.say("failed", text.encode())


def _etha_group(timeout: float) -> ConfigurableGroup:
    group: ConfigurableGroup = carrier("etha")(timeout)
    return group
