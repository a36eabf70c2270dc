"""An optimizer that begins a step in `zero_grad` and lets all members vote on it in `step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer as _TorchOptimizer

from etha.errors import ConfigError

_Base: Any = _TorchOptimizer


class Optimizer(_Base):  # type: ignore[misc]
    """Wraps an optimizer of torch for a training loop that knows nothing of members:

        optimizer = groups.Optimizer(members, torch.optim.AdamW(model.parameters()))
        for batch in data:
            optimizer.zero_grad()            # members.begin()
            loss(model, batch).backward()
            optimizer.step()                 # steps if members.commit()

    Call both once per step, on every rank, in this order. ``committed`` says whether the last step counted, and
    ``quorum`` is that of the current one. Schedulers of learning rates and hooks see the wrapped optimizer.
    """

    def __init__(self, members: Any, optimizer: _TorchOptimizer) -> None:
        # Not super().__init__(): parameters and state are those of the wrapped optimizer.
        self.members = members
        self.optimizer = optimizer
        self.quorum: Any = None
        self.committed = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin the step: see who takes part, load the state if this member is behind. Then clear the gradients."""
        self.quorum = self.members.begin()
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step if all members vote for it; otherwise leave parameters and state as they are."""
        if closure is not None:
            raise ConfigError(
                "a closure would compute gradients several times in one step of the members: leave it out"
            )
        self.committed = bool(self.members.commit())
        if self.committed:
            self.optimizer.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        """Hooks, defaults and whatever else an optimizer has are the wrapped one's."""
        if name == "optimizer":
            raise AttributeError(name)  # not yet set: while it is being unpickled or copied
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
