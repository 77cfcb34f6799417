"""Estimates of models with frozen parameters."""

from __future__ import annotations

import pytest
from unit.estimate.test_memory import VOCABULARY, WHOLE, forecast_llama, llama_arguments

from flagscale.estimate.arithmetic import flops_per_token

FROZEN = "--freeze-parameters embedding decoder.layers.[0-15]"
LAYER = 4096 * (2 * 4096 + 2048 + 3 * 14336) + 2 * 4096
EMBEDDING = VOCABULARY * 4096


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        pytest.param(FROZEN, [16 * LAYER + 4096 + EMBEDDING], id="freeze"),
        pytest.param(
            "--trainable-parameters decoder.layers.[16-31] decoder.final_layernorm output_layer",
            [16 * LAYER + 4096 + EMBEDDING],
            id="train",
        ),
        pytest.param(
            f"{FROZEN} --pipeline-model-parallel-size 2",
            [0, 16 * LAYER + 4096 + EMBEDDING],
            id="frozen-stage",
        ),
        pytest.param(
            f"{FROZEN} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 8",
            [8 * LAYER, 8 * LAYER + 4096 + EMBEDDING],
            id="interleaved",
        ),
    ],
)
def test_only_trained_weights_have_gradients_and_optimizer_state(
    options: str, trained: list[int]
) -> None:
    stages = forecast_llama(f"{WHOLE} {options}", 2).stages
    assert [stage.memory.gradients / 4 for stage in stages] == trained
    whole = forecast_llama(f"{WHOLE} {options.replace(FROZEN, '')}", 2).stages
    if "trainable" not in options:
        weights = [stage.memory.weights for stage in stages]
        assert weights == [stage.memory.weights for stage in whole]


def test_frozen_weights_spare_their_gradients() -> None:
    """Leading layers need no backward pass; a frozen matrix between trained ones no gradient."""
    whole = flops_per_token(llama_arguments(WHOLE), VOCABULARY)
    leading = flops_per_token(llama_arguments(f"{WHOLE} {FROZEN}"), VOCABULARY)
    head = 3 * 2 * VOCABULARY * 4096
    assert whole - leading == pytest.approx((whole - head) / 2 * 2 / 3)
    mlp = "--freeze-parameters decoder.layers.5.mlp.linear_fc2"
    middle = flops_per_token(llama_arguments(f"{WHOLE} {mlp}"), VOCABULARY)
    assert whole - middle == 2 * 4096 * 14336
