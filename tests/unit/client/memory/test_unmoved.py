"""Registered tensors that have moved are noticed: by compiled code, and by Python where there is none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from etha.client.memory import base
from etha.client.memory.base import Unmoved
from etha.errors import RegistrationError
from etha.native.opened import opened
from etha.native.unmoved import AXES, PLACE, UnmovedLibrary, load_unmoved


@pytest.fixture(params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way to find out."""
    if request.param == "python":
        monkeypatch.setattr("etha.native.unmoved.load_unmoved", lambda: None)
    elif load_unmoved() is None:
        pytest.skip("no C compiler (cc) on the path")
    return str(request.param)


@pytest.fixture
def world() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def named(*tensors: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(str(i), tensor) for i, tensor in enumerate(tensors)]


def test_the_table_has_the_size_of_the_struct() -> None:
    library = load_unmoved()
    if library is None:
        pytest.skip("no C compiler (cc) on the path")
    assert library.struct_bytes == PLACE.itemsize


def _set(tensor: torch.Tensor) -> None:
    tensor.data = torch.empty(4, 6)


def _transpose(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.t()


def _restride(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.as_strided((4, 6), (1, 4))


def _cast(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(torch.int32)


def _cast_to_one_of_its_size(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(torch.uint8).view(torch.complex64).view(torch.int64)[:, :3]


def _shorten(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data[:2]


def _flatten(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(24)


def _shift(tensor: torch.Tensor) -> None:
    tensor.data = torch.empty(0).set_(tensor.data.untyped_storage(), 1, (4, 5), (6, 1))


def _resize_storage(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(1 << 22)


def _free_storage(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def _swap(tensor: torch.Tensor) -> None:
    torch.utils.swap_tensors(tensor, torch.empty(4, 6))


CHANGES: list[Callable[[torch.Tensor], None]] = [
    _set, _transpose, _restride, _cast, _cast_to_one_of_its_size, _shorten, _flatten, _shift, _resize_storage,
    _free_storage, _swap,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_moves_a_tensor_is_noticed(change: Callable[[torch.Tensor], None], way: str) -> None:
    tensors = [torch.zeros(4, 6) for _ in range(5)]
    found = Unmoved(named(*tensors))
    assert found.changed() == []
    for i in (1, 4):
        change(tensors[i])
    assert found.changed() == ["1", "4"]
    with pytest.raises(RegistrationError, match=r"the batch: .* of 2 registered tensors .*: '1', '4'; close it"):
        found.check("the batch")


def test_a_tensor_that_becomes_a_conjugate_view_of_itself_is_noticed(way: str) -> None:
    tensors = [torch.zeros(4, 6, dtype=torch.complex64), torch.zeros(3)]
    found = Unmoved(named(*tensors))
    assert found.changed() == []
    tensors[0].data = tensors[0].data.conj()
    assert found.changed() == ["0"]


def test_what_does_not_move_a_tensor_is_no_change(way: str) -> None:
    parameter, plain = torch.nn.Parameter(torch.zeros(4, 6)), torch.zeros(5)
    found = Unmoved(named(parameter, plain, plain))
    parameter.grad = torch.ones(4, 6)
    parameter.requires_grad_(False)
    parameter.data.add_(1)
    plain.requires_grad_()
    with torch.no_grad():
        plain.fill_(3)
    plain.custom = "x"  # type: ignore[attr-defined]
    assert found.changed() == []


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.int8, torch.bool,
    torch.uint16, torch.complex64, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@given(data=st.data())
def test_compiled_code_says_what_python_says(data: st.DataObject) -> None:
    """A tensor becomes another view of the same memory, or of memory beside it."""
    if load_unmoved() is None:
        pytest.skip("no C compiler (cc) on the path")
    memory = torch.zeros(1 << 12, dtype=torch.uint8)

    def view() -> torch.Tensor:
        dtype = data.draw(st.sampled_from(DTYPES))
        axes = data.draw(st.integers(0, 3))
        shape = data.draw(st.lists(st.integers(0, 3), min_size=axes, max_size=axes))
        strides = data.draw(st.lists(st.integers(0, 5), min_size=axes, max_size=axes))
        offset = data.draw(st.integers(0, 1))
        return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, shape, strides)

    tensors = [view() for _ in range(data.draw(st.integers(1, 4)))]
    compiled = Unmoved(named(*tensors))
    assert compiled._table is not None
    assert compiled.changed() == []
    for at in data.draw(st.sets(st.integers(0, len(tensors) - 1))):
        other = view()
        torch.utils.swap_tensors(tensors[at], other)
    known = [
        (base.fingerprint(tensor), fingerprint) for tensor, fingerprint in zip(tensors, compiled._known, strict=True)
    ]
    differ = [str(i) for i, (now, before) in enumerate(known) if now != before]
    assert compiled.changed() == differ and compiled._table.unmoved() == (not differ)


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(2, dtype=torch.bits8),
        torch.zeros([1] * (AXES + 1)),
        torch.zeros(2).as_subclass(type("Mine", (torch.Tensor,), {})),
    ],
    ids=["dtype", "axes", "class"],
)
def test_a_tensor_that_compiled_code_cannot_describe_is_left_to_python(odd: torch.Tensor) -> None:
    plain = torch.zeros(3)
    found = Unmoved(named(plain, odd))
    assert found._table is None and found.changed() == []
    plain.data = torch.zeros(3)
    assert found.changed() == ["0"]


def test_dtensors(world: DeviceMesh, way: str) -> None:
    tensors = [DTensor.from_local(torch.zeros(4, 6), world, [Replicate()]) for _ in range(3)]
    parameter: Any = torch.nn.Parameter(tensors[2])
    found = Unmoved(named(tensors[0], tensors[1], parameter, torch.zeros(2)))
    assert (found._table is not None) is (way == "compiled")
    assert found.changed() == []
    with torch.no_grad():
        parameter.add_(1)
    assert found.changed() == []
    tensors[1]._local_tensor = torch.zeros(4, 6)
    assert found.changed() == ["1"]
    parameter._local_tensor.data = torch.zeros(4, 6)
    assert found.changed() == ["1", "2"]


def test_dtensors_that_are_swapped(world: DeviceMesh, way: str) -> None:
    """As ``Module.to`` does with ``torch.__future__.set_swap_module_params_on_conversion``."""
    one, two, other = (DTensor.from_local(torch.zeros(4, 6), world, [Replicate()]) for _ in range(3))
    found = Unmoved(named(one, two))
    torch.utils.swap_tensors(two, other)
    assert found.changed() == ["1"]
    torch.utils.swap_tensors(two, other)
    assert found.changed() == []


def test_it_ends_with_its_tensors(way: str) -> None:
    tensor = torch.zeros(4)
    seen = weakref.ref(tensor)
    found = Unmoved(named(tensor))
    del tensor
    gc.collect()
    assert seen() is not None
    del found
    gc.collect()
    assert seen() is None


def test_python_does_it_where_torch_gives_no_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert opened(UnmovedLibrary) is None
    monkeypatch.setattr("etha.native.unmoved.load_unmoved", lambda: opened(UnmovedLibrary))
    assert Unmoved(named(torch.zeros(3))).changed() == []


def test_compiled_code_looks_at_all_tensors_at_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Unmoved(named(*(torch.empty(2, 3) for _ in range(1000))))
    asked: list[torch.Tensor] = []

    def fingerprint(tensor: torch.Tensor) -> base.Fingerprint:
        asked.append(tensor)
        return original(tensor)

    original = base.fingerprint
    monkeypatch.setattr(base, "fingerprint", fingerprint)
    assert found.changed() == []
    assert len(asked) == (0 if way == "compiled" else 1000)
