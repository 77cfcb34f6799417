"""Which tensors of Hugging Face make which of megatron.core, a table a kind of layer.

Names of megatron.core are those of its distributed checkpoints, in which layers are counted over
the whole model and a layer's experts lie in one tensor, ``[expert, out, in]``. Letters are sizes:

==  ==========================================
V   the vocabulary
P   positions
H   the model's width (hidden_size)
A   all heads of queries together
G   all heads of keys (or of values) together
D   one head
F   the MLP's inner width
E   an expert's inner width
N   experts
S   the inner width of the expert that all tokens share
Q   latent numbers of queries
L   latent numbers of keys and values
M   these and the part of keys that is turned
T   all heads' queries, of multi-latent attention
U   all heads' keys, but for what is turned, and values
W   all heads' values
==  ==========================================

A digit before a letter multiplies it. A row whose ``when`` names an argument is left out where that
is false, one whose ``unless`` does where it is true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flagscale.train.checkpoint.formats.rules import (
    HALVES,
    HEADS,
    HEADS_TRANSPOSED,
    SAME,
    TRANSPOSED,
    VOCABULARY,
    Copied,
    Rule,
    Sizes,
    per_expert,
)
from flagscale.train.checkpoint.formats.tensors import Outline, Shape

Values = Mapping[str, Any]


class Theirs(NamedTuple):
    """A tensor of Hugging Face: its name, and a letter for each dimension."""

    name: str
    shape: str


class Row(NamedTuple):
    """One tensor of megatron.core and what makes it."""

    ours: str
    theirs: tuple[Theirs, ...]
    rule: Rule = SAME
    when: str = ""
    unless: str = ""


def _row(ours: str, *theirs: str, rule: Rule = SAME, when: str = "", unless: str = "") -> Row:
    """Each of ``theirs`` is a name and its dimensions, such as ``lm_head.weight V,H``."""
    pairs = (text.split() for text in theirs)
    return Row(ours, tuple(Theirs(name, shape) for name, shape in pairs), rule, when, unless)


_QKV, _FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"
_EXPERTS = "mlp.experts.experts"
_UNTIED, _BIASES = "untie_embeddings_and_output_weights", "add_bias_linear"
_QKV_BIASES = "add_qkv_bias"
_Q, _K, _V = (f"self_attn.{part}_proj" for part in "qkv")


@dataclass(frozen=True)
class Table:
    """``prefix`` may be missing in published files; ``ignored`` is what they hold beside weights
    (a regular expression). ``further`` is what layers behind the last, which predict further
    tokens, have beside those of the last one; ``copies`` what they hold once more of the model's
    own tensors; ``counts`` the keys of config.json that tell how many there are."""

    ends: tuple[Row, ...]
    layer: tuple[Row, ...]
    dense: tuple[Row, ...]
    sparse: tuple[Row, ...] = ()
    layers: str = "model.layers."
    prefix: str = ""
    ignored: str = r".*\.rotary_emb\.inv_freq"
    further: tuple[Row, ...] = ()
    copies: tuple[Row, ...] = ()
    counts: tuple[str, ...] = ()


_LLAMA = Table(
    ends=(
        _row("embedding.word_embeddings.weight", "model.embed_tokens.weight V,H", rule=VOCABULARY),
        _row("decoder.final_layernorm.weight", "model.norm.weight H"),
        _row("output_layer.weight", "lm_head.weight V,H", rule=VOCABULARY, when=_UNTIED),
    ),
    layer=(
        _row(f"{_QKV}.layer_norm_weight", "input_layernorm.weight H"),
        _row(
            f"{_QKV}.weight", f"{_Q}.weight A,H", f"{_K}.weight G,H", f"{_V}.weight G,H", rule=HEADS
        ),
        _row(
            f"{_QKV}.bias", f"{_Q}.bias A", f"{_K}.bias G", f"{_V}.bias G", rule=HEADS, when=_BIASES
        ),
        _row(
            f"{_QKV}.bias",
            f"{_Q}.bias A",
            f"{_K}.bias G",
            f"{_V}.bias G",
            rule=HEADS,
            when=_QKV_BIASES,
        ),
        _row("self_attention.q_layernorm.weight", "self_attn.q_norm.weight D", when="qk_layernorm"),
        _row("self_attention.k_layernorm.weight", "self_attn.k_norm.weight D", when="qk_layernorm"),
        _row("self_attention.linear_proj.weight", "self_attn.o_proj.weight H,A"),
        _row("self_attention.linear_proj.bias", "self_attn.o_proj.bias H", when=_BIASES),
        _row(f"{_FC1}.layer_norm_weight", "post_attention_layernorm.weight H"),
    ),
    dense=(
        _row(f"{_FC1}.weight", "mlp.gate_proj.weight F,H", "mlp.up_proj.weight F,H", rule=HALVES),
        _row(
            f"{_FC1}.bias", "mlp.gate_proj.bias F", "mlp.up_proj.bias F", rule=HALVES, when=_BIASES
        ),
        _row("mlp.linear_fc2.weight", "mlp.down_proj.weight H,F"),
        _row("mlp.linear_fc2.bias", "mlp.down_proj.bias H", when=_BIASES),
    ),
)


def _sparse(block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """A layer's router and experts; ``block`` is what holds both."""
    expert = f"{block}.experts.{{expert}}"
    return (
        _row("mlp.router.weight", f"{block}.gate.weight N,H"),
        _row(
            f"{_EXPERTS}.linear_fc1.weight",
            f"{expert}.{gate}.weight E,H",
            f"{expert}.{up}.weight E,H",
            rule=per_expert(HALVES),
        ),
        _row(
            f"{_EXPERTS}.linear_fc2.weight",
            f"{expert}.{down}.weight H,E",
            rule=per_expert(SAME),
        ),
    )


