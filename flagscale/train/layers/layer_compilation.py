"""Compilation of transformer layers with ``torch.compile``.

A layer is compiled as one graph without graph breaks and with static shapes. Identical layers share
a graph. The hooks of a layer are not compiled: they wait for parameters that data parallelism
gathers.
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
from flagscale.train.layers.jit import explain_missing_compiler


def explain_uncompiled_layers(config: TransformerConfig) -> str | None:
    """Return the reason why layers of this configuration cannot be compiled as a whole, or None."""
    if config.attention_backend == AttnBackend.local:
        return (
            "attention_backend: local is megatron.core's attention, which requires several graphs"
        )
    if config.attention_dropout and not config.sequence_parallel:
        return "attention_dropout uses a separate RNG state for each tensor-parallel rank"
    if (
        config.multi_latent_attention
        and config.sequence_parallel
        and _miscompiles_backward_collectives()
    ):
        return (
            f"torch {torch.__version__} compiles multi_latent_attention with sequence_parallel "
            "incorrectly; 2.12 compiles it correctly"
        )
    return explain_missing_compiler()


def _miscompiles_backward_collectives() -> bool:
    """Return whether torch compiles collectives in a backward pass incorrectly (fixed in 2.12).

    The compiled graph reads a tensor before the collective has filled it.
    """
    return torch.__version__ < TorchVersion("2.12")


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """Compile each transformer layer of ``model`` at its first run.

    Of an MoE layer only attention is compiled, because the number of tokens per expert varies.

    A layer that cannot be compiled as one graph runs eagerly with a warning. If ranks communicate
    within a layer (tensor or context parallelism), this is an error instead: the other ranks would
    run a graph with another order of collectives, and hang or mix up messages.

    Args:
        model: unwrapped model.
        backend: compiler backend of torch.

    Raises:
        ConfigError: at the first run, if a layer in which ranks communicate cannot be compiled.
    """
    _use_concat_kernel()
    layers, failures = find_transformer_layers(model), list[Exception]()
    ranks_communicate = any(
        layer.config.tensor_model_parallel_size * layer.config.context_parallel_size > 1
        for layer in layers
    )
    for layer in layers:
        # megatron.core would enable gradients for adding a bias even in evaluation, which would
        # require an additional graph.
        layer.bias_dropout_add_exec_handler = contextlib.nullcontext
        method = "_forward_attention" if isinstance(layer.mlp, MoELayer) else "forward"
        setattr(
            layer,
            method,
            compile_with_fallback(
                getattr(layer, method), failures, backend, raise_on_failure=ranks_communicate
            ),
        )
    if layers:
        layers[0].register_forward_pre_hook(_normalize_strides, with_kwargs=True)


_MAX_GRAPHS = 32
"""Graphs of a function: of training, validation and scoring, with and without recomputation. torch
allows 8, beyond which layers would not be compiled any more.
"""


def compile_with_fallback(
    function: Callable[..., Any],
    failures: list[Exception],
    backend: str = "inductor",
    *,
    raise_on_failure: bool = False,
) -> Callable[..., Any]:
    """Compile ``function`` as one graph, with a fallback to eager execution.

    If compilation fails, before anything has run, all functions that share the list ``failures``
    run eagerly, with a warning. With ``raise_on_failure``, ConfigError is raised instead.
    """
    # Imported here because it takes a second.
    from torch._dynamo import config as compiler_config
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    compiler_config.recompile_limit = max(compiler_config.recompile_limit, _MAX_GRAPHS)
    compiled = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not failures:
            try:
                return compiled(*args, **options)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                failures.append(error)
                reason = str(error).strip().splitlines()[0]
                if raise_on_failure:
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


def get_compile_seconds() -> float:
    """Return the seconds this process has spent compiling; 0 if torch's compiler is not loaded."""
    utils = sys.modules.get("torch._dynamo.utils")
    return float(utils.calculate_time_spent()["total_wall_time"]) if utils is not None else 0.0


def _normalize_strides(_: Any, args: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Give the first layer's input the strides of the other layers' inputs.

    The output of the embedding is a transposed view with different strides if a dimension has size
    1, for which the layer would be compiled again.
    """
    hidden = options["hidden_states"]
    return args, {**options, "hidden_states": hidden.reshape(-1).view(hidden.shape)}


def find_transformer_layers(model: torch.nn.Module) -> list[Any]:
    """Return the transformer layers of ``model`` in order."""
    return [module for module in model.modules() if isinstance(module, TransformerLayer)]


def _use_concat_kernel() -> None:
    """Compile a concatenation of two computed halves into one kernel that computes each half once.

    torch's compiler otherwise computes both halves for every element and selects one, which more
    than doubles the time of SwiGLU's backward pass and of rotary positions. The lowering is private
    API of torch: if it differs from the expected one, the slower kernel stays.
    """
    try:
        from torch._inductor import ir, lowering

        create_concat, tensor_box = ir.ConcatKernel.create, ir.TensorBox
        is_expected_api = callable(lowering.pointwise_cat)
    except (ImportError, AttributeError):
        return
    if is_expected_api:
        lowering.pointwise_cat = lambda inputs, dim=0: tensor_box(create_concat(inputs, dim))
