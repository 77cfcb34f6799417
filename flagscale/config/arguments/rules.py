"""What must hold between the arguments of this project's training program.

Pure, and free of torch: the launcher applies the rules before anything starts, and the training
program applies them again, since it can be started by hand. What megatron.core cannot do without
Transformer Engine or Apex, or does silently wrong, is refused here with its reason.

``values`` are arguments by name, aliases folded, defaults filled in. A broken rule is the name of
the argument to change and what is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from flagscale.config.arguments import devices, precision
from flagscale.config.arguments.precision import Broken, Values

_UNSUPPORTED: tuple[tuple[str, str], ...] = (
    ("use_megatron_fsdp", "this trainer shards the optimizer only (use_distributed_optimizer)"),
    ("use_custom_fsdp", "this trainer shards the optimizer only (use_distributed_optimizer)"),
    ("multi_latent_attention", "there is no multi-latent attention without Transformer Engine"),
    ("mtp_num_layers", "multi-token prediction is not built"),
    ("moe_permute_fusion", "it needs Transformer Engine's fused permutation"),
    ("moe_router_fusion", "it needs Transformer Engine's fused router"),
    ("fp4", "fp4 needs Transformer Engine"),
    ("use_precision_aware_optimizer", "it needs Transformer Engine's optimizer"),
    ("optimizer_cpu_offload", "offloading the optimizer needs Transformer Engine's or Apex's"),
    ("cpu_offloading", "offloading activations needs Transformer Engine"),
    ("tp_comm_overlap", "overlapping tensor-parallel communication needs Transformer Engine"),
    ("masked_softmax_fusion", "it needs Apex's CUDA extension; scaled_dot_product_attention fuses"),
    ("fp8_param", "weights are kept in 16 bits and cast once a step"),
    ("fp8_param_gather", "weights are kept in 16 bits and cast once a step"),
    ("fp8_dot_product_attention", "attention is computed in 16 bits"),
    ("fp8_multi_head_attention", "attention is computed in 16 bits"),
    ("activation_func_fp8_input_store", "it needs Transformer Engine"),
    ("persist_layer_norm", "it needs Apex; torch's norms are fused anyway"),
    ("memory_efficient_layer_norm", "it needs Apex"),
    ("layernorm_zero_centered_gamma", "the norms here have no zero-centred weight"),
    ("reset_attention_mask", "attention here is causal over the whole sequence"),
    ("enable_cuda_graph", "CUDA graphs need Transformer Engine"),
    ("external_cuda_graph", "CUDA graphs need Transformer Engine"),
    ("heterogeneous_block_specs", "all layers are alike"),
    ("experimental_attention_variant", "attention here is softmax attention"),
)

_NOT_RECOMPUTED: Mapping[str, str] = {
    "layernorm": "needs Transformer Engine",
    "moe_act": "needs Transformer Engine's grouped experts",
    "mla_up_proj": "needs multi-latent attention, which is not built",
}
_LOCAL_ATTENTION: Mapping[str, Any] = {
    "window_size": None,
    "softmax_type": "vanilla",
    "qk_clip": False,
    "log_max_attention_logit": False,
}
"""What torch's scaled_dot_product_attention cannot do, and the values that ask for nothing."""

