"""Recomputation of parts of a layer (``recompute_granularity: selective``).

megatron.core's layers decide themselves which of their modules are recomputed; this module sets
their switches and replaces the two primitives behind them, so that the same layer can also be
compiled. While torch traces a layer, a recomputed part is marked for the partitioner of forward
and backward graphs, and the layer stays one graph. In eager execution it is
megatron.core's recomputation with its random number generators.

There are two ways to recompute. ``core_attn``, ``mlp``, ``moe`` and ``shared_experts`` keep their
inputs and recompute everything inside. ``layernorm``, ``moe_act`` and ``mla_up_proj`` also discard
their outputs, which the next operation would keep for its backward pass, and restore them before
that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.utils.checkpoint import checkpoint as checkpoint_in_graph


class OutputCheckpoint(random.CheckpointWithoutOutput):  # type: ignore[misc]
    """Recomputation of a function whose output is discarded until the backward pass.

    megatron.core's class, which assumes Transformer Engine whatever its argument is.
    """

    def __init__(self, fp8: Any = None) -> None:
        super().__init__(fp8)
        self.fp8 = False

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Run ``run_function``; arguments and results are as of megatron.core's method."""
        if torch.compiler.is_compiling():
            return _mark_in_graph(run_function, *args)
        return super().checkpoint(run_function, *args)

    def discard_output_and_register_recompute(self, hook_tensor: torch.Tensor) -> None:
        """Discard the output; recompute it when the gradient of ``hook_tensor`` is known."""
        if not torch.compiler.is_compiling():  # the partitioner discards outputs in a graph
            super().discard_output_and_register_recompute(hook_tensor)


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function`` and keep only its inputs for the backward pass, which runs it again."""
    if torch.compiler.is_compiling():
        return _mark_in_graph(function, *args)
    return random.checkpoint(function, False, *args)


def _mark_in_graph(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint_in_graph(function, *args, use_reentrant=False, preserve_rng_state=False)


def recompute_modules(layer: Any, modules: Collection[str]) -> None:
    """Recompute modules of a layer, before it is compiled.

    Args:
        layer: a transformer layer of megatron.core.
        modules: names in ``recompute_modules``. A name that the layer has no module for, such as
            ``mlp`` in a layer of experts, has no effect.
    """
    # Resolved by megatron.core's layers at each call.
    tensor_parallel.CheckpointWithoutOutput = OutputCheckpoint
    attention, mlp = layer.self_attention, layer.mlp
    has_experts = isinstance(mlp, MoELayer)
    recomputes_norms = "layernorm" in modules
    recomputes_mlp = "mlp" in modules and not has_experts
    layer.recompute_input_layernorm = recomputes_norms
    # A recomputed MLP includes the norm before it, whose output is not kept then.
    layer.recompute_pre_mlp_layernorm = recomputes_norms and not recomputes_mlp
    if "core_attn" in modules:
        attention.core_attention.forward = partial(
            _recompute_attention, attention.core_attention.forward
        )
    if "mla_up_proj" in modules:
        attention.recompute_up_proj = True
    if recomputes_mlp:
        norm = layer.pre_mlp_layernorm if recomputes_norms else None
        if norm is not None:
            layer._forward_pre_mlp_layernorm = _return_input
        mlp.forward = partial(_recompute_mlp, mlp.forward, norm)
    if has_experts:
        mlp.moe_layer_recompute = "moe" in modules
        mlp.shared_experts_recompute = "shared_experts" in modules
        mlp.experts.recompute_activation = "moe_act" in modules


def _recompute_attention(
    forward: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    return recompute(partial(forward, **options), query, key, value, attention_mask)


def _recompute_mlp(
    forward: Callable[..., Any], norm: Any, hidden: torch.Tensor, **options: Any
) -> Any:
    """Return the output of an MLP and its bias, which is a parameter.

    An eager recomputation must not return a parameter: autograd would take it for a result of the
    recomputed function.
    """

    def run(hidden: torch.Tensor) -> Any:
        return forward(hidden if norm is None else norm(hidden), **options)

    if torch.compiler.is_compiling():
        return recompute(run, hidden)
    biases = []

    def run_without_bias(hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor
        output, bias = run(hidden)
        biases.append(bias)
        return output

    return recompute(run_without_bias, hidden), biases[0]


def _return_input(hidden: torch.Tensor) -> torch.Tensor:
    return hidden
