"""DDP for groups whose members come and go: its buckets are the final ones from the first step on.

torch's DDP reduces all gradients in one bucket in its first step and rebuilds its buckets before the second one, with
two broadcasts. A process that joins later does that while the others do not, so their calls do not match. Here the
constructor rebuilds the buckets, over a group of one, after a backward pass in which every parameter has a gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import parallel

from etha.errors import ConfigError
from etha.groups.dummy import ProcessGroupDummy

log = logging.getLogger(__name__)

_TorchDDP: Any = parallel.DistributedDataParallel


class DistributedDataParallel(_TorchDDP):  # type: ignore[misc]
    """torch's DistributedDataParallel over a group whose members come and go. Takes the same arguments.

    A process can join at any step, because all steps make the same calls. Over a `ManagedProcessGroup` the constructor
    calls no other member: weights are equal because all start from the same seed or checkpoint, and newcomers load
    theirs (`Members.state`). ``static_graph`` is refused, because its first step differs from the others.
    """

    #: For `plain_ddp_hint`.
    rebuilds_buckets = False

    def __init__(self, module: nn.Module, *args: Any, process_group: Any, **kwargs: Any) -> None:
        if kwargs.get("static_graph"):
            raise ConfigError(
                "static_graph=True: the first step of a newcomer would make other calls than the steps of the others; "
                "leave it out"
            )
        if hasattr(process_group, "enter_epoch"):
            kwargs.setdefault("init_sync", False)
        parameters = [p for p in module.parameters() if p.requires_grad]
        if reason := _why_not_rebuilt(parameters, kwargs):
            log.debug("DDP looks for unused parameters in every step, because %s", reason)
            kwargs["find_unused_parameters"] = True
        super().__init__(module, *args, process_group=process_group, **kwargs)
        if not kwargs.get("find_unused_parameters") and not getattr(self, "_use_python_reducer", False):
            self._rebuild_buckets_now(parameters)

    def _rebuild_buckets_now(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have the reducer see a backward pass in the reverse order of the parameters, as it will be about."""
        grads = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        alone = ProcessGroupDummy(0, 1)  # a name, because C++ calls Python's methods only as long as Python has it
        self.reducer._update_process_group(alone)
        try:
            with torch.enable_grad():
                self.reducer.prepare_for_forward()
                self.reducer.prepare_for_backward([])
                total = sum((p.real if p.is_complex() else p).sum() for p in parameters)
                assert isinstance(total, torch.Tensor)
                total.backward()  # type: ignore[no-untyped-call]
            if not self.reducer._rebuild_buckets():
                raise ConfigError("this torch cannot rebuild DDP's buckets at once: give find_unused_parameters=True")
        finally:
            self.reducer._update_process_group(self.process_group)
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad


def _why_not_rebuilt(parameters: Sequence[nn.Parameter], kwargs: dict[str, Any]) -> str:
    """Why buckets cannot be rebuilt in the constructor; then DDP must look for unused parameters and never rebuilds."""
    if kwargs.get("mixed_precision") is not None:
        return "mixed_precision replaces the parameters in forward"
    if kwargs.get("delay_all_reduce_named_params") is not None:
        return "some parameters are reduced by hand"
    if len({p.device for p in parameters}) > 1:
        return "gradients of several devices come in no fixed order"
    if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters):
        return "parameters have hooks, which must not see a gradient before the first step"
    return ""
