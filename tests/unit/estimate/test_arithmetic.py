from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from flagscale.estimate.arithmetic import flops_per_token


def make_model(**changes: Any) -> Namespace:
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


def test_llama_3_8b_agrees_with_a_manual_count() -> None:
    # 7 504 658 432 weights in matrices (8.03 G without the embedding and the norms).
    expected = 6 * 7_504_658_432 + 6 * 32 * 4096 * 4096
    assert flops_per_token(make_model(), 128256) == pytest.approx(expected, rel=1e-6)


def test_frozen_matrices_have_no_gradients_of_weights() -> None:
    expected = 4 * (7_504_658_432 - 128256 * 4096) + 6 * 32 * 4096 * 4096
    flops = flops_per_token(make_model(peft_type="lora"), 0)
    assert flops == pytest.approx(expected, rel=1e-6)


def test_mfu_agrees_with_a_published_measurement() -> None:
    # 10 278 tokens/s a GPU were 50.1 % of an H200's 989 TFLOP/s.
    mfu = 10278 * flops_per_token(make_model(), 128256) / 989e12
    assert mfu == pytest.approx(0.501, abs=0.001)


def test_only_selected_experts_are_counted() -> None:
    dense = flops_per_token(make_model(), 1000)
    mixture = flops_per_token(make_model(num_moe_experts=8, moe_router_topk=1), 1000)
    assert mixture - dense == pytest.approx(6 * 32 * 4096 * 8)


def test_dense_layers_between_mixtures() -> None:
    all_mixtures = flops_per_token(make_model(num_moe_experts=8), 1000)
    every_second = flops_per_token(make_model(num_moe_experts=8, moe_layer_freq=2), 1000)
    by_list = flops_per_token(make_model(num_moe_experts=8, moe_layer_freq=[1, 0] * 16), 1000)
    assert every_second == by_list
    assert every_second < all_mixtures


@pytest.mark.parametrize("window", [0, 1, 5, 99, 100, 4096])
def test_window_limits_attention(window: int) -> None:
    def of_attention(**changes: Any) -> float:
        own = {"seq_length": 100, "num_layers": 1}
        return flops_per_token(make_model(**own, **changes), 0) - flops_per_token(
            make_model(**own, window_size=[0, 0]), 0
        )

    attended = [
        min(window, position) for position in range(100)
    ]  # tokens before each token, without itself
    # Two products of 2 x 4096 FLOP, in the forward pass and twice in the backward pass.
    assert of_attention(window_size=[window, 0]) == pytest.approx(
        (sum(attended) / 100 if window < 100 else 49) * 6 * 2 * 4096, rel=1e-9, abs=1e-3
    )


def test_windows_in_some_layers() -> None:
    without_window, with_window = make_model(), make_model(window_size=[128, 0])
    three_of_four = make_model(window_size=[128, 0], window_attn_skip_freq=4)
    from_list = make_model(window_size=[128, 0], window_attn_skip_freq=[1, 1, 1, 0] * 8)
    saved_flops = [
        flops_per_token(without_window, 0) - flops_per_token(args, 0)
        for args in (with_window, three_of_four, from_list)
    ]
    assert saved_flops[1] == saved_flops[2] == pytest.approx(saved_flops[0] * 0.75)
    assert saved_flops[0] > 0
