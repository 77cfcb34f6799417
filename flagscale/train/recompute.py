"""Activation recomputation (checkpointing) chosen per pipeline stage and micro-batch.

:func:`resolve_auto_recompute` chooses the number of recomputed layers from the memory of the
devices. :func:`apply_recompute_choices` configures the model for the choices, automatic or from the
arguments.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.rules.activation_offload import offloads_activations
from flagscale.config.arguments.rules.recompute import (
    RecomputeChoice,
    module_choice,
    recompute_plan,
)
from flagscale.config.arguments.spec.system_arguments import RECOMPUTE_AUTO
from flagscale.errors import ConfigError
from flagscale.estimate.forecast import StageForecast, forecast_step, with_recomputed_layers
from flagscale.estimate.memory import usable_bytes
from flagscale.train.device import Device
from flagscale.train.distributed import gather_from_ranks
from flagscale.train.layers.activation_offload import LayerOffload, Transfers
from flagscale.train.layers.layer_compilation import find_transformer_layers
from flagscale.train.layers.selective_recompute import recompute_modules
from flagscale.train.models.initialize import find_transformer_blocks

_GIB = 2**30


def resolve_auto_recompute(
    args: argparse.Namespace, vocabulary: int, device: Device, log: Callable[[str], None]
) -> argparse.Namespace:
    """Resolve ``recompute_granularity: auto`` for this rank's pipeline stage.

    All ranks call it after the parallel layout is initialized. The ranks of a stage get the same
    result.

    Args:
        args: resolved arguments of this rank.
        vocabulary: size of the padded vocabulary.
        device: device of this rank, before anything is allocated.
        log: logs a line, once per job.

    Returns:
        The arguments with recomputation of a number of whole layers and of modules of the others,
        or unchanged ``args`` if the granularity is not ``auto``.
    """
    if args.recompute_granularity != RECOMPUTE_AUTO:
        return args
    rank_stage = parallel_state.get_pipeline_model_parallel_rank()
    stage_limits_bytes = _stage_memory_limits(_memory_limit(args, device), rank_stage)
    stages = forecast_step(args, vocabulary, stage_limits_bytes).stages
    for stage, limit_bytes in zip(stages, stage_limits_bytes, strict=True):
        log(_describe_stage(stage, limit_bytes))
    stage = stages[rank_stage]
    return with_recomputed_layers(args, stage.recomputed_layers, stage.recomputed_modules)


def _memory_limit(args: argparse.Namespace, device: Device) -> float:
    """Return the number of bytes that this rank may allocate; infinite if the limit is unknown."""
    if args.recompute_memory_gib is not None:
        return float(args.recompute_memory_gib * _GIB)
    free_bytes = device.accelerator.available_memory(device.torch_device)
    if free_bytes is None:
        return math.inf
    return usable_bytes(free_bytes)


def _stage_memory_limits(rank_limit_bytes: float, stage: int) -> list[float]:
    """Return the smallest limit among the ranks of each stage, in bytes."""
    limits = gather_from_ranks((stage, rank_limit_bytes))
    stage_count = max(stage for stage, _ in limits) + 1
    return [
        min(limit_bytes for limit_stage, limit_bytes in limits if limit_stage == stage)
        for stage in range(stage_count)
    ]


def _describe_stage(stage: StageForecast, limit_bytes: float) -> str:
    if limit_bytes == math.inf:
        return (
            f"{stage.name}: nothing is recomputed, because the memory of its devices is not known"
        )
    memory_use = f"{stage.memory.total / _GIB:.1f} of {limit_bytes / _GIB:.1f} GiB by calculation"
    if stage.memory.total > limit_bytes:
        memory_use = f"{memory_use}, which is too much: `flagscale estimate` shows what would fit"
    parts = stage.describe_recomputation()
    if not parts:
        return f"{stage.name}: nothing is recomputed: {memory_use}"
    chunk = " of a chunk" if len(stage.flops) > 1 else ""
    layers = f"of {stage.layers // len(stage.flops)} layers{chunk}"
    return f"{stage.name}: {', '.join(parts)} {layers} are recomputed: {memory_use}"


def apply_recompute_choices(
    args: argparse.Namespace, config: TransformerConfig, models: Sequence[Any]
) -> None:
    """Recompute or offload activations of this rank's layers according to the arguments.

    megatron.core reads its configuration in each forward pass of a chunk's layers. A hook therefore
    writes the choice for the micro-batch to the configuration just before that pass.

    Args:
        args: resolved arguments.
        config: configuration shared by the models.
        models: unwrapped models of this rank, one per chunk.

    Raises:
        ConfigError: the number of layers of a chunk is not divisible by ``recompute_num_layers``.
    """
    choices_per_chunk = recompute_plan(vars(args), args.num_microbatches)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stage_count = parallel_state.get_pipeline_model_parallel_world_size()
    for index, model in enumerate(models):
        _recompute_modules(args, model)
        choices = [_configured_choice(config)]
        if choices_per_chunk is not None:
            choices = list(choices_per_chunk[stage_count * index + stage])
            for block in find_transformer_blocks(model).values():
                block.register_forward_pre_hook(_RecomputeHook(config, choices))
        for block in find_transformer_blocks(model).values():
            _check_divisible(choices, len(block.layers))
    if offloads_activations(vars(args)):
        _offload_activations(args, models)


def _offload_activations(args: argparse.Namespace, models: Sequence[Any]) -> None:
    """Keep activations of the layers of each chunk in host memory between their passes."""
    transfers = Transfers(next(models[0].parameters()).device)
    modules = args.offload_modules if args.fine_grained_activation_offloading else None
    for model in models:
        for block in find_transformer_blocks(model).values():
            layers = list(block.layers)
            LayerOffload(
                layers,
                args.cpu_offloading_num_layers or len(layers),
                transfers,
                smallest=args.min_offloaded_tensor_size,
                modules=modules,
            )


def _recompute_modules(args: argparse.Namespace, model: Any) -> None:
    """Recompute modules of the layers of a chunk that are not recomputed whole.

    Layers of multi-token prediction follow the others.
    """
    modules = module_choice(args)
    whole_layers = args.recompute_num_layers if args.recompute_granularity == "full" else 0
    for index, layer in enumerate(find_transformer_layers(model) if modules else ()):
        if index >= whole_layers:
            recompute_modules(layer, modules.of_layer(index))


class _RecomputeHook:
    """Forward pre-hook of a chunk's layers that selects the recomputation of the micro-batch."""

    def __init__(
        self, config: TransformerConfig, choices: Sequence[RecomputeChoice | None]
    ) -> None:
        """Create the hook of a chunk.

        Args:
            config: configuration to modify.
            choices: one entry per micro-batch of a step, in the order in which the chunk runs them.
        """
        self._config = config
        self._choices = choices
        self._micro_batch_index = 0

    def __call__(self, layers: Any, _: Any) -> None:
        if not layers.training:
            return  # evaluation: no recomputation, and not a micro-batch of a training step
        choice = self._choices[self._micro_batch_index % len(self._choices)]
        self._micro_batch_index += 1
        self._config.recompute_granularity = "full" if choice else None
        if choice:
            self._config.recompute_method = choice.method
            self._config.recompute_num_layers = choice.layers


def _configured_choice(config: TransformerConfig) -> RecomputeChoice | None:
    if config.recompute_granularity != "full":
        return None
    return RecomputeChoice(config.recompute_method, config.recompute_num_layers)


def _check_divisible(choices: Sequence[RecomputeChoice | None], layers: int) -> None:
    """Raise ConfigError if the layers of a chunk are not divisible into units of equal size.

    A unit is a number of layers that are recomputed together (``recompute_method: uniform``).

    megatron.core would access layers beyond the end of the chunk for the last, shorter unit.
    """
    for choice in set(choices):
        if choice and choice.method == "uniform" and layers % choice.layers:
            raise ConfigError(
                f"recompute_num_layers: units of {choice.layers} layers do not divide the {layers} "
                "of a stage",
                hint="set recompute_method: block, or a number that divides all stages' layers",
            )
