"""Plain mistakes in arguments are ConfigErrors that name the argument, in both clients, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import etha
from etha.client.arguments.checks import MAX_VERSION, check_shape, check_timeout, shown
from etha.errors import ConfigError, RegistrationError
from etha.testing import AsyncDummyTensorBusClient, DummyTensorBusClient

HUGE = 10**400
MESH = {"device_mesh": (1,), "placements": [Replicate()]}
#: More digits than Python prints.
ENDLESS = 10**5000

Call = Callable[..., Any]


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no")


INIT = [
    ({"device_mesh": [0, 1]}, r"device_mesh=\[0, 1\] must be a DeviceMesh, a tensor of ranks such as torch\.tensor"),
    ({"device_mesh": "a"}, "device_mesh='a' must be"),
    ({"device_mesh": 1}, "device_mesh=1 must be"),
    ({"device_mesh": (1,), "placements": Replicate()}, r"placements=Replicate\(\) must be a sequence"),
    ({"device_mesh": (1,), "placements": "R"}, "placements='R' must be a sequence"),
    ({"timeout": HUGE}, "timeout=1000+.* is too large: use math.inf"),
    ({"timeout": ENDLESS}, "timeout=a int is too large"),
    ({"timeout": "3"}, "timeout='3' must be seconds"),
    ({"timeout": math.nan}, "timeout=nan must be seconds"),
    ({"expected_world_size": 2**70, "rank": 0}, "expected_world_size=1180591620717411303424: a side has at most"),
    ({"expected_world_size": ENDLESS, "rank": 0}, "expected_world_size=a int: a side has at most"),
    ({"expected_world_size": 0, "rank": 0}, "expected_world_size=0: a side has at least 1 rank"),
    ({"expected_world_size": -3}, "expected_world_size=-3: a side has at least 1 rank"),
    ({"rank": True}, "rank=True is not an int"),
    ({"rank": -1}, "rank -1 is not inside a side of 1 ranks"),
    ({"ranks": [0]}, r"ranks=\[0\] must be a mapping"),
    ({"ranks": {0: "1"}}, r"ranks\[0\] is '1', not a whole number"),
    ({"ranks": {0: -1}}, r"ranks\[0\]=-1 is no rank"),
]

W = {"w": torch.zeros(5)}
REGISTER: list[tuple[dict[str, Any], str]] = [
    ({"tensors": None}, "tensors=None must be a mapping name -> tensor or a list"),
    ({"tensors": 5}, "tensors=5 must be"),
    ({"tensors": "ab"}, "tensors='ab' must be"),
    ({"tensors": torch.zeros(())}, r"tensors=tensor\(0\.\) must be a mapping"),
    ({"tensors": torch.zeros(2)}, r"tensors=tensor\(\[0\., 0\.\]\) must be a mapping"),
    ({"tensors": [], "pair_name": None}, "an empty list of tensors names no pair: give pair_name="),
    ({"tensors": {"\ud800": torch.zeros(1)}}, r"tensor name '\\ud800' has a surrogate at position 0"),
    ({"tensors": {"": torch.zeros(1)}}, "tensor name '' must be a text of 1 to 500 bytes"),
    ({"tensors": {"x" * 501: torch.zeros(1)}}, "tensor name 'xxx.* must be a text of 1 to 500 bytes"),
    ({"pair_name": 3}, "pair name 3 is not allowed"),
    ({"pair_name": ["p"]}, r"pair name \['p'\] is not allowed"),
    ({"shapes": {"w": 5}}, r"shapes\['w'\]=5 must be a shape, such as \(4, 8\)"),
    ({"shapes": {"w": "5"}}, r"shapes\['w'\]='5' must be a shape"),
    ({"shapes": {"w": ("5",)}}, r"shapes\['w'\]: size 0 is '5', not a whole number"),
    ({"shapes": {"w": (5.7,)}}, r"shapes\['w'\]: size 0 is 5\.7, not a whole number"),
    ({"shapes": {"w": (True,)}}, r"shapes\['w'\]: size 0 is True, not a whole number"),
    ({"shapes": {"w": {5}}}, r"shapes\['w'\]=\{5\} must be a shape"),
    ({"shapes": {"other": 5}}, r"shapes\['other'\]=5 must be a shape"),
    ({"shapes": [5]}, r"shapes=\[5\] must be a mapping"),
    ({"placements": [Replicate()]}, r"placements=\[Replicate\(\)\] must be a mapping"),
    ({"placements": {"w": Replicate()}}, r"placements\['w'\]=Replicate\(\) must be a sequence"),
    ({"regions": 5}, "regions=5 must be a mapping"),
    ({"bucket_size": True}, "bucket_size=True must be a number of bytes"),
    ({"bucket_size": 2**70}, "bucket_size=1180591620717411303424 must be a number of bytes"),
    ({"bucket_size": 1.5}, "bucket_size=1.5 must be a number of bytes"),
    ({"bucket_size": 0}, "bucket_size=0 must be a number of bytes"),
    ({"atomic": "yes"}, "atomic='yes' must be True, False or 'swap'"),
    ({"atomic": 1}, "atomic=1 must be True, False or 'swap'"),
    ({"direction": ["send"]}, r"direction=\['send'\] must be"),
    ({"verify": True}, "verify=True must be"),
    ({"timeout": HUGE}, "timeout=1000+.* is too large"),
]

TRANSFER: list[tuple[dict[str, Any], str]] = [
    ({"transfer_type": "SEND"}, "transfer_type='SEND' must be"),
    ({"transfer_type": ["send"]}, r"transfer_type=\['send'\] must be"),
    ({"version": 2**64}, "version=18446744073709551616 does not fit 64 bits"),
    ({"version": -(2**63) - 1}, "version=-9223372036854775809 does not fit 64 bits"),
    ({"version": ENDLESS}, "version=a int does not fit 64 bits"),
    ({"version": "x" * (MAX_VERSION + 1)}, r"version='x+\.\.\. has 65,537 characters, at most 65,536 are possible"),
    ({"version": "\ud800"}, r"version '\\ud800' has a surrogate"),
    ({"version": True}, "version=True must be an int or a str"),
    ({"version": Unprintable()}, "version=a Unprintable must be an int or a str"),
    ({"timeout": HUGE}, "timeout=1000+.* is too large"),
    ({"progress": 3}, "progress=3 cannot be called"),
    ({"on_commit": 3, "transfer_type": "recv"}, "on_commit=3 cannot be called"),
    ({"snapshot": "yes"}, "snapshot='yes' must be True or False"),
    ({"on_error": "x"}, "on_error='x' must be"),
    ({"on_error": []}, r"on_error=\[\] must be"),
]


async def started() -> AsyncDummyTensorBusClient:
    client = AsyncDummyTensorBusClient()
    await client.init_pair("p", "a", "b", rank=0, **MESH)
    return client


@pytest.mark.parametrize(("arguments", "text"), INIT, ids=lambda value: shown(value)[:40])
async def test_init_pair(arguments: dict[str, Any], text: str) -> None:
    arguments = {"rank": 0, **arguments}
    async with AsyncDummyTensorBusClient() as client:
        with pytest.raises(ConfigError, match=text):
            await client.init_pair("p", "a", "b", **arguments)


@pytest.mark.parametrize(("arguments", "text"), REGISTER, ids=lambda value: shown(value)[:40])
async def test_register_tensors(arguments: dict[str, Any], text: str) -> None:
    arguments = {"tensors": W, "pair_name": "p", **arguments}
    async with await started() as client:
        with pytest.raises(ConfigError, match=text):
            await client.register_tensors("b", **arguments)
        await client.register_tensors("b", W, pair_name="p")


@pytest.mark.parametrize(("arguments", "text"), TRANSFER, ids=lambda value: shown(value)[:40])
async def test_transfer(arguments: dict[str, Any], text: str) -> None:
    arguments = {"transfer_type": "send", **arguments}
    async with await started() as client:
        handle = await client.register_tensors("b", W, pair_name="p", atomic=True)
        with pytest.raises(ConfigError, match=text):
            await handle.transfer(**arguments)
        with pytest.raises(ConfigError, match=text):
            await client.transfer("b", **arguments)
        for name in ([], None, 3):
            with pytest.raises(RegistrationError, match="is not registered in this client"):
                await client.transfer(name, "send")  # type: ignore[arg-type]


def test_the_blocking_client_says_the_same() -> None:
    with DummyTensorBusClient() as client:
        for arguments, text in INIT:
            with pytest.raises(ConfigError, match=text):
                client.init_pair("p", "a", "b", **{"rank": 0, **arguments})
        client.init_pair("p", "a", "b", rank=0, **MESH)
        for arguments, text in REGISTER:
            with pytest.raises(ConfigError, match=text):
                client.register_tensors("b", **{"tensors": W, "pair_name": "p", **arguments})
        handle = client.register_tensors("b", W, pair_name="p", atomic=True)
        for arguments, text in TRANSFER:
            with pytest.raises(ConfigError, match=text):
                handle.transfer(**{"transfer_type": "send", **arguments})
        with pytest.raises(ConfigError, match="blocking='no' must be True or False"):
            handle.transfer("send", blocking="no")  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", [AsyncDummyTensorBusClient, DummyTensorBusClient])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"agent": 5}, "agent=5 must be a str or None"),
        ({"redis_url": b"redis://"}, "redis_url=b'redis://' must be a str or None"),
        ({"autostart": "no"}, "autostart='no' must be True or False"),
        ({"timeout": HUGE}, "timeout=1000+.* is too large"),
        ({"device": 3.5}, "device=3.5: "),
        ({"device": "xyz"}, "device='xyz': "),
        ({"device": 10**29}, "device=1000+: "),
        ({"namespace": 5}, "namespace name 5 is not allowed"),
        ({"on_error": 5}, "on_error=5 must be"),
    ],
    ids=lambda value: shown(value)[:40],
)
def test_the_constructors(kind: Call, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        kind(**arguments)


async def test_what_is_unusual_and_right_is_taken() -> None:
    assert check_timeout(np.float32(0.5), "timeout") == 0.5 == check_timeout(Fraction(1, 2), "timeout")
    assert check_timeout(math.inf, "timeout") == math.inf
    assert check_shape("shape", torch.Size([2, 3])) == (2, 3) == check_shape("shape", np.array([2, 3]))
    assert check_shape("shape", [np.int64(2), torch.tensor(3)]) == (2, 3) and check_shape("shape", ()) == ()
    async with AsyncDummyTensorBusClient() as client:
        for i, mesh in enumerate([np.array([0]), torch.tensor([0]), (1,)]):
            await client.init_pair(f"p{i}", "a", "b", device_mesh=mesh, placements=[Shard(0)], rank=0)
        handle = await client.register_tensors(
            "b", {"w": torch.zeros(5)}, pair_name="p0", shapes={"w": np.array([5])}, placements={"other": [Shard(0)]}
        )
        for version in (-(2**63), 2**64 - 1, "", "x" * MAX_VERSION, "é\x00"):
            assert (await handle.transfer("send", version=version)).version == version
        empty = await client.register_tensors("c", [], pair_name="p0")
        await empty.close()


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((2.5,), r"etha\.empty: shape: size 0 is 2\.5, not a whole number"),
        (2.5, r"etha\.empty: shape=2\.5 must be a shape"),
        ("3", "shape='3' must be a shape"),
        (None, "shape=None must be a shape"),
        (True, "size 0 is True, not a whole number"),
        ((-1,), "size 0 is -1, not from 0"),
        (2**70, "size 0 is 1180591620717411303424, not from 0"),
        ((2**62,), "needs 18446744073709551616 bytes"),
        ((0, 2**62, 4), "has more elements than fit 63 bits"),
        ((2**40, 2**40), "has more elements than fit 63 bits"),
        ({2}, r"shape=\{2\} must be a shape"),
    ],
    ids=str,
)
def test_shapes_of_empty(shape: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        etha.empty(shape)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.bits8, torch.quint4x2, "float32", float, None], ids=str)
def test_dtypes_of_empty(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"etha\.empty: dtype"):
        etha.empty((3,), dtype=dtype)


@pytest.mark.parametrize("device", ["meta", "xyz", 3.5], ids=str)
def test_devices_of_empty(device: Any) -> None:
    with pytest.raises(ConfigError, match="device"):
        etha.empty((3,), device=device)


def module_of(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("x", tensor)
    return module


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "MKL-DNN": lambda: torch.eye(2).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.eye(2), 1.0, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's: prototypes and deprecations
@pytest.mark.parametrize("form", FORMS)
async def test_forms_of_tensors_are_called_by_their_names(form: str) -> None:
    for call in (etha.empty_like, lambda tensor: etha.share_module(module_of(tensor))):
        with pytest.raises(ConfigError, match=f"is a {form} tensor"):
            call(FORMS[form]())
    async with await started() as client:
        with pytest.raises(RegistrationError, match=f"an? {form} tensor"):
            await client.register_tensors("b", {"w": FORMS[form]()}, pair_name="p")


async def test_other_things_than_tensors_and_modules() -> None:
    with pytest.raises(ConfigError, match="3 is not a tensor"):
        etha.empty_like(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"3 is not a torch\.nn\.Module"):
        etha.share_module(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="UninitializedParameter: run a forward first"):
        etha.share_module(nn.LazyLinear(3))
    async with await started() as client:
        bits = torch.zeros(3, dtype=torch.uint8).view(torch.bits8)
        with pytest.raises(RegistrationError, match=r"dtype torch\.bits8 cannot be moved"):
            await client.register_tensors("b", {"w": bits}, pair_name="p")
