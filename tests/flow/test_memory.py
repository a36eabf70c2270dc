"""Where tensors lie and what they are made of: strides, dtypes, mapped memory, one memory under two names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import etha

from .team import Seat, Team, bits
from .truth import cut, stale, whole

# ---- strides ------------------------------------------------------------------------------------


def strided(me: Seat) -> None:
    """Every local tensor is a view; what lies between the elements of a target view stays as it was."""
    full = {name: whole((6, 10), version) for version, name in enumerate(("transposed", "stepped", "window", "turned"))}
    full["stretched"] = whole((6, 1)).expand(6, 10)
    full["deep"] = whole((4, 6, 5))
    lay = {name: Shard(0 if me.sends else 1) for name in full}
    mine = {name: cut(tensor, lay[name].dim, 2, me.rank) for name, tensor in full.items()}
    views: dict[str, torch.Tensor] = {}
    margins: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def view_of(name: str, base: torch.Tensor, view: torch.Tensor) -> None:
        base.fill_(-5)
        inside = torch.zeros_like(base)
        inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
        views[name], margins[name] = view, (base, inside == 0)

    for name, tensor in mine.items():
        rows, columns = tensor.shape[0], tensor.shape[1]
        match name:
            case "transposed":
                base = torch.empty(columns, rows)
                view_of(name, base, base.T)
            case "stepped":
                base = torch.empty(3 * rows, 2 * columns)
                view_of(name, base, base[1::3, ::2])
            case "window":
                base = torch.empty(rows + 2, columns + 3)
                view_of(name, base, base[1:-1, 2:-1])
            case "turned":
                base = torch.empty(columns + 1, 2 * rows)
                view_of(name, base, base[1:, ::2].T)
            case "deep":
                base = torch.empty(tensor.shape[2], rows, columns + 1)
                view_of(name, base, base[:, :, 1:].permute(1, 2, 0))
            case "stretched" if me.sends:
                base = torch.empty(rows, 1)
                view_of(name, base, base.expand(rows, columns))
            case "stretched":
                view_of(name, base := torch.empty(rows, columns), base.view(rows, columns))
        if me.sends and name != "stretched":
            views[name].copy_(tensor)
        elif me.sends:
            margins[name][0].copy_(tensor[:, :1])
    me.move(
        "strided",
        views,
        placements={name: [p] for name, p in lay.items()},
        shapes={n: t.shape for n, t in full.items()},
    )
    for name, tensor in mine.items():
        base, outside = margins[name]
        assert torch.equal(views[name], tensor), name
        assert (base[outside] == -5).all(), f"{name}: written outside the view"


def test_any_strided_view_is_a_source_and_a_target_and_its_margins_stay(team: Team) -> None:
    team.run(strided)


# ---- dtypes -------------------------------------------------------------------------------------

CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
    (torch.float16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float64, torch.float32),
    (torch.float32, torch.float64),
    (torch.float64, torch.bfloat16),
    (torch.int8, torch.int32),
    (torch.int16, torch.int64),
    (torch.int32, torch.int64),
    (torch.uint8, torch.uint8),
    (torch.bool, torch.bool),
    (torch.complex64, torch.complex64),
]


def values(dtype: torch.dtype) -> torch.Tensor:
    """[9, 31] of the dtype: ordinary numbers, ties, the largest and smallest, signed zeros, infinities, NaN."""
    random = torch.Generator().manual_seed(5)
    if dtype.is_complex:
        return torch.randn(9, 31, generator=random, dtype=dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, (9, 31), generator=random).to(dtype)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        full = torch.randint(info.min, info.max, (9, 31), generator=random, dtype=torch.int64).to(dtype)
        full[0, :2] = torch.tensor([info.min, info.max], dtype=dtype)
        return full
    full = torch.randn(9, 31, generator=random, dtype=torch.float64) * 10.0 ** torch.randint(
        -12, 12, (9, 31), generator=random
    )
    special = [
        0.0,
        -0.0,
        float("inf"),
        float("-inf"),
        float("nan"),
        1 + 2**-8,
        1 + 3 * 2**-8,
        65519.0,
        65520.0,
        1e-45,
        6e-8,
    ]
    full[4, : len(special)] = torch.tensor(special, dtype=torch.float64)
    return full.to(dtype)


def cast(me: Seat) -> None:
    source = {f"{a} to {b}".replace("torch.", ""): values(a) for a, b in CASTS}
    becomes = dict(zip(source, (b for _, b in CASTS), strict=True))
    lay = Shard(0 if me.sends else 1)
    for repeat, make in enumerate((torch.empty_like, etha.empty_like)):
        if me.sends:
            tensors = {name: cut(tensor, 0, 2, me.rank) for name, tensor in source.items()}
        else:
            tensors = {n: make(cut(t, 1, 2, me.rank).to(becomes[n])) for n, t in source.items()}
            for tensor in tensors.values():
                tensor.fill_(1)
        shapes = {name: tuple(tensor.shape) for name, tensor in source.items()}
        me.move(f"cast{repeat}", tensors, placements={name: [lay] for name in tensors}, shapes=shapes)
        if not me.sends:
            for name, tensor in tensors.items():
                truth = cut(source[name].to(becomes[name]), 1, 2, me.rank)
                assert torch.equal(bits(tensor), bits(truth)), name


def test_other_dtypes_hold_what_to_gives_to_the_bit(team: Team) -> None:
    team.run(cast)


def narrow_wire(me: Seat) -> Any:
    tensors = {
        "down": torch.zeros(8, 8, dtype=torch.float32 if me.sends else torch.bfloat16),
        "up": torch.zeros(8, 8, dtype=torch.bfloat16 if me.sends else torch.float32),
        "wide": torch.zeros(8, 8, dtype=torch.int8 if me.sends else torch.int64),
    }
    mine = {name: cut(tensor, 0, 2, me.rank) for name, tensor in tensors.items()}
    return me.move("narrow", mine, placements={name: [Shard(0)] for name in mine}).bytes


def test_the_narrower_dtype_travels(team: Team) -> None:
    moved = team.run(narrow_wire)
    assert moved["trainer"] == moved["inference"] == [4 * 8 * (2 + 2 + 1)] * 2


# ---- memory -------------------------------------------------------------------------------------


def mapped(me: Seat) -> None:
    full = whole((300, 257), 1)
    mine = cut(full, 0 if me.sends else 1, 2, me.rank)
    tensor = etha.empty(mine.shape)
    tensor.copy_(mine if me.sends else stale(mine))
    # A view of mapped memory, beside the whole of it.
    base = etha.empty((mine.shape[0], 2 * mine.shape[1]), dtype=torch.bfloat16)
    base.zero_()
    half = base[:, ::2]
    if me.sends:
        half.copy_(mine.to(torch.bfloat16))
    lay = [Shard(0 if me.sends else 1)]
    me.move(
        "mapped", {"a": tensor, "b": half}, placements={"a": lay, "b": lay}, shapes={"a": full.shape, "b": full.shape}
    )
    assert torch.equal(tensor, mine)
    assert torch.equal(half, mine.to(torch.bfloat16)) and not base[:, 1::2].any()


def test_tensors_of_etha_empty_send_and_receive(team: Team) -> None:
    team.run(mapped)


def shared_module(me: Seat) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 6, bias=False))
    model[2].weight = torch.nn.Parameter(torch.randn(6, 8))
    truth = {name: p.detach().clone() for name, p in model.named_parameters()}
    if not me.sends:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(9)
    before = dict(model.named_parameters())
    assert etha.share_module(model) is model
    assert all(p is before[name] for name, p in model.named_parameters())
    versions = {name: p._version for name, p in model.named_parameters()}
    me.move("module", dict(model.named_parameters()), placements={name: [Replicate()] for name in truth})
    for name, p in model.named_parameters():
        assert p.requires_grad and p.is_leaf and p.grad is None
        assert torch.equal(p, truth[name]), name
        assert (p._version > versions[name]) is not me.sends, "autograd hears of what was received"


def test_a_shared_module_sends_and_receives_its_parameters(team: Team) -> None:
    team.run(shared_module)


def tied_source(me: Seat) -> None:
    full = whole((6, 4))
    names = ("embedding", "head")
    tensors = dict.fromkeys(names, full.clone()) if me.sends else {name: stale(full) for name in names}
    me.move("tied", tensors, placements={name: [Replicate()] for name in names})
    assert all(torch.equal(tensors[name], full) for name in names)


def test_one_memory_under_two_names_is_a_source_of_both(team: Team) -> None:
    team.run(tied_source)


def to_tied_target(me: Seat) -> None:
    full = whole((6, 4))
    names = ("embedding", "head")
    tensors = {name: full.clone() for name in names} if me.sends else dict.fromkeys(names, stale(full))
    me.move("to tied".replace(" ", "-"), tensors, placements={name: [Replicate()] for name in names})
    assert all(torch.equal(tensors[name], full) for name in names)


def test_the_same_region_under_two_names_is_a_target(team: Team) -> None:
    team.run(to_tied_target)


def half_aliased(me: Seat) -> None:
    base = torch.zeros(10)
    tensors = {"a": base[:6], "b": base[4:]} if not me.sends else {"a": torch.zeros(6), "b": torch.zeros(6)}
    with pytest.raises(etha.RegistrationError) as caught:
        me.move(
            "aliased",
            tensors,
            placements={name: [Replicate()] for name in tensors},
            direction="send" if me.sends else "recv",
        )
    assert {v.code for v in caught.value.violations} == {"alias"}
    assert {(v.side, v.rank) for v in caught.value.violations} == {("inference", 0), ("inference", 1)}


def test_overlapping_targets_are_refused_on_every_rank(team: Team) -> None:
    team.run(half_aliased)
