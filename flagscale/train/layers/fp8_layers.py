"""Selection of the linear layers that use FP8, and quantization of their weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.errors import ConfigError
from flagscale.train.layers.fp8 import (
    DIMENSION_MULTIPLE,
    Fp8Recipe,
    Fp8Weight,
    Scaling,
    quantize_weight,
)
from flagscale.train.layers.layer_compilation import find_transformer_layers
from flagscale.train.layers.linear import AccumulatingColumnLinear, AccumulatingRowLinear


class Fp8Linears(NamedTuple):
    """The layers of a model chunk that use FP8.

    Attributes:
        scaling: granularity of scales.
        by_weight: layer of each weight.
    """

    scaling: Scaling
    by_weight: Mapping[torch.nn.Parameter, Any]


def find_fp8_linears(model: Any, config: TransformerConfig, scaling: Scaling) -> Fp8Linears:
    """Return the layers of an unwrapped model chunk that use FP8.

    Raises:
        ConfigError: a dimension of a weight is not supported by FP8 GEMMs.
    """
    layers = _iter_fp8_layers(model, config)
    by_weight = {linear.weight: linear for _, linears in layers for linear in linears}
    return Fp8Linears(scaling, by_weight)


def enable_fp8(model: Any, config: TransformerConfig, recipe: Fp8Recipe) -> None:
    """Use FP8 in the linear layers of transformer layers.

    Experts stay in 16 bits, and so do the first and last layers if the configuration selects that.

    Raises:
        ConfigError: a dimension of a weight is not supported by FP8 GEMMs.
    """
    for layer, linears in _iter_fp8_layers(model, config):
        for linear in linears:
            linear.fp8_recipe = recipe
        # If weights are sharded, their buckets have set fp8_weight and fill it.
        unsharded = [linear for linear in linears if linear.fp8_weight is None]
        if unsharded:
            layer.fp8_weights_stale = True
            layer.forward = _quantize_before_forward(layer, unsharded, layer.forward)


def invalidate_fp8_weights(model: torch.nn.Module) -> None:
    """Mark the FP8 weights of ``model`` as stale, to be quantized again before their next use."""
    for layer in find_transformer_layers(model):
        if hasattr(layer, "fp8_weights_stale"):
            layer.fp8_weights_stale = True


def _iter_fp8_layers(model: Any, config: TransformerConfig) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the transformer layers that use FP8, with their linear layers that do."""
    for layer in find_transformer_layers(model):
        if _uses_fp8(layer.layer_number, config):
            yield layer, list(_find_fp8_linears(layer))


def _uses_fp8(layer_number: int, config: TransformerConfig) -> bool:
    if not config.first_last_layers_bf16:
        return True
    first_bf16_layers = config.num_layers_at_start_in_bf16
    last_fp8_layer = config.num_layers - config.num_layers_at_end_in_bf16
    return bool(first_bf16_layers < layer_number <= last_fp8_layer)


def _find_fp8_linears(layer: Any) -> Iterator[Any]:
    """Yield the linear layers of a transformer layer that use FP8: all except experts."""
    for name, module in layer.named_modules():
        is_linear = isinstance(module, AccumulatingColumnLinear | AccumulatingRowLinear)
        if is_linear and not module.is_expert:
            for size in module.weight.shape:
                if size % DIMENSION_MULTIPLE:
                    raise ConfigError(
                        f"fp8: {name} of layer {layer.layer_number} has a weight of "
                        f"{' x '.join(map(str, module.weight.shape))} on a rank; 8-bit GEMMs "
                        f"require multiples of {DIMENSION_MULTIPLE}",
                        hint="lower tensor_model_parallel_size, or leave fp8 out",
                    )
            yield module


def _quantize_before_forward(layer: Any, linears: list[Any], forward: Any) -> Any:
    """Return ``forward`` preceded by quantization of stale weights.

    The weights of other data-parallel ranks are gathered by then, because forward pre-hooks run
    before.
    """

    @functools.wraps(forward)
    def call(*args: Any, **options: Any) -> Any:
        if layer.fp8_weights_stale:
            for linear in linears:
                linear.fp8_weight = _quantize_in_place(linear)
            layer.fp8_weights_stale = False
        return forward(*args, **options)

    return call


@torch.no_grad()
def _quantize_in_place(linear: Any) -> Fp8Weight:
    """Quantize a weight and return its FP8 values.

    They are written to the memory of the previous values, because CUDA graphs contain its address.
    """
    new_values = quantize_weight(linear.weight.detach(), linear.fp8_recipe.scaling)
    if linear.fp8_weight is None:
        return new_values
    for stored, value in zip(linear.fp8_weight, new_values, strict=True):
        stored.copy_(value)
    weight: Fp8Weight = linear.fp8_weight
    return weight
