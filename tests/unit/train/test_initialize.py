"""Initial values of norm weights and biases."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from flagscale.train.models.initialize import initialize_weights

pytestmark = pytest.mark.torch


@pytest.fixture
def single_rank_layout(single_process_group: None) -> Iterator[None]:
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.usefixtures("single_rank_layout")
@pytest.mark.parametrize(
    ("norm_init_value", "expected"), [(None, 1.0), (0.25, 0.25)], ids=["default", "configured"]
)
def test_norm_weights_start_from_the_configured_value(
    norm_init_value: float | None, expected: float
) -> None:
    model: Any = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    config: Any = SimpleNamespace(
        num_moe_experts=None,
        num_layers=1,
        init_method_std=0.02,
        gated_linear_unit=False,
        layernorm_zero_centered_gamma=False,
    )
    initialize_weights(model, config, 1, norm_init_value=norm_init_value)
    norm, linear = model
    assert norm.weight.tolist() == [expected] * 4
    assert norm.bias.tolist() == linear.bias.tolist() == [0.0] * 4
    # Drawn from a normal distribution with standard deviation 0.02.
    assert 0 < linear.weight.abs().max() < 0.1