OPTIMIZER_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Precisions of the optimizer's state, which only Transformer Engine's optimizer can lower."""


def broken(values: Values) -> list[Broken]:
    """Rules that do not depend on the number of ranks. Where arguments are missing that the others
    are measured by, only those are told."""
    missing = list(_required(values))
    if missing:
        return missing
    rules = (
        devices.known,
        _unsupported,
        _not_built,
        _attention,
        precision.precision,
        precision.compiled_only,
        precision.eight_bits,
        _tensor_parallel,
        _context_parallel,
        _pipeline_parallel,
        _experts,
        _length,
        _overlap,
        _profiling,
        _schedule,
        _split,
    )
    return [found for rule in rules for found in rule(values)]


def broken_layout(values: Values, world_size: int) -> list[Broken]:
    """Rules of the parallel sizes and the batch with ``world_size`` ranks; they hold for any
    Megatron."""
    tp, pp = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    cp = values["context_parallel_size"]
    model = tp * pp * cp
    if world_size % model:
        sizes = f"tensor {tp} x pipeline {pp}" + (f" x context {cp}" if cp > 1 else "")
        name = "tensor_model_parallel_size" if tp > 1 else "pipeline_model_parallel_size"
        return [(name, f"{sizes} = {model} ranks do not divide the {world_size} of the job")]
    return [*_batches(values, world_size // model), *_expert_ranks(values, world_size)]


def virtual_chunks(values: Values) -> int | None:
    """Model chunks a pipeline rank holds, whichever of three arguments says so; None: one."""
    pp = values["pipeline_model_parallel_size"]
    layers = values["num_layers_per_virtual_pipeline_stage"]
    chunks = values["num_virtual_stages_per_pipeline_rank"]
    if layers is not None:
        chunks = values["num_layers"] // (pp * layers)
    chunks = chunks or values["virtual_pipeline_model_parallel_size"]
    return None if chunks in (None, 1) else int(chunks)


def needs_checkpoint(values: Values) -> str | None:
    """The argument that asks for a checkpoint in ``load``; None where training may start without
    one. To leave out a part of it, should there be one, asks for nothing.
    """
    names = ("exit_on_missing_checkpoint", "finetune")
    return next((name for name in names if values[name]), None)


def missing_checkpoint(values: Values) -> tuple[str, str | None]:
    """What is to be said where ``load`` holds no checkpoint, and a hint where that is an error."""
    load, name = values["load"], needs_checkpoint(values)
    found = f"{load} holds no checkpoint" if load else "no checkpoint is named"
    if name is None:
        return f"{found}; training starts from step 0", None
    return f"{found}, and {name} asks for one", (
        f"set load to the directory of a run's checkpoints; without {name} training would start "
        "from step 0"
    )


def _required(values: Values) -> Iterator[Broken]:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "lr"):
        if values[name] is None:
            yield name, "is required"


def _unsupported(values: Values) -> Iterator[Broken]:
    for name, reason in _UNSUPPORTED:
        if values.get(name):
            yield name, f"{values[name]!r} is not supported by this trainer: {reason}"
    for name in OPTIMIZER_DTYPES:
        if str(values.get(name) or "fp32").rpartition(".")[2] not in ("fp32", "float32"):
            yield name, f"{values[name]!r} needs Transformer Engine's optimizer; leave it out"
    if values["transformer_impl"] == "transformer_engine":
        yield (
            "transformer_impl",
            "transformer_engine: this trainer has no layers of Transformer Engine; take auto, "
            "whose layers torch compiles on CUDA",
        )
    if values["optimizer"] not in ("adam", "sgd"):
        yield "optimizer", f"{values['optimizer']!r}: expected 'adam' or 'sgd'"


def _not_built(values: Values) -> Iterator[Broken]:
    if values["cuda_graph_impl"] != "none":
        yield (
            "cuda_graph_impl",
            f"{values['cuda_graph_impl']}: CUDA graphs need Transformer Engine; leave it out",
        )
    if values["cross_entropy_fusion_impl"] == "te":
        yield "cross_entropy_fusion_impl", "te needs Transformer Engine; native fuses without it"
    instances = values["num_distributed_optimizer_instances"]
    if instances > 1:
        message = f"{instances}: the optimizer here is sharded over all data-parallel ranks; use 1"
        yield "num_distributed_optimizer_instances", message
    if values["recompute_granularity"] == "selective":
        for name in values["recompute_modules"] or ():
            if name in _NOT_RECOMPUTED:
                yield "recompute_modules", f"{name} {_NOT_RECOMPUTED[name]}"


def _attention(values: Values) -> Iterator[Broken]:
    if values["attention_backend"] == "local":
        return
    for name, nothing in _LOCAL_ATTENTION.items():
        if (values[name] or nothing) != nothing:
            yield (
                name,
                f"{values[name]!r} is not possible with scaled_dot_product_attention; "
                "attention_backend: local takes megatron.core's own attention",
            )


def _tensor_parallel(values: Values) -> Iterator[Broken]:
    tp, heads = values["tensor_model_parallel_size"], values["num_attention_heads"]
    groups, hidden = values["num_query_groups"], values["hidden_size"]
    if heads % tp:
        yield _indivisible(values, "num_attention_heads", "tensor_model_parallel_size")
    if groups is not None:
        if heads % groups:
            yield "num_query_groups", f"{groups} does not divide {heads} heads"
        elif groups % tp:
            yield _indivisible(values, "num_query_groups", "tensor_model_parallel_size")
    if values["kv_channels"] is None and hidden % heads:
        yield _indivisible(values, "hidden_size", "num_attention_heads")
    if values["ffn_hidden_size"] is not None and values["ffn_hidden_size"] % tp:
        yield _indivisible(values, "ffn_hidden_size", "tensor_model_parallel_size")
    if values["sequence_parallel"] and tp == 1:
        yield "sequence_parallel", "needs tensor_model_parallel_size above 1"
    elif values["sequence_parallel"] and values["seq_length"] % tp:
        yield _indivisible(values, "seq_length", "tensor_model_parallel_size")


def _indivisible(values: Values, name: str, by: str) -> Broken:
    return name, f"{values[name]} is not divisible by {by} {values[by]}"


def _context_parallel(values: Values) -> Iterator[Broken]:
    cp, tp = values["context_parallel_size"], values["tensor_model_parallel_size"]
    if cp == 1:
        return
    if values["attention_backend"] == "local":
        message = f"{cp}: megatron.core's own attention (attention_backend: local) cannot split a "
        yield "context_parallel_size", message + "sequence over ranks; take auto"
    pieces = 2 * cp * (tp if values["sequence_parallel"] else 1)
    if values["seq_length"] % pieces:
        by = f"2 x context_parallel_size {cp}" + (f" x tensor {tp}" if pieces > 2 * cp else "")
        yield "seq_length", f"{values['seq_length']} is not divisible by {by}"
    kinds = values["cp_comm_type"]
    for kind in kinds if isinstance(kinds, (list, tuple)) else [kinds]:
        if kind not in (None, "all_gather"):
            yield "cp_comm_type", f"{kind}: keys and values are gathered here; leave it out"


def _pipeline_parallel(values: Values) -> Iterator[Broken]:
    pp = values["pipeline_model_parallel_size"]
    per_stage = values["num_layers_per_virtual_pipeline_stage"]
    chunks = virtual_chunks(values)
    if per_stage is not None and values["num_layers"] % (pp * per_stage):
        by = f"{per_stage} x pipeline_model_parallel_size {pp}"
        message = f"{values['num_layers']} layers do not divide into {by}"
        yield "num_layers_per_virtual_pipeline_stage", message
    elif values["pipeline_model_parallel_layout"] is None:
        yield from _layers(values, pp, chunks or 1)
    if chunks is not None and pp == 1:
        message = f"{chunks} virtual stages need a pipeline of at least 2"
        yield "pipeline_model_parallel_size", message


def _layers(values: Values, pp: int, chunks: int) -> Iterator[Broken]:
    """Layers divide evenly over the stages whose share is not given."""
    layers, stages = values["num_layers"], pp
    layers += bool(values["account_for_embedding_in_pipeline_split"])
    layers += bool(values["account_for_loss_in_pipeline_split"])
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if values[name] is not None:
            layers, stages = layers - values[name], stages - 1
    if stages < 1 or layers < 0:
        yield "num_layers", "the first and last stage leave nothing to the others"
    elif layers % (stages * chunks):
        each = f"{stages} pipeline stages" + (f" x {chunks} virtual" if chunks > 1 else "")
        yield "num_layers", f"{layers} layers do not divide into {each}"


def _experts(values: Values) -> Iterator[Broken]:
    ep, experts = values["expert_model_parallel_size"], values["num_moe_experts"]
    if ep > 1 and not experts:
        yield "expert_model_parallel_size", f"{ep} needs num_moe_experts"
    elif experts and experts % ep:
        yield _indivisible(values, "num_moe_experts", "expert_model_parallel_size")
    if values["moe_grouped_gemm"] and not experts:
        yield "moe_grouped_gemm", "needs num_moe_experts"
    elif values["moe_grouped_gemm"] and values["add_bias_linear"]:
        yield "moe_grouped_gemm", "the grouped experts have no biases: set disable_bias_linear"
    if experts and values["moe_token_dispatcher_type"] == "flex":
        tp = values["expert_tensor_parallel_size"] or values["tensor_model_parallel_size"]
        if tp * ep == 1:
            yield (
                "moe_token_dispatcher_type",
                "flex needs experts on more than one rank (expert_model_parallel_size); take "
                "alltoall",
            )
    if experts and values["moe_router_topk"] == 1 and not values["moe_router_pre_softmax"]:
        yield "moe_router_topk", "1 needs moe_router_pre_softmax: true"


def _length(values: Values) -> Iterator[Broken]:
    iters, samples = values["train_iters"], values["train_samples"]
    if (iters is None) == (samples is None):
        found = "neither" if iters is None else "both"
        name = "train_iters" if iters is None else "train_samples"
        yield name, f"give either train_iters or train_samples, found {found}"
    longest = values["max_position_embeddings"]
    if longest is not None and longest < values["seq_length"]:
        yield (
            "max_position_embeddings",
            f"{longest} is less than seq_length {values['seq_length']}",
        )


def _overlap(values: Values) -> Iterator[Broken]:
    if values["overlap_param_gather"] and not values["use_distributed_optimizer"]:
        yield "overlap_param_gather", "needs use_distributed_optimizer"
    elif values["overlap_param_gather"] and not values["overlap_grad_reduce"]:
        yield "overlap_param_gather", "needs overlap_grad_reduce"


def _profiling(values: Values) -> Iterator[Broken]:
    first, end = values["profile_step_start"], values["profile_step_end"]
    if values["profile"] and end <= first:
        yield "profile_step_end", f"{end} is not after profile_step_start {first}"


def _schedule(values: Values) -> Iterator[Broken]:
    for name in ("min_lr", "lr_warmup_init"):
        if values[name] > values["lr"]:
            yield name, f"{values[name]} exceeds lr {values['lr']}"
    fraction = values["lr_warmup_fraction"]
    if fraction is not None and (values["lr_warmup_iters"] or values["lr_warmup_samples"]):
        yield "lr_warmup_fraction", "excludes lr_warmup_iters and lr_warmup_samples"
    else:
        yield from _warmup(values)
    lengths = (values["lr_wsd_decay_iters"], values["lr_wsd_decay_samples"])
    if values["lr_decay_style"] == "WSD" and lengths == (None, None):
        yield "lr_wsd_decay_iters", "WSD needs it, or lr_wsd_decay_samples"
    start, end = weight_decays(values)
    if start > end:
        yield "start_weight_decay", f"{start} exceeds end_weight_decay {end}"
    elif start != end and values["weight_decay_incr_style"] == "constant":
        message = f"constant does not lead from {start} to {end}; take linear"
        yield "weight_decay_incr_style", message
    if values["override_opt_param_scheduler"] and values["use_checkpoint_opt_param_scheduler"]:
        yield "override_opt_param_scheduler", "excludes use_checkpoint_opt_param_scheduler"


def _warmup(values: Values) -> Iterator[Broken]:
    """Warm-up must be shorter than the decay it is part of."""
    decay = _steps(values, "lr_decay") or _steps(values, "train")
    warmup = _steps(values, "lr_warmup")
    if warmup and decay is not None and warmup >= decay:
        name = "lr_warmup_samples" if values["lr_warmup_samples"] else "lr_warmup_iters"
        yield name, f"warming up for {warmup:g} steps leaves nothing of the {decay:g} of the decay"


def _steps(values: Values, what: str) -> float | None:
    """A length in steps, in whichever unit it is given; None if samples cannot be converted."""
    samples, batch = values[f"{what}_samples"], values["global_batch_size"]
    if samples:
        return samples / batch if batch else None
    steps: float | None = values[f"{what}_iters"]
    return steps


def weight_decays(values: Values) -> tuple[float, float]:
    """Weight decay at the start and at the end of training."""
    start, end = values["start_weight_decay"], values["end_weight_decay"]
    return (
        values["weight_decay"] if start is None else start,
        values["weight_decay"] if end is None else end,
    )


def _batches(values: Values, dp: int) -> Iterator[Broken]:
    micro, batch = values["micro_batch_size"], values["global_batch_size"]
    batch = micro * dp if batch is None else batch
    if batch % (micro * dp):
        yield (
            "global_batch_size",
            f"{batch} is not divisible by micro_batch_size {micro} x data-parallel size {dp}",
        )
        return
    pp, count = values["pipeline_model_parallel_size"], batch // (micro * dp)
    if virtual_chunks(values) and pp > 1 and count % pp:
        yield (
            "global_batch_size",
            f"{batch} gives {count} micro-batches, which pipeline_model_parallel_size {pp} with "
            "virtual stages must divide",
        )


def _expert_ranks(values: Values, world_size: int) -> Iterator[Broken]:
    ep, pp = values["expert_model_parallel_size"], values["pipeline_model_parallel_size"]
    expert_tp = values["expert_tensor_parallel_size"] or values["tensor_model_parallel_size"]
    if ep > 1 and world_size % (ep * expert_tp * pp):
        message = f"{ep} x tensor {expert_tp} x pipeline {pp} does not divide {world_size} ranks"
        yield "expert_model_parallel_size", message


def split_shares(text: str) -> tuple[float, float, float] | None:
    """Shares of training, validation and test of a ``split`` such as ``969,30,1``, which sum to 1;
    None unless they are one to three numbers of at least 0 with a positive sum."""
    try:
        shares = [float(part) for part in text.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        return None
    shares += [0.0] * (3 - len(shares))
    if len(shares) != 3 or not all(math.isfinite(share) and share >= 0 for share in shares):
        return None
    total = sum(shares)
    return (shares[0] / total, shares[1] / total, shares[2] / total) if total > 0 else None


def _split(values: Values) -> Iterator[Broken]:
    text = values["split"]
    if text and split_shares(text) is None:
        yield (
            "split",
            f"expected up to three numbers for training, validation and test, such as 969,30,1, "
            f"found {text!r}",
        )
