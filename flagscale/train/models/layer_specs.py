"""Layer specifications: megatron.core's local layers with this project's modules."""

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

from flagscale.train.layers.grouped_experts import GroupedExperts
from flagscale.train.layers.mla import LocalMLASelfAttention
from flagscale.train.layers.router import router_constructor
from flagscale.train.layers.sandwich_norm import SandwichNormLayer
from flagscale.train.models.attention import SDPAttention
from flagscale.train.models.base import ChunkSpec
from flagscale.train.models.config import LayerConfig
from flagscale.train.models.mtp import RecomputableMtpLayer
from flagscale.train.models.norm import select_norm_class
from flagscale.train.models.optimized import LINEAR_REPLACEMENTS
from flagscale.train.models.sliding_window import SlidingWindowAttention, uses_standard_attention

_MASK_TYPE_PARAMETER = "attn_mask_type"
_UNREPLACED_SUBMODULES = ("linear_q_down_proj", "linear_kv_down_proj")
"""Submodules of MLA for which megatron.core requires its own class."""


def decoder_block_spec(
    args: Namespace, config: LayerConfig, chunk: ChunkSpec, *, causal: bool = True
) -> Any:
    """Return the layer specifications of a chunk.

    Norms and attention are replaced, the router if needed, and the linear layers of an optimized
    chunk.

    Args:
        args: resolved arguments.
        config: the model's configuration.
        chunk: the chunk to build.
        causal: whether a token attends only to previous tokens, or to its whole sequence.
    """
    spec = get_gpt_decoder_block_spec(
        config, vp_stage=chunk.vp_stage, **_local_layer_options(config)
    )
    replacements = _module_replacements(args, config, chunk)
    parameters = {} if causal else {_MASK_TYPE_PARAMETER: AttnMaskType.no_mask}
    spec.layer_norm = replacements[WrappedTorchNorm]
    spec.layer_specs = [
        _replace_modules(layer, replacements, parameters) for layer in spec.layer_specs
    ]
    return spec


def mtp_block_spec(args: Namespace, config: LayerConfig, chunk: ChunkSpec) -> Any:
    """Return the specification of a chunk's multi-token prediction layers, or None.

    They are built like the model's last layer.
    """
    if not config.mtp_num_layers:
        return None
    last_layer = get_gpt_decoder_layer_specs(config, **_local_layer_options(config))[-1]
    spec = get_gpt_mtp_block_spec(
        config, last_layer, use_transformer_engine=False, vp_stage=chunk.vp_stage
    )
    if spec is None:
        return None
    replacements = _module_replacements(args, config, chunk)
    replacements[MultiTokenPredictionLayer] = RecomputableMtpLayer
    spec.layer_specs = [_replace_modules(layer, replacements, {}) for layer in spec.layer_specs]
    return spec


def _local_layer_options(config: LayerConfig) -> dict[str, Any]:
    """Return the options that select megatron.core's local layers."""
    return {
        "use_transformer_engine": False,
        "normalization": config.normalization,
        "qk_l2_norm": config.qk_l2_norm,
    }


def _module_replacements(args: Namespace, config: LayerConfig, chunk: ChunkSpec) -> dict[Any, Any]:
    replacements: dict[Any, Any] = {WrappedTorchNorm: select_norm_class(config)}
    replacements[MLASelfAttention] = LocalMLASelfAttention
    if config.attention_backend != AttnBackend.local:
        replacements[DotProductAttention] = (
            SDPAttention if uses_standard_attention(config) else SlidingWindowAttention
        )
    if config.sandwich_norm or config.window_rotary_base:
        replacements[TransformerLayer] = SandwichNormLayer
    if chunk.optimized:
        replacements.update(LINEAR_REPLACEMENTS)
    if args.num_moe_experts:
        replacements[TopKRouter] = router_constructor(args)
    if args.moe_grouped_gemm:
        replacements[SequentialMLP] = GroupedExperts
    return replacements


def _replace_modules(
    spec: Any, replacements: Mapping[Any, Any], parameters: Mapping[str, Any]
) -> Any:
    """Return ``spec`` with module classes and parameters replaced, at any depth.

    Args:
        spec: module specification, or a part of one.
        replacements: new class for each module class to replace.
        parameters: new value for each parameter, where a module has one of that name.
    """
    if isinstance(spec, ModuleSpec):
        replaced_params = {
            name: parameters.get(name, value) for name, value in (spec.params or {}).items()
        }
        return ModuleSpec(
            module=replacements.get(spec.module, spec.module),
            params=replaced_params,
            submodules=_replace_modules(spec.submodules, replacements, parameters),
        )
    if hasattr(spec, "__dataclass_fields__") and not isinstance(spec, type):
        values = {f.name: getattr(spec, f.name) for f in fields(spec)}
        values |= {
            name: _replace_modules(value, replacements, parameters)
            for name, value in values.items()
            if name not in _UNREPLACED_SUBMODULES
        }
        return type(spec)(**values)
    return replacements.get(spec, spec) if isinstance(spec, type) else spec
