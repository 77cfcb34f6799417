"""Mappings from Hugging Face's tensors to megatron.core's, one table per model family.

megatron.core's names are those of its distributed checkpoints: layers are numbered over the whole
model, and all experts of a layer are stacked in one tensor ``[expert, out, in]``. Shapes are
written in letters:

==  ==============================================================
V   vocabulary size
P   number of positions
H   hidden size
A   query heads x head dimension
G   key (or value) heads x head dimension
D   head dimension
F   FFN hidden size
E   FFN hidden size of an expert
N   number of experts
S   FFN hidden size of the shared experts
Q   rank of the compressed queries (q_lora_rank)
L   rank of the compressed keys and values (kv_lora_rank)
M   L plus the rotary dimension of keys
T   queries of all heads, with multi-latent attention
U   non-rotary keys and values of all heads
W   values of all heads
==  ==============================================================

A digit before a letter multiplies it. A row of a table with ``when`` applies only if that argument
is true, one with ``unless`` only if it is false.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flagscale.train.checkpoint.formats.lazy_tensors import MetaTensor, Shape
from flagscale.train.checkpoint.formats.weight_transforms import (
    CONV1D_QKV,
    GATE_AND_UP,
    GROUPED_QKV,
    IDENTITY,
    TRANSPOSE,
    TRIM_VOCABULARY,
    ModelSizes,
    MtpRepeated,
    WeightTransform,
    apply_per_expert,
)

Values = Mapping[str, Any]


class HuggingFaceTensor(NamedTuple):
    """A Hugging Face tensor: its name, and its shape in letters."""

    name: str
    shape: str


class TensorMapping(NamedTuple):
    """Row of a table: a megatron.core tensor and the transform from Hugging Face tensors.

    See :func:`_map` for the fields.
    """

    megatron_name: str
    huggingface_tensors: tuple[HuggingFaceTensor, ...]
    transform: WeightTransform = IDENTITY
    when: str = ""
    unless: str = ""


def _map(
    megatron_name: str,
    *huggingface_tensors: str,
    transform: WeightTransform = IDENTITY,
    when: str = "",
    unless: str = "",
) -> TensorMapping:
    """Build a :class:`TensorMapping`.

    Args:
        megatron_name: name in megatron.core, without the prefix of the layer.
        huggingface_tensors: name and shape of each Hugging Face tensor, such as
            ``lm_head.weight V,H``.
        transform: how the Hugging Face tensors make megatron.core's.
        when: argument that must be true for the row to apply.
        unless: argument that must be false for the row to apply.
    """
    tensors = (text.split() for text in huggingface_tensors)
    return TensorMapping(
        megatron_name,
        tuple(HuggingFaceTensor(name, shape) for name, shape in tensors),
        transform,
        when,
        unless,
    )


_QKV = "self_attention.linear_qkv"
_FC1 = "mlp.linear_fc1"
_EXPERTS = "mlp.experts.experts"
_UNTIED_ARGUMENT = "untie_embeddings_and_output_weights"
_BIAS_ARGUMENT = "add_bias_linear"
_QKV_BIAS_ARGUMENT = "add_qkv_bias"
_Q = "self_attn.q_proj"
_K = "self_attn.k_proj"
_V = "self_attn.v_proj"


@dataclass(frozen=True)
class FamilyMapping:
    """Tensors of a model family.

    Attributes:
        outer: embeddings, final norm and output layer; the embedding first.
        every_layer: tensors of every layer.
        dense_mlp: MLP of a dense layer.
        experts: router and experts of a mixture-of-experts layer.
        layer_prefix: prefix of a layer's name in Hugging Face.
        prefix: prefix of all names that published files may omit.
        ignored_pattern: regular expression for tensors in files that are not weights.
        mtp_layer: tensors of a multi-token prediction layer in addition to those of a normal layer.
        mtp_copies: tensors of the model that each multi-token prediction layer repeats.
        mtp_count_keys: keys of ``config.json`` for the number of multi-token prediction layers.
    """

    outer: tuple[TensorMapping, ...]
    every_layer: tuple[TensorMapping, ...]
    dense_mlp: tuple[TensorMapping, ...]
    experts: tuple[TensorMapping, ...] = ()
    layer_prefix: str = "model.layers."
    prefix: str = "model."
    ignored_pattern: str = r".*\.rotary_emb\.inv_freq"
    mtp_layer: tuple[TensorMapping, ...] = ()
    mtp_copies: tuple[TensorMapping, ...] = ()
    mtp_count_keys: tuple[str, ...] = ()


_LLAMA = FamilyMapping(
    outer=(
        _map(
            "embedding.word_embeddings.weight",
            "model.embed_tokens.weight V,H",
            transform=TRIM_VOCABULARY,
        ),
        _map("decoder.final_layernorm.weight", "model.norm.weight H"),
        _map(
            "output_layer.weight",
            "lm_head.weight V,H",
            transform=TRIM_VOCABULARY,
            when=_UNTIED_ARGUMENT,
        ),
    ),
    every_layer=(
        _map(f"{_QKV}.layer_norm_weight", "input_layernorm.weight H"),
        _map(
            f"{_QKV}.weight",
            f"{_Q}.weight A,H",
            f"{_K}.weight G,H",
            f"{_V}.weight G,H",
            transform=GROUPED_QKV,
        ),
        _map(
            f"{_QKV}.bias",
            f"{_Q}.bias A",
            f"{_K}.bias G",
            f"{_V}.bias G",
            transform=GROUPED_QKV,
            when=_BIAS_ARGUMENT,
        ),
        _map(
            f"{_QKV}.bias",
            f"{_Q}.bias A",
            f"{_K}.bias G",
            f"{_V}.bias G",
            transform=GROUPED_QKV,
            when=_QKV_BIAS_ARGUMENT,
        ),
        _map("self_attention.q_layernorm.weight", "self_attn.q_norm.weight D", when="qk_layernorm"),
        _map("self_attention.k_layernorm.weight", "self_attn.k_norm.weight D", when="qk_layernorm"),
        _map("self_attention.linear_proj.weight", "self_attn.o_proj.weight H,A"),
        _map("self_attention.linear_proj.bias", "self_attn.o_proj.bias H", when=_BIAS_ARGUMENT),
        _map(f"{_FC1}.layer_norm_weight", "post_attention_layernorm.weight H"),
    ),
    dense_mlp=(
        _map(
            f"{_FC1}.weight",
            "mlp.gate_proj.weight F,H",
            "mlp.up_proj.weight F,H",
            transform=GATE_AND_UP,
        ),
        _map(
            f"{_FC1}.bias",
            "mlp.gate_proj.bias F",
            "mlp.up_proj.bias F",
            transform=GATE_AND_UP,
            when=_BIAS_ARGUMENT,
        ),
        _map("mlp.linear_fc2.weight", "mlp.down_proj.weight H,F"),
        _map("mlp.linear_fc2.bias", "mlp.down_proj.bias H", when=_BIAS_ARGUMENT),
    ),
)


def _map_experts(block: str, gate: str, up: str, down: str) -> tuple[TensorMapping, ...]:
    """Map a layer's router and experts.

    Args:
        block: name of the module that contains both.
        gate: name of an expert's gate projection.
        up: name of an expert's up projection.
        down: name of an expert's down projection.
    """
    expert = f"{block}.experts.{{expert}}"
    return (
        _map("mlp.router.weight", f"{block}.gate.weight N,H"),
        _map(
            f"{_EXPERTS}.linear_fc1.weight",
            f"{expert}.{gate}.weight E,H",
            f"{expert}.{up}.weight E,H",
            transform=apply_per_expert(GATE_AND_UP),
        ),
        _map(
            f"{_EXPERTS}.linear_fc2.weight",
            f"{expert}.{down}.weight H,E",
            transform=apply_per_expert(IDENTITY),
        ),
    )


_GEMMA2 = FamilyMapping(
    outer=_LLAMA.outer,
    every_layer=(
        *(row for row in _LLAMA.every_layer if row.megatron_name != f"{_FC1}.layer_norm_weight"),
        _map("post_self_attn_layernorm.weight", "post_attention_layernorm.weight H"),
        _map(f"{_FC1}.layer_norm_weight", "pre_feedforward_layernorm.weight H"),
        _map("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight H"),
    ),
    dense_mlp=_LLAMA.dense_mlp,
)

_GPT2 = FamilyMapping(
    outer=(
        _map(
            "embedding.word_embeddings.weight",
            "transformer.wte.weight V,H",
            transform=TRIM_VOCABULARY,
        ),
        _map("embedding.position_embeddings.weight", "transformer.wpe.weight P,H"),
        _map("decoder.final_layernorm.weight", "transformer.ln_f.weight H"),
        _map("decoder.final_layernorm.bias", "transformer.ln_f.bias H"),
        _map(
            "output_layer.weight",
            "lm_head.weight V,H",
            transform=TRIM_VOCABULARY,
            when=_UNTIED_ARGUMENT,
        ),
    ),
    every_layer=(
        _map(f"{_QKV}.layer_norm_weight", "ln_1.weight H"),
        _map(f"{_QKV}.layer_norm_bias", "ln_1.bias H"),
        _map(f"{_QKV}.weight", "attn.c_attn.weight H,3A", transform=CONV1D_QKV),
        _map(f"{_QKV}.bias", "attn.c_attn.bias 3A", transform=CONV1D_QKV),
        _map("self_attention.linear_proj.weight", "attn.c_proj.weight A,H", transform=TRANSPOSE),
        _map("self_attention.linear_proj.bias", "attn.c_proj.bias H"),
        _map(f"{_FC1}.layer_norm_weight", "ln_2.weight H"),
        _map(f"{_FC1}.layer_norm_bias", "ln_2.bias H"),
    ),
    dense_mlp=(
        _map(f"{_FC1}.weight", "mlp.c_fc.weight H,F", transform=TRANSPOSE),
        _map(f"{_FC1}.bias", "mlp.c_fc.bias F"),
        _map("mlp.linear_fc2.weight", "mlp.c_proj.weight F,H", transform=TRANSPOSE),
        _map("mlp.linear_fc2.bias", "mlp.c_proj.bias H"),
    ),
    layer_prefix="transformer.h.",
    prefix="transformer.",
    ignored_pattern=r".*\.attn\.(bias|masked_bias)",
)

_ATTENTION = "self_attention"
_Q_LORA_ARGUMENT = "q_lora_rank"
_SHARED = "mlp.shared_experts"


def _build_deepseek(*router_rows: TensorMapping, **mtp_fields: Any) -> FamilyMapping:
    """Build the mapping of a DeepSeek family.

    Args:
        router_rows: tensors of the router in addition to its matrix.
        mtp_fields: fields of :class:`FamilyMapping` for multi-token prediction.
    """
    return FamilyMapping(
        outer=_LLAMA.outer,
        every_layer=(
            _map("input_layernorm.weight", "input_layernorm.weight H"),
            _map(f"{_ATTENTION}.linear_q_proj.weight", f"{_Q}.weight T,H", unless=_Q_LORA_ARGUMENT),
            _map(
                f"{_ATTENTION}.linear_q_down_proj.weight",
                "self_attn.q_a_proj.weight Q,H",
                when=_Q_LORA_ARGUMENT,
            ),
            _map(
                f"{_ATTENTION}.q_layernorm.weight",
                "self_attn.q_a_layernorm.weight Q",
                when=_Q_LORA_ARGUMENT,
            ),
            _map(
                f"{_ATTENTION}.linear_q_up_proj.weight",
                "self_attn.q_b_proj.weight T,Q",
                when=_Q_LORA_ARGUMENT,
            ),
            _map(
                f"{_ATTENTION}.linear_kv_down_proj.weight",
                "self_attn.kv_a_proj_with_mqa.weight M,H",
            ),
            _map(f"{_ATTENTION}.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight L"),
            _map(f"{_ATTENTION}.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight U,L"),
            _map(f"{_ATTENTION}.linear_proj.weight", "self_attn.o_proj.weight H,W"),
            _map("pre_mlp_layernorm.weight", "post_attention_layernorm.weight H"),
        ),
        dense_mlp=_LLAMA.dense_mlp,
        experts=(
            *_map_experts("mlp", "gate_proj", "up_proj", "down_proj"),
            *router_rows,
            _map(
                f"{_SHARED}.linear_fc1.weight",
                f"{_SHARED}.gate_proj.weight S,H",
                f"{_SHARED}.up_proj.weight S,H",
                transform=GATE_AND_UP,
            ),
            _map(f"{_SHARED}.linear_fc2.weight", f"{_SHARED}.down_proj.weight H,S"),
        ),
        **mtp_fields,
    )


FAMILY_MAPPINGS: Mapping[str, FamilyMapping] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": replace(_LLAMA, experts=_map_experts("block_sparse_moe", "w1", "w3", "w2")),
    "qwen3_moe": replace(_LLAMA, experts=_map_experts("mlp", "gate_proj", "up_proj", "down_proj")),
    "gpt2": _GPT2,
    "gemma": _LLAMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "deepseek_v2": _build_deepseek(),
    "deepseek_v3": _build_deepseek(
        _map("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias N"),
        mtp_layer=(
            _map("enorm.weight", "enorm.weight H"),
            _map("hnorm.weight", "hnorm.weight H"),
            _map("eh_proj.weight", "eh_proj.weight H,2H"),
            _map("final_layernorm.weight", "shared_head.norm.weight H"),
        ),
        mtp_copies=(
            _map("embedding.word_embeddings.weight", "embed_tokens.weight V,H"),
            _map("output_layer.weight", "shared_head.head.weight V,H"),
        ),
        mtp_count_keys=("num_nextn_predict_layers", "num_mtp_layers"),
    ),
}
"""Mappings by ``model_type``, as in ``flagscale.config.arguments.compat.huggingface.families``."""


@dataclass(frozen=True)
class WeightSpec:
    """A megatron.core tensor of a model, with its full name.

    Attributes:
        name: full name in megatron.core.
        huggingface_tensors: names and shapes of the Hugging Face tensors that it consists of.
        transform: the transform.
        sizes: dimensions of the model.
    """

    name: str
    huggingface_tensors: tuple[tuple[str, tuple[int, ...]], ...]
    transform: WeightTransform
    sizes: ModelSizes

    @property
    def shape(self) -> Shape:
        """Shape of the megatron.core tensor."""
        return self.transform.to_megatron(
            [MetaTensor(shape) for _, shape in self.huggingface_tensors], self.sizes
        ).shape


def iter_weights(model_type: str, values: Values) -> Iterator[WeightSpec]:
    """Yield every tensor of a model, layer by layer, then those of multi-token prediction layers.

    Args:
        model_type: the family.
        values: fully resolved arguments of the model (``huggingface.models.effective``).
    """
    mapping, sizes = FAMILY_MAPPINGS[model_type], ModelSizes.from_arguments(values)
    yield from _iter_outer_weights(mapping.outer[:1], mapping, values, sizes)
    for layer in range(values["num_layers"]):
        yield from _iter_rows(
            _select_layer_rows(mapping, values, layer),
            f"decoder.layers.{layer}.",
            f"{mapping.layer_prefix}{layer}.",
            values,
            sizes,
        )
    yield from _iter_outer_weights(mapping.outer[1:], mapping, values, sizes)
    for prefix, huggingface_prefix in _list_mtp_prefixes(mapping, values):
        last_layer_rows = _select_layer_rows(mapping, values, values["num_layers"] - 1)
        layer_prefix = f"{prefix}transformer_layer."
        yield from _iter_rows(last_layer_rows, layer_prefix, huggingface_prefix, values, sizes)
        yield from _iter_rows(mapping.mtp_layer, prefix, huggingface_prefix, values, sizes)


def _select_layer_rows(
    mapping: FamilyMapping, values: Values, layer: int
) -> tuple[TensorMapping, ...]:
    """Return the tensors of a layer, with a dense MLP or with experts."""
    has_experts = values["num_moe_experts"] and values["moe_layer_freq"][layer]
    return (*mapping.every_layer, *(mapping.experts if has_experts else mapping.dense_mlp))


def _list_mtp_prefixes(mapping: FamilyMapping, values: Values) -> list[tuple[str, str]]:
    """Return each multi-token prediction layer's prefix in megatron.core and in Hugging Face."""
    layer_count = (values.get("mtp_num_layers") or 0) if mapping.mtp_layer else 0
    first_mtp_layer = values["num_layers"]
    return [
        (f"mtp.layers.{i}.", f"{mapping.layer_prefix}{first_mtp_layer + i}.")
        for i in range(layer_count)
    ]


