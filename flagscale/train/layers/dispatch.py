"""Brings tokens to experts that all lie on this rank, and back.

How many rows there are is known without asking the device: every token goes to as many experts.
So nothing waits, and shapes are fixed. A token's way there is a row copied to several places, its
way back the sum of several rows; each is the other's gradient, and no addition is in an order that
changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from flagscale.train.layers.experts import ALIGNMENT, GroupedExperts, Laid
from flagscale.train.layers.jit import compiled_if_faster


@dataclass(frozen=True)
class Routes:
    """Where tokens go. ``chosen [tokens, k]``: the experts of each token, ascending. ``rows
    [tokens, k]``: the row of each choice. ``choices [rows]``: the choice that a row has, counted
    through ``chosen``, or -1 for a row that fills up. ``ends [experts]``: see
    :class:`~.experts.Laid`."""

    chosen: torch.Tensor
    rows: torch.Tensor
    choices: torch.Tensor
    ends: torch.Tensor


def routes(routing_map: torch.Tensor, k: int) -> Routes:
    """Rows for ``routing_map [tokens, experts]``, in each of whose rows ``k`` are set. An expert's
    rows begin at a multiple of :data:`~.experts.ALIGNMENT`; there are tokens x ``k`` + experts x
    that many."""
    return Routes(*_routes(routing_map, k))


@compiled_if_faster()
def _routes(routing_map: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    tokens, experts = routing_map.shape
    ones = routing_map.to(torch.int32)
    among_tokens, among_experts = ones.cumsum(0), ones.cumsum(1)
    counts = among_tokens[-1]
    filled = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = filled.cumsum(0)
    # An expert that is not chosen is written to a column that nobody reads.
    column = torch.where(routing_map, among_experts - 1, k)
    numbers = torch.arange(experts, device=ones.device).expand(tokens, experts)
    chosen = numbers.new_zeros(tokens, k + 1).scatter(1, column, numbers)[:, :k]
    rows = (ends - filled)[chosen] + among_tokens.gather(1, chosen) - 1
    choices = rows.new_full((tokens * k + experts * ALIGNMENT,), -1)
    choices = choices.scatter(0, rows.flatten(), torch.arange(tokens * k, device=ones.device))
    return chosen, rows, choices, ends.to(torch.int32)


class _Spread(torch.autograd.Function):
    """``[tokens, …]`` to ``[rows, …]``: each token at the rows of its choices, 0 in those that
    fill up."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, found: Routes) -> torch.Tensor:
        ctx.found = found
        return _spread(tokens, found.choices, found.rows.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _collect(gradient, ctx.found.rows), None


class _Collect(torch.autograd.Function):
    """``[rows, …]`` to ``[tokens, …]``: the sum of the rows of a token's choices."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, found: Routes) -> torch.Tensor:
        ctx.found = found
        return _collect(rows, found.rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _spread(gradient, ctx.found.choices, ctx.found.rows.shape[1]), None


class _Weights(torch.autograd.Function):
    """``probs [tokens, experts]`` to ``[rows]``: what a row's choice weighs."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, found: Routes) -> torch.Tensor:
        ctx.found, ctx.experts = found, probs.shape[1]
        return _spread(probs.gather(1, found.chosen).flatten(), found.choices, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        found, of_choices = ctx.found, gradient[ctx.found.rows]
        nothing = gradient.new_zeros(len(of_choices), ctx.experts)
        return nothing.scatter(1, found.chosen, of_choices), None


@compiled_if_faster()
def _spread(tokens: torch.Tensor, choices: torch.Tensor, k: int) -> torch.Tensor:
    held = (choices >= 0).view(-1, *(1,) * (tokens.dim() - 1))
    return torch.where(held, tokens[choices.clamp(min=0) // k], 0)


@compiled_if_faster()
def _collect(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return rows[places].sum(1, dtype=torch.float32).to(rows.dtype)


class OneRankDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """In place of megatron.core's dispatchers where there is nobody to send to."""

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._shape, self._map = hidden_states.shape, routing_map
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, Laid, torch.Tensor]:
        """Rows ``[rows, hidden]`` in the experts' order, where theirs end, and their weights."""
        found = self._found = routes(self._map, self.config.moe_router_topk)
        rows = _Spread.apply(hidden_states, found)  # type: ignore[no-untyped-call]
        weights = _Weights.apply(probs, found)  # type: ignore[no-untyped-call]
        return rows, Laid(found.ends), weights

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        found = self._found
        del self._found, self._map
        return _Collect.apply(hidden_states, found)  # type: ignore[no-any-return,no-untyped-call]

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.view(self._shape)


def send_directly(model: torch.nn.Module) -> None:
    """Give the layers of experts in ``model`` the direct way where all their experts are grouped
    and on this rank, and none of them turns tokens down."""
    for layer in model.modules():
        if not (isinstance(layer, MoELayer) and isinstance(layer.experts, GroupedExperts)):
            continue
        config, old = layer.config, layer.token_dispatcher
        limited = config.moe_expert_capacity_factor is not None
        if old.tp_ep_group.size() == 1 and not limited and not config.moe_shared_expert_overlap:
            layer.token_dispatcher = OneRankDispatcher(config, layer.experts.groups)
