"""Construction of the model chunks of a rank.

A model chunk is the part of the model that one pipeline stage or virtual pipeline stage holds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.rules.adapters import adapter_parts
from flagscale.config.arguments.rules.optimizer import captures_steps
from flagscale.config.arguments.rules.sharding import shards_gradients, shards_weights
from flagscale.train.device import Device
from flagscale.train.layers.data_parallel import LayerwiseDataParallel
from flagscale.train.layers.fp8_layers import find_fp8_linears
from flagscale.train.layers.lora import LoraConfig, attach_adapters, is_adapter
from flagscale.train.layers.token_dispatcher import use_local_dispatcher
from flagscale.train.models.attention import select_sdp_kernels
from flagscale.train.models.base import ChunkSpec, ModelSpec, get_model_spec
from flagscale.train.models.config import build_ddp_config, resolve_transformer_impl
from flagscale.train.models.freezing import freeze_parameters
from flagscale.train.models.initialize import initialize_weights, iter_parameter_names
from flagscale.train.models.optimized import apply_optimizations
from flagscale.train.recompute import apply_recompute_choices
from flagscale.train.sharding.data_parallel import ShardedDataParallel
from flagscale.train.sharding.deferred import DeferredAllocation
from flagscale.train.state import unwrap_model

# Variables for Transformer Engine, which is not used here. megatron.core sets them and fails if
# they have another value.
_TRANSFORMER_ENGINE_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def build_chunks(
    args: argparse.Namespace,
    config: TransformerConfig,
    vocabulary: int,
    device: Device,
    *,
    initialize_all: bool = True,
    for_training: bool = True,
) -> list[DistributedDataParallel]:
    """Return this rank's model chunks on the device, initialized and wrapped in DDP.

    Args:
        args: resolved arguments.
        config: the model's configuration, shared by all chunks.
        vocabulary: size of the padded vocabulary.
        device: device of the weights.
        initialize_all: whether to initialize all weights. If false, only adapters are initialized,
            because the caller loads all other weights.
        for_training: if false, chunks are not wrapped in DDP, which would allocate gradients.
    """
    for variable in _TRANSFORMER_ENGINE_VARIABLES:
        os.environ.pop(variable, None)
    vp_stages: list[int | None] = [None]
    if config.virtual_pipeline_model_parallel_size is not None:
        vp_stages = list(range(config.virtual_pipeline_model_parallel_size))
    optimized = resolve_transformer_impl(args, device) == "compiled"
    select_sdp_kernels(config, device)
    spec = get_model_spec(args)
    is_deferred = _can_defer_allocation(args, spec)
    with DeferredAllocation() if is_deferred else nullcontext():
        models: list[Any] = [
            spec.build(args, config, _build_chunk_spec(vocabulary, stage, optimized=optimized)).to(
                device.torch_device
            )
            for stage in vp_stages
        ]
    for model in models:
        # Attributes that schedules and checkpoints read, for every family.
        model.model_type, model.vocab_size = ModelType.encoder_or_decoder, vocabulary
        use_local_dispatcher(model)
        if targets := adapter_parts(vars(args)):
            attach_adapters(model, targets, _build_lora_config(args))
        _mark_expert_parameters(model)
        if is_deferred:
            continue
        on_host = bool(args.use_cpu_initialization)
        if initialize_all:
            spec.initialize(model, config, args.seed, args.norm_init_weight, on_host=on_host)
        else:
            initialize_weights(model, config, args.seed, on_host=on_host, selected=is_adapter)
    freeze_parameters(models, args, config)
    apply_recompute_choices(args, config, models)
    if args.bf16 or args.fp16:
        models = [Float16Module(config, model) for model in models]
    ddp_config = build_ddp_config(args)
    initialize = None
    if is_deferred:
        initialize = partial(_initialize_parameters, args, config, initialize_all=initialize_all)
    # If steps are captured, gradients must be accumulated on the capturing stream.
    with device.side_stream() if captures_steps(vars(args)) else nullcontext():
        chunks: list[Any] = [
            _add_data_parallelism(
                args, config, ddp_config, model, index, initialize, optimized=optimized
            )
            if for_training
            else model
            for index, model in enumerate(models)
        ]
    if optimized:
        for chunk in chunks:
            apply_optimizations(unwrap_model(chunk), args, config, device)
    return chunks


def _can_defer_allocation(args: argparse.Namespace, spec: ModelSpec) -> bool:
    """Return whether weights can be allocated and initialized layer by layer."""
    # megatron.core sums the weights that stages share during construction.
    stages_share_weights = args.pipeline_model_parallel_size > 1 and (
        not args.untie_embeddings_and_output_weights or args.mtp_num_layers
    )
    # A family with an initialization of its own initializes whole models.
    initializes_by_name = type(spec).initialize is ModelSpec.initialize
    return shards_weights(vars(args)) and initializes_by_name and not stages_share_weights


def _initialize_parameters(
    args: argparse.Namespace,
    config: TransformerConfig,
    model: Any,
    parameters: Collection[torch.nn.Parameter],
    *,
    initialize_all: bool,
) -> None:
    """Initialize given parameters of an unwrapped model, or only the adapters among them."""
    names = {
        name
        for group_names, parameter in iter_parameter_names(model, config)
        if parameter in parameters
        for name in group_names
        if initialize_all or is_adapter(name)
    }
    initialize_weights(
        model,
        config,
        args.seed,
        norm_init_value=args.norm_init_weight,
        on_host=bool(args.use_cpu_initialization),
        selected=names.__contains__,
    )


def _add_data_parallelism(
    args: argparse.Namespace,
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    model: Any,
    index: int,
    initialize: Callable[[Any, Collection[torch.nn.Parameter]], None] | None,
    *,
    optimized: bool,
) -> DistributedDataParallel:
    """Wrap a model chunk; ``index`` is its number among this rank's chunks.

    ``initialize`` initializes given weights of an unwrapped model; None if they are initialized.
    """
    if shards_gradients(vars(args)):
        fp8_linears = None
        if args.fp8 and optimized:
            fp8_linears = find_fp8_linears(unwrap_model(model), config, args.fp8_recipe)
        return ShardedDataParallel(
            config,
            ddp_config,
            model,
            shards_weights=shards_weights(vars(args)),
            accumulates_in_layers=optimized,
            timeout=timedelta(minutes=args.distributed_timeout_minutes),
            initialize=None if initialize is None else partial(initialize, unwrap_model(model)),
            fp8_linears=fp8_linears,
        )
    ddp_class = LayerwiseDataParallel if optimized else DistributedDataParallel
    # Only the gradients of the first chunk are reduced during the backward pass.
    return ddp_class(config, ddp_config, model, disable_bucketing=index > 0)


def _build_lora_config(args: argparse.Namespace) -> LoraConfig:
    """Return the configuration of the LoRA adapters."""
    return LoraConfig(
        args.lora_dim,
        args.lora_alpha,
        args.lora_dropout,
        dropout_on_output=args.lora_dropout_position == "post",
        init_method=args.lora_in_init_method,
    )


def _build_chunk_spec(vocabulary: int, vp_stage: int | None, *, optimized: bool) -> ChunkSpec:
    single_chunk = vp_stage is None
    return ChunkSpec(
        vocabulary=vocabulary,
        vp_stage=vp_stage,
        first=parallel_state.is_pipeline_first_stage(
            ignore_virtual=single_chunk, vp_stage=vp_stage
        ),
        last=parallel_state.is_pipeline_last_stage(ignore_virtual=single_chunk, vp_stage=vp_stage),
        optimized=optimized,
    )


def _mark_expert_parameters(model: torch.nn.Module) -> None:
    """Mark expert parameters, which have process groups and an optimizer part of their own.

    megatron.core marks them only with expert parallelism. Without the mark, checkpoints of one rank
    do not fit other layouts, meshes with and without expert parallelism have different optimizers,
    and gradients are reduced over the wrong ranks if experts do not use tensor parallelism but
    other layers do.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def list_parameters(chunks: list[DistributedDataParallel]) -> list[torch.nn.Parameter]:
    """Return all parameters that this rank holds."""
    return [parameter for chunk in chunks for parameter in chunk.parameters()]
