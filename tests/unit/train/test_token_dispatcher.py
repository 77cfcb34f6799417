"""Local MoE token dispatcher, compared with a loop over experts, with gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.train.layers.grouped_experts import ROW_ALIGNMENT
from flagscale.train.layers.token_dispatcher import LocalTokenDispatcher, build_routes

pytestmark = pytest.mark.torch


def random_routing_map(tokens: int, experts: int, k: int, seed: int) -> torch.Tensor:
    """Return a random routing map [tokens, experts] with ``k`` true entries per row.

    With some seeds a few experts get most tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    bias = torch.linspace(0, seed % 3, experts)
    scores = torch.rand(tokens, experts, generator=generator) + bias
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, scores.topk(k).indices, True)


# Tokens, experts, experts per token, and seed.
routing_sizes = st.tuples(
    st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99)
)


@settings(max_examples=60, deadline=None)
@given(routing_sizes.filter(lambda size: size[2] <= size[1]))
def test_every_token_has_a_row_among_those_of_each_of_its_experts(
    size: tuple[int, int, int, int],
) -> None:
    tokens, experts, k, _ = size
    routing_map = random_routing_map(*size)
    routes = build_routes(routing_map, k)
    assert torch.zeros_like(routing_map).scatter(1, routes.experts, True).equal(routing_map)
    ends = routes.ends.tolist()
    starts = [0, *ends[:-1]]
    assert not any(end % ROW_ALIGNMENT for end in ends)
    assert ends[-1] <= len(routes.choices) == tokens * k + experts * ROW_ALIGNMENT
    for choice, (expert, row) in enumerate(
        zip(routes.experts.flatten().tolist(), routes.rows.flatten().tolist(), strict=True)
    ):
        assert starts[expert] <= row < ends[expert]
        assert routes.choices[row] == choice
    assert int((routes.choices >= 0).sum()) == tokens * k


def create_dispatcher(k: int) -> LocalTokenDispatcher:
    single_rank_group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups: Any = SimpleNamespace(
        ep=single_rank_group, expt_tp=single_rank_group, tp_ep=single_rank_group
    )
    return LocalTokenDispatcher(SimpleNamespace(moe_router_topk=k), groups)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_dispatch_and_combine_equal_a_loop_over_experts(seed: int) -> None:
    tokens, experts, k, hidden = 20, 6, 3, 8
    routing_map = random_routing_map(tokens, experts, k, seed)
    generator = torch.Generator().manual_seed(seed)
    # An expert multiplies tokens by a vector; the loss is a weighted sum.
    hidden_states, weight = (torch.randn(4, 5, hidden, generator=generator) for _ in range(2))
    probs = torch.rand(tokens, experts, generator=generator) * routing_map
    expert_factors = torch.randn(experts, hidden, generator=generator)
    results = []
    for run_experts in (_run_experts_in_a_loop, _run_experts_with_dispatcher):
        inputs = [x.clone().requires_grad_() for x in (hidden_states, probs, expert_factors)]
        output = run_experts(inputs[0], routing_map, inputs[1], inputs[2], k)
        assert output.shape == hidden_states.shape
        (output * weight).sum().backward()
        # Probabilities of unselected experts do not affect the loss.
        inputs[1].grad *= routing_map
        results.append([output.detach(), *(input_.grad for input_ in inputs)])
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected)


def _run_experts_in_a_loop(
    hidden: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor,
    expert_factors: torch.Tensor,
    _: int,
) -> torch.Tensor:
    """Multiply all tokens by the factors of each expert, and sum with the probabilities."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    expert_outputs = [
        probs[:, e, None] * routing_map[:, e, None] * flat * expert_factors[e]
        for e in range(len(expert_factors))
    ]
    return torch.stack(expert_outputs).sum(0).view(hidden.shape)


def _run_experts_with_dispatcher(
    hidden: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor,
    expert_factors: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """Multiply the rows of each expert by the expert's factors, through the dispatcher."""
    dispatcher = create_dispatcher(k)
    dispatched = dispatcher.token_dispatch(
        *dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    )
    rows, layout, weights = dispatcher.dispatch_postprocess(*dispatched)
    experts = torch.bucketize(torch.arange(len(rows)), layout.ends, right=True)
    is_expert_row = (experts < len(expert_factors))[:, None]
    outputs = torch.where(
        is_expert_row,
        rows * expert_factors[experts.clamp(max=len(expert_factors) - 1)],
        float("nan"),
    )
    combined = dispatcher.combine_preprocess(outputs * weights[:, None])
    return dispatcher.combine_postprocess(dispatcher.token_combine(combined))


def test_16_bit_rows_are_summed_in_fp32() -> None:
    dispatcher, k = create_dispatcher(4), 4
    routing_map = torch.ones(1, 4, dtype=torch.bool)
    dispatched = dispatcher.dispatch_preprocess(
        torch.ones(1, 1, 2).bfloat16(), routing_map, torch.ones(1, 4)
    )
    rows, _, _ = dispatcher.dispatch_postprocess(*dispatched)
    # Added one after another in bf16, 256 + 1 is 256, so each of the three ones would be lost.
    token_rows = build_routes(routing_map, k).rows[0]
    rows = rows.index_copy(
        0, token_rows, torch.tensor([[256.0], [1], [1], [1]]).expand(-1, 2).bfloat16()
    )
    assert dispatcher.combine_preprocess(rows).tolist() == [[260.0, 260.0]]
