"""Presents a vLLM model as its loaders expect it, although its weights were processed long ago, and reloads it.

While a model serves, its parameters may be packed, fused or gone. vLLM can put them back as they were created, on the
meta device. Its loaders then fill them as in a first load (filling.py). As soon as a module has had all of a load's
writes, it is processed, and the result is copied to the live module's memory. vLLM's own layerwise reload also copies
the result, but it counts and keeps only what goes through a parameter's ``weight_loader``, and loses the rest.
"""

from __future__ import annotations

import copy
import ctypes
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_meta_tensor
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.utils.torch_utils import set_default_torch_dtype

from etha.errors import ConfigError, TransferError
from etha.integrations.vllm.weights.compare import (
    Comparison,
    Experts,
    Integers,
    ProbeOutcome,
    Product,
    multiplies,
    unequal,
)
from etha.integrations.vllm.weights.filling import Filling, MetaReadError, ParameterMemory, RealIndices
from etha.integrations.vllm.weights.keep import Meta, Recorded, Recording
from etha.integrations.vllm.weights.quantized import cast_refused, exact_integers, kernel_of, quantized

Weights = Iterable[tuple[str, torch.Tensor]]
#: Warns about every layer into which nothing was loaded. Here that would be all of them, because layers are filled in
#: another way.
_NOISE = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
#: Methods that leave a parameter as it was loaded, or empty if they have packed it.
_KEEPS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def record(model: nn.Module, model_config: Any, metas: Iterable[Meta], device: torch.device) -> Recorded:
    """What this worker's model keeps of each checkpoint tensor. The model continues to serve."""
    with _created(model, model_config), _modules_kept(model):
        return Recording({place.name: place.seen for place in places_of(model)}, device).of(metas, loader_of(model))


