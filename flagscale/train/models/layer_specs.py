"""The transformer layers of every family: megatron.core's local ones, with this project's parts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer

from flagscale.train.layers.experts import GroupedExperts
from flagscale.train.layers.latent import LatentAttention
from flagscale.train.layers.router import router
from flagscale.train.layers.sandwich import SandwichLayer
from flagscale.train.models.attention import SDPAttention
from flagscale.train.models.base import Chunk
from flagscale.train.models.config import LayerConfig
from flagscale.train.models.fast import LINEARS
from flagscale.train.models.mtp import FurtherLayer
from flagscale.train.models.norm import norm_class
from flagscale.train.models.windows import WindowedAttention, are_plain

_MASK = "attn_mask_type"
_KEPT = ("linear_q_down_proj", "linear_kv_down_proj")
"""Of multi-latent attention, which takes megatron.core's own class for them alone."""


def block_spec(args: Namespace, config: LayerConfig, chunk: Chunk, *, causal: bool = True) -> Any:
    """The layers of a chunk, with the norms, attention and where needed the router replaced, and
    the linear layers of a fast chunk.

    Args:
        args: resolved arguments.
        config: the model's configuration.
        chunk: what is built.
        causal: whether a token attends to those before it alone, or to all of its sequence.
    """
    spec = get_gpt_decoder_block_spec(config, vp_stage=chunk.stage, **_plain(config))
    replacements = _replacements(args, config, chunk)
    parameters = {} if causal else {_MASK: AttnMaskType.no_mask}
    spec.layer_norm = replacements[WrappedTorchNorm]
    spec.layer_specs = [_replace(layer, replacements, parameters) for layer in spec.layer_specs]
    return spec


def further_spec(args: Namespace, config: LayerConfig, chunk: Chunk) -> Any:
    """The layers of a chunk that predict further tokens, which are as the model's last one; None
    where it has none."""
    if not config.mtp_num_layers:
        return None
    last = get_gpt_decoder_layer_specs(config, **_plain(config))[-1]
    spec = get_gpt_mtp_block_spec(config, last, use_transformer_engine=False, vp_stage=chunk.stage)
    if spec is None:
        return None
    replacements = _replacements(args, config, chunk)
    replacements[MultiTokenPredictionLayer] = FurtherLayer
    spec.layer_specs = [_replace(layer, replacements, {}) for layer in spec.layer_specs]
    return spec


def _plain(config: LayerConfig) -> dict[str, Any]:
    """What megatron.core's local layers are asked for with."""
    return {
        "use_transformer_engine": False,
        "normalization": config.normalization,
        "qk_l2_norm": config.qk_l2_norm,
    }


def _replacements(args: Namespace, config: LayerConfig, chunk: Chunk) -> dict[Any, Any]:
    replacements: dict[Any, Any] = {WrappedTorchNorm: norm_class(config)}
    replacements[MLASelfAttention] = LatentAttention
    if config.attention_backend != AttnBackend.local:
        plain = are_plain(config)
        replacements[DotProductAttention] = SDPAttention if plain else WindowedAttention
    if config.sandwich_norm or config.window_rotary_base:
        replacements[TransformerLayer] = SandwichLayer
    if chunk.fast:
        replacements.update(LINEARS)
    if args.num_moe_experts:
        replacements[TopKRouter] = router(args)
    if args.moe_grouped_gemm:
        replacements[SequentialMLP] = GroupedExperts
    return replacements


def _replace(spec: Any, replacements: Mapping[Any, Any], parameters: Mapping[str, Any]) -> Any:
    """``spec`` with each module class that ``replacements`` names exchanged, and each of its
    ``parameters`` where it has one of that name, at any depth."""
    if isinstance(spec, ModuleSpec):
        own = {name: parameters.get(name, value) for name, value in (spec.params or {}).items()}
        return ModuleSpec(
            module=replacements.get(spec.module, spec.module),
            params=own,
            submodules=_replace(spec.submodules, replacements, parameters),
        )
    if hasattr(spec, "__dataclass_fields__") and not isinstance(spec, type):
        values = {f.name: getattr(spec, f.name) for f in fields(spec)}
        values |= {
            name: _replace(value, replacements, parameters)
            for name, value in values.items()
            if name not in _KEPT
        }
        return type(spec)(**values)
    return replacements.get(spec, spec) if isinstance(spec, type) else spec
