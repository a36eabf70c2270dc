"""FirstLoad: a version on its way into a model that vLLM has just created, and has not processed yet.

The loaders find the parameters as they expect them, so nothing has to be put back (``loading.py``), and what is packed
is packed once. Only for models without quantized layers; vLLM quantizes others while it loads.
"""

from __future__ import annotations

import torch
from torch import nn

from etha.integrations.vllm.weights.keep import Meta, Recording, nothing
from etha.integrations.vllm.weights.loading import loader_of, places_of
from etha.integrations.vllm.weights.received import Agree, agreed, refuse_recorded, room_of, stand_in_of


class FirstLoad:
    """A version for ``model``. Register ``room()`` and ``regions``; ``apply`` loads it. See ``Received``."""

    def __init__(
        self, model: nn.Module, metas: list[Meta], device: torch.device, *, agree: Agree, memory: torch.device
    ) -> None:
        self._model, self._device, self._memory = model, device, memory
        params = {place.name: place.seen for place in places_of(model)}
        recorded = Recording(params, device).of(metas, loader_of(model))
        refuse_recorded(recorded, metas)
        self.kept = agreed(recorded.kept, agree)
        self.regions = {name: item.region for name, item in self.kept.items()}
        self.shapes = {name: item.meta.shape for name, item in self.kept.items()}
        self._tensors: dict[str, torch.Tensor] = {}

    def room(self) -> dict[str, torch.Tensor]:
        """Memory for the kept region of each tensor; allocated once."""
        if not self._tensors:
            self._tensors = {name: room_of(item, self._memory) for name, item in self.kept.items()}
        return self._tensors

    def apply(self) -> None:
        """Load what was received, as vLLM loads a checkpoint."""
        items = [item for item in self.kept.values() if not nothing(item)]
        loader_of(self._model)(stand_in_of(item, self._tensors[item.meta.name], self._device) for item in items)