class Reload:
    """Brings checkpoint tensors into the live ``model``, a module at a time. Modules without tensors stay unchanged.

    Call ``rehearse`` first, with tensors of the same names, shapes and dtypes. It changes nothing, counts a load's
    writes to each parameter, and refuses what ``run`` could not bring in whole.
    """

    def __init__(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        self._model, self._config, self._device = model, model_config, device
        self._due: dict[str, int] = {}
        self._indices: Any = nullcontext()
        self._whole: set[str] = set()
        #: Parameters that the loaders read again when their module may be finished.
        self._reread: set[str] = set()
        #: Of these, the ones that have elements which no load writes to.
        self._padded: set[str] = set()
        #: Parameters that the loaders make while they load: module, name in it, name in the model.
        self._made: list[tuple[nn.Module, str, str]] = []
        self._twins = _twins(model)
        #: Parameters of which the rest stays what the engine holds.
        self.partial: list[str] = []

    def rehearse(self, weights: Sequence[tuple[str, torch.Tensor]], due: Mapping[str, int]) -> None:
        """ConfigError, naming the parameter, for what cannot be brought in whole; ``due`` are writes known before."""
        try:
            self._rehearse(weights, due)
        except MetaReadError:
            self._indices = RealIndices()  # only then, because it costs time at each of torch's functions
            self._rehearse(weights, due)

    def _rehearse(self, weights: Weights, due: Mapping[str, int]) -> None:
        with _created(self._model, self._config), _modules_kept(self._model) as replaced:
            places = places_of(self._model)
            for place in places:
                place.due = due.get(place.name)
            filling = _Filling(places, self._device)
            with torch.no_grad(), self._indices, filling:
                loader_of(self._model)(self._forgetting(weights, places, filling))
            filled = [place for place in places if place.writes]
            self._refuse_casts(filling)
            self._refuse_rereads([place for place in places if place.read_alone])
            for place in filled:
                self._due[place.name] = place.writes
                if place.covered() >= getattr(place.seen, "weight_loader_numel", place.seen.numel()):
                    self._whole.add(place.name)
                    if place.covered() < place.seen.numel():
                        self._padded.add(place.name)
                place.memory = None
            self._made = _made(self._model, places)
            made = {(module, leaf) for module, leaf, _ in self._made}
            modules = {place.module for place in filled}
            self._refuse_parts([p for p in places if p.module in modules and (p.module, p.leaf) not in made])
        if replaced:
            raise ConfigError(
                f"the engine's loader makes the module {replaced[0]!r} anew with every load, which a live model cannot "
                f"follow: this model is not supported"
            )
        self._refuse_made()
        self._refuse_ties(filled)

    def _forgetting(
        self, weights: Weights, places: list[ParameterMemory], filling: Filling
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights; memory of modules that are full is given back before the next one."""
        for pair in weights:
            yield pair
            filling.step += 1
            for place in places:
                if place.memory is not None and place.due is not None and place.writes >= place.due:
                    place.memory = None

    def _refuse_casts(self, filling: Filling) -> None:
        for name, source, target in sorted(filling.casts, key=str):
            raise ConfigError(cast_refused(name, source, target))

    def _refuse_rereads(self, places: list[ParameterMemory]) -> None:
        """Parameters that the loaders compute with after they were loaded, where what is packed cannot be read back.

        vLLM makes the head of some classifiers from the tied head of a language model, when all else is loaded.
        """
        self._reread = {place.name for place in places}
        for place in places:
            if place.seen.device.type == "meta" and not _readable(place):
                raise ConfigError(
                    f"the engine's loaders compute with {place.name!r} after it was loaded, which the engine holds "
                    f"packed and cannot read back: this model is not supported"
                )

    def _refuse_parts(self, places: list[ParameterMemory]) -> None:
        """Modules that get a part of what they are made of, where what is packed cannot be read back."""
        for place in places:
            if place.name in self._whole or not place.seen.numel() or place.leaf in SKIP_TENSORS - {"bias"}:
                continue
            if isinstance(place.seen, nn.Parameter) and not _readable(place):
                raise ConfigError(
                    f"the trainer's tensors fill {place.covered()} of {place.seen.numel()} elements of the engine's "
                    f"{place.name!r}, which it holds packed and cannot read back: send all tensors that the module "
                    f"{type(place.module).__name__} is made of, or none of them"
                )
            if place.writes:
                self.partial.append(place.name)

    def _refuse_made(self) -> None:
        """Parameters that the loaders make and this engine, which was not started from such a checkpoint, has not."""
        for module, leaf, name in self._made:
            if getattr(module, leaf, None) is None:
                raise ConfigError(
                    f"the engine's loader makes {name!r}, which this engine has not, for it has loaded no checkpoint "
                    f"with it: start the engine from a checkpoint and not with weights of its own (load_format)"
                )

    def _refuse_ties(self, filled: list[ParameterMemory]) -> None:
        """Two parameters that are one memory in the engine, and are both sent."""
        owners: dict[int, str] = {}
        for place in filled:
            live = place.module._parameters.get(place.leaf)
            if live is None or not live.numel():
                continue
            other = owners.setdefault(live.untyped_storage()._cdata, place.name)
            if other != place.name:
                raise ConfigError(
                    f"the engine holds {other!r} and {place.name!r} as one tied memory, and the trainer sends both: "
                    f"leave one of them out (EthaSource), or start the engine with a configuration that does not tie"
                )

    def run(self, weights: Weights) -> set[nn.Module]:
        """Load ``weights``; returns the modules that were written. Call ``settle`` next.

        TransferError if the loaders write differently than in the rehearsal. The model is then of two versions.
        """
        self._twins = _twins(self._model)  # again: buffers may be others since the engine has slept
        live = self._live_made()
        with _created(self._model, self._config):
            done, wrong = self._load(weights, self._finish)
            for (module, leaf, _), was in zip(self._made, live, strict=True):
                _keep_memory(module, leaf, was)
        if wrong:
            raise TransferError(
                f"the engine's loaders did not do what they did when the trainer was met: {len(wrong)} parameters, "
                f"{wrong[0]!r} first, are not those of the version that was received; "
                f"the model is of two versions until it has received one whole: restart the engine, or send again"
            )
        return done

    def compare(self, weights: Weights) -> Comparison:
        """Compare the live model with what a load of ``weights`` would make of it. The model does not change."""
        found, probed = Comparison(), []
        names = {module: name for name, module in self._model.named_modules()}

        def full(module: nn.Module, places: list[ParameterMemory]) -> None:
            probed.extend(self._compared(names[module], module, places, found))
            for place in places:
                place.closed = True
                if place.name not in self._reread:
                    place.memory = None

        live = self._live_made()
        with _created(self._model, self._config):
            _, wrong = self._load(weights, full)
            for (module, leaf, name), was in zip(self._made, live, strict=True):
                found.add(name, unequal(was, getattr(module, leaf)))
        found.differs += [f"{name}: the loaders did not do what they did when the trainer was met" for name in wrong]
        self._add_products(probed, names, found)
        return found

    def _live_made(self) -> list[torch.Tensor]:
        """What the engine computes with of that which its loaders make anew."""
        return [getattr(module, leaf).detach() for module, leaf, _ in self._made]

    def compare_computed(self, modules: Iterable[nn.Module]) -> Comparison:
        """Which of ``modules`` compute with something else than the weight that they hold, which can be read."""
        found, probed = Comparison(), []
        names = {module: name for name, module in self._model.named_modules()}
        for module in modules:
            weight = module._parameters.get("weight")
            if weight is not None and multiplies(module, weight):
                probed.append(ProbeOutcome(f"{names[module]}.weight", module, Product(weight.detach())))
        self._add_products(probed, names, found)
        return found

    @torch.no_grad()
    def _add_products(self, probed: list[ProbeOutcome], names: Mapping[nn.Module, str], found: Comparison) -> None:
        for one in self._with_ties(probed, names):
            found.add(one.name, one.product.wrong(one.module))

    def _compared(self, name: str, module: Any, places: list[ParameterMemory], found: Comparison) -> list[ProbeOutcome]:
        """Compare what can be read of a module; its products, for what cannot, or is computed with as a copy."""
        if quantized(module):
            return self._compared_quantized(name, module, places, found)
        loaded = {place.leaf: place for place in places if place.memory is not None}
        made = {leaf: place.memory for leaf, place in loaded.items() if place.memory is not None}
        products: list[ProbeOutcome] = []
        covered: set[str] = set()
        weight = made.get("weight")
        if weight is not None and multiplies(module, weight):
            products.append(ProbeOutcome(f"{name}.weight", module, Product(weight)))
            covered = {"weight"}
        elif Experts.possible(module, made):
            products.append(ProbeOutcome(name, module, Experts(module, made["w13_weight"], made["w2_weight"])))
            covered = set(made)
        for leaf, place in loaded.items():
            memory, live = made[leaf], _live(place)
            if place.seen.device.type != "meta":
                live = place.seen
            twins = self._twins.get((id(module), leaf), ())
            for twin in twins:
                found.add(place.name, unequal(twin, memory.view_as(twin)))
            if live is not None and (_readable(place) or not isinstance(place.seen, nn.Parameter)):
                found.add(place.name, unequal(live, memory))
            elif leaf not in covered and not twins:
                found.left_out.append(place.name)
        return products

    def _compared_quantized(
        self, name: str, module: Any, places: list[ParameterMemory], found: Comparison
    ) -> list[ProbeOutcome]:
        """The same for a quantized module: its products where a kernel holds it, else all that is made of it."""
        made = {place.leaf: place.memory for place in places if place.memory is not None}
        for place in places:
            if place.seen.device.type != "meta" and place.memory is not None:
                found.add(place.name, unequal(place.seen, made.pop(place.leaf)))
        config: Any = getattr(kernel_of(module), "config", None)
        if hasattr(kernel_of(module), "dnnl_handler"):
            if config.is_static_input_scheme and not config.input_symmetric:
                found.left_out += [f"{name}.{leaf}" for leaf in made]
                return []
            shifted, scale = not config.input_symmetric, made.get("input_scale")
            product = Integers(
                made["weight"], made["weight_scale"], module.logical_widths, self._config.dtype, scale, shifted
            )
            if not exact_integers():
                product.expect(self._computed_anew(module, made, product.probe))
            return [ProbeOutcome(f"{name}.weight", module, product)]
        info: Any = get_layerwise_info(module)
        parameters: dict[str, torch.Tensor] = info.kernel_tensors[0]
        self._make(module, places)
        self._refuse_others(module, parameters)
        for leaf, live in parameters.items():
            if (new := getattr(module, leaf)) is not live:
                found.add(f"{name}.{leaf}", unequal(live, new))
        return []

    def _computed_anew(self, module: Any, made: Mapping[str, torch.Tensor], probe: torch.Tensor) -> torch.Tensor:
        """What ``module`` would compute of ``probe`` if its kernel packed ``made`` now, beside what it serves with."""
        other, kernel = copy.copy(module), copy.copy(kernel_of(module))
        other._parameters = dict(module._parameters)
        for leaf, tensor in made.items():
            is_parameter = isinstance(tensor, nn.Parameter)
            other._parameters[leaf] = tensor if is_parameter else nn.Parameter(tensor, requires_grad=False)
        with set_default_torch_dtype(self._config.dtype):
            kernel.process_weights_after_loading(other)
        computed: torch.Tensor = kernel.apply_weights(other, probe, None)
        return computed

    def _with_ties(self, probed: list[ProbeOutcome], names: Mapping[nn.Module, str]) -> Iterator[ProbeOutcome]:
        """Modules, and those that nothing was loaded into, but whose weight is that of one of them."""
        yield from probed
        own = {one.module for one in probed}
        for one in probed:
            weight = one.module._parameters.get("weight")
            if weight is None or not weight.numel():
                continue
            for module, name in names.items():
                other = module._parameters.get("weight")
                tied = other is not None and other.untyped_storage()._cdata == weight.untyped_storage()._cdata
                if tied and other is not None and module not in own and multiplies(module, other):
                    yield ProbeOutcome(f"{name}.weight", module, one.product)

    def _load(
        self, weights: Weights, full: Callable[[nn.Module, list[ParameterMemory]], None]
    ) -> tuple[set[nn.Module], list[str]]:
        """Load ``weights`` into new memory; ``full`` is called with each module that has all of its own.

        The modules, and the parameters with which the loaders did something else than in the rehearsal.
        """
        done: set[nn.Module] = set()
        places = places_of(self._model)
        open_: dict[nn.Module, list[ParameterMemory]] = {}
        for place in places:
            place.due = self._due.get(place.name, 0)
            open_.setdefault(place.module, []).append(place)
        open_ = {module: own for module, own in open_.items() if any(place.due for place in own)}
        filling = _Filling(places, self._device, self._whole, self._padded)

        def finish_full() -> None:
            for module in [m for m, own in open_.items() if all(p.writes == p.due for p in own)]:
                with filling.off():
                    full(module, open_.pop(module))
                done.add(module)

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for pair in weights:
                yield pair
                filling.step += 1
                finish_full()

        with torch.no_grad(), self._indices, filling:
            loader_of(self._model)(tensors())
            finish_full()
        return done, sorted({place.name for place in places if place.writes != place.due} | filling.late)

    @torch.no_grad()
    def _finish(self, module: nn.Module, places: list[ParameterMemory]) -> None:
        """Process what was loaded into ``module`` and copy it to where the live one lies, as vLLM's reload does."""
        info: Any = get_layerwise_info(module)
        parameters: dict[str, Any] = info.kernel_tensors[0]
        buffers: dict[str, Any] = info.kernel_tensors[1]
        for place in places:
            place.closed = True
            for twin in self._twins.get((id(module), place.leaf), ()):
                if place.memory is not None:
                    twin.copy_(place.memory.view_as(twin))
        if is_deferred_attention_layer(module):  # the end of the reload processes them
            for place in places:
                live = _live(place)
                if place.memory is not None and live is not None:
                    live.data.copy_(place.memory)
                place.memory = None
            return
        for place in places:
            if place.seen.device.type != "meta" and place.memory is not None:  # vLLM leaves it where it is
                place.seen.data.copy_(place.memory)
        self._make(module, places)
        self._refuse_others(module, parameters)
        for name, live in (*parameters.items(), *buffers.items()):
            new = getattr(module, name, None)
            if isinstance(new, torch.Tensor) and new is not live and new.device.type != "meta":
                if new.shape != live.shape or new.dtype != live.dtype:
                    raise TransferError(
                        f"{name!r} of {type(module).__name__} is {tuple(live.shape)}, {live.dtype} in the engine and "
                        f"{tuple(new.shape)}, {new.dtype} after a reload: restart the engine"
                    )
                if quantized(module) and live.device.type == "cpu":
                    live.data = new.data  # oneDNN's products keep the address of their scales
                else:
                    live.data.copy_(new)
        _place_kernel_tensors(module, info)
        info.reset()

    def _make(self, module: nn.Module, places: list[ParameterMemory]) -> None:
        """Put what was loaded into ``module``, beside what it computes with, and let vLLM process it."""
        for place in places:
            live = _live(place)
            if place.seen.device.type != "meta":
                pass
            elif place.memory is not None:
                setattr(module, place.leaf, place.memory)
            elif isinstance(place.seen, nn.Parameter):
                setattr(module, place.leaf, _memory(place, live))
            elif live is not None:
                setattr(module, place.leaf, live)
            place.memory = None
        for name, tensor in get_layer_tensors(module).items():
            if tensor.is_meta and name not in SKIP_TENSORS:  # of no elements
                setattr(module, name, torch.empty_like(tensor, device=self._device))
        self._process(module)

    def _process(self, module: nn.Module) -> None:
        """As when vLLM loads: some kernels write products of the default dtype, whatever memory they are given."""
        with set_default_torch_dtype(self._config.dtype):
            _process(module)

    def _refuse_others(self, module: nn.Module, live: Collection[str]) -> None:
        """TransferError where what a quantized module has once it is processed is not what it computed with before."""
        made = {name for name, tensor in module._parameters.items() if tensor is not None}
        if quantized(module) and made != set(live):
            raise TransferError(
                f"{type(module).__name__} has {sorted(live)} in the engine and {sorted(made)} after a reload: "
                f"restart the engine"
            )

    @torch.no_grad()
    def settle(self, done: set[nn.Module]) -> None:
        """Process modules that nothing was loaded into, but whose parameter is that of one in ``done``.

        On a CPU vLLM's embeddings and heads keep the parameter and a packed copy of it, and compute with the copy.
        """
        written = {p.untyped_storage()._cdata for module in done for p in module.parameters(recurse=False) if p.numel()}
        for module in self._model.modules():
            own = [p for p in module.parameters(recurse=False) if p.numel()]
            if module in done or quantized(module):
                continue
            if any(p.untyped_storage()._cdata in written for p in own):
                self._process(module)
        _give_back()


class _Filling(Filling):  # type: ignore[no-untyped-call]
    """Memory of a place: undefined where all of it will be written, zero in a padding, else what the engine holds.

    Once its module is finished, the engine holds what was loaded, and a loader may read it there.
    """

    def __init__(
        self,
        places: Iterable[ParameterMemory],
        device: torch.device,
        whole: set[str] | None = None,
        padded: Collection[str] = (),
    ) -> None:
        super().__init__(places, device)
        self._whole, self._padded = whole, padded

    def make(self, place: ParameterMemory) -> torch.Tensor:
        if place.closed:
            return held if (held := _live(place)) is not None else getattr(place.module, place.leaf)
        made = _memory(place, None if self._whole is None or place.name in self._whole else _live(place))
        if place.name in self._padded and place.seen.device.type == "meta":
            made.data.zero_()  # as it was created: kernels compute with the padding, too
        return made


def _live(place: ParameterMemory) -> torch.Tensor | None:
    """The tensor that the engine computes with, while its module is as it was created."""
    info: Any = get_layerwise_info(place.module)
    for tensors in info.kernel_tensors or ():
        if place.leaf in tensors:
            found: torch.Tensor = tensors[place.leaf]
            return found
    return None


def _memory(place: ParameterMemory, live: torch.Tensor | None) -> torch.Tensor:
    """Memory for ``place``, with what ``live`` holds where it holds the same."""
    if place.seen.device.type != "meta":
        made = place.seen.detach().clone()
    else:
        info: Any = get_layerwise_info(place.module)
        with info.restore_device:
            made = materialize_meta_tensor(place.seen)  # of the parameter's class, with its attributes
    if live is not None and live.shape == made.shape:
        made.data.copy_(live)
    elif live is not None:
        made.data.zero_()
    return made


def _give_back() -> None:
    """Return the memory of the modules that were filled to the system: glibc would keep several layers' worth."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _process(module: Any) -> None:
    """vLLM's processing of a loaded module: quantize, pack, shuffle."""
    if hasattr(module, "_already_called_process_weights_after_loading"):
        del module._already_called_process_weights_after_loading
    method: Any = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return
    if hasattr(kernel := kernel_of(module), "dnnl_handler"):
        kernel.dnnl_handler = None  # as the next
    if hasattr(module, "cpu_linear"):
        module.cpu_linear = None  # frees the packed copy of the version before, which would be there beside the new one
    with _packed_again(module, method):
        method.process_weights_after_loading(module)
    if hasattr(module, "update_param_tp_status"):
        module.update_param_tp_status()


@contextmanager
def _packed_again(module: nn.Module, method: Any) -> Iterator[None]:
    """Experts on a CPU pack their weights only while they have no kernel, so that vLLM 0.32's own reload leaves what
    was loaded unpacked, and their answers wrong: they get a new kernel with every version.
    """
    kernel: Any = getattr(method, "moe_kernel", None)
    if kernel is None or any(p.device.type != "cpu" for p in module.parameters()):
        yield
        return
    method.moe_kernel = None
    try:
        yield
    finally:
        if method.moe_kernel is None:
            method.moe_kernel = kernel


def places_of(model: nn.Module) -> list[ParameterMemory]:
    """Every parameter and buffer, each memory once; of the module that has it first."""
    found: dict[int, ParameterMemory] = {}
    for prefix, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.numel():
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            key = tensor.untyped_storage()._cdata
            found.setdefault(key, ParameterMemory(name=name, module=module, leaf=leaf, seen=tensor))
    return list(found.values())


def _made(model: nn.Module, places: Iterable[ParameterMemory]) -> list[tuple[nn.Module, str, str]]:
    """What a load has left in the model beside ``places``; each with its module, and its name there and in the model.

    vLLM's TransformersForCausalLM gives its head a bias when it comes to one in the checkpoint.
    """
    known = {place.seen.untyped_storage()._cdata for place in places}
    return [
        (module, leaf, f"{prefix}.{leaf}" if prefix else leaf)
        for prefix, module in model.named_modules()
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.numel() and tensor.untyped_storage()._cdata not in known
    ]


@torch.no_grad()
def _keep_memory(module: nn.Module, leaf: str, was: torch.Tensor) -> None:
    """Bring what a loader has made into the memory that the engine computes with."""
    new = getattr(module, leaf)
    if new.untyped_storage()._cdata == was.untyped_storage()._cdata:
        return  # that is done: the module was finished later
    was.copy_(new)
    new.data = was


def _readable(place: ParameterMemory) -> bool:
    """Whether the engine holds the parameter as it was loaded."""
    live = _live(place)
    if live is None or live.shape != place.seen.shape or live.dtype != place.seen.dtype:
        return False
    if place.leaf == "weight" and hasattr(place.module, "_cpu_unpacked_conv_weight"):
        return False
    method: Any = getattr(place.module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase) or isinstance(method, _KEEPS):
        return True
    return type(method).process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading


def _twins(model: nn.Module) -> dict[tuple[int, str], list[torch.Tensor]]:
    """Buffers that were views of a parameter when the model was made, and are not any more: packing has moved it.

    By module and name of the parameter, which is told by its shape. Mamba's convolutions compute with such a buffer.
    """
    found: dict[tuple[int, str], list[torch.Tensor]] = {}
    live = {p.untyped_storage()._cdata for p in model.parameters() if p.numel()}
    for prefix, module in model.named_modules():
        made: Any = get_layerwise_info(module).restore_metadata[1]
        for leaf in sorted(module._non_persistent_buffers_set - set(made) - SKIP_TENSORS):
            twin = module._buffers.get(leaf)
            if twin is None or not twin.numel() or twin.untyped_storage()._cdata in live:
                continue
            alike = [
                (id(owner), name)
                for owner in module.modules()
                for name, tensor in get_layerwise_info(owner).restore_metadata[0].items()
                if tensor.numel() == twin.numel() and tensor.dtype == twin.dtype
            ]
            if len(alike) > 1:
                raise ConfigError(
                    f"buffer {leaf!r} of {prefix!r} ({type(module).__name__}) was a view of one of {len(alike)} "
                    f"parameters of its size, and it cannot be told which: this model is not supported"
                )
            for key in alike:
                found.setdefault(key, []).append(twin)
    return found


def loader_of(model: Any) -> Any:
    """The model's own loaders, which take (name, tensor) pairs."""

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with disable_mtp_completeness_check():
            model.load_weights(iter(weights))

    return load


@contextmanager
def _created(model: nn.Module, model_config: Any) -> Iterator[None]:
    """The model with its parameters as they were created, on meta, and its own loaders, not vLLM's buffering ones.

    The default dtype is the one under which vLLM loads, because some loaders make tensors of their own.
    """
    released = _released(model)
    initialize_layerwise_reload(model)
    try:
        for tensor in (*model.parameters(), *model.buffers()):
            loader: Any = getattr(tensor, "weight_loader", None)
            while getattr(loader, "__name__", "") == "online_process_loader":
                loader = loader.__wrapped__
                setattr(tensor, "weight_loader", loader)  # noqa: B010
        with set_default_torch_dtype(model_config.dtype):
            yield
    finally:
        with _quiet():
            finalize_layerwise_reload(model, model_config)
        for module, leaf in released:
            if not hasattr(module, leaf):
                module.register_parameter(leaf, None)


@contextmanager
def _modules_kept(model: nn.Module) -> Iterator[list[str]]:
    """The model has its own modules again afterwards; the names of those that were put in their place, or added."""
    before = [(name, module, dict(module._modules)) for name, module in model.named_modules()]
    replaced: list[str] = []
    try:
        yield replaced
    finally:
        for prefix, module, children in before:
            for leaf, child in module._modules.items():
                if child is not children.get(leaf):
                    replaced.append(f"{prefix}.{leaf}" if prefix else leaf)
            if module._modules != children:
                module._modules.clear()
                module._modules.update(children)


def _released(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Parameters that are None, because a kernel holds their numbers, or none were loaded: vLLM forgets their names."""
    return [(module, leaf) for module in model.modules() for leaf, held in module._parameters.items() if held is None]


@contextmanager
def _quiet() -> Iterator[None]:
    before = _NOISE.level
    _NOISE.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _NOISE.setLevel(before)
