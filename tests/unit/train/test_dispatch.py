"""Tokens reach the experts that they chose, and come back, with the gradients of a plain loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.train.layers.dispatch import OneRankDispatcher, routes
from flagscale.train.layers.experts import ALIGNMENT

pytestmark = pytest.mark.torch


def chosen_at_random(tokens: int, experts: int, k: int, seed: int) -> torch.Tensor:
    """``[tokens, experts]``, ``k`` of each row set; with some seeds a few experts have most."""
    generator = torch.Generator().manual_seed(seed)
    liked = torch.linspace(0, seed % 3, experts)
    scores = torch.rand(tokens, experts, generator=generator) + liked
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, scores.topk(k).indices, True)


sizes = st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))


@settings(max_examples=60, deadline=None)
@given(sizes.filter(lambda size: size[2] <= size[1]))
def test_every_choice_has_a_row_of_its_expert(size: tuple[int, int, int, int]) -> None:
    tokens, experts, k, _ = size
    wanted = chosen_at_random(*size)
    found = routes(wanted, k)
    assert torch.zeros_like(wanted).scatter(1, found.chosen, True).equal(wanted)
    ends = found.ends.tolist()
    begins = [0, *ends[:-1]]
    assert not any(end % ALIGNMENT for end in ends)
    assert ends[-1] <= len(found.choices) == tokens * k + experts * ALIGNMENT
    for choice, (expert, row) in enumerate(
        zip(found.chosen.flatten().tolist(), found.rows.flatten().tolist(), strict=True)
    ):
        assert begins[expert] <= row < ends[expert]
        assert found.choices[row] == choice
    assert int((found.choices >= 0).sum()) == tokens * k


def dispatcher(k: int) -> OneRankDispatcher:
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups: Any = SimpleNamespace(ep=alone, expt_tp=alone, tp_ep=alone)
    return OneRankDispatcher(SimpleNamespace(moe_router_topk=k), groups)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_there_and_back_with_gradients(seed: int) -> None:
    tokens, experts, k, hidden = 20, 6, 3, 8
    wanted = chosen_at_random(tokens, experts, k, seed)
    generator = torch.Generator().manual_seed(seed)
    given_, weight = (torch.randn(4, 5, hidden, generator=generator) for _ in range(2))
    probs = torch.rand(tokens, experts, generator=generator) * wanted
    factors = torch.randn(experts, hidden, generator=generator)
    results = []
    for way in (_by_a_loop, _by_the_dispatcher):
        leaves = [x.clone().requires_grad_() for x in (given_, probs, factors)]
        output = way(leaves[0], wanted, leaves[1], leaves[2], k)
        assert output.shape == given_.shape
        (output * weight).sum().backward()
        # What was not chosen has no way to reach the loss.
        leaves[1].grad *= wanted
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for mine, plain in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, plain)


def _by_a_loop(
    hidden: torch.Tensor, wanted: torch.Tensor, probs: torch.Tensor, factors: torch.Tensor, _: int
) -> torch.Tensor:
    flat = hidden.reshape(-1, hidden.shape[-1])
    parts = [
        probs[:, e, None] * wanted[:, e, None] * flat * factors[e] for e in range(len(factors))
    ]
    return torch.stack(parts).sum(0).view(hidden.shape)


def _by_the_dispatcher(
    hidden: torch.Tensor, wanted: torch.Tensor, probs: torch.Tensor, factors: torch.Tensor, k: int
) -> torch.Tensor:
    """An expert multiplies by its own factors."""
    way = dispatcher(k)
    sent = way.token_dispatch(*way.dispatch_preprocess(hidden, wanted, probs))
    rows, laid, weights = way.dispatch_postprocess(*sent)
    experts = torch.bucketize(torch.arange(len(rows)), laid.ends, right=True)
    held = (experts < len(factors))[:, None]
    done = torch.where(held, rows * factors[experts.clamp(max=len(factors) - 1)], float("nan"))
    back = way.combine_preprocess(done * weights[:, None])
    return way.combine_postprocess(way.token_combine(back))


def test_numbers_of_16_bits_are_added_up_in_32() -> None:
    way, k = dispatcher(4), 4
    wanted = torch.ones(1, 4, dtype=torch.bool)
    sent = way.dispatch_preprocess(torch.ones(1, 1, 2).bfloat16(), wanted, torch.ones(1, 4))
    rows, _, _ = way.dispatch_postprocess(*sent)
    # One after another in 16 bits each of the three would be lost.
    found = routes(wanted, k).rows[0]
    rows = rows.index_copy(
        0, found, torch.tensor([[256.0], [1], [1], [1]]).expand(-1, 2).bfloat16()
    )
    assert way.combine_preprocess(rows).tolist() == [[260.0, 260.0]]
