"""What is compiled by torch, and how.

A layer is compiled as one graph without breaks and with fixed shapes; layers that are alike share
it. A layer's own hooks stay outside: they wait for the parameters that data parallelism gathers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.torch_version import TorchVersion

from flagscale.errors import ConfigError
from flagscale.train.layers.jit import why_not_here


def why_not(config: TransformerConfig) -> str | None:
    """Why layers of this configuration cannot be compiled as a whole here; None where they can."""
    if config.recompute_granularity == "selective":
        return "recompute_granularity: selective recomputes parts of a layer"
    if config.attention_backend == AttnBackend.local:
        return "attention_backend: local is megatron.core's own attention, in several graphs"
    if config.attention_dropout and not config.sequence_parallel:
        return "attention_dropout draws from a state of its own for each tensor-parallel rank"
    if config.fine_grained_activation_offloading or config.cpu_offloading:
        return "offloading moves parts of a layer's activations"
    if config.multi_latent_attention and config.sequence_parallel and _fills_behind_its_back():
        return (
            f"torch {torch.__version__} makes a wrong graph of how multi_latent_attention gathers "
            "keys with sequence_parallel; 2.12 makes a right one"
        )
    return why_not_here()


def _fills_behind_its_back() -> bool:
    """Whether what a collective fills in a backward pass is read as it was before."""
    return torch.__version__ < TorchVersion("2.12")


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """Compile each transformer layer of the bare ``model``, when it first runs, by torch's
    ``backend``.

    Of a layer of experts its attention is compiled: which expert has how many tokens changes.

    A layer that turns out not to be possible as one graph runs as it is, with a warning; where
    ranks share its work this is an error, at its first run. There the others would go on with a
    graph, whose collectives come in another order: they would wait for each other, or take one
    for another's.
    """
    _write_both_halves_at_once()
    layers, failures = transformer_layers(model), list[Exception]()
    shared = any(
        layer.config.tensor_model_parallel_size * layer.config.context_parallel_size > 1
        for layer in layers
    )
    for layer in layers:
        # Or a bias would bring its gradient's graph into evaluation, and a graph of its own here.
        layer.bias_dropout_add_exec_handler = contextlib.nullcontext
        part = "_forward_attention" if isinstance(layer.mlp, MoELayer) else "forward"
        setattr(layer, part, or_as_it_is(getattr(layer, part), failures, backend, shared=shared))
    if layers:
        layers[0].register_forward_pre_hook(_with_usual_strides, with_kwargs=True)


def or_as_it_is(
    function: Callable[..., Any],
    failures: list[Exception],
    backend: str = "inductor",
    *,
    shared: bool = False,
) -> Callable[..., Any]:
    """``function`` compiled as one graph; as it is, with a warning, where that turns out not to be
    possible, for all that share the list ``failures``. Nothing has run by then. With ``shared``
    that raises :class:`ConfigError` instead."""
    # Loaded where it is used: that takes a second.
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    whole = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not failures:
            try:
                return whole(*args, **options)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                failures.append(error)
                reason = str(error).strip().splitlines()[0]
                if shared:
                    raise ConfigError(
                        f"layers cannot be compiled on this rank: {reason}",
                        hint="transformer_impl: local trains without compiling, more slowly",
                    ) from error
                warnings.warn(
                    f"layers are not compiled, which costs speed: {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return function(*args, **options)

    return call


def seconds_spent() -> float:
    """Seconds that this process has been compiling; 0 where torch has not loaded its compiler."""
    utils = sys.modules.get("torch._dynamo.utils")
    return float(utils.calculate_time_spent()["total_wall_time"]) if utils is not None else 0.0


def _with_usual_strides(_: Any, args: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """The embedding's output is a transposed view, and so has strides of its own where a dimension
    is one long: to a graph, another kind of input than the other layers'."""
    hidden = options["hidden_states"]
    return args, {**options, "hidden_states": hidden.reshape(-1).view(hidden.shape)}


def transformer_layers(model: torch.nn.Module) -> list[Any]:
    """The transformer layers inside ``model``, in order."""
    return [module for module in model.modules() if isinstance(module, TransformerLayer)]


def _write_both_halves_at_once() -> None:
    """Have two computed halves written by one kernel that computes each where it goes.

    torch's compiler otherwise computes both halves for every element and picks one, which takes
    SwiGLU's backward pass and rotary positions more than twice the time. The lowering is private
    to torch: where it is not as known, the slower kernel stays.
    """
    try:
        from torch._inductor import ir, lowering

        create, box = ir.ConcatKernel.create, ir.TensorBox
        known = callable(lowering.pointwise_cat)
    except (ImportError, AttributeError):
        return
    if known:
        lowering.pointwise_cat = lambda inputs, dim=0: box(create(inputs, dim))
