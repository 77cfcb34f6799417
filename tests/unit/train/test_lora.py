"""LoRA adapters: dropout on inputs and outputs, gradients, and initialization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from flagscale.train.layers.lora import LoraColumnLinear, LoraConfig, LoraRowLinear, get_initial_std

pytestmark = pytest.mark.torch

RANK, ALPHA, DROPOUT = 4, 8.0, 0.25
LAYERS = {
    "column": (ColumnParallelLinear, LoraColumnLinear, {}),
    "row": (RowParallelLinear, LoraRowLinear, {"input_is_parallel": True}),
}


@pytest.fixture
def single_rank_layout(single_process_group: None) -> Iterator[None]:
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest, single_rank_layout: None) -> Any:
    """Layer of 64 inputs and 8 outputs whose adapter drops a quarter of its inputs."""
    torch.manual_seed(1)
    base_class, lora_class, options = LAYERS[request.param]
    config = ModelParallelConfig(use_cpu_initialization=True, params_dtype=torch.float32)
    group = parallel_state.get_tensor_model_parallel_group()
    linear: Any = base_class(
        64, 8, config=config, init_method=torch.nn.init.normal_, bias=False,
        skip_bias_add=False, tp_group=group, **options,
    )  # fmt: skip
    linear.__class__ = lora_class
    linear.add_adapter(LoraConfig(RANK, ALPHA, DROPOUT))
    with torch.no_grad():
        linear.lora_a.normal_()
        linear.lora_b.normal_()
    return linear


def test_evaluation_has_no_dropout(layer: Any) -> None:
    layer.double().eval()
    inputs = torch.randn(6, 1, 64, dtype=torch.float64)
    merged = layer.weight + ALPHA / RANK * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(layer(inputs)[0], inputs @ merged.t())


def test_only_the_adapter_has_dropout(layer: Any) -> None:
    layer.train()
    inputs = torch.ones(4000, 1, 64)
    torch.manual_seed(0)
    adapter_output = layer(inputs)[0] - inputs @ layer.weight.t()
    assert len(adapter_output.unique(dim=0)) > 3000  # each token has a different mask
    adapter_weight = ALPHA / RANK * layer.lora_b @ layer.lora_a
    # Remaining inputs are scaled up: the mean is unchanged, and an input's variance is p / (1 - p).
    standard_deviation = (adapter_weight.square().sum(1) * DROPOUT / (1 - DROPOUT)).sqrt()
    torch.testing.assert_close(adapter_output[:, 0].std(0), standard_deviation, rtol=0.1, atol=0)
    mean_error = (adapter_output[:, 0].mean(0) - adapter_weight.sum(1)).abs()
    assert (mean_error < 5 * standard_deviation / 4000**0.5).all()


def test_gradients_use_the_dropout_mask_of_the_forward_pass(layer: Any) -> None:
    layer.train()
    inputs = torch.randn(6, 1, 64)
    torch.manual_seed(1)
    layer(inputs)[0].sum().backward()
    torch.manual_seed(1)
    dropped_inputs = torch.nn.functional.dropout(inputs, DROPOUT)
    expected = torch.ones(8, 6) @ (dropped_inputs[:, 0] @ layer.lora_a.t()) * ALPHA / RANK
    torch.testing.assert_close(layer.lora_b.grad, expected)
    assert layer.weight.grad is None


def test_dropout_on_the_adapter_output(layer: Any) -> None:
    layer.lora_config = replace(layer.lora_config, dropout_on_output=True)
    layer.train()
    inputs = torch.randn(500, 1, 64)
    expected = ALPHA / RANK * inputs[:, 0] @ layer.lora_a.t() @ layer.lora_b.t()
    adapter_output = (layer(inputs)[0] - inputs @ layer.weight.t())[:, 0].detach()
    dropped = adapter_output.abs() < 1e-4
    assert float(dropped.float().mean()) == pytest.approx(DROPOUT, abs=0.03)
    torch.testing.assert_close(
        adapter_output[~dropped], (expected / (1 - DROPOUT))[~dropped], rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(
    ("init_method", "standard_deviation"),
    [("kaiming", (3 * 64) ** -0.5), ("xavier", (2 / (64 + RANK)) ** 0.5), ("normal", 0.2)],
)
def test_initial_standard_deviation_of_a(
    layer: Any, init_method: str, standard_deviation: float
) -> None:
    layer.add_adapter(LoraConfig(RANK, ALPHA, init_method=init_method))
    assert get_initial_std(layer.lora_a) == pytest.approx(standard_deviation)
