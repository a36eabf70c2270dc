"""Registration refuses what cannot work, before a byte moves, with every reason of every rank in one error."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from etha.errors import RegistrationError, Violation
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site


class Odd(torch.Tensor):
    """A subclass of which nobody knows where its values lie."""


def two_by_two(site: Site) -> Sides:
    return Sides(site, f"p-{uuid.uuid4().hex[:8]}", trainer=2, inference=2)


async def meet(sides: Sides) -> None:
    await sides.meet(device_mesh=(2,), placements=[Replicate()])


def refused(answers: dict[Member, Any]) -> tuple[Violation, ...]:
    """What all ranks were told, which is the same."""
    reported = list(answers.values())
    for error in reported:
        assert isinstance(error, RegistrationError), error
        assert error.code == "registration"
        assert error.violations == reported[0].violations
        for violation in error.violations[:20]:
            assert str(violation) in error.message
    found: tuple[Violation, ...] = reported[0].violations
    return found


def short(violations: Iterable[Violation]) -> set[tuple[str, str, str, int | None]]:
    return {(v.code, v.name, v.side, v.rank) for v in violations}


async def test_all_kinds_of_all_ranks_in_one_error(site: Site) -> None:
    async with two_by_two(site) as sides:
        await meet(sides)

        def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
            shapes = {"rows": (4, 3), "cut": (6,)}
            if side == "trainer":
                tensors = {
                    "good": torch.zeros(3),
                    "only_trainer": torch.zeros(2),
                    "shape": torch.zeros(4),
                    "number": torch.zeros(4, dtype=torch.int64),
                    "rows": torch.zeros(2 if rank == 0 else 3, 3),
                    "meta": torch.zeros(2, device="meta") if rank == 1 else torch.zeros(2),
                    "contributions": torch.zeros(2),
                }
                if rank == 0:
                    tensors["cut"] = torch.zeros(3)
                places = {"rows": [Shard(0)], "cut": [Shard(0)]}
                return tensors, {"direction": "send", "placements": places, "shapes": shapes}
            memory = torch.zeros(8)
            tensors = {
                "good": torch.zeros(3),
                "only_inference": torch.zeros(2),
                "shape": torch.zeros(5),
                "number": torch.zeros(4),
                "rows": torch.zeros(4, 3),
                "cut": torch.zeros(6),
                "meta": torch.zeros(2),
                "contributions": torch.zeros(2),
                "left": memory[:5],
                "right": memory[3:],
            }
            return tensors, {"placements": {"contributions": [Partial()]}}

        found = short(refused(await sides.register("b", given)))
        assert found >= {
            ("unknown_name", "only_trainer", "trainer", None),
            ("missing_name", "only_inference", "trainer", None),
            ("missing_name", "left", "trainer", None),
            ("shape_mismatch", "shape", "inference", None),
            ("dtype", "number", "inference", None),
            ("shape_mismatch", "rows", "trainer", 1),
            ("uncovered", "cut", "inference", 0),
            ("uncovered", "cut", "inference", 1),
            ("unsupported", "meta", "trainer", 1),
            ("target_partial", "contributions", "inference", None),
        }
        assert {("alias", "left", "inference", r) for r in (0, 1)} & found
        assert not {name for _, name, _, _ in found} & {"good"}


async def test_a_tensor_with_two_faults_has_both_told(site: Site) -> None:
    async with two_by_two(site) as sides:
        await meet(sides)

        def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
            if side == "trainer":
                local = torch.zeros(3 if rank else 2, dtype=torch.int64)
                return {"w": local}, {"direction": "send", "placements": {"w": [Shard(0)]}, "shapes": {"w": (4,)}}
            return {"w": torch.zeros(1).expand(5)}, {}

        found = short(refused(await sides.register("b", given)))
        assert found == {
            ("shape_mismatch", "w", "trainer", 1),
            ("shape_mismatch", "w", "inference", None),
            ("dtype", "w", "inference", None),
            ("alias", "w", "inference", 0),
            ("alias", "w", "inference", 1),
        }


UNSUPPORTED = {
    "meta": (lambda: torch.zeros(2, device="meta"), "meta tensor .* materialise it first"),
    "sparse": (
        lambda: torch.eye(2).to_sparse(),
        r"sparse tensor \(torch.sparse_coo\); register its indices and values",
    ),
    "conj": (lambda: torch.zeros(2, dtype=torch.complex64).conj(), r"conjugate or negative view; call resolve_conj"),
    "neg": (lambda: torch.zeros(2, dtype=torch.complex64).conj().imag, r"conjugate or negative view"),
    "odd": (lambda: torch.zeros(2).as_subclass(Odd), "tensors of class Odd cannot be moved"),
    "text": (lambda: "w", "not a tensor, but of type str"),
}


async def test_what_is_no_plain_tensor_is_refused_by_name(site: Site) -> None:
    async with two_by_two(site) as sides:
        await meet(sides)

        def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
            bad = {name: make() for name, (make, _) in UNSUPPORTED.items()}
            return (bad if (side, rank) == ("trainer", 1) else {}), {}

        violations = refused(await sides.register("b", given))
        assert {v.name for v in violations} == set(UNSUPPORTED)
        for v in violations:
            assert (v.code, v.side, v.rank) == ("unsupported", "trainer", 1)
            assert re.search(UNSUPPORTED[v.name][1], v.text), v.text


@pytest.mark.filterwarnings("ignore:.*quantize.*")
@pytest.mark.filterwarnings("ignore:.*TypedStorage.*")
async def test_quantized(site: Site) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        [v] = refused(await sides.register("b", lambda side, rank: ({"w": quantized} if side == "trainer" else {}, {})))
        assert "quantized tensor; register its int_repr() and scales" in v.text


async def test_a_dtype_that_etha_does_not_know(site: Site) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        pairs = [
            (torch.float32, torch.int32),
            (torch.int64, torch.int32),
            (torch.uint8, torch.int16),
            (torch.bool, torch.float32),
        ]
        for i, (there, here) in enumerate(pairs):
            answers = await sides.register(
                f"b{i}",
                lambda side, rank, there=there, here=here: (
                    {"w": torch.zeros(2, dtype=there if side == "trainer" else here)},
                    {"direction": "send" if side == "trainer" else None},
                ),
            )
            [v] = refused(answers)
            assert v.code == "dtype" and str(there).removeprefix("torch.") in v.text
            assert str(here).removeprefix("torch.") in v.text


async def test_layouts_that_disagree(site: Site) -> None:
    async with two_by_two(site) as sides:
        await meet(sides)

        def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
            if side == "inference":
                return {"w": torch.zeros(4), "v": torch.zeros(4), "u": torch.zeros(4)}, {}
            return (
                {
                    "w": torch.zeros(2) if rank == 0 else torch.zeros(4),
                    "v": torch.zeros(4, dtype=torch.float32 if rank == 0 else torch.float64),
                    "u": torch.zeros(4),
                },
                {"placements": {"w": [Shard(0) if rank == 0 else Replicate()]}, "shapes": {"u": (4 + rank,)}},
            )

        violations = refused(await sides.register("b", given))
        text = {v.name: v for v in violations}
        assert (
            text["w"].code == "layout" and "layouts of one name must be equal or over disjoint ranks" in text["w"].text
        )
        assert text["v"].code == "dtype" and "float32 and float64" in text["v"].text
        assert text["u"].code == "shape_mismatch" and "[(4,), (5,)]" in text["u"].text
        assert all(v.side == "trainer" for v in violations)


async def test_a_global_shape_that_cannot_be_told(site: Site) -> None:
    async with two_by_two(site) as sides:
        await meet(sides)

        def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
            sharded = {"placements": {"w": [Shard(0)]}}
            if side == "inference":
                return {"w": torch.zeros(4)}, {}
            return ({"w": torch.zeros(2)} if rank == 0 else {}), sharded if rank == 0 else {}

        violations = refused(await sides.register("b", given))
        [v] = [v for v in violations if v.name == "w"]
        assert (v.code, v.side) == ("shape_mismatch", "trainer")
        assert "sizes 3, 4 all fit" in v.text and "give the global shape in shapes=" in v.text


async def test_forms_and_pairs_must_agree(site: Site) -> None:
    async with two_by_two(site) as sides:
        await meet(sides)

        def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
            tensor = torch.zeros(4)
            return ([(tensor, sides.pair)] if side == "trainer" else {"w": tensor}), {}

        violations = refused(await sides.register("b", given))
        forms = [v for v in violations if v.code == "form"]
        assert short(forms) == {("form", "", "trainer", 0), ("form", "", "trainer", 1)}
        assert "use the same form on both sides" in forms[0].text


async def test_one_memory_under_two_names(site: Site) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        tied = torch.arange(4.0)

        def given(same: bool) -> Any:
            def of(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
                if side == "trainer":
                    return {"a": tied, "b": tied, "c": tied[1:]}, {"direction": "send"}
                own = torch.zeros(5)
                return {"a": own[:4], "b": own[:4] if same else own[1:], "c": torch.zeros(3)}, {}

            return of

        [v] = refused(await sides.register("b", given(False)))
        assert (v.code, v.side, v.rank) == ("alias", "inference", 0)
        assert {v.name} | {"a", "b"} == {"a", "b"} and ("'b'" in v.text or "'a'" in v.text)
        handles = await sides.register("b", given(True))
        results = await sides.move(handles)
        assert [r.seq for r in results.values()] == [1, 1]


@pytest.mark.parametrize("atomic", [False, True])
async def test_names_tied_on_the_target_need_one_memory_on_the_source(site: Site, atomic: bool) -> None:
    """Else the last copy would win, whichever that is; equal values in two places are two values."""
    async with two_by_two(site) as sides:
        await meet(sides)
        tied, apart = torch.arange(4.0), torch.arange(4.0)
        source = {"a": tied, "b": tied, "c": apart}

        def given(names: str, *, only: int | None = None, cut: bool = False) -> Any:
            """The target ties ``names`` (on rank ``only``); ``cut``: the source's second one lies apart on rank 1."""

            def of(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
                if side == "trainer":
                    held = {name: source[name] for name in names}
                    if cut and rank == 1:
                        held[names[1]] = tied.clone()
                    return held, {"direction": "send"}
                own = torch.zeros(4)
                return {n: own if only in (None, rank) else torch.zeros(4) for n in names}, {"atomic": atomic}

            return of

        for refused_ones, ranks in (
            (given("ac"), (0, 1)),
            (given("ac", only=1), (1,)),
            (given("ab", cut=True), (0, 1)),
        ):
            found = refused(await sides.register("b", refused_ones))
            assert {(v.code, v.side, v.rank) for v in found} == {("double_write", "inference", r) for r in ranks}
            assert all("tie them on the source as well, or register one of them" in v.text for v in found)
        handles = await sides.register("b", given("ab"))
        await sides.move(handles)
        for handle in handles.values():
            await handle.close()


async def test_names_tied_on_both_sides_must_be_cut_alike(site: Site) -> None:
    """One memory cannot hold the upper rows of one name and the lower ones of the other, nor a matrix both ways."""
    async with two_by_two(site) as sides:
        await meet(sides)
        tied = torch.arange(16.0).view(4, 4)
        outs = {rank: torch.zeros(2, 4) for rank in (0, 1)}
        upper, lower = [[(0, 2)], [(0, 4)]], [[(2, 4)], [(0, 4)]]

        def given(second: Any, other: torch.Tensor) -> Any:
            def of(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
                shapes = {"shapes": {"a": (4, 4), "b": (4, 4)}}
                if side == "trainer":
                    return {"a": tied, "b": other}, {"direction": "send", **shapes}
                return {"a": outs[rank], "b": outs[rank]}, {"regions": {"a": upper, "b": second}, **shapes}

            return of

        for different in (given(upper, tied.t()), given(lower, tied)):
            found = refused(await sides.register("b", different))
            assert {(v.code, v.rank) for v in found} == {("double_write", 0), ("double_write", 1)}
        handles = await sides.register("b", given(upper, tied))
        await sides.move(handles)
        assert torch.equal(outs[0], tied[:2]) and torch.equal(outs[1], tied[:2])


async def test_a_direction_is_proven_now_or_by_its_first_transfer(site: Site) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])

        def given(**directions: str) -> Any:
            def of(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
                tensor = torch.zeros(1).expand(4) if side == "trainer" else torch.ones(4)
                return {"w": tensor}, {"direction": directions.get(side)}

            return of

        for directions in ({"trainer": "recv"}, {"inference": "send"}, {"trainer": "both"}, {"inference": "both"}):
            [v] = refused(await sides.register("b", given(**directions)))
            assert (v.code, v.name, v.side, v.rank) == ("alias", "w", "trainer", 0)
        handles = await sides.register("b", given())
        for member, handle in handles.items():
            verb = "recv" if member[0] == "trainer" else "send"
            with pytest.raises(RegistrationError, match=r"batch 'b' cannot move from inference to trainer") as caught:
                await handle.transfer(verb)
            assert [x.code for x in caught.value.violations] == ["alias"]
        results = await sides.move(handles)
        assert [r.seq for r in results.values()] == [1, 1], "what was refused consumed nothing"
        for handle in handles.values():
            await handle.close()
        assert all(h.plan for h in (await sides.register("b", given(trainer="send", inference="recv"))).values())


async def test_after_a_refusal_the_id_is_free(site: Site) -> None:
    async with two_by_two(site) as sides:
        await meet(sides)

        def given(size: int) -> Any:
            return lambda side, rank: ({"w": torch.zeros(4 if side == "trainer" else size)}, {})

        for _ in range(3):
            refused(await sides.register("b", given(5)))
            handles = await sides.register("b", given(4))
            assert {r.seq for r in (await sides.move(handles)).values()} and not any(
                isinstance(r, Exception) for r in handles.values()
            )
            for handle in handles.values():
                await handle.close()


async def test_an_open_id_with_other_tensors(site: Site) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        mine = {side: torch.zeros(2) for side in sides.worlds}
        handles = await sides.register("b", lambda side, rank: ({"w": mine[side]}, {}))
        again = await sides.clients["trainer", 0].register_tensors("b", {"w": mine["trainer"]}, pair_name=sides.pair)
        assert again.plan == handles["trainer", 0].plan, "the same tensors are a no-op"
        expected = f"this client has registered batch 'b' on pair '{sides.pair}' with other tensors or another pair"
        with pytest.raises(
            RegistrationError, match=f"{expected}, and an id is one batch of a client: close its handle"
        ):
            await sides.clients["trainer", 0].register_tensors("b", {"w": torch.zeros(2)}, pair_name=sides.pair)


async def test_a_long_list_is_whole_in_violations(site: Site) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        answers = await sides.register(
            "b",
            lambda side, rank: (
                {f"w{i}": torch.zeros(3 if side == "trainer" else 2) for i in range(30)},
                {"direction": "send" if side == "trainer" else None},
            ),
        )
        violations = refused(answers)
        assert len(violations) == 30
        error = answers["trainer", 0]
        assert "batch 'b'" in error.message and sides.pair in error.message
        assert "30 reasons" in error.message and "and 10 more, see .violations" in error.message


@pytest.mark.parametrize("shape", [(-5,), (2**65,), (2**40, 2**40)], ids=str)
async def test_a_shape_that_cannot_be_is_told_to_all_ranks(site: Site, pair: str, shape: tuple[int, ...]) -> None:
    async with Sides(site, pair, trainer=2) as sides:
        await sides.meet(trainer={"device_mesh": (2,)}, inference={"device_mesh": (1,)}, placements=[Replicate()])

        async def register(member: tuple[str, int]) -> Any:
            wrong = {"shapes": {"w": shape}} if member == ("trainer", 0) else {}
            return await sides.clients[member].register_tensors(
                "b", {"w": torch.zeros(5)}, pair_name=pair, timeout=60, **wrong
            )

        for error in await asyncio.gather(*(register(member) for member in sides.members), return_exceptions=True):
            assert isinstance(error, RegistrationError), error
            assert [(v.code, v.name, v.side, v.rank) for v in error.violations if "shapes['w']" in v.text] == [
                ("shape_mismatch", "w", "trainer", 0)
            ]
        handles = await sides.register("b", lambda side, rank: ({"w": torch.zeros(5)}, {}))
        assert len(handles) == 3
