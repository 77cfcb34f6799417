"""Freezing of parameters by their names (``freeze_parameters``, ``trainable_parameters``).

Frozen parameters have no gradient buffer and no optimizer state, and are reduced by no rank.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.parameters import EMBEDDING, POSITIONS
from flagscale.config.arguments.rules.freezing import (
    check_patterns,
    freezing_argument,
    select_frozen,
)
from flagscale.errors import ConfigError, Problem
from flagscale.train.distributed import gather_from_ranks
from flagscale.train.layers.lora import require_output_grad
from flagscale.train.models.initialize import count_whole_elements, iter_parameter_names


def freeze_parameters(
    models: list[Any], args: argparse.Namespace, config: TransformerConfig
) -> None:
    """Freeze the selected parameters. Collective: all ranks call it.

    Args:
        models: unwrapped model chunks of this rank, before they are wrapped in DDP.
        args: resolved arguments.
        config: the model's configuration.

    Raises:
        ConfigError: on all ranks, if a pattern matches no parameter of the whole model, or if all
            or none are selected.
    """
    if freezing_argument(vars(args)) is None:
        return
    all_names = sorted(_gather_sizes(models, config))
    if violations := list(check_patterns(vars(args), all_names)):
        raise ConfigError([Problem(name, message) for name, message in violations])
    frozen = select_frozen(vars(args), all_names)
    for model in models:
        for names, parameter in iter_parameter_names(model, config):
            parameter.requires_grad_(names[0] not in frozen)
        if model.pre_process and _hides_parameters(args) and {EMBEDDING, POSITIONS} & frozen:
            model.embedding.register_forward_hook(require_output_grad)


def _hides_parameters(args: argparse.Namespace) -> bool:
    """Return whether layers are recomputed. Autograd sees only the inputs of a recomputed layer: if
    none requires a gradient, the layer's parameters get none.
    """
    return bool(args.recompute_granularity or args.moe_layer_recompute)


class WeightCounts(NamedTuple):
    """Number of weights of the whole model, and of those that are trained."""

    total: int
    trained: int


def count_trained_weights(models: list[Any], config: TransformerConfig) -> WeightCounts:
    """Count the weights of the whole model. Collective: all ranks call it."""
    sizes = _gather_sizes(models, config)
    return WeightCounts(
        sum(size for size, _ in sizes.values()),
        sum(size for size, is_trained in sizes.values() if is_trained),
    )


def _gather_sizes(models: list[Any], config: TransformerConfig) -> dict[str, tuple[int, bool]]:
    """Return the number of elements of all parameters of the model by global name, and whether they
    are trained.
    """
    sizes: dict[str, tuple[int, bool]] = {}
    for model in models:
        for names, parameter in iter_parameter_names(model, config):
            size = count_whole_elements(parameter) // len(names)
            sizes.update(dict.fromkeys(names, (size, parameter.requires_grad)))
    return {
        name: size for rank_sizes in gather_from_ranks(sizes) for name, size in rank_sizes.items()
    }
