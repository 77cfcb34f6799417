"""Builds the chunks of the model that this rank holds."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.adapters import parts_of
from flagscale.config.arguments.graphs import captures_steps
from flagscale.train.device import Device
from flagscale.train.layers.data_parallel import LayerwiseDataParallel
from flagscale.train.layers.dispatch import send_directly
from flagscale.train.layers.lora import Adapter, attach, is_adapter
from flagscale.train.models.attention import choose_kernel
from flagscale.train.models.base import Chunk, spec_of
from flagscale.train.models.config import ddp_config, implementation
from flagscale.train.models.fast import finish
from flagscale.train.models.initialize import initialize
from flagscale.train.recompute import follow
from flagscale.train.state import unwrap

# Transformer Engine's choice of attention. It is not used here, yet megatron.core sets these and
# refuses to find them set otherwise.
_TRANSFORMER_ENGINE = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def build_chunks(
    args: argparse.Namespace,
    config: TransformerConfig,
    vocabulary: int,
    device: Device,
    *,
    draw: bool = True,
) -> list[DistributedDataParallel]:
    """This rank's model chunks, with initial weights, on the device, wrapped in DDP.

    Args:
        args: resolved arguments.
        config: the model's configuration, shared by all chunks.
        vocabulary: the padded vocabulary's size.
        device: where the weights live.
        draw: without, only adapters have initial weights: whoever calls it brings all others.
    """
    for variable in _TRANSFORMER_ENGINE:
        os.environ.pop(variable, None)
    stages: list[int | None] = [None]
    if config.virtual_pipeline_model_parallel_size is not None:
        stages = list(range(config.virtual_pipeline_model_parallel_size))
    fast = implementation(args, device) == "compiled"
    choose_kernel(config, device)
    spec = spec_of(args)
    models: list[Any] = [
        spec.build(args, config, _chunk(vocabulary, stage, fast=fast)).to(device.torch_device)
        for stage in stages
    ]
    for model in models:
        # What schedules and checkpoints ask for, of whichever family.
        model.model_type, model.vocab_size = ModelType.encoder_or_decoder, vocabulary
        send_directly(model)
        _set_experts_apart(model)
        if targets := parts_of(vars(args)):
            attach(model, targets, _adapter_of(args))
        on_host = bool(args.use_cpu_initialization)
        if draw:
            spec.initialize(model, config, args.seed, args.norm_init_weight, on_host=on_host)
        else:
            initialize(model, config, args.seed, on_host=on_host, wanted=is_adapter)
    follow(args, config, models)
    if args.bf16 or args.fp16:
        models = [Float16Module(config, model) for model in models]
    reduction = ddp_config(args)
    parallel = LayerwiseDataParallel if fast else DistributedDataParallel
    # Only the first chunk's gradients are reduced while the backward pass still runs.
    # Where a step is captured, gradients have to be added up on the stream that it is captured on.
    with device.beside() if captures_steps(vars(args)) else nullcontext():
        chunks = [
            parallel(config, reduction, model, disable_bucketing=index > 0)
            for index, model in enumerate(models)
        ]
    if fast:
        for chunk in chunks:
            finish(unwrap(chunk), args, config, device)
    return chunks


def _adapter_of(args: argparse.Namespace) -> Adapter:
    """The adapter that each layer gets which has one."""
    return Adapter(
        args.lora_dim,
        args.lora_alpha,
        args.lora_dropout,
        behind=args.lora_dropout_position == "post",
        drawn=args.lora_in_init_method,
    )


def _chunk(vocabulary: int, stage: int | None, *, fast: bool) -> Chunk:
    alone = stage is None
    return Chunk(
        vocabulary=vocabulary,
        stage=stage,
        first=parallel_state.is_pipeline_first_stage(ignore_virtual=alone, vp_stage=stage),
        last=parallel_state.is_pipeline_last_stage(ignore_virtual=alone, vp_stage=stage),
        fast=fast,
    )


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
