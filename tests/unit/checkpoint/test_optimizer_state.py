"""State of the distributed optimizer that is gathered to be saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flagscale.train.checkpoint import optimizer_state
from flagscale.train.checkpoint.gather_plan import Part

pytestmark = pytest.mark.torch


def test_a_part_that_is_sent_in_several_rounds_is_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading it may convert all of it to fp32."""
    monkeypatch.setattr(optimizer_state, "_SENT_ELEMENTS", 3)
    weights = [torch.zeros(10), torch.zeros(2, 4)]
    reads = []

    def read(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        reads.append(weight)
        return {
            name: torch.arange(weight.numel()) + 100.0 * index
            for index, name in enumerate(("param", "exp_avg", "exp_avg_sq"))
        }

    optimizer: Any = SimpleNamespace(
        data_parallel_group=SimpleNamespace(rank=lambda: 0, size=lambda: 1),
        _get_main_param_and_optimizer_states=read,
    )
    parameters = [
        optimizer_state._Parameter(weight, [Part(0, 0, weight.numel())]) for weight in weights
    ]
    states = optimizer_state._gather_states(optimizer, parameters)
    assert [id(weight) for weight in reads] == [id(weight) for weight in weights]
    for index, weight in enumerate(weights):
        expected = torch.arange(weight.numel()).view(weight.shape) + 200.0
        assert torch.equal(states[index]["exp_avg_sq"], expected)
