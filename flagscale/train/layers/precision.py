"""Which linear layers of a model take 8-bit products, and when their weights are cast."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.errors import ConfigError
from flagscale.train.layers.compiling import transformer_layers
from flagscale.train.layers.fp8 import MULTIPLE, Cast, Recipe, cast_weight
from flagscale.train.layers.linear import AccumulatingColumnLinear, AccumulatingRowLinear


def use_fp8(model: Any, config: TransformerConfig, recipe: Recipe) -> None:
    """Have the linear layers of the transformer layers take 8-bit products, but for experts', and
    for the first and last layers where the configuration leaves those in 16 bits.

    Raises:
        ConfigError: a weight has a dimension that 8-bit products do not take.
    """
    for layer in transformer_layers(model):
        if _in_eight_bits(layer.layer_number, config):
            linears = list(_linears(layer))
            for linear in linears:
                linear.recipe = recipe
            layer.weights_changed = True
            layer.forward = _casting_first(layer, linears, layer.forward)


def weights_changed(model: torch.nn.Module) -> None:
    """Have the weights of ``model`` cast again before they are used next."""
    for layer in transformer_layers(model):
        if hasattr(layer, "weights_changed"):
            layer.weights_changed = True


def _in_eight_bits(number: int, config: TransformerConfig) -> bool:
    if not config.first_last_layers_bf16:
        return True
    first = config.num_layers_at_start_in_bf16
    last = config.num_layers - config.num_layers_at_end_in_bf16
    return bool(first < number <= last)


def _linears(layer: Any) -> Iterator[Any]:
    for name, module in layer.named_modules():
        linear = isinstance(module, AccumulatingColumnLinear | AccumulatingRowLinear)
        if linear and not module.is_expert:
            for size in module.weight.shape:
                if size % MULTIPLE:
                    raise ConfigError(
                        f"fp8: {name} of layer {layer.layer_number} has a weight of "
                        f"{' x '.join(map(str, module.weight.shape))} on a rank; 8-bit products "
                        f"take multiples of {MULTIPLE}",
                        hint="lower tensor_model_parallel_size, or leave fp8 out",
                    )
            yield module


def _casting_first(layer: Any, linears: list[Any], forward: Any) -> Any:
    """``forward``, casting weights that have changed. By then those of other data-parallel ranks
    have been gathered: who waits for them is a hook, and hooks come before this."""

    @functools.wraps(forward)
    def call(*args: Any, **options: Any) -> Any:
        if layer.weights_changed:
            for linear in linears:
                linear.cast = _cast(linear)
            layer.weights_changed = False
        return forward(*args, **options)

    return call


@torch.no_grad()
def _cast(linear: Any) -> Cast:
    """The weight in 8 bits, in the memory of the last cast: addresses in graphs stay true."""
    new = cast_weight(linear.weight.detach(), linear.recipe.scaling)
    if linear.cast is None:
        return new
    for old, value in zip(linear.cast, new, strict=True):
        old.copy_(value)
    kept: Cast = linear.cast
    return kept
