"""Names and sizes of a model's parameters, from its arguments. No torch.

Names are global: layers and experts are numbered over the whole model, whatever part of it a rank
holds. They are those of megatron.core's modules, which ``freeze_parameters`` matches and estimates
count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flagscale.config.arguments.rules.model_family import get_model_family
from flagscale.config.arguments.spec.argument import Values

EMBEDDING = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
EXPERT_PATH = "mlp.experts.local_experts."
"""Path in a layer that is followed by the number of an expert."""


class LayerParameter(NamedTuple):
    """A parameter of a transformer layer.

    ``name`` is that in the layer; of an expert's parameter, it is that in the expert. ``size`` is
    the number of elements over all tensor-parallel ranks, which share them if ``is_split``.
    ``inputs`` is the number of columns of a matrix, 0 for other parameters.
    """

    name: str
    size: int
    is_split: bool = True
    is_expert: bool = False
    inputs: int = 0


def list_layer_parameters(values: Values, *, is_moe: bool) -> tuple[LayerParameter, ...]:
    """Return the parameters of a transformer layer; those of one expert stand for all."""
    mlp = _moe_parameters(values) if is_moe else _dense_mlp_parameters(values)
    return (*_attention_parameters(values), *_layer_norms(values), *mlp)


def list_norm_parameters(values: Values, name: str, size: int) -> tuple[LayerParameter, ...]:
    """Return the parameters of a norm, which every tensor-parallel rank has."""
    weight = LayerParameter(f"{name}.weight", size, is_split=False)
    if values["normalization"] == "RMSNorm":
        return (weight,)
    return weight, LayerParameter(f"{name}.bias", size, is_split=False)


def list_parameter_names(values: Values) -> list[str] | None:
    """Return the names of all parameters of a model; None if its family does not describe them."""
    transformer = get_model_family(values["family"]).transformer
    if transformer is None:
        return None
    names = [EMBEDDING]
    if values["position_embedding_type"] == "learned_absolute":
        names.append(POSITIONS)
    flags = moe_layer_flags(values)
    for number, is_moe in enumerate(flags):
        names += _layer_names(values, f"{transformer.block}.layers.{number}.", is_moe=is_moe)
    for parameter in list_norm_parameters(values, f"{transformer.block}.final_layernorm", 0):
        names.append(parameter.name)
    for number in range(values["mtp_num_layers"] or 0):
        names += _mtp_names(values, f"mtp.layers.{number}.", is_moe=flags[-1])
    if transformer.head_layers:
        names += ["lm_head.dense.weight", "lm_head.dense.bias"]
        names += [p.name for p in list_norm_parameters(values, "lm_head.layer_norm", 0)]
    if values["untie_embeddings_and_output_weights"]:
        names.append(OUTPUT_LAYER)
    return [*names, *(["output_layer.bias"] if transformer.output_bias else [])]


def moe_layer_flags(values: Values) -> tuple[bool, ...]:
    """Return for each layer whether it is a mixture of experts.

    ``moe_layer_freq`` n selects every n-th layer; a list has a 1 for these layers.
    """
    layers: int = values["num_layers"]
    if not values["num_moe_experts"]:
        return (False,) * layers
    frequency: int | Iterable[object] = values["moe_layer_freq"]
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(layers))
    return tuple(bool(int(str(layer))) for layer in frequency)


def _layer_names(values: Values, prefix: str, *, is_moe: bool) -> Iterator[str]:
    for parameter in list_layer_parameters(values, is_moe=is_moe):
        if parameter.is_expert:
            for expert in range(values["num_moe_experts"]):
                yield f"{prefix}{EXPERT_PATH}{expert}.{parameter.name}"
        else:
            yield f"{prefix}{parameter.name}"


def _mtp_names(values: Values, prefix: str, *, is_moe: bool) -> Iterator[str]:
    for name in ("enorm", "hnorm", "final_layernorm"):
        for parameter in list_norm_parameters(values, name, 0):
            yield f"{prefix}{parameter.name}"
    yield f"{prefix}eh_proj.weight"
    yield from _layer_names(values, f"{prefix}transformer_layer.", is_moe=is_moe)


def _layer_norms(values: Values) -> Iterator[LayerParameter]:
    names = ["input_layernorm", "pre_mlp_layernorm"]
    if values["sandwich_norm"]:
        names += ["post_self_attn_layernorm", "post_mlp_layernorm"]
    for name in names:
        yield from list_norm_parameters(values, name, values["hidden_size"])


def _attention_parameters(values: Values) -> Iterator[LayerParameter]:
    if values["multi_latent_attention"]:
        parameters, norms = _latent_projections(values)
    else:
        parameters, norms = _fused_projections(values)
    for parameter in parameters:
        yield parameter._replace(name=f"self_attention.{parameter.name}")
    for name, size in norms.items() if values["qk_layernorm"] else ():
        yield from list_norm_parameters(values, f"self_attention.{name}", size)


def _fused_projections(values: Values) -> tuple[list[LayerParameter], dict[str, int]]:
    """Return the projections of multi-head attention, and the sizes of its norms."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    width = values["kv_channels"] or hidden // heads
    qkv_width = width * (heads + 2 * (values["num_query_groups"] or heads))
    parameters = [
        LayerParameter("linear_qkv.weight", hidden * qkv_width, inputs=hidden),
        LayerParameter("linear_proj.weight", width * heads * hidden, inputs=width * heads),
    ]
    if values["add_bias_linear"] or values["add_qkv_bias"]:
        parameters.append(LayerParameter("linear_qkv.bias", qkv_width))
    if values["add_bias_linear"]:
        parameters.append(LayerParameter("linear_proj.bias", hidden, is_split=False))
    return parameters, {"q_layernorm": width, "k_layernorm": width}


