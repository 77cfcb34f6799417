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
    # As on an accelerator, whose states are copied to host memory.
    monkeypatch.setattr(optimizer_state, "_find_own_tensors", lambda *_: None)
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


def test_states_in_host_memory_are_not_copied() -> None:
    weights = [torch.zeros(10), torch.zeros(2, 4)]
    tensors = [
        {name: torch.rand(weight.numel()) for name in ("param", "exp_avg", "exp_avg_sq")}
        for weight in weights
    ]
    tensors[1]["exp_avg"] = tensors[1]["exp_avg"].double()  # needs a conversion
    optimizer: Any = SimpleNamespace(
        data_parallel_group=SimpleNamespace(rank=lambda: 0, size=lambda: 1),
        _get_main_param_and_optimizer_states=lambda weight: tensors[weight.dim() - 1],
    )
    parameters = [
        optimizer_state._Parameter(weight, [Part(0, 0, weight.numel())]) for weight in weights
    ]
    states = optimizer_state._gather_states(optimizer, parameters)
    for index, weight in enumerate(weights):
        for name, tensor in tensors[index].items():
            state = states[index][name]
            assert state.shape == weight.shape and state.dtype == torch.float32
            assert torch.equal(state.view(-1), tensor.float())
            assert (state.data_ptr() == tensor.data_ptr()) == (index == 0)
