"""megatron.core's configuration objects, built from the arguments of the training program."""

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

from flagscale.config.arguments.rules.context_parallel import select_cp_communication
from flagscale.config.arguments.rules.optimizer_states import OPTIMIZER_DTYPES, state_formats
from flagscale.config.arguments.rules.sharding import shards_gradients
from flagscale.config.arguments.spec.model_arguments import Architecture
from flagscale.errors import ConfigError
from flagscale.train.device import Device

_Config = TypeVar("_Config")


@dataclass
class LayerConfig(Architecture, TransformerConfig):  # type: ignore[misc]
    """Configuration of a transformer model without multi-latent attention (MLA)."""


@dataclass
class MlaConfig(Architecture, MLATransformerConfig):  # type: ignore[misc]
    """Configuration of a model with multi-latent attention (MLA)."""


def get_params_dtype(args: argparse.Namespace) -> torch.dtype:
    """Return the dtype of the model's weights."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32


def resolve_transformer_impl(
    args: argparse.Namespace, device: Device
) -> Literal["local", "compiled"]:
    """Resolve ``transformer_impl``: ``auto`` compiles if the device benefits from it or for FP8."""
    transformer_impl = args.transformer_impl
    if transformer_impl == "auto":
        transformer_impl = "compiled" if device.compiles or args.fp8 else "local"
    return "compiled" if transformer_impl == "compiled" else "local"


def build_transformer_config(args: argparse.Namespace, device: Device) -> TransformerConfig:
    """Return the model's configuration.

    Raises:
        ConfigError: megatron.core rejects the combination; the message is megatron.core's.
    """
    dtype = get_params_dtype(args)
    overrides: dict[str, Any] = {
        "attention_backend": AttnBackend[str(args.attention_backend).rpartition(".")[2]],
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        # Frees an output once it is being sent. Kernels of a device run in order, but gloo may
        # still read the memory and would send what is written there next.
        "deallocate_pipeline_outputs": not device.is_host,
        # Features that this project's layers implement; megatron.core must not.
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "recompute_granularity": "full" if args.recompute_granularity == "full" else None,
        "moe_layer_recompute": False,
        "cpu_offloading": False,
        "cpu_offloading_num_layers": 0,
        "fine_grained_activation_offloading": False,
        "fp8": None,
        "moe_grouped_gemm": False,
        "cuda_graph_impl": "none",
        "cuda_graph_scope": [],
        "cp_comm_type": select_cp_communication(vars(args)),
        # Weights are initialized by flagscale.train.models.initialize. perform_initialization must
        # stay enabled: it marks the parameters that are split over tensor-parallel ranks.
        "perform_initialization": True,
        "use_cpu_initialization": False,
        "init_method": _keep_uninitialized,
        "output_layer_init_method": _keep_uninitialized,
        "embedding_init_method": _keep_uninitialized,
        # Fused by torch.compile, which gains nothing on a CPU.
        "bias_activation_fusion": args.bias_activation_fusion and device.compiles,
        "bias_dropout_fusion": args.bias_dropout_fusion and device.compiles,
        "mtp_num_layers": args.mtp_num_layers or None,
    }
    if args.swiglu:
        overrides.update(gated_linear_unit=True, activation_func=functional.silu)
    elif args.openai_gelu:
        # megatron.core would fuse another function.
        overrides.update(activation_func=_tanh_gelu, bias_activation_fusion=False)
    elif args.squared_relu:
        overrides.update(activation_func=squared_relu, bias_activation_fusion=False)
    elif not args.add_bias_linear:
        # megatron.core fuses GELU only with a bias.
        overrides["bias_activation_fusion"] = False
    if args.multi_latent_attention:
        return _build_config(MlaConfig, args, {**overrides, **_mla_overrides(args)})
    return _build_config(LayerConfig, args, overrides)


def _mla_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the MLA configuration that differ from the argument of the same name."""
    return {
        "q_lora_rank": args.q_lora_rank,  # None is a valid value
        "kv_channels": args.qk_head_dim + args.qk_pos_emb_head_dim,
        # megatron.core scales scores by it even if positions are not scaled.
        "mscale_all_dim": 0.0 if args.rope_type == "rope" else args.mscale_all_dim,
        "num_query_groups": args.num_attention_heads,
    }


def _tanh_gelu(tensor: torch.Tensor) -> torch.Tensor:
    return functional.gelu(tensor, approximate="tanh")


def _keep_uninitialized(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` unchanged, in place of an initialization."""
    return tensor


def build_ddp_config(args: argparse.Namespace) -> DistributedDataParallelConfig:
    """Return the configuration of data parallelism.

    Gradients of 16-bit weights are accumulated and reduced in fp32 unless ``main_grads_dtype`` is
    bf16.
    """
    overrides = {"grad_reduce_in_fp32": state_formats(vars(args)).gradients == "fp32"}
    if shards_gradients(vars(args)):
        # Forward passes always gather what they need, without megatron.core's hooks.
        overrides["overlap_param_gather"] = False
    return _build_config(DistributedDataParallelConfig, args, overrides)


def build_optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """Return the optimizer's configuration."""
    overrides = {
        "params_dtype": get_params_dtype(args),
        **dict.fromkeys(OPTIMIZER_DTYPES, torch.float32),
        # Features that this project's optimizer implements; megatron.core must not.
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,
    }
    return _build_config(OptimizerConfig, args, overrides)


def _build_config(
    config_class: type[_Config], args: argparse.Namespace, overrides: dict[str, Any]
) -> _Config:
    field_names = {f.name for f in fields(config_class) if f.init}  # type: ignore[arg-type]
    values = {k: v for k, v in vars(args).items() if k in field_names and v is not None}
    values.update({k: v for k, v in overrides.items() if k in field_names})
    try:
        return config_class(**values)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"megatron.core rejects this configuration: {error}") from error
