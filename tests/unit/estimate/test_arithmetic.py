from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from flagscale.estimate.arithmetic import flops_per_token


def model(**changes: Any) -> Namespace:
    base: dict[str, Any] = {
        "family": "gpt",
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": None,
        "multi_latent_attention": False,
        "seq_length": 4096,
        "swiglu": True,
        "gated_linear_unit": False,
        "num_moe_experts": None,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_layer_freq": 1,
        "fp8": None,
        "peft_type": None,
        "mtp_num_layers": None,
        "window_size": None,
        "window_attn_skip_freq": None,
    }
    return Namespace(**{**base, **changes})


def test_llama_3_8b_by_hand() -> None:
    # 7 504 658 432 weights in matrices (8.03 G without the embedding and the norms).
    expected = 6 * 7_504_658_432 + 6 * 32 * 4096 * 4096
    assert flops_per_token(model(), 128256) == pytest.approx(expected, rel=1e-6)


def test_frozen_matrices_have_no_gradients_of_weights() -> None:
    expected = 4 * (7_504_658_432 - 128256 * 4096) + 6 * 32 * 4096 * 4096
    found = flops_per_token(model(peft_type="lora"), 0)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_known_measurement() -> None:
    # 10 278 tokens/s a GPU were 50.1 % of an H200's 989 TFLOP/s.
    mfu = 10278 * flops_per_token(model(), 128256) / 989e12
    assert mfu == pytest.approx(0.501, abs=0.001)


def test_only_selected_experts_are_counted() -> None:
    dense = flops_per_token(model(), 1000)
    mixture = flops_per_token(model(num_moe_experts=8, moe_router_topk=1), 1000)
    assert mixture - dense == pytest.approx(6 * 32 * 4096 * 8)


def test_dense_layers_between_mixtures() -> None:
    every = flops_per_token(model(num_moe_experts=8), 1000)
    second = flops_per_token(model(num_moe_experts=8, moe_layer_freq=2), 1000)
    listed = flops_per_token(model(num_moe_experts=8, moe_layer_freq=[1, 0] * 16), 1000)
    assert second == listed
    assert second < every


@pytest.mark.parametrize("window", [0, 1, 5, 99, 100, 4096])
def test_window_limits_attention(window: int) -> None:
    def of_attention(**changes: Any) -> float:
        own = {"seq_length": 100, "num_layers": 1}
        return flops_per_token(model(**own, **changes), 0) - flops_per_token(
            model(**own, window_size=[0, 0]), 0
        )

    seen = [min(window, place) for place in range(100)]  # before each token, itself left out
    # Two products, of 2 x 4096, three times.
    assert of_attention(window_size=[window, 0]) == pytest.approx(
        (sum(seen) / 100 if window < 100 else 49) * 6 * 2 * 4096, rel=1e-9, abs=1e-3
    )


def test_windows_in_some_layers() -> None:
    none, every = model(), model(window_size=[128, 0])
    third = model(window_size=[128, 0], window_attn_skip_freq=4)
    listed = model(window_size=[128, 0], window_attn_skip_freq=[1, 1, 1, 0] * 8)
    saved = [flops_per_token(none, 0) - flops_per_token(one, 0) for one in (every, third, listed)]
    assert saved[1] == saved[2] == pytest.approx(saved[0] * 0.75)
    assert saved[0] > 0
