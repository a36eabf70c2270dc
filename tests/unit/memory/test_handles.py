"""Handles say where a tensor lies."""

from __future__ import annotations

import torch

from etha.memory.handles import describe, span_nbytes


def test_a_plain_tensor_is_an_address_of_this_process() -> None:
    t = torch.empty(4, 6, dtype=torch.bfloat16)[1:, ::2]
    handle = describe(t)
    assert handle.segment is None and handle.offset == t.data_ptr()
    assert handle.shape == (3, 3) and handle.strides == (6, 2) and handle.dtype == "bfloat16"


def test_span_counts_from_the_first_to_behind_the_last_element() -> None:
    assert span_nbytes((3, 3), (6, 2), 2) == (2 * 6 + 2 * 2 + 1) * 2
    assert span_nbytes((), (), 4) == 4
    assert span_nbytes((5, 0), (1, 1), 4) == 0
    assert span_nbytes((5, 3), (0, 1), 4) == 12
