"""Rules of the model's layers: attention, layer options, experts, multi-token prediction. No torch.

- Multi-latent attention (DeepSeek-AI, "DeepSeek-V2", 2024): queries, keys and values are computed
  from a low-rank latent vector per token. Only a part of each head's queries and keys is rotated by
  position, and all heads share this part of the keys.
- Mixtures of experts: routing, load balancing, capacity and dispatch of tokens. megatron.core
  applies some of these rules to models without experts, too. The placement of experts on ranks is
  in :mod:`.parallel_layout`.
- Multi-token prediction: extra layers that predict tokens further ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flagscale.config.arguments.rules.data import documents_are_separate
from flagscale.config.arguments.rules.optimizer import CUDA_GRAPH, captures_steps
from flagscale.config.arguments.rules.parallel_layout import layout_of_chunks
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.model_arguments import SINKHORN
from flagscale.config.arguments.spec.values import format_value

_LAYERS_WITHOUT_ROPE = "no_rope_freq"


def check_attention(values: Values) -> Iterator[Violation]:
    """Check positions, norms and scale of attention."""
    scale = values["softmax_scale"]
    if scale is not None and scale <= 0:
        yield (
            "softmax_scale",
            f"must be greater than 0, found {format_value(scale)}; the default is "
            "1 / sqrt(kv_channels)",
        )
    if values["qk_l2_norm"] and values["qk_layernorm"] and not values["multi_latent_attention"]:
        yield "qk_layernorm", "cannot be combined with qk_l2_norm; leave one out"
    yield from _check_layers_without_rope(values)
    if values["position_embedding_type"] == "rope":
        yield from _check_rotary_width(values)


def _check_rotary_width(values: Values) -> Iterator[Violation]:
    """Check that the head dimension is even, because rotary positions rotate pairs of elements."""
    name, rotated_fraction = "kv_channels", values["rotary_percent"]
    if values["multi_latent_attention"]:
        name, rotated_fraction = "qk_pos_emb_head_dim", 1.0
    width, actual = values[name], format_value(values[name])
    if width is None:
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        if hidden % heads:
            return  # reported by check_tensor_parallel
        width, name = hidden // heads, "hidden_size"
        actual = f"{hidden} / num_attention_heads {heads} = {width}"
    if width % 2 and int(width * rotated_fraction) == width:
        yield (
            name,
            f"rotary positions require an even head dimension, found {actual}",
        )


def _check_layers_without_rope(values: Values) -> Iterator[Violation]:
    """Check ``no_rope_freq``: every n-th layer has no rotary positions, or a list of 0 and 1."""
    pattern, layers = values[_LAYERS_WITHOUT_ROPE], values["num_layers"]
    if isinstance(pattern, (list, tuple)):
        if pattern and len(pattern) != layers:
            yield (
                _LAYERS_WITHOUT_ROPE,
                f"expected one item per layer (num_layers {layers}), found {len(pattern)}",
            )
    elif pattern and (pattern < 0 or layers % pattern):
        yield (
            _LAYERS_WITHOUT_ROPE,
            f"expected a divisor of num_layers {layers} or a list with an item per layer, found "
            f"{pattern}",
        )


MLA = "multi_latent_attention"
_EXCLUDED_BY_LATENT: Mapping[str, str] = {
    "qk_l2_norm": "use qk_layernorm, which normalizes the latent projections",
    "softmax_scale": "the scale follows from the head dimension and mscale_all_dim",
    "window_size": "sliding windows are not implemented for it",
    "attn_logit_softcapping": "soft-capping is not implemented for it",
    "window_rotary_base": "sliding windows are not implemented for it",
    "rotary_interleaved": "megatron.core rotates its positions in halves",
    "attention_output_gate": "megatron.core has no output gate for it",
    "use_rope_scaling": "use rope_type: yarn to scale its positions",
    "rotary_seq_len_interpolation_factor": "use rope_type: yarn to scale its positions",
}
"""Arguments that are not supported with multi-latent attention, with the reason."""


def check_latent_attention(values: Values) -> Iterator[Violation]:
    """Check multi-latent attention."""
    if not values[MLA]:
        if values["rope_type"] == "yarn":
            yield (
                "rope_type",
                f"yarn requires {MLA}; for other attention use_rope_scaling scales positions like "
                "Llama 3.1",
            )
        return
    if values["reset_position_ids"] and not documents_are_separate(values):
        yield (
            "reset_position_ids",
            f"is not supported with {MLA} alone, whose layers number positions through the whole "
            "sequence; set reset_attention_mask: true, which has the same effect",
        )
    for name, reason in _EXCLUDED_BY_LATENT.items():
        if values[name]:
            yield (
                name,
                f"{format_value(values[name])} is not supported with {MLA}: {reason}; leave it out",
            )
    if values["position_embedding_type"] != "rope":
        actual = format_value(values["position_embedding_type"])
        yield "position_embedding_type", f"{MLA} requires rope, found {actual}"
    if (backend := values["attention_backend"]) in ("local", "flash"):
        yield (
            "attention_backend",
            f"{backend} is not supported with {MLA}: its kernel requires values and keys of the "
            "same width; use auto",
        )
    if values["family"] != "gpt":
        yield MLA, f"is not supported with family: {values['family']}"
    yield from _check_latent_split(values)


def _check_latent_split(values: Values) -> Iterator[Violation]:
    """Check that tensor-parallel ranks can split the latent vectors evenly."""
    tp = values["tensor_model_parallel_size"]
    sizes = {"q_lora_rank": values["q_lora_rank"], "kv_lora_rank": values["kv_lora_rank"]}
    if sizes["kv_lora_rank"]:
        sizes["kv_lora_rank"] += values["qk_pos_emb_head_dim"]
    for name, size in sizes.items():
        if size and size % tp:
            rotary_text = f" + qk_pos_emb_head_dim {values['qk_pos_emb_head_dim']} = {size}"
            sum_text = rotary_text if name == "kv_lora_rank" else ""
            yield (
                name,
                f"{values[name]}{sum_text} is not divisible by tensor_model_parallel_size {tp}",
            )


def check_layer_options(values: Values) -> Iterator[Violation]:
    """Check options of layers: norms, sliding windows, soft-capping."""
    if values["layernorm_zero_centered_gamma"] and values["normalization"] != "RMSNorm":
        yield (
            "layernorm_zero_centered_gamma",
            f"requires normalization: RMSNorm, found {values['normalization']}",
        )
    if values["window_rotary_base"] and values["position_embedding_type"] != "rope":
        yield (
            "window_rotary_base",
            "requires position_embedding_type: rope, found "
            f"{format_value(values['position_embedding_type'])}",
        )
    yield from _check_windows(values)
    for name in ("window_size", "attn_logit_softcapping"):
        if values[name]:
            yield from _check_kernels(name, values)


def _check_windows(values: Values) -> Iterator[Violation]:
    window, pattern = values["window_size"], values["window_attn_skip_freq"]
    if not window:
        return
    if len(window) != 2 or window[0] < 0 or window[1] != 0:
        yield (
            "window_size",
            "expected [number of preceding tokens that a token attends to, 0], such as [4095, 0], "
            f"found {format_value(window)}",
        )
    layers = values["num_layers"]
    if isinstance(pattern, list) and len(pattern) != layers:
        yield (
            "window_attn_skip_freq",
            f"expected one item per layer (num_layers {layers}), found {len(pattern)}",
        )
    elif pattern == 0:
        yield (
            "window_attn_skip_freq",
            "expected n (every n-th layer has full attention) or a list, found 0",
        )


def _check_kernels(name: str, values: Values) -> Iterator[Violation]:
    """Check that the attention kernel supports windows or soft-capping (argument ``name``)."""
    backend = values["attention_backend"]
    is_core_window = backend == "local" and name == "window_size"
    if backend not in ("auto", "unfused") and not is_core_window:
        yield name, f"is not supported by attention_backend: {backend}; use auto"


_LOCAL_ATTENTION: Mapping[str, Any] = {"softmax_type": "vanilla"}
"""Options that torch's scaled_dot_product_attention does not support, with their "off" values."""


