"""MoE router whose auxiliary losses do not depend on the parallel layout or on the loss reduction.

In megatron.core each data-parallel rank computes the losses of its own micro-batch. The
data-parallel ranks of a heterogeneous mesh (:mod:`flagscale.train.meshes.groups`) divide one
micro-batch instead. Here the losses equal those of one rank with the whole micro-batch, so that
stages on different meshes are trained identically. With ``calculate_per_token_loss``, megatron.core
weights the losses by the tokens of a rank, and ``seq_aux_loss`` by the tokens of one sequence. With
tensor or context parallelism, or several sequences, this is less than without
``calculate_per_token_loss``.
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
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    save_to_aux_losses_tracker,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter

if not hasattr(moe_utils, "te_general_gemm"):
    # megatron.core 0.16.1 compares it with None, but defines it only with Transformer Engine.
    moe_utils.te_general_gemm = None


@dataclass(frozen=True)
class MeshMicroBatch:
    """Size of a micro-batch over all data-parallel ranks of a mesh, in sequences and in tokens."""

    sequences: int
    tokens: int


def router_constructor(args: argparse.Namespace) -> Callable[..., TopKRouter]:
    """Return the constructor of a model's routers. ``args`` are a rank's resolved arguments."""
    if args.meshes is not None:
        sequences = args.meshes.sequences
        return partial(
            LayoutIndependentRouter,
            mesh_batch=MeshMicroBatch(sequences, sequences * args.seq_length),
        )
    return LayoutIndependentRouter if args.calculate_per_token_loss else TopKRouter


class LayoutIndependentRouter(TopKRouter):  # type: ignore[misc]
    """megatron.core's router with layout-independent losses.

    Each loss is the sum of the losses of all ranks of the group that shares the micro-batch.
    """

    def __init__(
        self, config: Any, pg_collection: Any = None, *, mesh_batch: MeshMicroBatch | None = None
    ) -> None:
        """Create the router.

        ``mesh_batch``: size of the micro-batch that all data-parallel ranks share. None if each of
        them has its own.
        """
        super().__init__(config=config, pg_collection=pg_collection)
        self._mesh_batch = mesh_batch
        self._loss_group: dist.ProcessGroup = (
            self.tp_dp_cp_group if mesh_batch else self.tp_cp_group
        )

    def apply_z_loss(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits [tokens, experts] with the z-loss attached, which keeps them small."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        loss = logits.logsumexp(dim=-1).square().sum() * (coefficient / self._count_tokens(logits))
        return self._attach_loss(logits, loss, coefficient, "z_loss", self._loss_group)

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
        counts = _count_tokens_per_expert(routing_map, self._loss_group)
        loss = self._load_balancing_loss(
            scores_for_aux_loss, counts, self._count_tokens(probs), coefficient
        )
        return self._attach_loss(probs, loss, coefficient, "load_balancing_loss", self._loss_group)

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
        # As in megatron.core: sequences are treated as additional experts, so that the result is
        # the sum over sequences.
        scores = scores_for_aux_loss.reshape(seq_length, -1)
        counts = _count_tokens_per_expert(routing_map.reshape(seq_length, -1), self.tp_cp_group)
        tokens = seq_length * self.tp_cp_group.size()
        loss = self._load_balancing_loss(scores, counts, tokens, coefficient)
        loss = loss / (self._mesh_batch.sequences if self._mesh_batch else bsz)
        return self._attach_loss(
            probs, loss, coefficient, "seq_load_balancing_loss", self._loss_group
        )

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
        self.global_tokens_per_expert += _count_tokens_per_expert(routing_map, group)
        self.ga_steps += 1
        counts = self.global_tokens_per_expert / self.ga_steps
        tokens = self._count_tokens(probs) * group.size() // self._loss_group.size()
        loss = self._load_balancing_loss(scores_for_aux_loss, counts, tokens, coefficient)
        return self._attach_loss(probs, loss, coefficient, "global_load_balancing_loss", group)

    def _load_balancing_loss(
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

    def _count_tokens(self, per_token: torch.Tensor) -> int:
        """Return the number of tokens of the shared micro-batch.

        ``per_token`` is [tokens of this rank, experts].
        """
        return (
            self._mesh_batch.tokens
            if self._mesh_batch
            else per_token.shape[0] * self._loss_group.size()
        )

    def _attach_loss(
        self,
        activation: torch.Tensor,
        loss: torch.Tensor,
        coefficient: float,
        name: str,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Attach ``loss`` to the backward pass of ``activation`` and record it for the log.

        ``group`` is the group over which the loss is summed.
        """
        layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        save_to_aux_losses_tracker(
            name, loss / coefficient, self.layer_number, layers, reduce_group=group
        )
        # Gradients are divided by the tokens of the step, or by the number of data-parallel ranks.
        # If these share the micro-batch, each has a summand of this loss.
        weight = self._loss_group.size() / self.tp_cp_group.size()
        if self.calculate_per_token_loss:
            weight = self._count_tokens(activation)
        attached: torch.Tensor = MoEAuxLossAutoScaler.apply(activation, loss * weight)
        return attached


def _count_tokens_per_expert(routing_map: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tokens per expert over the ranks of the group."""
    counts: torch.Tensor = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), group)
    return counts
