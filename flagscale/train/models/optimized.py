"""Models of megatron.core built from optimized layers (``transformer_impl: compiled``).

They use this project's linear layers, loss, embedding and rotary tables, and optionally FP8,
communication overlap and compiled layers.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.rules.adapters import adapts_experts
from flagscale.config.arguments.rules.optimizer import captures_steps
from flagscale.errors import ConfigError
from flagscale.train.device import Device
from flagscale.train.layers.cross_entropy import vocab_parallel_cross_entropy
from flagscale.train.layers.embedding import AccumulatingEmbedding
from flagscale.train.layers.fp8 import Fp8Recipe
from flagscale.train.layers.fp8_layers import enable_fp8
from flagscale.train.layers.layer_compilation import compile_layers, explain_uncompiled_layers
from flagscale.train.layers.linear import AccumulatingColumnLinear, AccumulatingRowLinear
from flagscale.train.layers.rotary import use_rotary_tables
from flagscale.train.layers.tp_comm_overlap import enable_overlap, explain_no_overlap
from flagscale.train.models.config import resolve_transformer_impl

LINEAR_REPLACEMENTS: dict[type, type] = {
    ColumnParallelLinear: AccumulatingColumnLinear,
    RowParallelLinear: AccumulatingRowLinear,
}
"""Replacements of linear layers in a layer specification."""


class OptimizedModelMixin:
    """Mixin that precedes a model class and replaces its embedding, output layer and loss.

    Parameters and outputs stay the same. The model has an ``embedding`` if ``pre_process`` or
    ``mtp_process`` is set, and an ``output_layer`` if ``post_process`` is set.
    """

    config: Any
    pre_process: bool
    post_process: bool
    mtp_process: bool = False
    embedding: Any
    output_layer: Any
    pg_collection: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # megatron.core builds these modules without a specification. The classes differ only in
        # methods. AccumulatingEmbedding adds gradients row by row, which is not deterministic on
        # CUDA.
        has_embedding = self.pre_process or self.mtp_process
        if has_embedding and not self.config.deterministic_mode:
            _replace_class(
                self.embedding.word_embeddings, VocabParallelEmbedding, AccumulatingEmbedding
            )
        if self.post_process:
            _replace_class(self.output_layer, ColumnParallelLinear, AccumulatingColumnLinear)
        use_rotary_tables(self)

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Return the cross-entropy of each token, [b, s], in nats. ``logits`` are [s, b, v/tp]."""
        return vocab_parallel_cross_entropy(logits, labels, self.pg_collection.tp)


def _replace_class(module: torch.nn.Module, old_class: type, new_class: type) -> None:
    if type(module) is old_class:
        module.__class__ = new_class


def list_build_notes(
    args: argparse.Namespace, config: TransformerConfig, device: Device
) -> Iterator[str]:
    """Yield lines for the log about options without effect and about slow or 8-bit computation."""
    if captures_steps(vars(args)) and device.is_host:
        yield f"cuda_graph_impl: {device.name} does not support graphs; steps run without"
    if args.tp_comm_overlap and args.sequence_parallel:
        reason = explain_no_overlap(args, device)
        if reason is not None:
            yield f"no effect of tp_comm_overlap: {reason}"
    if (args.bf16 or args.fp16) and device.is_host and _lacks_fast_16_bit_matmul():
        yield (
            f"{'bf16' if args.bf16 else 'fp16'}: this CPU has no AVX-512, without which torch "
            "computes 16-bit GEMMs a hundred times slower than 32-bit ones; false is faster"
        )
    if resolve_transformer_impl(args, device) == "compiled":
        reason = explain_uncompiled_layers(config) or _explain_uncompiled_options(args)
        if reason is not None and device.compiles:
            yield f"the layers are not compiled, which costs speed: {reason}"
        if args.fp8:
            experts = ", except those of experts," if args.num_moe_experts else ""
            yield (
                f"fp8: GEMMs of the layers{experts} have 8-bit operands ({args.fp8}, "
                f"{args.fp8_recipe}); attention, embedding, head and loss are in bf16"
            )


def _lacks_fast_16_bit_matmul() -> bool:
    """Return whether torch has no fast 16-bit GEMM for this CPU."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def _explain_uncompiled_options(args: argparse.Namespace) -> str | None:
    """Return the reason why arguments that are no fields of the configuration exclude compiling,
    or None.
    """
    if args.fine_grained_activation_offloading:
        return "fine_grained_activation_offloading offloads parts of a layer"
    if not (args.peft_type and args.lora_dropout):
        return None
    if args.tensor_model_parallel_size > 1:
        return "lora_dropout uses a separate RNG state for each tensor-parallel rank"
    if adapts_experts(vars(args)):
        return "lora_dropout uses a separate RNG state for the experts of each rank"
    return None


def apply_optimizations(
    model: Any, args: argparse.Namespace, config: TransformerConfig, device: Device
) -> None:
    """Configure FP8, communication overlap and compilation of a model.

    Args:
        model: unwrapped model, after it has been wrapped in data parallelism.
        args: resolved arguments.
        config: the model's configuration.
        device: device of the model.

    Raises:
        ConfigError: the device or the layer sizes do not support FP8, or the devices of a
            tensor-parallel group cannot access each other's memory.
    """
    if args.tp_comm_overlap and explain_no_overlap(args, device) is None:
        enable_overlap(model, device)
    if (
        device.compiles
        and explain_uncompiled_layers(config) is None
        and _explain_uncompiled_options(args) is None
    ):
        compile_layers(model)
    if args.fp8:
        if not device.supports_fp8:
            raise ConfigError(
                f"fp8: {device.name} does not support 8-bit GEMMs",
                hint="leave fp8 out; it requires Ada, Hopper or later",
            )
        if args.fp8_recipe == "blockwise" and not device.supports_block_scaled_fp8:
            raise ConfigError(
                f"fp8_recipe: blockwise: {device.name} does not support 8-bit GEMMs that are "
                "scaled by blocks",
                hint="set fp8_recipe: tensorwise; blockwise requires Hopper and CUDA 12.9 or later",
            )
        enable_fp8(model, config, Fp8Recipe(args.fp8, args.fp8_recipe, args.fp8_wgrad))
