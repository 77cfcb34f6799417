"""MoE token dispatcher for layers whose experts are all on this rank.

The experts' input has a row for each pair of a token and one of its experts, ordered by expert.
Every token has the same number of experts, so the number of rows is known without synchronizing the
device, and shapes are static. Permutation copies a token to its rows; unpermutation sums the rows
of a token. Each is the gradient of the other, and sums have a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from flagscale.train.layers.grouped_experts import ROW_ALIGNMENT, GroupedExperts, GroupedRows
from flagscale.train.layers.jit import compiled_if_faster


@dataclass(frozen=True)
class TokenRoutes:
    """Assignment of tokens to rows of the expert input.

    Attributes:
        experts: experts of each token in ascending order, [tokens, k].
        rows: row of each token for each of its experts, [tokens, k].
        choices: inverse of ``rows``: for each row the index into ``rows.flatten()``, [rows]; -1 for
            padding rows.
        ends: see :class:`~.grouped_experts.GroupedRows`.
    """

    experts: torch.Tensor
    rows: torch.Tensor
    choices: torch.Tensor
    ends: torch.Tensor


def build_routes(routing_map: torch.Tensor, k: int) -> TokenRoutes:
    """Compute the rows of a ``routing_map`` [tokens, experts] with ``k`` true entries per token.

    The rows of an expert begin at a multiple of :data:`~.grouped_experts.ROW_ALIGNMENT`. There are
    tokens · ``k`` + experts · ``ROW_ALIGNMENT`` rows.
    """
    return TokenRoutes(*_compute_routes(routing_map, k))


@compiled_if_faster()
def _compute_routes(routing_map: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    tokens, experts = routing_map.shape
    selected = routing_map.to(torch.int32)
    rank_in_expert, rank_in_token = selected.cumsum(0), selected.cumsum(1)
    counts = rank_in_expert[-1]
    padded_counts = (counts + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
    ends = padded_counts.cumsum(0)
    # Unselected experts are written to an extra column that is dropped.
    column = torch.where(routing_map, rank_in_token - 1, k)
    numbers = torch.arange(experts, device=selected.device).expand(tokens, experts)
    token_experts = numbers.new_zeros(tokens, k + 1).scatter(1, column, numbers)[:, :k]
    rows = (ends - padded_counts)[token_experts] + rank_in_expert.gather(1, token_experts) - 1
    choices = rows.new_full((tokens * k + experts * ROW_ALIGNMENT,), -1)
    choices = choices.scatter(0, rows.flatten(), torch.arange(tokens * k, device=selected.device))
    return token_experts, rows, choices, ends.to(torch.int32)


class _Permute(torch.autograd.Function):
    """Permute [tokens, …] to [rows, …]: copies each token to its rows; padding rows are 0."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, routes: TokenRoutes) -> torch.Tensor:
        ctx.routes = routes
        return _permute_tokens(tokens, routes.choices, routes.rows.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _unpermute_rows(gradient, ctx.routes.rows), None


class _Unpermute(torch.autograd.Function):
    """Unpermute [rows, …] to [tokens, …]: sums the rows of each token."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, routes: TokenRoutes) -> torch.Tensor:
        ctx.routes = routes
        return _unpermute_rows(rows, routes.rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _permute_tokens(gradient, ctx.routes.choices, ctx.routes.rows.shape[1]), None


class _PermuteProbs(torch.autograd.Function):
    """Permute router probabilities [tokens, experts] to [rows]."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, routes: TokenRoutes) -> torch.Tensor:
        ctx.routes, ctx.experts = routes, probs.shape[1]
        return _permute_tokens(probs.gather(1, routes.experts).flatten(), routes.choices, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        routes, choice_gradients = ctx.routes, gradient[ctx.routes.rows]
        zeros = gradient.new_zeros(len(choice_gradients), ctx.experts)
        return zeros.scatter(1, routes.experts, choice_gradients), None


@compiled_if_faster()
def _permute_tokens(tokens: torch.Tensor, choices: torch.Tensor, k: int) -> torch.Tensor:
    is_token = (choices >= 0).view(-1, *(1,) * (tokens.dim() - 1))
    return torch.where(is_token, tokens[choices.clamp(min=0) // k], 0)


@compiled_if_faster()
def _unpermute_rows(rows: torch.Tensor, token_rows: torch.Tensor) -> torch.Tensor:
    return rows[token_rows].sum(1, dtype=torch.float32).to(rows.dtype)


class LocalTokenDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Token dispatcher without communication, in place of megatron.core's."""

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._shape, self._routing_map = hidden_states.shape, routing_map
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, GroupedRows, torch.Tensor]:
        """Return the rows [rows, h] by expert, their layout, and the probabilities [rows]."""
        routes = self._routes = build_routes(self._routing_map, self.config.moe_router_topk)
        rows = _Permute.apply(hidden_states, routes)  # type: ignore[no-untyped-call]
        weights = _PermuteProbs.apply(probs, routes)  # type: ignore[no-untyped-call]
        return rows, GroupedRows(routes.ends), weights

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        routes = self._routes
        del self._routes, self._routing_map
        return _Unpermute.apply(hidden_states, routes)  # type: ignore[no-any-return,no-untyped-call]

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.view(self._shape)


def use_local_dispatcher(model: torch.nn.Module) -> None:
    """Use the local dispatcher in MoE layers whose experts are grouped and all on this rank.

    Layers with a capacity factor, which drop tokens, are excluded.
    """
    for layer in model.modules():
        if not (isinstance(layer, MoELayer) and isinstance(layer.experts, GroupedExperts)):
            continue
        config, dispatcher = layer.config, layer.token_dispatcher
        drops_tokens = config.moe_expert_capacity_factor is not None
        if (
            dispatcher.tp_ep_group.size() == 1
            and not drops_tokens
            and not config.moe_shared_expert_overlap
        ):
            layer.token_dispatcher = LocalTokenDispatcher(config, layer.experts.process_groups)
