"""bench/peers: the index arithmetic for peers without layouts, and the truth that all are held to."""

from __future__ import annotations

import pytest
import torch

from bench.peers import truth
from bench.peers.cases import Row, Run, Side, Whole, llama, rows


def row(shape: tuple[int, ...], dim: int, ranks: int = 2) -> Row:
    return Row(key="t", title="t", tensors=(Whole(name="w", shape=shape),), ranks=ranks, dim=dim)


def test_same_placements_are_one_run_for_each_rank() -> None:
    case = row((4, 6), 0)
    assert list(case.runs(case.tensors[0], 1, 1)) == [Run(at_source=0, at_target=0, nbytes=48)]
    assert list(case.runs(case.tensors[0], 0, 1)) == []


def test_rows_to_columns_are_one_run_for_each_row() -> None:
    case = row((4, 6), 1)
    # Source rank 1 holds rows 2 and 3, target rank 0 columns 0 to 2.
    assert list(case.runs(case.tensors[0], 1, 0)) == [
        Run(at_source=0, at_target=24, nbytes=12),
        Run(at_source=24, at_target=36, nbytes=12),
    ]
    assert case.local_shape(case.tensors[0], "target", 0) == (4, 3)


@pytest.mark.parametrize("case", rows(256), ids=lambda case: case.key)
def test_runs_move_every_byte_to_where_the_truth_wants_it(case: Row) -> None:
    def held(side: Side, rank: int) -> dict[str, torch.Tensor]:
        shapes = {tensor: case.local_shape(tensor, side, rank) for tensor in case.tensors}
        return {tensor.name: torch.zeros(shape, dtype=truth.DTYPES[tensor.dtype]) for tensor, shape in shapes.items()}

    sources = [held("source", rank) for rank in range(case.ranks)]
    targets = [held("target", rank) for rank in range(case.ranks)]
    for rank, tensors in enumerate(sources):
        truth.fill(case, rank, 3, tensors)
    for rank, tensors in enumerate(targets):
        truth.clear(tensors)
        for tensor in case.tensors:
            there = tensors[tensor.name].view(-1).view(torch.uint8)
            for source in range(case.ranks):
                here = sources[source][tensor.name].view(-1).view(torch.uint8)
                for run in case.runs(tensor, source, rank):
                    there[run.at_target : run.at_target + run.nbytes] = here[run.at_source : run.at_source + run.nbytes]
        assert truth.fault(case, rank, 3, tensors) is None
        assert truth.fault(case, rank, 4, tensors) is not None


def test_a_row_that_is_shifted_by_one_is_told() -> None:
    case = row((8, 8192), 0, ranks=1)
    held = {"w": torch.zeros(8, 8192)}
    truth.fill(case, 0, 1, held)
    held["w"][3] = held["w"][4].clone()
    said = truth.fault(case, 0, 1, held)
    assert said is not None
    assert said.startswith("w[3, ")


def test_a_dim_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="dim 1 is not cut in 2 equal parts"):
        row((4, 5), 1)


def test_the_model_has_the_tensors_of_llama_3_8b_in_a_gib() -> None:
    assert [tensor.shape for tensor in llama(4096)[:3]] == [(128256, 4096), (4096,), (128256, 4096)]
    assert sum(tensor.nbytes for tensor in llama(4096)) == 8_030_261_248 * 2
    model = next(case for case in rows() if case.key == "llama")
    assert len(model.tensors) == 291
    assert 0.99 < model.nbytes / 2**30 < 1.01
