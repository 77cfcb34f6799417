"""From the arguments a user gave to the ones training runs with.

Sizes that follow from others are filled in, options that only work together are set together, and
what megatron.core cannot do without Transformer Engine or Apex (sometimes silently wrong) is
refused with its reason. No torch, no process group: the launcher may call it too.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

from flagscale.errors import ConfigError, Problem

_REFUSED: tuple[tuple[str, str], ...] = (
    ("use_megatron_fsdp", "this trainer shards the optimizer only (use_distributed_optimizer)"),
    ("use_custom_fsdp", "this trainer shards the optimizer only (use_distributed_optimizer)"),
    ("multi_latent_attention", "there is no multi-latent attention without Transformer Engine"),
    ("mtp_num_layers", "multi-token prediction is not built"),
    ("moe_grouped_gemm", "grouped GEMM needs a CUDA extension; experts run one after another"),
    ("fp8", "fp8 needs Transformer Engine"),
    ("fp4", "fp4 needs Transformer Engine"),
    ("use_precision_aware_optimizer", "it needs Transformer Engine's optimizer"),
    ("optimizer_cpu_offload", "offloading the optimizer needs Transformer Engine's or Apex's"),
    ("cpu_offloading", "offloading activations needs Transformer Engine"),
    ("tp_comm_overlap", "overlapping tensor-parallel communication needs Transformer Engine"),
    ("gradient_accumulation_fusion", "it needs Apex's CUDA extension"),
    ("masked_softmax_fusion", "it needs Apex's CUDA extension; scaled_dot_product_attention fuses"),
    ("apply_rope_fusion", "it needs Transformer Engine or Apex"),
    ("persist_layer_norm", "it needs Apex; torch's norms are fused anyway"),
    ("memory_efficient_layer_norm", "it needs Apex"),
    ("layernorm_zero_centered_gamma", "the norms here have no zero-centred weight"),
    ("reset_attention_mask", "attention here is causal over the whole sequence"),
    ("enable_cuda_graph", "CUDA graphs need Transformer Engine"),
    ("external_cuda_graph", "CUDA graphs need Transformer Engine"),
    ("heterogeneous_block_specs", "all layers are alike"),
    ("experimental_attention_variant", "attention here is softmax attention"),
)

OPTIMIZER_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Precisions of the optimizer's state, which only Transformer Engine's optimizer can lower."""


def resolve(args: argparse.Namespace, world_size: int) -> argparse.Namespace:
    """A copy of ``args`` with every derived value set, for ``world_size`` ranks.

    Sets ``global_batch_size``, ``train_iters``, ``train_samples``, ``data_parallel_size``,
    ``num_microbatches``, ``virtual_pipeline_model_parallel_size``, the point-to-point options of
    the interleaved schedule, ``ffn_hidden_size`` and ``max_position_embeddings``.

    Raises:
        ConfigError: with every problem found.
    """
    out = copy.copy(args)
    problems = [*_required(out)]
    if not problems:
        problems += [*_refused(out), *_parallel(out, world_size)]
    if not problems:
        problems += [*_batches(out), *_length(out), *_virtual_stages(out), *_options(out)]
        problems += _schedule(out)
    if problems:
        raise ConfigError(problems)
    return out


def _required(args: argparse.Namespace) -> Iterator[Problem]:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if not getattr(args, name):
            yield Problem(name, "must be given and positive")
    if args.lr is None:
        yield Problem("lr", "must be given: the learning rate after warm-up")


