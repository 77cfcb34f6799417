"""Recomputation that differs between pipeline stages and micro-batches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.recompute import Choice, plan
from flagscale.errors import ConfigError
from flagscale.train.models.initialize import blocks


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
