"""Builds megatron.core's GPTModel, of its local layers or of this project's faster ones."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.train.layers.rotary import at
from flagscale.train.models.base import Chunk
from flagscale.train.models.fast import Fast
from flagscale.train.models.layer_specs import block_spec


class FastGPT(Fast, GPTModel):  # type: ignore[misc]
    """The same parameters and the same function as megatron.core's."""


class _Positioned:
    """Goes before a model's class: rotary positions are those of the batch, not counted."""

    config: Any
    decoder: Any
    rotary_pos_emb: Any

    def _preprocess(self, input_ids: Any, position_ids: Any, *args: Any, **options: Any) -> Any:
        found = super()._preprocess(input_ids, position_ids, *args, **options)  # type: ignore[misc]
        hidden, angles, *rest = found
        if angles is None or position_ids is None:
            return found
        length = self.rotary_pos_emb.get_rotary_seq_len(None, self.decoder, hidden, self.config)
        # Of the whole sequence, whichever part of it this rank has.
        every = self.rotary_pos_emb(length, packed_seq=True)
        return hidden, at(every, position_ids), *rest


class PositionedGPT(_Positioned, GPTModel):  # type: ignore[misc]
    """megatron.core's, with positions that begin anew."""


class PositionedFastGPT(_Positioned, FastGPT):
    """The faster one, with positions that begin anew."""


def _model(args: Namespace, chunk: Chunk) -> type[Any]:
    if args.reset_position_ids and args.position_embedding_type == "rope":
        return PositionedFastGPT if chunk.fast else PositionedGPT
    return FastGPT if chunk.fast else GPTModel


def build(args: Namespace, config: TransformerConfig, chunk: Chunk) -> Any:
    """A chunk of the model."""
    return _model(args, chunk)(
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