def check_local_attention(values: Values) -> Iterator[Violation]:
    if values["attention_backend"] == "local":
        return
    for name, off_value in _LOCAL_ATTENTION.items():
        if (values[name] or off_value) != off_value:
            yield (
                name,
                f"{format_value(values[name])} is not supported by scaled_dot_product_attention; "
                "use attention_backend: local",
            )


def check_documents(values: Values) -> Iterator[Violation]:
    """Check that attention can be restricted to documents."""
    if not values["reset_attention_mask"]:
        return
    if values["window_size"] and values["attention_backend"] == "local":
        yield (
            "window_size",
            "is not supported with reset_attention_mask and attention_backend: local, whose window "
            "mask ignores documents; use attention_backend: auto",
        )
    if values["attention_backend"] == "fused":
        yield (
            "attention_backend",
            "fused is not supported with reset_attention_mask: the cuDNN kernel cannot separate "
            "documents; use auto or flash",
        )


_BALANCING, _COEFFICIENTS = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
_GROUPS, _CHOSEN_GROUPS = "moe_router_num_groups", "moe_router_group_topk"
_CAPACITY, _PADDED = "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"
_DISPATCHER, _SHARED_WIDTH = "moe_token_dispatcher_type", "moe_shared_expert_intermediate_size"


def check_moe(values: Values) -> Iterator[Violation]:
    """Check experts and their routers."""
    yield from _check_topk(values)
    yield from _check_groups(values)
    yield from _check_balancing(values)
    yield from _check_capacity(values)
    yield from _check_dispatch(values)
    if values["moe_ffn_hidden_size"] and not values["num_moe_experts"]:
        yield "moe_ffn_hidden_size", "requires num_moe_experts; leave it out"


