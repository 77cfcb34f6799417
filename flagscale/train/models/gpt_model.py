"""Builds megatron.core's GPTModel, of its local layers or of this project's faster ones."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from flagscale.train.layers.rotary import RotaryPair, at
from flagscale.train.models.base import Chunk
from flagscale.train.models.config import LayerConfig
from flagscale.train.models.fast import Fast
from flagscale.train.models.layer_specs import block_spec, further_spec
from flagscale.train.models.mtp import MultiToken


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


class _Scaled:
    """Goes before a model's class: embeddings are scaled, logits bounded, and layers with a window
    have rotary positions of their own, where the configuration says so."""

    config: Any
    pre_process: bool
    post_process: bool
    output_layer: Any
    rotary_pos_emb: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # In the embedding's precision, as its weights were trained with.
        root = torch.tensor(math.sqrt(self.config.hidden_size), dtype=self.config.params_dtype)
        self.embedding_scale = float(root)
        if self.post_process and self.config.final_logit_softcapping:
            self.output_layer.register_forward_hook(_bound)
        if base := self.config.window_rotary_base:
            full = self.rotary_pos_emb
            windowed = type(full)(
                kv_channels=self.config.kv_channels,
                rotary_percent=options["rotary_percent"],
                rotary_interleaved=self.config.rotary_interleaved,
                rotary_base=base,
                cp_group=full.cp_group,
            )
            self.rotary_pos_emb = RotaryPair(full, windowed)

    def _preprocess(self, *args: Any, **options: Any) -> Any:
        hidden, *rest = super()._preprocess(*args, **options)  # type: ignore[misc]
        if self.pre_process and self.config.scale_embeddings:
            hidden = hidden * self.embedding_scale
        return hidden, *rest


def _bound(layer: Any, _: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Logits ``s`` as ``c tanh(s / c)``."""
    cap: float = layer.config.final_logit_softcapping
    logits, bias = output
    return torch.tanh(logits / cap) * cap, bias


def _model(args: Namespace, config: LayerConfig, chunk: Chunk) -> type[Any]:
    before: list[type] = [MultiToken] if config.mtp_num_layers else []
    counted = args.multi_latent_attention  # by each layer, and attention takes the distances
    if args.reset_position_ids and args.position_embedding_type == "rope" and not counted:
        before.append(_Positioned)
    if config.scale_embeddings or config.final_logit_softcapping or config.window_rotary_base:
        before.append(_Scaled)
    model = FastGPT if chunk.fast else GPTModel
    return type(model.__name__, (*before, model), {}) if before else model


def build(args: Namespace, config: LayerConfig, chunk: Chunk) -> Any:
    """A chunk of the model."""
    return _model(args, config, chunk)(
        config=config,
        transformer_layer_spec=block_spec(args, config, chunk),
        mtp_block_spec=further_spec(args, config, chunk),
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
