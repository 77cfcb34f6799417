"""Builds the chunks of the GPT model that this rank holds."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.train.device import Device
from flagscale.train.layers.data_parallel import LayerwiseDataParallel
from flagscale.train.layers.experts import GroupedExperts
from flagscale.train.layers.router import router
from flagscale.train.models.attention import SDPAttention, choose_kernel
from flagscale.train.models.config import ddp_config, implementation
from flagscale.train.models.fast import LINEARS, FastGPT, finish
from flagscale.train.models.initialize import initialize
from flagscale.train.models.norm import norm_class
from flagscale.train.recompute import follow
from flagscale.train.state import unwrap

# Transformer Engine's choice of attention. It is not used here, yet megatron.core sets these and
# refuses to find them set otherwise.
_TRANSFORMER_ENGINE = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def build_chunks(
    args: argparse.Namespace, config: TransformerConfig, vocabulary: int, device: Device
) -> list[DistributedDataParallel]:
    """This rank's model chunks, with initial weights, on the device, wrapped in DDP.

    Args:
        args: resolved arguments.
        config: the model's configuration, shared by all chunks.
        vocabulary: the padded vocabulary's size.
        device: where the weights live.
    """
    for variable in _TRANSFORMER_ENGINE:
        os.environ.pop(variable, None)
    stages: list[int | None] = [None]
    if config.virtual_pipeline_model_parallel_size is not None:
        stages = list(range(config.virtual_pipeline_model_parallel_size))
    fast = implementation(args, device) == "compiled"
    choose_kernel(config, device)
    models = [
        _gpt(args, config, vocabulary, stage, fast=fast).to(device.torch_device) for stage in stages
    ]
    for model in models:
        _set_experts_apart(model)
        initialize(model, config, args.seed, norms=args.norm_init_weight)
    follow(args, config, models)
    if args.bf16 or args.fp16:
        models = [Float16Module(config, model) for model in models]
    reduction = ddp_config(args)
    parallel = LayerwiseDataParallel if fast else DistributedDataParallel
    # Only the first chunk's gradients are reduced while the backward pass still runs.
    chunks = [
        parallel(config, reduction, model, disable_bucketing=index > 0)
        for index, model in enumerate(models)
    ]
    if fast:
        for chunk in chunks:
            finish(unwrap(chunk), args, config, device)
    return chunks


def _gpt(
    args: argparse.Namespace,
    config: TransformerConfig,
    vocabulary: int,
    stage: int | None,
    *,
    fast: bool,
) -> GPTModel:
    interleaved = stage is not None
    return (FastGPT if fast else GPTModel)(
        config=config,
        transformer_layer_spec=_block_spec(args, config, stage, fast=fast),
        vocab_size=vocabulary,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(
            ignore_virtual=not interleaved, vp_stage=stage
        ),
        post_process=parallel_state.is_pipeline_last_stage(
            ignore_virtual=not interleaved, vp_stage=stage
        ),
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=stage,
    )


def _block_spec(
    args: argparse.Namespace, config: TransformerConfig, stage: int | None, *, fast: bool
) -> Any:
    """megatron.core's local layers of this stage, with the norms, attention and where needed the
    router replaced, and the linear layers of a ``fast`` model."""
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=stage,
    )
    replacements: dict[Any, Any] = {WrappedTorchNorm: norm_class(config.normalization)}
    if config.attention_backend != AttnBackend.local:
        replacements[DotProductAttention] = SDPAttention
    if fast:
        replacements.update(LINEARS)
    if args.num_moe_experts:
        replacements[TopKRouter] = router(args)
    if args.moe_grouped_gemm:
        replacements[SequentialMLP] = GroupedExperts
    spec.layer_norm = replacements[WrappedTorchNorm]
    spec.layer_specs = [_replace(layer, replacements) for layer in spec.layer_specs]
    return spec


def _replace(spec: Any, replacements: dict[Any, Any]) -> Any:
    """``spec`` with each module class that ``replacements`` names exchanged, at any depth."""
    if isinstance(spec, ModuleSpec):
        return ModuleSpec(
            module=replacements.get(spec.module, spec.module),
            params=spec.params,
            submodules=_replace(spec.submodules, replacements),
        )
    if hasattr(spec, "__dataclass_fields__") and not isinstance(spec, type):
        values = {f.name: _replace(getattr(spec, f.name), replacements) for f in fields(spec)}
        return type(spec)(**values)
    return replacements.get(spec, spec) if isinstance(spec, type) else spec


def _set_experts_apart(model: torch.nn.Module) -> None:
    """Experts have groups and a part of the optimizer of their own, however many ranks they lie
    on. megatron.core says so only where these are more than one: then checkpoints of one rank fit
    no more, meshes with and without expert parallelism have unlike optimizers, and with tensor
    parallelism but not of experts gradients are summed over the wrong ranks."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def parameters_of(chunks: list[DistributedDataParallel]) -> list[torch.nn.Parameter]:
    """All parameters this rank holds."""
    return [parameter for chunk in chunks for parameter in chunk.parameters()]
