"""Recomputation that differs between pipeline stages and micro-batches."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.recompute import AUTO, Choice, plan
from flagscale.errors import ConfigError
from flagscale.estimate.forecast import Stage, forecast, recomputing
from flagscale.train.device import Device
from flagscale.train.models.initialize import blocks

_GIB = 2**30
_PLANNED = 0.93
"""Share of the free memory that is planned with: allocators lose some, the forecast is up to 3.4 %
low, and communication libraries take their buffers later."""


def settle(
    args: argparse.Namespace, vocabulary: int, device: Device, tell: Callable[[str], None]
) -> argparse.Namespace:
    """This rank's arguments with what ``recompute_granularity: auto`` comes to for its stage; as
    they are without it. All ranks call it, laid out; those of a stage find the same.

    Args:
        args: this rank's arguments, resolved.
        vocabulary: the padded vocabulary's size.
        device: this rank's, whose memory holds nothing yet.
        tell: says a line, once for the job.
    """
    if args.recompute_granularity != AUTO:
        return args
    own = parallel_state.get_pipeline_model_parallel_rank()
    room = _room_of_stages(_room(args, device), own)
    stages = forecast(args, vocabulary, room).stages
    for stage, most in zip(stages, room, strict=True):
        tell(_reason(stage, most))
    return recomputing(args, stages[own].recomputed)


def _room(args: argparse.Namespace, device: Device) -> float:
    """Bytes that this rank may take."""
    if args.recompute_memory_gib is not None:
        return float(args.recompute_memory_gib * _GIB)
    free = device.accelerator.room(device.torch_device)
    return math.inf if free is None else _PLANNED * free


def _room_of_stages(own: float, stage: int) -> list[float]:
    """The least of each stage's ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (stage, own))
    stages = max(stage for stage, _ in found) + 1
    return [min(room for at, room in found if at == stage) for stage in range(stages)]


def _reason(stage: Stage, room: float) -> str:
    if room == math.inf:
        return f"{stage.name}: nothing is recomputed, its device's memory has no known limit"
    taken = f"{stage.memory.all / _GIB:.1f} of {room / _GIB:.1f} GiB by calculation"
    if stage.memory.all > room:
        taken = f"{taken}, which is too much: `action=estimate` says what would fit"
    if not stage.recomputed:
        return f"{stage.name}: nothing is recomputed: {taken}"
    chunk = " of a chunk" if len(stage.work) > 1 else ""
    layers = f"{stage.recomputed} of {stage.layers // len(stage.work)} layers{chunk}"
    return f"{stage.name}: {layers} are recomputed: {taken}"


def follow(args: argparse.Namespace, config: TransformerConfig, models: Sequence[Any]) -> None:
    """Have the layers of this rank recomputed as the arguments say for its stage.

    megatron.core reads its configuration in each forward pass of a chunk's layers, so that just
    before one the choice for its micro-batch is put there.

    Args:
        args: resolved arguments.
        config: the models', which they share.
        models: the bare models of this rank, a chunk each.

    Raises:
        ConfigError: the layers of a chunk do not divide into the units to be recomputed.
    """
    chosen = plan(vars(args), args.num_microbatches)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    for index, model in enumerate(models):
        own = [_as_configured(config)]
        if chosen is not None:
            own = list(chosen[stages * index + stage])
            for block in blocks(model).values():
                block.register_forward_pre_hook(_Choosing(config, own))
        for block in blocks(model).values():
            _check(own, len(block.layers))


class _Choosing:
    """A hook of a chunk's layers, called before each of their forward passes."""

    def __init__(self, config: TransformerConfig, choices: Sequence[Choice | None]) -> None:
        """``choices``: for each micro-batch of a step, in the order in which a chunk has them."""
        self._config = config
        self._choices = choices
        self._passed = 0

    def __call__(self, layers: Any, _: Any) -> None:
        if not layers.training:
            return  # nothing is recomputed, and these are no micro-batches of a step
        choice = self._choices[self._passed % len(self._choices)]
        self._passed += 1
        self._config.recompute_granularity = "full" if choice else None
        if choice:
            self._config.recompute_method = choice.method
            self._config.recompute_num_layers = choice.layers


def _as_configured(config: TransformerConfig) -> Choice | None:
    if config.recompute_granularity != "full":
        return None
    return Choice(config.recompute_method, config.recompute_num_layers)


def _check(choices: Sequence[Choice | None], layers: int) -> None:
    """megatron.core would look for a last, shorter unit's layers beyond the chunk's end."""
    for choice in set(choices):
        if choice and choice.method == "uniform" and layers % choice.layers:
            raise ConfigError(
                f"recompute_num_layers: units of {choice.layers} layers do not divide the {layers} "
                "of a stage",
                hint="take recompute_method: block, or a number that divides all stages' layers",
            )