def _latent_projections(values: Values) -> tuple[list[LayerParameter], dict[str, int]]:
    """Return the projections of multi-latent attention, and the sizes of its norms."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    query_rank, kv_rank = values["q_lora_rank"], values["kv_lora_rank"]
    rope_width = values["qk_pos_emb_head_dim"]
    query_width = heads * (values["qk_head_dim"] + rope_width)
    shapes = {
        "linear_kv_down_proj": (kv_rank + rope_width, hidden),
        "linear_kv_up_proj": (heads * (values["qk_head_dim"] + values["v_head_dim"]), kv_rank),
        "linear_proj": (hidden, heads * values["v_head_dim"]),
    }
    norms = {"kv_layernorm": kv_rank}
    if query_rank:
        shapes["linear_q_down_proj"] = query_rank, hidden
        shapes["linear_q_up_proj"] = query_width, query_rank
        norms["q_layernorm"] = query_rank
    else:
        shapes["linear_q_proj"] = query_width, hidden
    return [
        LayerParameter(f"{name}.weight", rows * inputs, inputs=inputs)
        for name, (rows, inputs) in shapes.items()
    ], norms


def _dense_mlp_parameters(values: Values) -> Iterator[LayerParameter]:
    width = values["ffn_hidden_size"] or 4 * values["hidden_size"]
    yield from _mlp_parameters(values, width, "mlp.", has_bias=values["add_bias_linear"])


def _moe_parameters(values: Values) -> Iterator[LayerParameter]:
    hidden = values["hidden_size"]
    width = values["moe_ffn_hidden_size"] or values["ffn_hidden_size"] or 4 * hidden
    experts = values["num_moe_experts"]
    yield LayerParameter("mlp.router.weight", hidden * experts, is_split=False, inputs=hidden)
    if values["add_bias_linear"]:
        yield LayerParameter("mlp.router.bias", experts, is_split=False)
    for parameter in _mlp_parameters(values, width, "", has_bias=values["add_bias_linear"]):
        yield parameter._replace(is_expert=True)
    if shared_width := values["moe_shared_expert_intermediate_size"]:
        path = "mlp.shared_experts."
        yield from _mlp_parameters(values, shared_width, path, has_bias=False)
        if values["moe_shared_expert_gate"]:
            yield LayerParameter(f"{path}gate_weight", hidden, is_split=False, inputs=hidden)


def _mlp_parameters(
    values: Values, width: int, path: str, *, has_bias: bool
) -> Iterator[LayerParameter]:
    hidden = values["hidden_size"]
    fc1_width = width * (2 if values["swiglu"] or values["gated_linear_unit"] else 1)
    yield LayerParameter(f"{path}linear_fc1.weight", hidden * fc1_width, inputs=hidden)
    yield LayerParameter(f"{path}linear_fc2.weight", width * hidden, inputs=width)
    if has_bias:
        yield LayerParameter(f"{path}linear_fc1.bias", fc1_width)
        yield LayerParameter(f"{path}linear_fc2.bias", hidden, is_split=False)
