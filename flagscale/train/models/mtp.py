"""Multi-token prediction (DeepSeek-AI, "DeepSeek-V3", 2024): layers behind the model's last one,
each of which tells a token one place further ahead than the one before it.

A further layer takes what the one before gave for a token and the embedding of the token that it
told; embedding and head are the model's own. The layers are megatron.core's, and so is the way in
which their losses join the backward pass. What the head gives without them stays as it is: their
losses are weighed and counted here by themselves. They are there for training alone.

``labels`` of a place are the next token; the further layer ``k`` (from 1 on) tells the label of the
place ``k`` further on, and counts where that label counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionLayer,
    roll_tensor,
)

_TAKEN = (
    "input_ids",
    "position_ids",
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
)
"""What the further layers take of the model's inputs."""


def further_masks(
    mask: torch.Tensor, documents: torch.Tensor | None, depth: int
) -> Mapping[str, torch.Tensor]:
    """Which places count for each of ``depth`` further layers, by names.

    Args:
        mask: ``[micro-batch, sequence]``, of whole sequences: which labels count.
        documents: a number for each token where documents are kept apart: nothing of one is told
            by another.
        depth: how many further layers there are.
    """
    return {f"loss_mask_{ahead}": _ahead(mask, documents, ahead) for ahead in range(1, depth + 1)}


def _ahead(mask: torch.Tensor, documents: torch.Tensor | None, places: int) -> torch.Tensor:
    found = torch.zeros_like(mask)
    found[:, :-places] = mask[:, places:]
    if documents is not None:
        found[:, :-places] *= documents[:, :-places] == documents[:, places:]
    return found


class FurtherLayer(MultiTokenPredictionLayer):  # type: ignore[misc]
    """megatron.core's, recomputed where the layers before it are: with them by units, and kept
    where only the first ones of a chunk are."""

    def _checkpointed_forward(self, forward_func: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.recompute_method != "uniform":
            return forward_func(*args, **kwargs)
        spread = self.config.distribute_saved_activations
        return tensor_parallel.checkpoint(forward_func, spread, *args, *kwargs.values())


class MultiToken:
    """Goes before a model's class, whose last chunk has the further layers.

    ``forward`` takes as ``loss_mask`` those of :func:`further_masks`, ``[layer, micro-batch,
    sequence]``, this rank's part of the sequences.
    """

    config: Any
    mtp: Any
    cp_group: Any
    embedding: Any
    output_layer: Any
    mtp_process: bool
    training: bool
    post_process: bool
    share_embeddings_and_output_weights: bool
    compute_language_model_loss: Any
    shared_embedding_or_output_weight: Any
    further_losses: torch.Tensor | None = None
    """Of each further layer the sum of its losses and the number of tokens, since it was taken."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not self.mtp_process:
            return
        # It is trained as the first stage's, of which it may be a copy.
        self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if self.share_embeddings_and_output_weights:
            # The embedding's is passed to it. megatron.core means to leave it out, and does so on
            # the first stage alone.
            self.output_layer.weight = None

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        *,
        loss_mask: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **inputs: Any,
    ) -> torch.Tensor:
        """In place of megatron.core's, which has no further layers without labels and divides by
        tokens that may be none."""
        if not self.post_process:
            return hidden_states
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        if self.training and labels is not None and loss_mask is not None:
            taken = {name: inputs[name] for name in _TAKEN}
            states = self.mtp(hidden_states=hidden_states, embedding=self.embedding, **taken)
            hidden_states, *further = torch.chunk(states, 1 + len(loss_mask))
            hidden_states = self._joined(hidden_states, further, labels, loss_mask, weight)
        logits, _ = self.output_layer(
            hidden_states, weight=weight, runtime_gather_output=runtime_gather_output
        )
        if labels is None:
            whole: torch.Tensor = logits.transpose(0, 1).contiguous()
            return whole
        losses: torch.Tensor = self.compute_language_model_loss(labels, logits)
        return losses

    def _joined(
        self,
        hidden: torch.Tensor,
        further: list[torch.Tensor],
        labels: torch.Tensor,
        masks: torch.Tensor,
        weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """``hidden`` with the losses of the further layers in its backward pass."""
        scale = self.config.mtp_loss_scaling_factor / len(further)
        counted = []
        for states, mask in zip(further, masks, strict=True):
            logits, _ = self.output_layer(states, weight=weight)
            labels, _ = roll_tensor(labels, shifts=-1, dims=-1, cp_group=self.cp_group)
            losses = self.compute_language_model_loss(labels, logits).float() * mask
            counted.append(torch.stack([losses.detach().sum(), mask.sum()]))
            share = scale * losses / self._tokens(mask)
            hidden = MTPLossAutoScaler.apply(hidden, share)
        found = torch.stack(counted).double()
        self.further_losses = (
            found if self.further_losses is None else self.further_losses.add_(found)
        )
        return hidden

    def _tokens(self, mask: torch.Tensor) -> torch.Tensor | float:
        """What a rank's losses of a micro-batch are divided by. Where the loss is a mean over the
        step's tokens, the schedule divides by those of the head; else it is these sequences'
        tokens, of which data parallelism averages over the ranks that have parts of them."""
        if self.config.calculate_per_token_loss:
            return 1.0
        count, ranks = mask.sum(), self.cp_group.size()
        if ranks > 1:
            dist.all_reduce(count, group=self.cp_group)
        own: torch.Tensor = count.clamp(min=1) / ranks
        return own