def _with(sparse: tuple[Row, ...]) -> Table:
    return Table(_LLAMA.ends, _LLAMA.layer, _LLAMA.dense, sparse)


_GEMMA2 = Table(
    ends=_LLAMA.ends,
    layer=(
        *(row for row in _LLAMA.layer if row.ours != f"{_FC1}.layer_norm_weight"),
        _row("post_self_attn_layernorm.weight", "post_attention_layernorm.weight H"),
        _row(f"{_FC1}.layer_norm_weight", "pre_feedforward_layernorm.weight H"),
        _row("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight H"),
    ),
    dense=_LLAMA.dense,
)

_GPT2 = Table(
    ends=(
        _row("embedding.word_embeddings.weight", "transformer.wte.weight V,H", rule=VOCABULARY),
        _row("embedding.position_embeddings.weight", "transformer.wpe.weight P,H"),
        _row("decoder.final_layernorm.weight", "transformer.ln_f.weight H"),
        _row("decoder.final_layernorm.bias", "transformer.ln_f.bias H"),
        _row("output_layer.weight", "lm_head.weight V,H", rule=VOCABULARY, when=_UNTIED),
    ),
    layer=(
        _row(f"{_QKV}.layer_norm_weight", "ln_1.weight H"),
        _row(f"{_QKV}.layer_norm_bias", "ln_1.bias H"),
        _row(f"{_QKV}.weight", "attn.c_attn.weight H,3A", rule=HEADS_TRANSPOSED),
        _row(f"{_QKV}.bias", "attn.c_attn.bias 3A", rule=HEADS_TRANSPOSED),
        _row("self_attention.linear_proj.weight", "attn.c_proj.weight A,H", rule=TRANSPOSED),
        _row("self_attention.linear_proj.bias", "attn.c_proj.bias H"),
        _row(f"{_FC1}.layer_norm_weight", "ln_2.weight H"),
        _row(f"{_FC1}.layer_norm_bias", "ln_2.bias H"),
    ),
    dense=(
        _row(f"{_FC1}.weight", "mlp.c_fc.weight H,F", rule=TRANSPOSED),
        _row(f"{_FC1}.bias", "mlp.c_fc.bias F"),
        _row("mlp.linear_fc2.weight", "mlp.c_proj.weight F,H", rule=TRANSPOSED),
        _row("mlp.linear_fc2.bias", "mlp.c_proj.bias H"),
    ),
    layers="transformer.h.",
    prefix="transformer.",
    ignored=r".*\.attn\.(bias|masked_bias)",
)

_MLA, _QUERIES = "self_attention", "q_lora_rank"
_SHARED = "mlp.shared_experts"


def _deepseek(*routing: Row, **further: Any) -> Table:
    """``routing``: what the router has beside its matrix; ``further``: of the table, what layers
    that predict further tokens have."""
    return Table(
        ends=_LLAMA.ends,
        layer=(
            _row("input_layernorm.weight", "input_layernorm.weight H"),
            _row(f"{_MLA}.linear_q_proj.weight", f"{_Q}.weight T,H", unless=_QUERIES),
            _row(
                f"{_MLA}.linear_q_down_proj.weight", "self_attn.q_a_proj.weight Q,H", when=_QUERIES
            ),
            _row(f"{_MLA}.q_layernorm.weight", "self_attn.q_a_layernorm.weight Q", when=_QUERIES),
            _row(f"{_MLA}.linear_q_up_proj.weight", "self_attn.q_b_proj.weight T,Q", when=_QUERIES),
            _row(f"{_MLA}.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight M,H"),
            _row(f"{_MLA}.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight L"),
            _row(f"{_MLA}.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight U,L"),
            _row(f"{_MLA}.linear_proj.weight", "self_attn.o_proj.weight H,W"),
            _row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight H"),
        ),
        dense=_LLAMA.dense,
        sparse=(
            *_sparse("mlp", "gate_proj", "up_proj", "down_proj"),
            *routing,
            _row(
                f"{_SHARED}.linear_fc1.weight",
                f"{_SHARED}.gate_proj.weight S,H",
                f"{_SHARED}.up_proj.weight S,H",
                rule=HALVES,
            ),
            _row(f"{_SHARED}.linear_fc2.weight", f"{_SHARED}.down_proj.weight H,S"),
        ),
        **further,
    )


