"""Lion, compared with another implementation, and its states."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from support.lion_reference import CASES, SHAPE, train
from support.muon_reference import draw

from flagscale.train.optim import lion
from flagscale.train.optim.lion import Lion

pytestmark = pytest.mark.torch

RECORDED = json.loads(
    (Path(__file__).parents[2] / "golden" / "train" / "lion.json").read_text("utf-8")
)


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_emerging_optimizers(name: str) -> None:
    weight = torch.nn.Parameter(draw(SHAPE, 0))
    train(Lion([weight], **CASES[name]), weight)
    expected = torch.tensor(RECORDED[name])
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-7)


def test_batches_of_parameters_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size in (1, 40, 1 << 24):
        monkeypatch.setattr(lion, "_BATCH_ELEMENTS", size)
        weights = [torch.nn.Parameter(draw((4, 5), number)) for number in range(4)]
        optimizer = Lion(weights, lr=1e-2, weight_decay=0.1)
        for step in range(3):
            for number, weight in enumerate(weights):
                weight.grad = None if number == 2 else draw((4, 5), 10 + step * number)
            optimizer.step()
        results.append(torch.stack([weight.detach() for weight in weights]))
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[2])
    assert torch.equal(results[0][2], draw((4, 5), 2))


def test_resuming_from_a_saved_state_equals_continuing() -> None:
    weight = torch.nn.Parameter(draw(SHAPE, 0))
    optimizer = Lion([weight], lr=1e-2)
    train(optimizer, weight)
    resumed_weight = torch.nn.Parameter(weight.detach().clone())
    resumed = Lion([resumed_weight], lr=1e-2)
    resumed.initialize_states()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, weight)
    train(resumed, resumed_weight)
    assert torch.equal(weight, resumed_weight)
    assert [set(state) for state in optimizer.state.values()] == [{"exp_avg"}]
