"""megatron.core's models built of this project's faster parts."""

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

from flagscale.config.arguments.graphs import captures_steps
from flagscale.errors import ConfigError
from flagscale.train.device import Device
from flagscale.train.layers.compiling import compile_layers, why_not
from flagscale.train.layers.embedding import AccumulatingEmbedding
from flagscale.train.layers.fp8 import Recipe
from flagscale.train.layers.linear import AccumulatingColumnLinear, AccumulatingRowLinear
from flagscale.train.layers.loss import vocabulary_loss
from flagscale.train.layers.overlapped import hide_exchanges
from flagscale.train.layers.overlapped import why_not as why_nothing_hidden
from flagscale.train.layers.precision import use_fp8
from flagscale.train.layers.rotary import use_table
from flagscale.train.models.config import implementation

LINEARS: dict[type, type] = {
    ColumnParallelLinear: AccumulatingColumnLinear,
    RowParallelLinear: AccumulatingRowLinear,
}
"""What a layer specification is rewritten with."""


class Fast:
    """Goes before a model's class, of which it keeps the parameters and the function: a model with
    an ``embedding`` where it is ``pre_process`` or predicts further tokens (``mtp_process``), an
    ``output_layer`` where it is ``post_process``.
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
        # What megatron.core builds without a specification; the classes differ in methods alone.
        # Adding up rows is in no fixed order on CUDA.
        embeds = self.pre_process or self.mtp_process
        if embeds and not self.config.deterministic_mode:
            _become(self.embedding.word_embeddings, VocabParallelEmbedding, AccumulatingEmbedding)
        if self.post_process:
            _become(self.output_layer, ColumnParallelLinear, AccumulatingColumnLinear)
        use_table(self)

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Cross-entropy of each token ``[batch, sequence]``, in nats."""
        return vocabulary_loss(logits, labels, self.pg_collection.tp)


def _become(module: torch.nn.Module, old: type, new: type) -> None:
    if type(module) is old:
        module.__class__ = new


def notes(args: argparse.Namespace, config: TransformerConfig, device: Device) -> Iterator[str]:
    """What a user may want to know of how the model is built, a line each."""
    if captures_steps(vars(args)) and device.is_host:
        yield f"cuda_graph_impl: {device.name} has no graphs; steps run as always"
    if args.tp_comm_overlap and args.sequence_parallel:
        reason = why_nothing_hidden(args, device)
        if reason is not None:
            yield f"no effect of tp_comm_overlap: {reason}"
    if (args.bf16 or args.fp16) and device.is_host and _lacks_16_bit_products():
        yield (
            f"{'bf16' if args.bf16 else 'fp16'}: this CPU has no AVX-512, without which torch "
            "multiplies 16-bit numbers a hundred times slower than 32-bit ones; false is faster"
        )
    if implementation(args, device) == "compiled":
        reason = why_not(config) or _why_no_adapters(args)
        if reason is not None and device.compiles:
            yield f"the layers are not compiled, which costs speed: {reason}"
        if args.fp8:
            experts = ", but for experts," if args.num_moe_experts else ""
            yield (
                f"fp8: the layers' linear products{experts} take 8-bit numbers ({args.fp8}, "
                f"{args.fp8_recipe}); attention, embedding, head and loss are in bf16"
            )


def _lacks_16_bit_products() -> bool:
    """Whether torch multiplies 16-bit matrices of this CPU number by number."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def _why_no_adapters(args: argparse.Namespace) -> str | None:
    """Why layers with adapters cannot be compiled as a whole; None where they can."""
    if args.peft_type and args.lora_dropout and args.tensor_model_parallel_size > 1:
        return "lora_dropout draws from a state of its own for each tensor-parallel rank"
    return None


def finish(model: Any, args: argparse.Namespace, config: TransformerConfig, device: Device) -> None:
    """Choose the precision of products, and whether they hide what ranks exchange; compile layers
    where that is asked for and possible.

    Args:
        model: the bare model, in data parallelism already.
        args: resolved arguments.
        config: the model's configuration.
        device: where the model is; a CPU does not gain by compiling.

    Raises:
        ConfigError: the device or the layers' sizes do not allow the precision, or devices do not
            share their memory.
    """
    if args.tp_comm_overlap and why_nothing_hidden(args, device) is None:
        hide_exchanges(model, device)
    if device.compiles and why_not(config) is None and _why_no_adapters(args) is None:
        compile_layers(model)
    if args.fp8:
        if not device.multiplies_eight_bits:
            raise ConfigError(
                f"fp8: {device.name} has no matrix products of 8-bit numbers",
                hint="leave fp8 out; it takes Ada, Hopper or later",
            )
        if args.fp8_recipe == "blockwise" and not device.multiplies_blocks:
            raise ConfigError(
                f"fp8_recipe: blockwise: {device.name} has no 8-bit matrix products that are "
                "scaled by blocks",
                hint="take fp8_recipe: tensorwise; blockwise takes Hopper and CUDA 12.9 or later",
            )
        use_fp8(model, config, Recipe(args.fp8, args.fp8_recipe, args.fp8_wgrad))