TABLES: Mapping[str, Table] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _with(_sparse("block_sparse_moe", "w1", "w3", "w2")),
    "qwen3_moe": _with(_sparse("mlp", "gate_proj", "up_proj", "down_proj")),
    "gpt2": _GPT2,
    "gemma": _LLAMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "deepseek_v2": _deepseek(),
    "deepseek_v3": _deepseek(
        _row("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias N"),
        further=(
            _row("enorm.weight", "enorm.weight H"),
            _row("hnorm.weight", "hnorm.weight H"),
            _row("eh_proj.weight", "eh_proj.weight H,2H"),
            _row("final_layernorm.weight", "shared_head.norm.weight H"),
        ),
        copies=(
            _row("embedding.word_embeddings.weight", "embed_tokens.weight V,H"),
            _row("output_layer.weight", "shared_head.head.weight V,H"),
        ),
        counts=("num_nextn_predict_layers", "num_mtp_layers"),
    ),
}
"""By ``model_type``, as ``flagscale.config.arguments.huggingface.families`` has them."""


@dataclass(frozen=True)
class Entry:
    """One tensor of megatron.core, with the full names and shapes of what makes it."""

    name: str
    theirs: tuple[tuple[str, tuple[int, ...]], ...]
    rule: Rule
    sizes: Sizes

    @property
    def shape(self) -> Shape:
        """The shape that it has here."""
        return self.rule.join([Outline(shape) for _, shape in self.theirs], self.sizes).shape


def entries(kind: str, values: Values) -> Iterator[Entry]:
    """Every tensor of a model of a family, layer by layer, and of layers that predict further
    tokens as far as the family has such.

    Args:
        kind: the family's ``model_type``.
        values: the model's arguments, written out (``huggingface.models.effective``).
    """
    table, sizes = TABLES[kind], Sizes.of(values)
    first, *rest = table.ends
    yield from _ends([first], table, values, sizes)
    for layer in range(values["num_layers"]):
        places = f"decoder.layers.{layer}.", f"{table.layers}{layer}."
        yield from _entries(_layer(table, values, layer), *places, values, sizes)
    yield from _ends(rest, table, values, sizes)
    for ours, theirs in _further(table, values):
        last = _layer(table, values, values["num_layers"] - 1)
        yield from _entries(last, f"{ours}transformer_layer.", theirs, values, sizes)
        yield from _entries(table.further, ours, theirs, values, sizes)


def _layer(table: Table, values: Values, layer: int) -> tuple[Row, ...]:
    experts = values["num_moe_experts"] and values["moe_layer_freq"][layer]
    return (*table.layer, *(table.sparse if experts else table.dense))


def _further(table: Table, values: Values) -> list[tuple[str, str]]:
    """Where layers that predict further tokens are, here and there."""
    count = (values.get("mtp_num_layers") or 0) if table.further else 0
    behind = values["num_layers"]
    return [(f"mtp.layers.{i}.", f"{table.layers}{behind + i}.") for i in range(count)]


def _ends(rows: Any, table: Table, values: Values, sizes: Sizes) -> Iterator[Entry]:
    """What stands before the layers or behind them, with the copies that further layers have."""
    tied = not values[_UNTIED]
    for entry in _entries(rows, "", "", values, sizes):
        names = [
            (f"{theirs}{name}", sizes.shape(shape))
            for _, theirs in _further(table, values)
            for row in table.copies
            for name, shape in row.theirs
            if tied or row.ours == entry.name
        ]
        own = entry.name in {row.ours for row in table.copies}
        if not names or not own:
            yield entry
        else:
            rule = Copied(entry.rule, 1 + len(names))
            yield Entry(entry.name, (*entry.theirs, *names), rule, sizes)


def _entries(rows: Any, ours: str, theirs: str, values: Values, sizes: Sizes) -> Iterator[Entry]:
    for row in rows:
        if (row.when and not values[row.when]) or (row.unless and values[row.unless]):
            continue
        parts = [
            (theirs + name, sizes.shape(shape))
            for name, shape in _each_expert(row.theirs, sizes.experts)
        ]
        yield Entry(ours + row.ours, tuple(parts), row.rule, sizes)


def _each_expert(theirs: tuple[Theirs, ...], experts: int) -> Iterator[Theirs]:
    """A layer's tensors; where they are an expert's, those of the first, of the second, …"""
    if not any("{expert}" in one.name for one in theirs):
        yield from theirs
        return
    for expert in range(experts):
        for one in theirs:
            yield Theirs(one.name.format(expert=expert), one.shape)
