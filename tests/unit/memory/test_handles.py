"""Handles say where a tensor lies; fingerprints, whether it still lies there."""

from __future__ import annotations

import time

import torch

from etha.memory.handles import describe, fingerprint, moved, span_nbytes


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


def test_whatever_moves_a_tensor_is_noticed() -> None:
    tensors = [torch.nn.Parameter(torch.empty(4, 6)) for _ in range(5)]
    known = [fingerprint(t) for t in tensors]
    assert moved(tensors, known) == []
    tensors[1].data = torch.empty(4, 6)
    tensors[2].data = tensors[2].data.t()
    tensors[3].data = tensors[3].data.to(torch.float16)
    tensors[4].data = tensors[4].data[:2]
    assert moved(tensors, known) == [1, 2, 3, 4]


def test_a_thousand_tensors_take_less_than_two_milliseconds() -> None:
    tensors = [torch.empty(2, 3) for _ in range(1000)]
    known = [fingerprint(t) for t in tensors]
    times = []
    for _ in range(20):
        began = time.thread_time()
        assert moved(tensors, known) == []
        times.append(time.thread_time() - began)
    assert min(times) < 0.002
