"""Builds megatron.core's GPTModel, of its local layers or of this project's faster ones."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.train.models.base import Chunk
from flagscale.train.models.fast import Fast
from flagscale.train.models.layer_specs import block_spec


class FastGPT(Fast, GPTModel):  # type: ignore[misc]
    """The same parameters and the same function as megatron.core's."""


def build(args: Namespace, config: TransformerConfig, chunk: Chunk) -> Any:
    """A chunk of the model."""
    return (FastGPT if chunk.fast else GPTModel)(
        config=config,
        transformer_layer_spec=block_spec(args, config, chunk),
        vocab_size=chunk.vocabulary,
        max_sequence_length=args.max_position_embeddings,
        pre_process=chunk.first,
        post_process=chunk.last,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=chunk.stage,
    )
