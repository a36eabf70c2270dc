"""The text and the model of the demo, in one process."""

from __future__ import annotations

import math

import pytest
import torch

from etha.demo import text
from etha.demo.hashes import digest, digests
from etha.demo.model import GPT, Shape, evaluating, write


def small() -> GPT:
    torch.manual_seed(0)
    return GPT(Shape(vocabulary=len(text.load().vocabulary), context=16, width=32, layers=1, heads=2))


def test_the_text_is_what_its_source_says() -> None:
    corpus = text.load()
    assert len(corpus.train) + len(corpus.held_out) == 279_051
    assert len(corpus.vocabulary) == 65
    assert corpus.decode(corpus.encode("To be, or not to be")) == "To be, or not to be"
    assert corpus.encode("{").tolist() == [0]


def test_training_rows_are_shifted_by_one_and_never_held_out() -> None:
    corpus = text.load()
    inputs, targets = corpus.batch(8, 16, torch.Generator().manual_seed(1))
    assert inputs.shape == targets.shape == (8, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    again, _ = corpus.held_out_rows(4, 16)
    assert torch.equal(again, corpus.held_out_rows(4, 16)[0])


def test_the_model_has_about_a_million_parameters_and_starts_without_knowledge() -> None:
    corpus = text.load()
    model = GPT(Shape(vocabulary=len(corpus.vocabulary)))
    assert 0.9e6 < sum(p.numel() for p in model.parameters()) < 1.1e6
    with evaluating(model):
        loss = float(model.loss(*corpus.held_out_rows(4, 64)))
    assert abs(loss - math.log(65)) < 1


def test_the_model_looks_only_backwards() -> None:
    model = small()
    row = torch.arange(10)[None]
    other = row.clone()
    other[0, 7:] = 0
    with evaluating(model):
        torch.testing.assert_close(model(row)[0, :7], model(other)[0, :7])


@pytest.mark.slow
def test_a_few_steps_lower_the_loss() -> None:
    corpus, model = text.load(), small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(20):
        loss = model.loss(*corpus.batch(8, 16, random))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_a_sample_is_the_same_for_the_same_seed() -> None:
    corpus, model = text.load(), small()
    prompt = corpus.encode("HAMLET:\n")
    first, again, other = (write(model, prompt, 24, seed=seed) for seed in (1, 1, 2))
    assert first.shape == (24,) and torch.equal(first, again) and not torch.equal(first, other)


def test_a_hash_sees_every_element_shape_and_dtype() -> None:
    base = torch.arange(6.0)
    changed = base.clone()
    changed[5] = -5.0
    found = {digest(t) for t in (base, changed, base.reshape(2, 3), base.to(torch.float64), base.to(torch.bfloat16))}
    assert len(found) == 5
    assert digest(torch.arange(12.0)[::2].div(2)) == digest(base)
    assert digest(torch.tensor(1.0)) != digest(torch.tensor([1.0]))
    assert digest(torch.empty(0)) == digest(torch.empty(0))
    assert digests([("w", base)], here=False) == {}
    assert digests([("w", base)], here=True) == {"w": digest(base)}
