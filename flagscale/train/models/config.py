"""megatron.core's configuration objects, from the arguments of the training program."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import torch
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn import functional

from flagscale.config.arguments.architecture import Architecture
from flagscale.config.arguments.rules import OPTIMIZER_DTYPES
from flagscale.errors import ConfigError
from flagscale.train.device import Device

_Config = TypeVar("_Config")


@dataclass
class LayerConfig(Architecture, TransformerConfig):  # type: ignore[misc]
    """A model's configuration."""


@dataclass
class LatentConfig(Architecture, MLATransformerConfig):  # type: ignore[misc]
    """Of a model with multi-latent attention."""


def params_dtype(args: argparse.Namespace) -> torch.dtype:
    """The precision of the model's weights."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32


def implementation(args: argparse.Namespace, device: Device) -> Literal["local", "compiled"]:
    """How the transformer is built: as ``transformer_impl`` says, compiled where that pays."""
    chosen = args.transformer_impl
    if chosen == "auto":
        chosen = "compiled" if device.compiles or args.fp8 else "local"
    return "compiled" if chosen == "compiled" else "local"


def transformer_config(args: argparse.Namespace, device: Device) -> TransformerConfig:
    """The model's configuration.

    Raises:
        ConfigError: megatron.core refuses the combination; the message is its own.
    """
    dtype = params_dtype(args)
    chosen: dict[str, Any] = {
        "attention_backend": AttnBackend[str(args.attention_backend).rpartition(".")[2]],
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        # Frees an output once it is on its way. A device's kernels run in order; gloo, however,
        # may still be reading the memory, and would send what is written there next.
        "deallocate_pipeline_outputs": not device.is_host,
        # What megatron.core is told of this project's own layers.
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "fp8": None,
        "moe_grouped_gemm": False,
        "cuda_graph_impl": "none",
        "cuda_graph_scope": [],
        # Weights are drawn by flagscale.train.models.initialize. Initialisation must stay on all
        # the same: it is what marks the parameters that are split over tensor-parallel ranks.
        "perform_initialization": True,
        "use_cpu_initialization": False,
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        # Fused by torch.compile, which gains nothing on a CPU.
        "bias_activation_fusion": args.bias_activation_fusion and device.compiles,
        "bias_dropout_fusion": args.bias_dropout_fusion and device.compiles,
        "mtp_num_layers": args.mtp_num_layers or None,
    }
    if args.swiglu:
        chosen.update(gated_linear_unit=True, activation_func=functional.silu)
    elif args.openai_gelu:
        # megatron.core fuses what it takes for another function.
        chosen.update(activation_func=_gelu_by_tanh, bias_activation_fusion=False)
    elif args.squared_relu:
        chosen.update(activation_func=squared_relu, bias_activation_fusion=False)
    elif not args.add_bias_linear:
        # megatron.core fuses GELU with the bias only.
        chosen["bias_activation_fusion"] = False
    if args.multi_latent_attention:
        return _build(LatentConfig, args, {**chosen, **_latent(args)})
    return _build(LayerConfig, args, chosen)


def _latent(args: argparse.Namespace) -> dict[str, Any]:
    """What of a configuration of multi-latent attention is not just its argument."""
    return {
        "q_lora_rank": args.q_lora_rank,  # None is a choice, not a silence
        "kv_channels": args.qk_head_dim + args.qk_pos_emb_head_dim,
        # Which megatron.core scales scores by whether positions are scaled or not.
        "mscale_all_dim": 0.0 if args.rope_type == "rope" else args.mscale_all_dim,
        "num_query_groups": args.num_attention_heads,
    }


def _gelu_by_tanh(tensor: torch.Tensor) -> torch.Tensor:
    return functional.gelu(tensor, approximate="tanh")


def _leave(tensor: torch.Tensor) -> torch.Tensor:
    """An initialisation that does nothing."""
    return tensor


def ddp_config(args: argparse.Namespace) -> DistributedDataParallelConfig:
    """How gradients are reduced. With 16-bit weights they are added up in fp32."""
    chosen = {"grad_reduce_in_fp32": args.grad_reduce_in_fp32 or args.bf16 or args.fp16}
    return _build(DistributedDataParallelConfig, args, chosen)


def optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """The optimizer's configuration."""
    chosen = {"params_dtype": params_dtype(args), **dict.fromkeys(OPTIMIZER_DTYPES, torch.float32)}
    return _build(OptimizerConfig, args, chosen)


def _build(kind: type[_Config], args: argparse.Namespace, chosen: dict[str, Any]) -> _Config:
    known = {f.name for f in fields(kind) if f.init}  # type: ignore[arg-type]
    given = {k: v for k, v in vars(args).items() if k in known and v is not None}
    given.update({k: v for k, v in chosen.items() if k in known})
    try:
        return kind(**given)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"megatron.core refuses this configuration: {error}") from error
