"""Training that synchronizes every so many steps: LocalSGD averages weights, DiLoCo steps an outer optimizer.

    inner steps     1 2 3 ... sync_every | 1 2 3 ...
    members                        begin, average, commit

Between two synchronizations a replica calls nobody, so replicas may come and go. A synchronization is one step of the
members: it counts on all replicas or on none.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from etha.errors import ConfigError


class _Periodic(ABC):
    """Counts the steps of an optimizer between entering and leaving, and calls ``_after_step`` after each."""

    def __init__(self, members: Any, optimizer: Optimizer, process_group: Any) -> None:
        self._members, self._optimizer, self._group = members, optimizer, process_group
        self._local_step = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> Any:
        self._hooks.append(self._optimizer.register_step_post_hook(self._count_step))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _count_step(self, *_: Any) -> None:
        self._local_step += 1
        self._after_step()

    @abstractmethod
    def _after_step(self) -> None:
        """Synchronize if it is time to."""


class LocalSGD(_Periodic):
    """Averages the weights of all replicas after every ``sync_every`` steps of ``optimizer`` (arXiv:1805.09767).

        with groups.LocalSGD(members, model, optimizer, sync_every=100, process_group=group):
            for batch in data:
                optimizer.zero_grad(); loss(model, batch).backward(); optimizer.step()

    ``process_group`` is a `ManagedProcessGroup` of ``members``. If a synchronization does not count, each replica keeps
    its weights, and the next one averages them. Buffers are not averaged. In a replica of several ranks each averages
    its shards of DTensors.
    """

    def __init__(
        self, members: Any, model: nn.Module, optimizer: Optimizer, sync_every: int, *, process_group: Any
    ) -> None:
        super().__init__(members, optimizer, process_group)
        if sync_every < 1:
            raise ConfigError(f"sync_every={sync_every}: synchronize after at least 1 step")
        self._model, self._sync_every = model, sync_every

    def _after_step(self) -> None:
        if self._local_step >= self._sync_every:
            self.sync()

    def sync(self) -> bool:
        """Average the weights now. Whether that counted."""
        self._local_step = 0
        quorum = self._members.begin()
        weights = [local_part(p) for p in self._model.parameters()]
        averages = [w.clone() for w in weights]
        Average(self._group, averages, quorum.size).wait()
        committed = bool(self._members.commit())
        if committed:
            for weight, average in zip(weights, averages, strict=True):
                weight.copy_(average)
        return committed


class DiLoCo(_Periodic):
    """Every ``sync_every`` inner steps an outer optimizer steps with the averaged change of the weights.

        with groups.DiLoCo(members, [model], inner, outer, sync_every=500, process_group=group) as diloco:
            members.state(model, inner, extra=(diloco.state_dict, diloco.load_state_dict))
            ...

    The change of a replica is its weights at the last synchronization less its present ones (arXiv:2311.08105). With
    several ``model_fragments`` one of them is synchronized every ``sync_every / fragments`` steps, in turn
    (arXiv:2501.18512). ``fragment_sync_delay``: begin to send so many inner steps before the result is used;
    ``fragment_update_alpha``: how much of the replica's own weights stays in the result, 0 to 1.

    ``outer_optimizer``: one for all fragments, or a list with one each. Copies of the weights lie on ``backup_device``
    (default: the CPU). If a synchronization does not count, the fragment goes back to the weights of the last one that
    did, and is synchronized again next time.
    """

    def __init__(
        self,
        members: Any,
        model_fragments: Sequence[nn.Module],
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer | Sequence[Optimizer],
        sync_every: int,
        *,
        process_group: Any,
        backup_device: torch.device | str = "cpu",
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        super().__init__(members, inner_optimizer, process_group)
        count = len(model_fragments)
        outer = [outer_optimizer] * count if isinstance(outer_optimizer, Optimizer) else list(outer_optimizer)
        if count < 1 or len(outer) != count:
            raise ConfigError(f"{count} fragments of the model and {len(outer)} outer optimizers")
        if sync_every < count or sync_every % count:
            raise ConfigError(f"sync_every={sync_every} must be a multiple of the number of fragments, {count}")
        self._interval = sync_every // count
        if not 0 <= fragment_sync_delay < self._interval:
            raise ConfigError(f"fragment_sync_delay={fragment_sync_delay} must be less than {self._interval} steps")
        if not 0 <= fragment_update_alpha <= 1 or math.isnan(fragment_update_alpha):
            raise ConfigError(f"fragment_update_alpha={fragment_update_alpha} is not between 0 and 1")
        self._delay, self._alpha = fragment_sync_delay, fragment_update_alpha
        self._fragments = [
            _Fragment(fragment, one, torch.device(backup_device))
            for fragment, one in zip(model_fragments, outer, strict=True)
        ]
        self._sending: tuple[_Fragment, Average] | None = None

    def _after_step(self) -> None:
        if self._local_step == self._interval - self._delay:
            self._send()
        if self._local_step >= self._interval:
            self._receive()

    def _send(self) -> None:
        """Begin the members' step and to average the change of one fragment. All replicas take the same one."""
        quorum = self._members.begin()
        fragment = self._fragments[quorum.step % len(self._fragments)]
        self._sending = (fragment, Average(self._group, fragment.changes(), quorum.size))

    def _receive(self) -> None:
        """Use the average if the step counts."""
        self._local_step = 0
        assert self._sending is not None
        (fragment, average), self._sending = self._sending, None
        average.wait()
        own = fragment.go_back(keep=self._alpha > 0)
        if self._members.commit():
            fragment.step(average.tensors)
            fragment.mix(own, self._alpha)

    def state_dict(self) -> dict[str, Any]:
        """Weights of the last synchronization and the outer optimizers' state, for newcomers and checkpoints."""
        return {
            "fragments": [
                {"weights": [w.clone() for w in each.backup], "outer_optimizer": each.optimizer.state_dict()}
                for each in self._fragments
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of another replica or of a checkpoint."""
        for fragment, given in zip(self._fragments, state["fragments"], strict=True):
            for mine, theirs in zip(fragment.backup, given["weights"], strict=True):
                mine.copy_(theirs)
            fragment.optimizer.load_state_dict(given["outer_optimizer"])


class _Fragment:
    """A part of the model that is synchronized as one, with its weights of the last synchronization."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, backup_device: torch.device) -> None:
        self.optimizer = optimizer
        self.parameters = list(module.parameters())
        self.backup = [_empty_backup(local_part(p), backup_device) for p in self.parameters]
        self._save()

    def _save(self) -> None:
        for kept, p in zip(self.backup, self.parameters, strict=True):
            kept.copy_(local_part(p))

    def changes(self) -> list[Tensor]:
        """What the inner steps have taken away from the weights: a gradient for the outer optimizer."""
        return [kept.to(p.device) - local_part(p) for kept, p in zip(self.backup, self.parameters, strict=True)]

    def go_back(self, *, keep: bool) -> list[Tensor]:
        """Put the weights of the last synchronization in place. Returns copies of the own ones if they are needed."""
        own = [local_part(p).clone() for p in self.parameters] if keep else []
        for kept, p in zip(self.backup, self.parameters, strict=True):
            local_part(p).copy_(kept)
        return own

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Step the outer optimizer and keep the result."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None  # the inner step's, also of other fragments
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = _like(p, gradient)
        self.optimizer.step()
        for p in self.parameters:
            p.grad = None
        self._save()

    def mix(self, own: Sequence[Tensor], alpha: float) -> None:
        for p, weight in zip(self.parameters, own, strict=False):
            local_part(p).lerp_(weight, alpha)


class Average:
    """Tensors on their way to being the average over all replicas, each in place; one call per dtype and device."""

    def __init__(self, group: Any, tensors: list[Tensor], count: int) -> None:
        self.tensors, self._count = tensors, count
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        options: Any = dist.AllreduceCoalescedOptions()
        options.reduceOp = dist.ReduceOp.SUM
        self._works = [group.allreduce_coalesced(each, options) for each in alike.values()]

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for tensor in self.tensors:
            tensor.div_(self._count)
        self._works = []


def local_part(p: Tensor) -> Tensor:
    """The elements of a parameter that this rank holds, as a tensor that shares their memory and has no gradient."""
    p = p.detach()
    return p.to_local() if hasattr(p, "to_local") else p


def _like(p: Tensor, local: Tensor) -> Tensor:
    """A local tensor as a gradient of a parameter: a DTensor if that is one."""
    if not hasattr(p, "to_local"):
        return local
    from torch.distributed.tensor import DTensor

    given: Any = p
    return DTensor.from_local(
        local, given.device_mesh, given.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def _empty_backup(like: Tensor, device: torch.device) -> Tensor:
    pinned = device.type == "cpu" and like.device.type != "cpu"
    return torch.empty(like.shape, dtype=like.dtype, device=device, pin_memory=pinned)