def _refused(args: argparse.Namespace) -> Iterator[Problem]:
    for name, reason in _REFUSED:
        value = getattr(args, name, None)
        if value:
            yield Problem(name, f"{value!r} is not supported by this trainer: {reason}")
    for name in OPTIMIZER_DTYPES:
        if getattr(args, name) != "fp32":
            yield Problem(name, f"{getattr(args, name)!r}: needs Transformer Engine; expected fp32")
    if args.context_parallel_size > 1:
        yield Problem(
            "context_parallel_size",
            f"{args.context_parallel_size}: neither attention here (torch's SDPA and "
            "megatron.core's local one) can work on a part of the sequence; use 1",
        )
    if args.transformer_impl != "local":
        yield Problem(
            "transformer_impl",
            f"{args.transformer_impl!r}: this trainer has the 'local' implementation only, "
            "with attention by torch's scaled_dot_product_attention",
        )
    if args.optimizer not in ("adam", "sgd"):
        yield Problem("optimizer", f"{args.optimizer!r}: expected 'adam' or 'sgd'")


def _parallel(args: argparse.Namespace, world_size: int) -> Iterator[Problem]:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if world_size % (tp * pp):
        yield Problem(
            "tensor_model_parallel_size",
            f"{tp} x pipeline_model_parallel_size {pp} does not divide the {world_size} ranks",
        )
        return
    args.data_parallel_size = world_size // (tp * pp)
    expert_tp = args.expert_tensor_parallel_size or tp
    if world_size % (expert_tp * args.expert_model_parallel_size * pp):
        yield Problem(
            "expert_model_parallel_size",
            f"{args.expert_model_parallel_size} x expert_tensor_parallel_size {expert_tp} x "
            f"pipeline_model_parallel_size {pp} does not divide the {world_size} ranks",
        )
    if args.sequence_parallel and tp == 1:
        yield Problem("sequence_parallel", "needs tensor_model_parallel_size above 1")
    elif args.sequence_parallel and args.seq_length % tp:
        yield Problem("seq_length", f"{args.seq_length} is not a multiple of {tp}, tensor-parallel")
    if args.num_attention_heads % tp:
        yield Problem(
            "num_attention_heads", f"{args.num_attention_heads} is not a multiple of {tp}"
        )


def _batches(args: argparse.Namespace) -> Iterator[Problem]:
    slice_ = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = slice_
    args.num_microbatches, rest = divmod(args.global_batch_size, slice_)
    if rest:
        yield Problem(
            "global_batch_size",
            f"{args.global_batch_size} is not a multiple of micro_batch_size "
            f"{args.micro_batch_size} x data-parallel size {args.data_parallel_size}",
        )


def _length(args: argparse.Namespace) -> Iterator[Problem]:
    if (args.train_iters is None) == (args.train_samples is None):
        given = "neither is" if args.train_iters is None else "both are"
        yield Problem("train_iters", f"give train_iters or train_samples; {given} given")
    elif args.train_iters is None:
        args.train_iters = args.train_samples // args.global_batch_size
    else:
        args.train_samples = args.train_iters * args.global_batch_size
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    elif args.max_position_embeddings < args.seq_length:
        yield Problem(
            "max_position_embeddings",
            f"{args.max_position_embeddings} is less than seq_length {args.seq_length}",
        )


def _virtual_stages(args: argparse.Namespace) -> Iterator[Problem]:
    pp = args.pipeline_model_parallel_size
    chunks, layers = (
        args.num_virtual_stages_per_pipeline_rank,
        args.num_layers_per_virtual_pipeline_stage,
    )
    if chunks is None and layers is not None:
        chunks, rest = divmod(args.num_layers, layers * pp)
        if rest:
            yield Problem(
                "num_layers_per_virtual_pipeline_stage",
                f"{layers} x {pp} stages does not divide num_layers {args.num_layers}",
            )
            return
    if chunks is None:
        chunks = args.virtual_pipeline_model_parallel_size
    if chunks is None or chunks == 1:
        args.virtual_pipeline_model_parallel_size = None
        return
    if pp == 1:
        yield Problem(
            "pipeline_model_parallel_size", f"{chunks} virtual stages need a pipeline of at least 2"
        )
    if args.num_microbatches % pp:
        yield Problem(
            "global_batch_size",
            f"the interleaved schedule needs micro-batches ({args.num_microbatches}) in multiples "
            f"of pipeline_model_parallel_size {pp}",
        )
    args.virtual_pipeline_model_parallel_size = chunks
    # With batched point-to-point calls two interleaved stages get each other's tensors and train
    # on wrong gradients without a word.
    args.overlap_p2p_comm, args.batch_p2p_comm = True, False


