"""Tests of the benchmark's models: each learns, and weights and data depend on the seed alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.bench.training.models import language, text
from flagscale.bench.training.models.builder import ModelUnderTest, build_model
from flagscale.bench.training.models.names import FAMILIES, ModelChoice
from flagscale.bench.training.timing import union_length

pytestmark = pytest.mark.torch


def _train(model: ModelUnderTest, batches: list[int]) -> list[float]:
    optimizer, losses = model.new_optimizer(), []
    for step in batches:
        optimizer.zero_grad()
        loss = model.module(**model.batch(7, step, 0))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_learns_and_uses_all_of_its_parameters(family: str) -> None:
    model = build_model(ModelChoice(family, "tiny"), seed=1, batch=4, sequence=24)
    first, *_, last = _train(model, [0] * 6)
    assert last < first
    # DistributedDataParallel does not support parameters without a gradient.
    assert all(p.grad is not None for p in model.module.parameters())


def test_weights_and_data_are_determined_by_the_seed() -> None:
    model, same_seed, other_seed = (
        build_model(ModelChoice("gpt2", "tiny"), seed=seed, batch=2, sequence=16)
        for seed in (1, 1, 2)
    )
    assert _train(model, [0, 1]) == _train(same_seed, [0, 1]) != _train(other_seed, [0, 1])
    batches = [model.batch(1, step, rank)["input_ids"] for step, rank in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(ids.flatten().tolist()) for ids in batches}) == 3


@pytest.mark.parametrize(
    ("family", "millions"),
    [("bert", 334), ("roberta", 354), ("bart", 407), ("gpt2", 774), ("llama", 1236)],
)
def test_large_models_have_published_sizes(family: str, millions: int) -> None:
    with torch.device("meta"):
        module = language.build_language_model(family, "large")
    assert round(sum(p.numel() for p in module.parameters()) / 1e6) == millions


@pytest.mark.parametrize("family", ["bert", "roberta", "bart", "gpt2", "llama"])
def test_longest_sequence_trains(family: str) -> None:
    """RoBERTa's position ids begin after the padding token's, so it needs more positions."""
    length = ModelChoice(family, "tiny").max_sequence
    model = build_model(ModelChoice(family, "tiny"), seed=0, batch=1, sequence=length)
    batch = model.batch(0, 0, 0)
    assert batch["input_ids"].shape == (1, length)
    assert torch.isfinite(model.module(**batch))


GENERATORS = st.integers(0, 2**31).map(lambda seed: torch.Generator().manual_seed(seed))


@settings(max_examples=30)
@given(length=st.integers(16, 128), generator=GENERATORS)
def test_labels_locate_the_question_in_the_passage(length: int, generator: Any) -> None:
    batch = text.draw_spans(text.build_corpus(500), 3, length, generator)
    ids, starts, ends = (
        batch[name].tolist() for name in ("input_ids", "start_positions", "end_positions")
    )
    for row, start, end in zip(ids, starts, ends, strict=True):
        assert len(row) == length
        assert row[1:5] == row[start : end + 1]
        assert (row[0], row[5], row[-1]) == (text.BOS, text.EOS, text.EOS)


@settings(max_examples=30)
@given(length=st.integers(16, 128), generator=GENERATORS)
def test_classified_passages_end_in_one_eos(length: int, generator: Any) -> None:
    batch = text.draw_classes(text.build_corpus(500), 3, length, generator)
    assert (batch["input_ids"] == text.EOS).sum(dim=1).tolist() == [1, 1, 1]
    assert batch["input_ids"].max() < 500
    assert 0 <= int(batch["labels"].min()) <= int(batch["labels"].max()) < text.CLASSES


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda s: (s[0], s[0] + s[1]))
    )
)
def test_overlapping_spans_are_counted_once(spans: list[tuple[int, int]]) -> None:
    moments = {moment for begin, end in spans for moment in range(begin, end)}
    assert union_length([(float(a), float(b)) for a, b in spans]) == len(moments)