def _iter_outer_weights(
    rows: Iterable[TensorMapping], mapping: FamilyMapping, values: Values, sizes: ModelSizes
) -> Iterator[WeightSpec]:
    """Yield tensors outside the layers, with their copies in multi-token prediction layers."""
    is_tied = not values[_UNTIED_ARGUMENT]
    for spec in _iter_rows(rows, "", "", values, sizes):
        copies = [
            (f"{prefix}{name}", sizes.shape(shape))
            for _, prefix in _list_mtp_prefixes(mapping, values)
            for row in mapping.mtp_copies
            for name, shape in row.huggingface_tensors
            if is_tied or row.megatron_name == spec.name
        ]
        is_shared = spec.name in {row.megatron_name for row in mapping.mtp_copies}
        if copies and is_shared:
            transform = MtpRepeated(spec.transform, 1 + len(copies))
            yield WeightSpec(spec.name, (*spec.huggingface_tensors, *copies), transform, sizes)
        else:
            yield spec


def _iter_rows(
    rows: Iterable[TensorMapping],
    megatron_prefix: str,
    huggingface_prefix: str,
    values: Values,
    sizes: ModelSizes,
) -> Iterator[WeightSpec]:
    """Yield the tensors of those rows that apply to the model."""
    for row in rows:
        if (row.when and not values[row.when]) or (row.unless and values[row.unless]):
            continue
        huggingface_tensors = [
            (huggingface_prefix + name, sizes.shape(shape))
            for name, shape in _expand_experts(row.huggingface_tensors, sizes.experts)
        ]
        yield WeightSpec(
            megatron_prefix + row.megatron_name, tuple(huggingface_tensors), row.transform, sizes
        )


def _expand_experts(
    tensors: tuple[HuggingFaceTensor, ...], experts: int
) -> Iterator[HuggingFaceTensor]:
    """Expand ``{expert}`` in names: all tensors of the first expert, then of the second, …"""
    if not any("{expert}" in tensor.name for tensor in tensors):
        yield from tensors
        return
    for expert in range(experts):
        for tensor in tensors:
            yield HuggingFaceTensor(tensor.name.format(expert=expert), tensor.shape)
