"""Multi-token prediction (MTP; DeepSeek-AI, "DeepSeek-V3", 2024): layers, loss masks and losses.

MTP layers follow the last decoder layer. Layer k combines the previous layer's output for a token
with the embedding of the token k positions ahead and predicts the following token. Embedding and
output layer are shared with the main model. MTP layers are used in training only.

The layers and the way their losses enter the backward pass are megatron.core's. The main loss and
its mask stay unchanged: each MTP layer has a loss mask of its own, and its losses are added up
separately for logging.

The label of a position is the next token. MTP layer k, from 1 on, predicts the label that is k
positions ahead. Its loss is masked where that label is masked.
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

_MTP_INPUTS = (
    "input_ids",
    "position_ids",
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
)
"""Inputs of the model that MTP layers use."""


def mtp_loss_masks(
    mask: torch.Tensor, documents: torch.Tensor | None, depth: int
) -> Mapping[str, torch.Tensor]:
    """Return the loss mask [b, s] of each MTP layer, by name.

    Args:
        mask: loss mask of whole sequences, [b, s].
        documents: number of the document of each token, [b, s]; None unless documents are masked.
            A layer does not predict tokens of another document.
        depth: number of MTP layers, k = 1 to ``depth``.
    """
    return {f"loss_mask_{k}": _shift_mask(mask, documents, k) for k in range(1, depth + 1)}


def _shift_mask(mask: torch.Tensor, documents: torch.Tensor | None, offset: int) -> torch.Tensor:
    """Return the mask of the labels that are ``offset`` positions ahead."""
    shifted = torch.zeros_like(mask)
    shifted[:, :-offset] = mask[:, offset:]
    if documents is not None:
        shifted[:, :-offset] *= documents[:, :-offset] == documents[:, offset:]
    return shifted


class RecomputableMtpLayer(MultiTokenPredictionLayer):  # type: ignore[misc]
    """megatron.core's MTP layer with recomputation that matches the decoder layers.

    With ``recompute_method: uniform`` the layer is recomputed. With ``block``, which recomputes
    only the first layers of a chunk, it is not.
    """

    def _checkpointed_forward(self, forward_func: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.recompute_method != "uniform":
            return forward_func(*args, **kwargs)
        distribute = self.config.distribute_saved_activations
        return tensor_parallel.checkpoint(forward_func, distribute, *args, *kwargs.values())


class MultiTokenPredictionMixin:
    """Mixin that precedes a model class whose last chunk has MTP layers.

    The ``loss_mask`` argument of ``forward`` stacks the masks of :func:`mtp_loss_masks`: [layers,
    b, s], this rank's part of the sequences.
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
    mtp_loss_sums: torch.Tensor | None = None
    """Sum of the unmasked losses and number of unmasked tokens of each MTP layer, [layers, 2],
    since the last reset to None.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not self.mtp_process:
            return
        # Same parameter group as the embedding of the first stage, of which it may be a copy.
        self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if self.share_embeddings_and_output_weights:
            # The tied weight is passed to the output layer. megatron.core omits this weight only on
            # the first stage.
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
        """Replace megatron.core's method.

        The original fails without labels, runs MTP layers in evaluation too, and divides by a
        number of tokens that may be zero. Here MTP layers run only in training.

        Args:
            hidden_states: output of the last decoder layer, [s, b, h].
            labels: [b, s], or None to return logits.
            loss_mask: a mask per MTP layer, [layers, b, s]; megatron.core has one of [b, s].
            runtime_gather_output: passed to the output layer.
            inputs: other arguments of megatron.core's method.

        Returns:
            Losses [b, s], or logits [b, s, vocabulary] if there are no labels.
        """
        if not self.post_process:
            return hidden_states
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        if self.training and labels is not None and loss_mask is not None:
            mtp_inputs = {name: inputs[name] for name in _MTP_INPUTS}
            # The decoder's output and those of the MTP layers, [(1 + layers) * s, b, h].
            all_states = self.mtp(
                hidden_states=hidden_states, embedding=self.embedding, **mtp_inputs
            )
            hidden_states, *mtp_states = torch.chunk(all_states, 1 + len(loss_mask))
            hidden_states = self._attach_mtp_losses(
                hidden_states, mtp_states, labels, loss_mask, weight
            )
        logits, _ = self.output_layer(
            hidden_states, weight=weight, runtime_gather_output=runtime_gather_output
        )
        if labels is None:
            batch_first_logits: torch.Tensor = logits.transpose(0, 1).contiguous()
            return batch_first_logits
        losses: torch.Tensor = self.compute_language_model_loss(labels, logits)
        return losses

    def _attach_mtp_losses(
        self,
        hidden: torch.Tensor,
        mtp_states: list[torch.Tensor],
        labels: torch.Tensor,
        masks: torch.Tensor,
        weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attach the losses of MTP layers to the backward pass of ``hidden``.

        Args:
            hidden: output of the last decoder layer, [s, b, h].
            mtp_states: output of each MTP layer, [s, b, h].
            labels: [b, s].
            masks: [layers, b, s].
            weight: weight of a tied output layer.
        """
        scale = self.config.mtp_loss_scaling_factor / len(mtp_states)
        layer_sums = []
        for states, mask in zip(mtp_states, masks, strict=True):
            logits, _ = self.output_layer(states, weight=weight)
            labels, _ = roll_tensor(labels, shifts=-1, dims=-1, cp_group=self.cp_group)
            losses = self.compute_language_model_loss(labels, logits).float() * mask
            layer_sums.append(torch.stack([losses.detach().sum(), mask.sum()]))
            scaled_losses = scale * losses / self._loss_divisor(mask)
            hidden = MTPLossAutoScaler.apply(hidden, scaled_losses)
        loss_sums = torch.stack(layer_sums).double()
        self.mtp_loss_sums = (
            loss_sums if self.mtp_loss_sums is None else self.mtp_loss_sums.add_(loss_sums)
        )
        return hidden

    def _loss_divisor(self, mask: torch.Tensor) -> torch.Tensor | float:
        """Return the divisor of this rank's losses of a micro-batch.

        With ``calculate_per_token_loss`` the schedule divides by the tokens of the main loss, so it
        is 1. Otherwise it is the number of unmasked tokens of the whole sequences, divided by the
        number of context-parallel ranks, because data parallelism averages over these.
        """
        if self.config.calculate_per_token_loss:
            return 1.0
        token_count, ranks = mask.sum(), self.cp_group.size()
        if ranks > 1:
            dist.all_reduce(token_count, group=self.cp_group)
        divisor: torch.Tensor = token_count.clamp(min=1) / ranks
        return divisor
