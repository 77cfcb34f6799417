"""Construction of megatron.core's GPTModel from its local layers or from optimized layers."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from flagscale.train.layers.rotary import RotaryPair, select_positions
from flagscale.train.models.base import ChunkSpec
from flagscale.train.models.config import LayerConfig
from flagscale.train.models.layer_specs import decoder_block_spec, mtp_block_spec
from flagscale.train.models.mtp import MultiTokenPredictionMixin
from flagscale.train.models.optimized import OptimizedModelMixin


class OptimizedGPT(OptimizedModelMixin, GPTModel):  # type: ignore[misc]
    """GPTModel built from optimized layers, with the same parameters and outputs."""


class _BatchPositionsMixin:
    """Mixin that precedes a model class and takes rotary positions from the batch.

    megatron.core counts positions through the sequence instead.
    """

    config: Any
    decoder: Any
    rotary_pos_emb: Any

    def _preprocess(self, input_ids: Any, position_ids: Any, *args: Any, **options: Any) -> Any:
        preprocessed = super()._preprocess(input_ids, position_ids, *args, **options)  # type: ignore[misc]
        hidden, angles, *remaining = preprocessed
        if angles is None or position_ids is None:
            return preprocessed
        length = self.rotary_pos_emb.get_rotary_seq_len(None, self.decoder, hidden, self.config)
        # Angles of the whole sequence, not only of this context-parallel rank's part.
        all_angles = self.rotary_pos_emb(length, packed_seq=True)
        return hidden, select_positions(all_angles, position_ids), *remaining


class _GemmaMixin:
    """Mixin that precedes a model class, for features of Gemma.

    It scales embeddings, soft-caps logits, and gives sliding-window layers a rotary base of their
    own, each if the configuration enables it.
    """

    config: Any
    pre_process: bool
    post_process: bool
    output_layer: Any
    rotary_pos_emb: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Rounded to the embedding's precision, as in the original training.
        scale = torch.tensor(math.sqrt(self.config.hidden_size), dtype=self.config.params_dtype)
        self.embedding_scale = float(scale)
        if self.post_process and self.config.final_logit_softcapping:
            self.output_layer.register_forward_hook(_softcap_logits)
        if base := self.config.window_rotary_base:
            global_rotary = self.rotary_pos_emb
            window_rotary = type(global_rotary)(
                kv_channels=self.config.kv_channels,
                rotary_percent=options["rotary_percent"],
                rotary_interleaved=self.config.rotary_interleaved,
                rotary_base=base,
                cp_group=global_rotary.cp_group,
            )
            self.rotary_pos_emb = RotaryPair(global_rotary, window_rotary)

    def _preprocess(self, *args: Any, **options: Any) -> Any:
        hidden, *remaining = super()._preprocess(*args, **options)  # type: ignore[misc]
        if self.pre_process and self.config.scale_embeddings:
            hidden = hidden * self.embedding_scale
        return hidden, *remaining


def _softcap_logits(
    layer: Any, _: Any, output: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any]:
    """Soft-cap logits ``s`` to ``c tanh(s / c)``."""
    cap: float = layer.config.final_logit_softcapping
    logits, bias = output
    return torch.tanh(logits / cap) * cap, bias


def _model_class(args: Namespace, config: LayerConfig, chunk: ChunkSpec) -> type[Any]:
    mixins: list[type] = [MultiTokenPredictionMixin] if config.mtp_num_layers else []
    # MLA layers count positions themselves, and attention depends only on distances.
    layers_count_positions = args.multi_latent_attention
    if (
        args.reset_position_ids
        and args.position_embedding_type == "rope"
        and not layers_count_positions
    ):
        mixins.append(_BatchPositionsMixin)
    if config.scale_embeddings or config.final_logit_softcapping or config.window_rotary_base:
        mixins.append(_GemmaMixin)
    model = OptimizedGPT if chunk.optimized else GPTModel
    return type(model.__name__, (*mixins, model), {}) if mixins else model


def build_gpt(args: Namespace, config: LayerConfig, chunk: ChunkSpec) -> Any:
    """Build a chunk of the model."""
    return _model_class(args, config, chunk)(
        config=config,
        transformer_layer_spec=decoder_block_spec(args, config, chunk),
        mtp_block_spec=mtp_block_spec(args, config, chunk),
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
        vp_stage=chunk.vp_stage,
    )