def _options(args: argparse.Namespace) -> Iterator[Problem]:
    if args.overlap_param_gather and not args.use_distributed_optimizer:
        yield Problem("overlap_param_gather", "needs use_distributed_optimizer")
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        yield Problem("overlap_param_gather", "needs overlap_grad_reduce")
    if args.fp16 and args.bf16:
        yield Problem("bf16", "fp16 and bf16 exclude each other")
    if args.cross_entropy_loss_fusion and not args.bf16:
        yield Problem(
            "cross_entropy_loss_fusion",
            "megatron.core rounds the fused loss's gradient to bf16; use it with bf16 only",
        )
    if args.swiglu and args.squared_relu:
        yield Problem("swiglu", "swiglu and squared_relu exclude each other")
    if args.ffn_hidden_size is None and args.swiglu:
        # Megatron-LM's rule: two thirds of 4 x hidden, in multiples of 64.
        args.ffn_hidden_size = int(4 * args.hidden_size * 2 / 3 / 64) * 64


def _schedule(args: argparse.Namespace) -> Iterator[Problem]:
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(args, name) > args.lr:
            yield Problem(name, f"{getattr(args, name)} exceeds lr {args.lr}")
    if args.lr_warmup_fraction is not None and (args.lr_warmup_iters or args.lr_warmup_samples):
        yield Problem("lr_warmup_fraction", "excludes lr_warmup_iters and lr_warmup_samples")
    elif args.train_samples:
        lengths = schedule_lengths(args)
        if lengths["lr_warmup_steps"] >= lengths["lr_decay_steps"]:
            yield Problem(
                "lr_warmup_iters",
                f"warming up for {lengths['lr_warmup_steps']:g} samples leaves nothing of the "
                f"{lengths['lr_decay_steps']} of the decay",
            )
        if args.lr_decay_style == "WSD" and lengths["wsd_decay_steps"] is None:
            yield Problem("lr_wsd_decay_iters", "WSD needs it, or lr_wsd_decay_samples")
    start, end = weight_decays(args)
    if start > end:
        yield Problem("start_weight_decay", f"{start} exceeds end_weight_decay {end}")
    elif start != end and args.weight_decay_incr_style == "constant":
        yield Problem(
            "weight_decay_incr_style", f"constant does not lead from {start} to {end}; take linear"
        )
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        yield Problem("override_opt_param_scheduler", "excludes use_checkpoint_opt_param_scheduler")


def weight_decays(args: argparse.Namespace) -> tuple[float, float]:
    """Weight decay at the start and at the end of training."""
    start, end = args.start_weight_decay, args.end_weight_decay
    return (
        args.weight_decay if start is None else start,
        args.weight_decay if end is None else end,
    )


def schedule_lengths(args: argparse.Namespace) -> dict[str, Any]:
    """Lengths of decay, warm-up, WSD's last phase and weight decay's increase, in samples."""
    batch = args.global_batch_size

    def samples(in_samples: int | None, in_steps: int | None) -> int | None:
        if in_samples is not None:
            return in_samples
        return None if in_steps is None else in_steps * batch

    total = max(args.train_samples, 1)
    decay = samples(args.lr_decay_samples, args.lr_decay_iters) or total
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    else:
        warmup = args.lr_warmup_samples or args.lr_warmup_iters * batch
    return {
        "lr_decay_steps": decay,
        "lr_warmup_steps": warmup,
        "wsd_decay_steps": samples(args.lr_wsd_decay_samples, args.lr_wsd_decay_iters),
        "wd_incr_steps": total,
    }
