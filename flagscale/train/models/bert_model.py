"""Transformer encoder with a masked-language-model head.

Weights have the names and shapes of megatron.core's BertModel. That class is not used directly: its
head uses a norm that does not support sequence parallelism without Apex, and it requires a padding
mask, which sequences here do not need.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from flagscale.train.models.base import ChunkSpec
from flagscale.train.models.layer_specs import decoder_block_spec
from flagscale.train.models.norm import select_norm_class
from flagscale.train.models.optimized import OptimizedModelMixin


class MaskedLanguageModelHead(MegatronModule):  # type: ignore[misc]
    """Linear layer, GELU and norm between the encoder and the output layer.

    Each tensor-parallel rank holds all weights. With sequence parallelism it processes a part of
    the tokens, so gradients are partial sums.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.dense = torch.nn.Linear(hidden, hidden, dtype=config.params_dtype)
        for parameter in self.dense.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        norm: Any = select_norm_class(config)
        self.layer_norm = norm(config, hidden, config.layernorm_epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Transform hidden states [s, b, h] to [s, b, h]."""
        output: torch.Tensor = self.layer_norm(functional.gelu(self.dense(hidden_states)))
        return output


class Bert(LanguageModule):  # type: ignore[misc]
    """Chunk of the BERT model."""

    def __init__(
        self, args: Namespace, config: TransformerConfig, chunk: ChunkSpec, layers: Any
    ) -> None:
        """Build the chunk; ``layers`` is the specification of its transformer layers."""
        super().__init__(config=config)
        self.pre_process, self.post_process = chunk.first, chunk.last
        self.share_embeddings_and_output_weights = not args.untie_embeddings_and_output_weights
        self.vp_stage = chunk.vp_stage
        self.fp16_lm_cross_entropy = args.fp16_lm_cross_entropy
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=chunk.vocabulary,
                max_sequence_length=args.max_position_embeddings,
                position_embedding_type=args.position_embedding_type,
                tp_group=self.pg_collection.tp,
            )
        if args.position_embedding_type == "rope":
            self.rotary_pos_emb = self._build_rotary_embedding(args)
        self.encoder = TransformerBlock(
            config=config,
            spec=layers,
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=self.pg_collection,
            vp_stage=chunk.vp_stage,
        )
        if self.post_process:
            self.lm_head = MaskedLanguageModelHead(config)
            self.output_layer = self._build_output_layer(chunk.vocabulary)
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()

    def _build_rotary_embedding(self, args: Namespace) -> RotaryEmbedding:
        return RotaryEmbedding(
            kv_channels=self.config.kv_channels,
            rotary_percent=args.rotary_percent,
            rotary_interleaved=self.config.rotary_interleaved,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            use_cpu_initialization=self.config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )

    def _build_output_layer(self, vocabulary: int) -> Any:
        return tensor_parallel.ColumnParallelLinear(
            self.config.hidden_size,
            vocabulary,
            config=self.config,
            init_method=self.config.init_method,
            bias=True,
            gather_output=False,
            skip_weight_param_allocation=self.pre_process
            and self.share_embeddings_and_output_weights,
            tp_group=self.pg_collection.tp,
        )

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the output of the previous pipeline stage, [s, b, h]."""
        hidden_states = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.encoder.set_input_tensor(hidden_states)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: None = None,
        labels: torch.Tensor | None = None,
    ) -> Any:
        """Run the chunk.

        Args:
            input_ids: tokens [b, s], on the first stage.
            position_ids: positions of the tokens [b, s].
            attention_mask: None, because every token attends to its whole sequence.
            labels: original tokens [b, s], on the last stage.

        Returns:
            Hidden states [s, b, h]. On the last stage the cross-entropy of each token [b, s] in
            nats, or without labels the logits [b, s, v/tp].
        """
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=input_ids, position_ids=position_ids)
        hidden = self.encoder(
            hidden_states=hidden,
            attention_mask=attention_mask,
            rotary_pos_emb=self._rotary_angles(hidden),
        )
        if not self.post_process:
            return hidden
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        logits, _ = self.output_layer(self.lm_head(hidden), weight=weight)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    def _rotary_angles(self, hidden: torch.Tensor | None) -> torch.Tensor | None:
        rotary = getattr(self, "rotary_pos_emb", None)
        if rotary is None:
            return None
        length = rotary.get_rotary_seq_len(None, self.encoder, hidden, self.config, None)
        angles: torch.Tensor = rotary(length)
        return angles


class OptimizedBert(OptimizedModelMixin, Bert):
    """BERT chunk built from optimized layers, with the same parameters and outputs."""


def build_bert(args: Namespace, config: TransformerConfig, chunk: ChunkSpec) -> Any:
    """Build a chunk of the model."""
    layers = decoder_block_spec(args, config, chunk, causal=False)
    return (OptimizedBert if chunk.optimized else Bert)(args, config, chunk, layers)
