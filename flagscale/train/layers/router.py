"""A router whose losses do not depend on which ranks share a micro-batch out, nor on whether the
loss is a mean or per token.

In megatron.core each data-parallel rank balances its own part of a micro-batch, which is what the
field calls a micro-batch there. On a mesh it is one for all its ranks: these losses are then those
of one rank with the whole of it, so that stages on unlike meshes learn alike. And with
``calculate_per_token_loss`` megatron.core weighs them by a rank's own tokens, with
``seq_aux_loss`` by those of one sequence: with tensor or context parallelism, or several sequences,
less than without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    save_to_aux_losses_tracker,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch over all ranks of a mesh."""

    sequences: int
    tokens: int


def router(args: argparse.Namespace) -> Callable[..., TopKRouter]:
    """What builds the routers of a model. ``args``: a rank's resolved arguments."""
    if args.meshes is not None:
        sequences = args.meshes.sequences
        return partial(WeighingRouter, whole=MicroBatch(sequences, sequences * args.seq_length))
    return WeighingRouter if args.calculate_per_token_loss else TopKRouter


class WeighingRouter(TopKRouter):  # type: ignore[misc]
    """megatron.core's router with other losses: each is the sum of what the ranks of a group find
    for their own tokens, the group that shares the micro-batch out."""

    def __init__(
        self, config: Any, pg_collection: Any = None, *, whole: MicroBatch | None = None
    ) -> None:
        """``whole``: what all data-parallel ranks have of a micro-batch together; without it each
        of them has one of its own."""
        super().__init__(config=config, pg_collection=pg_collection)
        self._whole = whole
        self._sharing: dist.ProcessGroup = self.tp_dp_cp_group if whole else self.tp_cp_group

    def apply_z_loss(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The logits ``[tokens, experts]``, with the loss that keeps them small attached."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        loss = logits.logsumexp(dim=-1).square().sum() * (coefficient / self._tokens(logits))
        return self._attached(logits, loss, coefficient, "z_loss", self._sharing)

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        counts = _summed(routing_map, self._sharing)
        loss = self._loss(scores_for_aux_loss, counts, self._tokens(probs), coefficient)
        return self._attached(probs, loss, coefficient, "load_balancing_loss", self._sharing)

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        # Sequences become experts of their own, so that the loss is the sum of all sequences'.
        scores = scores_for_aux_loss.reshape(seq_length, -1)
        counts = _summed(routing_map.reshape(seq_length, -1), self.tp_cp_group)
        tokens = seq_length * self.tp_cp_group.size()
        loss = self._loss(scores, counts, tokens, coefficient)
        loss = loss / (self._whole.sequences if self._whole else bsz)
        return self._attached(probs, loss, coefficient, "seq_load_balancing_loss", self._sharing)

    def _apply_global_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0:
            return probs
        group = self.tp_dp_cp_group
        self.global_tokens_per_expert += _summed(routing_map, group)
        self.ga_steps += 1
        counts = self.global_tokens_per_expert / self.ga_steps
        tokens = self._tokens(probs) * group.size() // self._sharing.size()
        loss = self._loss(scores_for_aux_loss, counts, tokens, coefficient)
        return self._attached(probs, loss, coefficient, "global_load_balancing_loss", group)

    def _loss(
        self, scores: torch.Tensor, counts: torch.Tensor, tokens: int, coefficient: float
    ) -> torch.Tensor:
        loss: torch.Tensor = switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=counts,
            total_num_tokens=tokens,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
        )
        return loss

    def _tokens(self, own: torch.Tensor) -> int:
        """Of the micro-batch that the ranks share. ``own``: ``[tokens of this rank, experts]``."""
        return self._whole.tokens if self._whole else own.shape[0] * self._sharing.size()

    def _attached(
        self,
        activation: torch.Tensor,
        loss: torch.Tensor,
        coefficient: float,
        name: str,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """``activation``, whose backward pass starts one of ``loss`` too. ``group``: over whose
        ranks the losses add up."""
        layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        save_to_aux_losses_tracker(
            name, loss / coefficient, self.layer_number, layers, reduce_group=group
        )
        # Gradients are divided by the tokens of the step; or by the data-parallel ranks, of which
        # each has a part of this one loss if they share the micro-batch.
        weight = self._sharing.size() / self.tp_cp_group.size()
        if self.calculate_per_token_loss:
            weight = self._tokens(activation)
        attached: torch.Tensor = MoEAuxLossAutoScaler.apply(activation, loss * weight)
        return attached


def _summed(routing_map: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Tokens of each expert over the ranks of the group."""
    counts: torch.Tensor = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), group)
    return counts