def _check_topk(values: Values) -> Iterator[Violation]:
    experts, topk = values["num_moe_experts"], values["moe_router_topk"]
    scores = values["moe_router_score_function"]
    if experts and topk > experts:
        yield "moe_router_topk", f"{topk} exceeds num_moe_experts {experts}"
    # The softmax of a single selected score is always 1 and has no gradient.
    is_constant = topk == 1 and scores == "softmax" and values[_BALANCING] != SINKHORN
    if is_constant and not values["moe_router_pre_softmax"]:
        hint = "" if experts else "; without num_moe_experts leave it out"
        yield "moe_router_topk", f"1 requires moe_router_pre_softmax: true{hint}"
    if values["moe_router_enable_expert_bias"] and scores != "sigmoid":
        yield (
            "moe_router_enable_expert_bias",
            f"requires moe_router_score_function: sigmoid, found {scores}",
        )


def _check_groups(values: Values) -> Iterator[Violation]:
    """Check group-limited routing: a token is routed to experts of some groups only."""
    experts, topk = values["num_moe_experts"], values["moe_router_topk"]
    groups, chosen = values[_GROUPS], values[_CHOSEN_GROUPS]
    if chosen and not groups:
        yield _CHOSEN_GROUPS, f"requires {_GROUPS}, the number of groups"
    elif groups and not chosen:
        yield _GROUPS, f"requires {_CHOSEN_GROUPS}, the number of groups per token"
    if not (groups and chosen):
        return
    if not experts:
        yield _CHOSEN_GROUPS, "requires num_moe_experts; leave it out"
    elif experts % groups:
        yield _GROUPS, f"{groups} does not divide num_moe_experts {experts}"
    elif chosen > groups:
        yield _CHOSEN_GROUPS, f"{chosen} exceeds {_GROUPS} {groups}"
    elif chosen > topk:
        yield _CHOSEN_GROUPS, f"{chosen} exceeds moe_router_topk {topk}"
    elif topk > (available := experts // groups * chosen):
        yield (
            "moe_router_topk",
            f"{topk} exceeds the {available} experts in {chosen} of {groups} groups "
            f"({_CHOSEN_GROUPS})",
        )


def _check_balancing(values: Values) -> Iterator[Violation]:
    kinds, coefficients = _as_list(values[_BALANCING]), _as_list(values[_COEFFICIENTS])
    if len(kinds) != len(coefficients):
        yield (
            _COEFFICIENTS,
            f"expected one coefficient per entry of {_BALANCING} "
            f"{format_value(values[_BALANCING])}, found {format_value(values[_COEFFICIENTS])}",
        )
    if len(set(kinds)) < len(kinds):
        yield _BALANCING, f"expected distinct entries, found {format_value(kinds)}"
    if SINKHORN not in kinds:
        return
    if len(kinds) > 1:
        yield (
            _BALANCING,
            f"{SINKHORN} is not a loss and cannot be combined with others, found "
            f"{format_value(kinds)}",
        )
    elif any(coefficients):
        yield (
            _COEFFICIENTS,
            f"is not supported with {_BALANCING}: {SINKHORN}, which has no loss; leave it out",
        )
    if values[_CAPACITY] is not None:
        yield (
            _CAPACITY,
            f"is not supported with {_BALANCING}: {SINKHORN}, which drops no tokens; use aux_loss",
        )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_capacity(values: Values) -> Iterator[Violation]:
    factor = values[_CAPACITY]
    if factor is not None and factor <= 0:
        yield (
            _CAPACITY,
            f"must be greater than 0, found {format_value(factor)}: an expert accepts this "
            "multiple of its even share of tokens; leave it out to drop no tokens",
        )
    if not values[_PADDED]:
        return
    if factor is None:
        yield _PADDED, f"requires {_CAPACITY}, the capacity to pad to"
    backends = (values["moe_enable_deepep"], values["moe_flex_dispatcher_backend"] == "deepep")
    if values[_DISPATCHER] == "flex" and any(backends):
        yield _PADDED, f"is not supported by {_DISPATCHER}: flex; use alltoall"


def _check_dispatch(values: Values) -> Iterator[Violation]:
    """Check features that only some token dispatchers support."""
    dispatcher = values[_DISPATCHER]
    if values["moe_enable_deepep"] and dispatcher != "flex":
        yield "moe_enable_deepep", f"requires {_DISPATCHER}: flex, found {dispatcher}"
    elif values["moe_enable_deepep"] and values["moe_flex_dispatcher_backend"] != "deepep":
        backend = values["moe_flex_dispatcher_backend"]
        yield (
            "moe_enable_deepep",
            f"cannot be combined with moe_flex_dispatcher_backend: {backend}; leave one out",
        )
    if values["variable_seq_lengths"] and dispatcher == "allgather":
        yield "variable_seq_lengths", f"requires {_DISPATCHER}: alltoall, found {dispatcher}"
    overlaps = values["moe_shared_expert_overlap"] and values[_SHARED_WIDTH]
    if overlaps and dispatcher != "alltoall":
        yield "moe_shared_expert_overlap", f"requires {_DISPATCHER}: alltoall, found {dispatcher}"


MTP = "mtp_num_layers"
_LOSS_SCALE = "mtp_loss_scaling_factor"
_LAYOUT = "pipeline_model_parallel_layout"
_EXCLUDED_BY_MTP: Mapping[str, str] = {
    "scale_embeddings": "its layers use unscaled embeddings",
    "sandwich_norm": "its layers have the norms of DeepSeek-V3 only",
    "window_size": "its layers attend to the whole sequence",
}
"""Arguments that are not supported with multi-token prediction, with the reason."""


def check_mtp(values: Values) -> Iterator[Violation]:
    """Check multi-token prediction."""
    layers = values[MTP]
    if layers is not None and layers < 0:
        yield MTP, f"expected a number of layers of at least 0, found {layers}"
        return
    if values[_LOSS_SCALE] < 0:
        yield _LOSS_SCALE, f"must not be negative, found {values[_LOSS_SCALE]}"
    yield from _check_mtp_stage(values)
    if not layers:
        return
    if values["family"] != "gpt":
        yield (
            MTP,
            f"is not supported with family: {values['family']}, which does not predict the next "
            "token; leave it out",
        )
    for name, reason in _EXCLUDED_BY_MTP.items():
        if values[name]:
            yield (
                MTP,
                f"is not supported with {name} {format_value(values[name])}: {reason}; leave one "
                "out",
            )
    if captures_steps(values):
        yield (
            MTP,
            f"is not supported with {CUDA_GRAPH}: {values[CUDA_GRAPH]}, because its losses are "
            "accumulated outside the captured graph; leave one out",
        )
    if (kind := values["position_embedding_type"]) not in ("rope", "none"):
        yield (
            "position_embedding_type",
            f"{format_value(kind)} is not supported with {MTP}: the position embedding would be "
            "learned twice; use rope",
        )
    length = values["seq_length"]
    if length is not None and layers >= length:
        yield MTP, f"must be less than seq_length {length}, found {layers}"


def _check_mtp_stage(values: Values) -> Iterator[Violation]:
    """Check that an explicit pipeline layout has the multi-token prediction layers (``m``) in the
    chunk of the loss."""
    if values[_LAYOUT] is None:
        return
    *earlier, last = layout_of_chunks(values)
    layers = values[MTP] or 0
    if any("m" in chunk for chunk in earlier) or last.count("m") != layers:
        yield (
            _LAYOUT,
            f"expected {layers} m ({MTP}) in the last stage, before L, and none in earlier stages; "
            f"found {values[_LAYOUT]}",
        )
