"""The base class of all process groups: torch's interface in front, one method ``_issue(call)`` behind.

torch calls a group from Python, from C++ (DDP, functional collectives) and from compiled graphs, under the names of
several releases. Every name ends in ``_dispatch`` and ``_begin``, which builds a `GroupCall` and gives it to
``_issue``. The group has a size and a rank that follow ``configure``, in C++ too, and a name by which C++ finds it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from etha.errors import GroupError
from etha.groups.calls import GroupCall, normalize, refusal
from etha.groups.store_client import MeetingPlace
from etha.groups.swallowing import Swallower
from etha.groups.work import DummyWork, JoinedWork

log = logging.getLogger(__name__)

Timeout = float | timedelta
_Method = TypeVar("_Method", bound=Callable[..., Any])
_c10d: Any = torch._C._distributed_c10d
#: torch's class, whose stubs give methods names and overloads that differ between its releases.
_Base: Any = dist.ProcessGroup
#: Numbers of registered names, so that a name can be registered again.
_COUNT = itertools.count()


def untraced(method: _Method) -> _Method:
    """Keep Dynamo out of a method: what it traced of a collective would be wrong, and compiled DDP would fail.

    Unlike ``torch.compiler.disable`` it does not import Dynamo, which takes a second, where nobody compiles.
    """

    @functools.wraps(method)
    def outer(*args: Any, **kwargs: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        disable = getattr(dynamo, "disable", None)
        if disable is None:
            return method(*args, **kwargs)
        inner = disabled.get(disable)
        if inner is None:
            inner = disabled[disable] = disable(method)
        return inner(*args, **kwargs)

    disabled: dict[Any, Any] = {}
    outer._torchdynamo_disable = True  # type: ignore[attr-defined]
    return outer  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """What one ``configure`` asks for. ``store`` is an address ``host:port/prefix``, or a torch store."""

    store: Any
    replica_id: str
    rank: int
    world_size: int
    quorum_id: int | None = None
    group_rank: int | None = None
    group_world_size: int | None = None
    global_ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise GroupError(f"a group cannot have {self.world_size} members")
        if not 0 <= self.rank < self.world_size:
            raise GroupError(f"rank {self.rank} is no rank of a group with {self.world_size} members")
        ranks = self.global_ranks
        if ranks is not None and (len(ranks) != self.world_size or len(set(ranks)) != len(ranks)):
            raise GroupError(f"global_ranks {list(ranks)} are not {self.world_size} different ranks")


class ProcessGroup(_Base):  # type: ignore[misc]
    """A process group that can be configured again and again, with other members each time.

    ``timeout``: seconds for a call, and for ``configure``. ``errors``: "raise", or "swallow": then a call that fails
    gives defined outputs instead, ``error()`` holds the error, and calls are skipped until the next ``configure``.
    Concrete groups override ``_configure``, ``_issue``, ``abort``, ``shutdown`` and ``errored``.
    """

    #: Device types of tensors that the group takes; empty for any.
    DEVICES: ClassVar[tuple[str, ...]] = ("cpu",)
    #: torch asks these of a backend, and the group is its own.
    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False
    #: Whether members compare their calls before they move a byte. Then they hear of a call that one of them refused.
    _compares: ClassVar[bool] = False

    def __init__(self, timeout: Timeout = 60.0, errors: Literal["raise", "swallow"] | int = "raise") -> None:
        super().__init__(0, 1)
        if isinstance(errors, int):  # subclasses that give torch's own arguments: rank and size
            timeout, errors = 60.0, "raise"
        if errors not in ("raise", "swallow"):
            raise GroupError(f'errors must be "raise" or "swallow", not {errors!r}')
        self._timeout = as_timedelta(timeout)
        self._swallower = Swallower() if errors == "swallow" else None
        self._rank, self._size = 0, 1
        self._name, self._desc = "", ""
        self._coalescing = threading.local()
        self._place: MeetingPlace | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _register_for_compile(cls)

    # ---- what a concrete group does ----------------------------------------------------------

    def configure(
        self,
        store_addr: Any,
        replica_id: str | int,
        rank: int,
        world_size: int | None = None,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Form the group anew: blocks until all members have come, or raises. Calls that still run end with an error.

        Also takes the older ``(store_addr, rank, world_size)``. ``store_addr`` is ``host:port/prefix`` of a TCPStore,
        or a torch store; each forming needs a prefix of its own.
        """
        if world_size is None:
            replica_id, rank, world_size = "0", int(replica_id), rank
        config = GroupConfig(
            store=store_addr,
            replica_id=str(replica_id),
            rank=int(rank),
            world_size=int(world_size),
            quorum_id=quorum_id,
            group_rank=group_rank,
            group_world_size=group_world_size,
            global_ranks=None if global_ranks is None else tuple(global_ranks),
        )
        if dist.is_initialized() and dist.group.WORLD is self:
            raise GroupError("the default group has a fixed size: destroy it and call init_process_group again")
        self._configure(config)
        if self._swallower is not None:
            self._swallower.error = None
        self._set_members(config.rank, config.world_size)

    # torch 2.15 names members by handles and forms groups of them; its backends do the same under these names.

    @property
    def supports_reconfigure(self) -> bool:
        """Whether ``reconfigure`` works: for every group but the default one, whose size is fixed."""
        return not (dist.is_initialized() and dist.group.WORLD is self)

    def get_reconfigure_handle(self) -> str:
        """What names this member in ``reconfigure``: give it to the others. This process then serves a TCPStore."""
        if self._place is None:
            self._place = MeetingPlace()
        return self._place.handle

    def reconfigure(self, opts: Any) -> DummyWork:
        """``configure`` in the words of torch 2.15, with ``opts`` of ``uuid``, ``handles``, ``timeout`` and ``hints``.

        ``handles`` are those of all members: in a list, in the order of their ranks; in a set, ranks go by the handles.
        ``uuid`` is a number that no reconfigure of these members had before. Returns when all members have come.
        """
        handles = list(opts.handles) if isinstance(opts.handles, list | tuple) else sorted(opts.handles)
        mine = self.get_reconfigure_handle()
        if mine not in handles:
            raise GroupError("reconfigure without this member's own handle: get_reconfigure_handle() returns it")
        address = f"{MeetingPlace.address(handles[0])}/reconfigure/{opts.uuid}"
        before, timeout = self._timeout, getattr(opts, "timeout", None)
        if timeout is not None:
            self.set_timeout(timeout)
        try:
            self.configure(address, mine, handles.index(mine), len(handles), int(opts.uuid))
        finally:
            self.set_timeout(before)
        return DummyWork([])

    def _configure(self, config: GroupConfig) -> None:
        raise GroupError(f"{type(self).__name__} cannot be configured: use a concrete group, such as ProcessGroupEtha")

    def _issue(self, call: GroupCall) -> Any:
        """Begin a call; returns its work."""
        raise GroupError(f"{type(self).__name__} makes no calls: use a concrete group, such as ProcessGroupEtha")

    def abort(self) -> None:
        """End the group at once: calls that run end with `GroupAbortedError`, other members' with `GroupLostError`."""

    def shutdown(self) -> None:
        """Leave the group and free what it holds."""

    def errored(self) -> Exception | None:
        """The first error since the last ``configure``."""
        return self.error()

    def error(self) -> Exception | None:
        """The first error that was swallowed or reported since the last ``configure``."""
        return None if self._swallower is None else self._swallower.error

    def report_error(self, e: Exception) -> None:
        """Skip all calls until the next ``configure``, because of an error that was seen elsewhere."""
        if self._swallower is None:
            raise GroupError('only a group that swallows errors takes reports: make it with errors="swallow"')
        self._swallower.report(e)

    def set_timeout(self, timeout: Timeout) -> None:
        """Seconds, or a timedelta, for each further call and ``configure``."""
        self._timeout = as_timedelta(timeout)

    def _set_members(self, rank: int, size: int) -> None:
        """Take the rank and size of a forming; dist.get_rank(group) follows."""
        self._rank, self._size = rank, size
        ranks = dist.distributed_c10d._world.pg_group_ranks
        if self in ranks and dist.is_initialized() and dist.group.WORLD is not self:
            ranks[self] = {dist.get_rank(): rank}

    # ---- who the group is --------------------------------------------------------------------

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        """``size()`` for C++."""
        return self.size()

    def getRank(self) -> int:
        """``rank()`` for C++."""
        return self.rank()

    def getBackendName(self) -> str:
        """A name of the kind of group."""
        return "etha"

    def name(self) -> str:
        return self.getBackendName()

    def getGroupName(self) -> str:
        """The name by which C++ and compiled graphs find the group; empty until it is registered."""
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def _set_group_name(self, name: str) -> None:
        self.setGroupName(name)

    def _set_group_desc(self, desc: str) -> None:
        self.setGroupDesc(desc)

    @property
    def group_name(self) -> str:
        return self.getGroupName()

    @property
    def group_desc(self) -> str:
        return self.getGroupDesc()

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self.DEVICES]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        """The group itself: torch asks it what its backend can do."""
        return self

    def _get_backend_name(self) -> str:
        return self.getBackendName()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: calls are compared by more than a number."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # ---- where torch finds it ----------------------------------------------------------------

    def register(self, name: str) -> ProcessGroup:
        """Make the group known to torch: DeviceMesh, functional collectives and ``torch.compile`` find it. Returns it.

        To torch it is a group of this process alone, because its members change. If ``torch.distributed`` is not
        initialized, only C++ and compiled graphs find it.
        """
        if self._name:
            raise GroupError(f"the group is registered already, as {self._name}")
        if not dist.is_initialized():
            self.setGroupName(f"{self.getBackendName()}:{name}:{next(_COUNT)}")
            _c10d._register_process_group(self.getGroupName(), self)
            return self
        backend = f"{self.getBackendName()}:{name}:{next(_COUNT)}"
        dist.Backend.register_backend(backend, lambda *_: self, devices=list(self.DEVICES) or ["cpu"])
        desc = f"{self.getBackendName()}:{name}"
        dist.new_group(ranks=[dist.get_rank()], backend=backend, group_desc=desc, timeout=self._timeout)
        self._set_members(self._rank, self._size)
        return self

    def unregister(self) -> None:
        """Undo ``register``. The group is shut down."""
        if self in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self)
        elif self._name:
            _c10d._unregister_process_group(self._name)
            self.shutdown()
        self._name = ""

    # ---- calls -------------------------------------------------------------------------------

    def _dispatch(self, method: str, *args: Any) -> Any:
        """Every call comes through here, in the words of torch."""
        given = _without_unset(args)
        if self._swallower is None:
            work = self._begin(method, given)
        else:
            begin, normal_form = lambda: self._begin(method, given), lambda: self._normal_form(method, given)
            work = self._swallower.run(method, begin, normal_form, self.rank())
        pending = getattr(self._coalescing, "works", None)
        if pending is not None:
            pending.append(work)
        return work

    def _begin(self, method: str, args: tuple[Any, ...]) -> Any:
        """Begin a call that is given in the words of torch; returns its work."""
        try:
            call = self._normal_form(method, args)
        except GroupError as error:
            self._say_refusal(method, error)
            raise
        return self._issue(call)

    def _say_refusal(self, method: str, error: GroupError) -> None:
        """Let the other members know that this one has refused its own arguments, because they may wait for the call.

        Those that have made the call get `GroupMismatchError`. If all have refused theirs, the group goes on.
        """
        call = refusal(method, str(error)) if self._compares and self.size() > 1 else None
        if call is not None:
            try:
                self._issue(call)
            except GroupError as failed:
                log.debug("the other members do not hear that %s was refused: %s", method, failed)

    def _normal_form(self, method: str, args: tuple[Any, ...]) -> GroupCall:
        return normalize(method, args, rank=self.rank(), size=self.size(), devices=self.DEVICES)

    @untraced
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Any:
        return self._dispatch("allreduce", tensors, opts if op is None else op, timeout)

    @untraced
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._dispatch("allreduce_coalesced", tensors, opts)

    @untraced
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None) -> Any:
        return self._dispatch("broadcast", tensors, opts if root is None else root, timeout)

    @untraced
    def broadcast_one(self, tensor: Tensor, root: int) -> Any:
        """Broadcast one tensor from ``root``, a rank of the group."""
        opts = dist.BroadcastOptions()
        opts.rootRank = root
        return self.broadcast([tensor], opts)

    @untraced
    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Any:
        return self._dispatch("reduce", tensors, opts if root is None else root, op, timeout)

    @untraced
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        return self._dispatch("allgather", output_tensors, input_tensors, opts)

    @untraced
    def allgather_coalesced(self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None) -> Any:
        return self._dispatch("allgather_coalesced", output_lists, input_list, opts)

    @untraced
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._dispatch("all_gather_single", output, input, opts)

    @untraced
    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._dispatch("_allgather_base", output, input, opts)

    @untraced
    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> Any:
        return self._dispatch("all_gather_single_coalesced", output_lists, input_list, opts)

    @untraced
    def allgather_into_tensor_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> Any:
        return self._dispatch("allgather_into_tensor_coalesced", output_lists, input_list, opts)

    @untraced
    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Any:
        return self._dispatch("gather", output_tensors, input_tensors, opts if root is None else root, timeout)

    @untraced
    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Any:
        return self._dispatch("scatter", output_tensors, input_tensors, opts if root is None else root, timeout)

    @untraced
    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Any:
        return self._dispatch("reduce_scatter", output_tensors, input_tensors, opts if op is None else op, timeout)

    @untraced
    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Any:
        return self._dispatch("reduce_scatter_single", outputTensor, inputTensor, opts)

    @untraced
    def _reduce_scatter_base(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Any:
        return self._dispatch("_reduce_scatter_base", outputTensor, inputTensor, opts)

    @untraced
    def reduce_scatter_single_coalesced(
        self,
        outputTensors: list[Tensor],
        inputTensors: list[Tensor],
        opts: Any = None,
    ) -> Any:
        return self._dispatch("reduce_scatter_single_coalesced", outputTensors, inputTensors, opts)

    @untraced
    def reduce_scatter_tensor_coalesced(
        self,
        outputTensors: list[Tensor],
        inputTensors: list[Tensor],
        opts: Any = None,
    ) -> Any:
        return self._dispatch("reduce_scatter_tensor_coalesced", outputTensors, inputTensors, opts)

    @untraced
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        return self._dispatch("all_to_all_single", output, input, output_split_sizes, input_split_sizes, opts)

    @untraced
    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        return self._dispatch("alltoall_base", output, input, output_split_sizes, input_split_sizes, opts)

    @untraced
    def alltoall(self, output_tensor: list[Tensor], input_tensor: list[Tensor], opts: Any = None) -> Any:
        return self._dispatch("alltoall", output_tensor, input_tensor, opts)

    @untraced
    def barrier(self, opts: Any = None) -> Any:
        return self._dispatch("barrier", opts)

    @untraced
    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:
        return self._dispatch("send", tensors, dstRank, tag)

    @untraced
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:
        return self._dispatch("recv", tensors, srcRank, tag)

    @untraced
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        return self._dispatch("recv_anysource", tensors, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the works of this thread's calls until ``_end_coalescing``. The calls themselves begin as always."""
        self._coalescing.works = []

    def _end_coalescing(self, device: torch.device) -> JoinedWork:
        works, self._coalescing.works = getattr(self._coalescing, "works", None) or [], None
        return JoinedWork(works)


def _without_unset(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments without the trailing ones that nobody gave."""
    end = len(args)
    while end and args[end - 1] is None:
        end -= 1
    return args[:end]


def as_timedelta(timeout: Timeout) -> timedelta:
    """Seconds or a timedelta, more than none."""
    try:
        found = timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))
    except (TypeError, ValueError, OverflowError):
        raise GroupError(f"a timeout of {timeout!r}: a finite number of seconds or a timedelta is needed") from None
    if found <= timedelta(0):
        raise GroupError(f"a timeout of {found.total_seconds():g} s has passed already")
    return found


def _register_for_compile(cls: type[ProcessGroup]) -> None:
    """Tell torch.compile to guard on size and rank, so that graphs are compiled again after a resize.

    Without it compiled code keeps the size that it saw first. Where torch cannot be told, outputs of the wrong size are
    refused when the call comes.
    """
    try:
        from torch._library.opaque_object import MemberType, register_opaque_type
    except ImportError:
        return
    names = ("size", "rank", "_get_backend_name", "group_name", "group_desc", "__eq__", "__ne__")
    with suppress(TypeError):  # torch 2.11 takes no classes that derive from its own process group
        register_opaque_type(
            cls,
            typ="reference",
            guard_fn=lambda group: [group.size(), group.rank()],
            members=dict.fromkeys(names, MemberType.USE_REAL),
        )


_register_for_compile(ProcessGroup)
