"""What adapters see of their layers' inputs, or give of what they add, while some is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from flagscale.train.layers.lora import Adapter, LoraColumnLinear, LoraRowLinear, spread

pytestmark = pytest.mark.torch

RANK, ALPHA, DROPPED = 4, 8.0, 0.25
LAYERS = {
    "column": (ColumnParallelLinear, LoraColumnLinear, {}),
    "row": (RowParallelLinear, LoraRowLinear, {"input_is_parallel": True}),
}


@pytest.fixture
def one_layout(one_rank: None) -> Iterator[None]:
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest, one_layout: None) -> Any:
    """A layer of 64 inputs and 8 outputs whose adapter drops a quarter of its inputs."""
    plain, adapted, options = LAYERS[request.param]
    config = ModelParallelConfig(use_cpu_initialization=True, params_dtype=torch.float32)
    group = parallel_state.get_tensor_model_parallel_group()
    made: Any = plain(
        64, 8, config=config, init_method=torch.nn.init.normal_, bias=False,
        skip_bias_add=False, tp_group=group, **options,
    )  # fmt: skip
    made.__class__ = adapted
    made.add_adapter(Adapter(RANK, ALPHA, DROPPED))
    with torch.no_grad():
        made.lora_a.normal_()
        made.lora_b.normal_()
    return made


def test_answers_are_of_all_inputs(layer: Any) -> None:
    layer.eval()
    given = torch.randn(6, 1, 64)
    merged = layer.weight + ALPHA / RANK * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(layer(given)[0], given @ merged.t())


def test_the_adapter_alone_is_trained_on_what_is_left(layer: Any) -> None:
    layer.train()
    given = torch.ones(4000, 1, 64)
    torch.manual_seed(0)
    found = layer(given)[0] - given @ layer.weight.t()
    assert len(found.unique(dim=0)) > 3000  # each token has other inputs dropped
    whole = ALPHA / RANK * layer.lora_b @ layer.lora_a
    # What is left is enlarged: the mean stays, and an input's share of the variance is p / (1 - p).
    deviation = (whole.square().sum(1) * DROPPED / (1 - DROPPED)).sqrt()
    torch.testing.assert_close(found[:, 0].std(0), deviation, rtol=0.1, atol=0)
    away = (found[:, 0].mean(0) - whole.sum(1)).abs()
    assert (away < 5 * deviation / 4000**0.5).all()


def test_gradients_are_of_the_same_inputs(layer: Any) -> None:
    layer.train()
    given = torch.randn(6, 1, 64)
    torch.manual_seed(1)
    layer(given)[0].sum().backward()
    torch.manual_seed(1)
    left = torch.nn.functional.dropout(given, DROPPED)
    outward = torch.ones(8, 6) @ (left[:, 0] @ layer.lora_a.t()) * ALPHA / RANK
    torch.testing.assert_close(layer.lora_b.grad, outward)
    assert layer.weight.grad is None


def test_behind_it_what_an_adapter_adds_is_dropped(layer: Any) -> None:
    layer.lora = replace(layer.lora, behind=True)
    layer.train()
    given = torch.randn(500, 1, 64)
    added = ALPHA / RANK * given[:, 0] @ layer.lora_a.t() @ layer.lora_b.t()
    found = (layer(given)[0] - given @ layer.weight.t())[:, 0].detach()
    dropped = found.abs() < 1e-4
    assert float(dropped.float().mean()) == pytest.approx(DROPPED, abs=0.03)
    torch.testing.assert_close(
        found[~dropped], (added / (1 - DROPPED))[~dropped], rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(
    ("drawn", "deviation"),
    [("kaiming", (3 * 64) ** -0.5), ("xavier", (2 / (64 + RANK)) ** 0.5), ("normal", 0.2)],
)
def test_how_the_first_matrix_is_drawn(layer: Any, drawn: str, deviation: float) -> None:
    layer.add_adapter(Adapter(RANK, ALPHA, drawn=drawn))
    assert spread(layer.lora_a) == pytest.approx(deviation)
