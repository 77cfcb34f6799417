"""What Megatron-LM calls and cuts otherwise than we do: tensors, arguments, files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flagscale.config.arguments.architecture import OWN
from flagscale.config.arguments.huggingface.models import FUNCTION, FURTHER
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.megatron_unpickler import Unknown
from flagscale.train.checkpoint.formats.tensors import Copies, Stored, Transposed, joined, rows

_WITHOUT_END = ("NullTokenizer", "NullMultimodalTokenizer")
"""Tokenizers whose ``vocab_size`` does not count the end of a document."""
FILE = "model_optim_rng.pt"
"""What a rank's directory holds."""
RELEASE = "release"
"""The directory of a checkpoint that is of no iteration: Megatron-LM takes its weights alone."""
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
EXPERT = re.compile(r"(.*\.mlp\.experts\.)experts\.(linear_fc[12])\.(weight)")
"""The tensor of all experts of a layer."""
ALIASES = {
    "num_moe_experts": ("num_experts",),
    "layernorm_epsilon": ("layernorm_epsilon", "norm_epsilon"),
    "layernorm_zero_centered_gamma": ("layernorm_zero_centered_gamma", "apply_layernorm_1p"),
    "bias_activation_fusion": ("bias_gelu_fusion",),
}
"""Names of arguments there, where they are others; a later one is of older versions."""
_QUERIES_AND_KEYS, _BEFORE_MLP = (
    "self_attention.linear_qkv.layer_norm_",
    "mlp.linear_fc1.layer_norm_",
)
_LOCAL = {_QUERIES_AND_KEYS: "input_layernorm.", _BEFORE_MLP: "pre_mlp_layernorm."}
"""Names of norms without Transformer Engine, and of a mixture's with it."""
_LATENT = {
    "pre_mlp_layernorm.": _BEFORE_MLP,
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Names of norms with Transformer Engine where attention is latent: ours are those without it."""
_LACKING = {
    "sandwich_norm": "norms behind attention and MLP",
    "scale_embeddings": "embeddings that are multiplied by the root of the width",
    "attn_logit_softcapping": "a bound of attention's scores",
    "final_logit_softcapping": "a bound of the logits",
    "window_rotary_base": "a rotary base of layers with windows",
}
"""What its layers lack, of :data:`OWN`."""
_DOWN = re.compile(r".*\.linear_(q|kv)_down_proj\.weight")
"""Whole on every rank with Transformer Engine, cut by rows without it."""
_ROWS = re.compile(
    r".*(linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|word_embeddings|output_layer)"
    r"\.(weight|bias)"
)
_HALVES = re.compile(r".*linear_fc1\.(weight|bias)")
_COLUMNS = re.compile(r".*(linear_proj|linear_fc2)\.weight")
_WHOLE = re.compile(r".*(norm|router|position_embeddings).*|.*(linear_proj|linear_fc2)\.bias")

_STATES = re.compile(
    r"(.*\.)?(_extra_state.*|inv_freq|(cos|sin)_cached|(local|global)_tokens_per_expert|ga_steps)"
    r"|(chained_\d+\.)?optimizer\..*|rng_state.*|opt_param_scheduler.*|rerun_state_machine.*"
)
"""What lies among a model's weights and decides nothing of what it computes."""


@dataclass(frozen=True)
class Layout:
    """How a checkpoint of Megatron-LM is cut: ranks in tensor, pipeline and expert parallelism, and
    the model chunks of a stage.

    ``first`` and ``last`` are the layers of these stages, where they are not as many as those of
    others. ``engine``: its layers are Transformer Engine's. ``grouped``: so are a layer's experts,
    together. The vocabulary is padded to a multiple of ``rows`` for each tensor-parallel rank.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    chunks: int = 1
    first: int | None = None
    last: int | None = None
    engine: bool = True
    grouped: bool = False
    rows: int = 1

    def layers(self, count: int) -> list[list[int]]:
        """Of every model chunk, in the order of layers: those that it has.

        Raises:
            CheckpointError: the stages cannot share ``count`` layers out.
        """
        ends = [self.first, self.last]
        given = [size for size in ends if size is not None]
        if given and self.chunks > 1:
            raise CheckpointError("stages of unlike sizes are written with one chunk a stage")
        among = self.pipeline * self.chunks - len(given)
        left = count - sum(given)
        if among < 0 or min([left, *given]) < 0 or (left % among if among else left):
            raise CheckpointError(
                f"{count} layers cannot be shared out over {self.pipeline} stages of {self.chunks} "
                f"chunks{f', of which {given} are given' if given else ''}: expected a multiple"
            )
        sizes = [left // among if among else 0] * among
        sizes = [*ends[:1], *sizes, *ends[1:]] if given else sizes  # type: ignore[list-item]
        found, begin = [], 0
        for size in [size for size in sizes if size is not None]:
            found.append(list(range(begin, begin + size)))
            begin += size
        return found

    def directory(self, place: Sequence[int]) -> str:
        """The name of a rank's directory, by its place in tensor, pipeline, expert parallelism."""
        name = f"mp_rank_{place[0]:02d}"
        name += f"_{place[1]:03d}" if self.pipeline > 1 else ""
        return name + (f"_{place[2]:03d}" if self.expert > 1 else "")

    def padded(self, vocabulary: int) -> int:
        """Rows of the embedding and the output layer."""
        step = self.rows * self.tensor
        return -(-vocabulary // step) * step


def rank_file(path: Path, layout: Layout, place: Sequence[int]) -> Path:
    """
    Raises:
        CheckpointError: it is missing.
    """
    found = path / layout.directory(place) / FILE
    if not found.is_file():
        raise CheckpointError(f"{found} is missing")
    return found


def values_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Of a checkpoint's arguments those that say which function the model is, by our names. They
    are taken as they are (:mod:`.megatron_arguments` looks at them)."""
    found = {}
    for name in FUNCTION:
        given = (args.get(one) for one in ALIASES.get(name, (name,)))
        value = next((one for one in given if one is not None), None)
        if name in ALIASES and value is None:
            value = args.get(name)
        if value is not None and not isinstance(value, Unknown):
            found[name] = list(value) if isinstance(value, tuple) else value
    if not args.get("group_query_attention"):
        found["num_query_groups"] = found.get("num_attention_heads")
    if args.get("q_lora_rank", 0) is None:
        found["q_lora_rank"] = None  # which says something
    # Tokens, without the rows of padding where it says how many there are.
    sizes = (args.get("padded_vocab_size"), args.get("vocab_size"))
    padded, tokens = (0 if isinstance(size, Unknown) else int(size or 0) for size in sizes)
    tokens = tokens or padded
    if args.get("tokenizer_type") in _WITHOUT_END and tokens < padded:
        tokens += 1
    found["vocab_size"] = tokens
    return found


def arguments_for(values: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The arguments of a checkpoint there, of ours."""
    found = dict(values)
    for ours, theirs in ALIASES.items():
        found.update(dict.fromkeys(theirs, values[ours]))
    tensor, expert = layout.tensor, layout.expert
    return {
        **found,
        "add_position_embedding": True,  # as Megatron-LM has it, whatever the embedding
        "ckpt_format": "torch",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "decoder_first_pipeline_num_layers": layout.first,
        "decoder_last_pipeline_num_layers": layout.last,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": tensor,
        "group_query_attention": values["num_query_groups"] != values["num_attention_heads"],
        "make_vocab_size_divisible_by": layout.rows,
        "moe_grouped_gemm": layout.grouped,
        "padded_vocab_size": layout.padded(values["vocab_size"]),
        "pipeline_model_parallel_size": layout.pipeline,
        "tensor_model_parallel_size": tensor,
        "transformer_impl": "transformer_engine" if layout.engine else "local",
        "virtual_pipeline_model_parallel_size": layout.chunks if layout.chunks > 1 else None,
    }


def precision_of(dtype: torch.dtype) -> dict[str, Any]:
    """What the arguments say of the tensors' precision."""
    return {
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }


def require_shared(values: Mapping[str, Any], path: Path) -> None:
    """Refuse, by ``path``, a model with parts that Megatron-LM's programs lack, or have otherwise.

    Raises:
        CheckpointError: it has some.
    """
    own = [f"{name}: its layers lack {_LACKING.get(name, name)}" for name in OWN if values[name]]
    if own:
        raise CheckpointError(
            f"{path}: Megatron-LM has no such model: {'; '.join(own)}",
            hint="Hugging Face's format and this project's have it",
        )


def is_weight(name: str, args: Mapping[str, Any]) -> bool:
    """Whether a tensor is one that a model is wrong without: no state of a run, and of no layer
    that predicts further tokens, where there are such."""
    return not _STATES.fullmatch(name) and not (args.get(FURTHER) and name.startswith("mtp."))


def spelled(name: str) -> Iterator[str]:
    """The names that a tensor of ours may have there."""
    yield name
    for ours, theirs in (*_LOCAL.items(), *_LATENT.items()):
        if ours in name:
            yield name.replace(ours, theirs)


def spelled_for(name: str, values: Mapping[str, Any], layer: int, *, engine: bool) -> str:
    """The name that a tensor of ours, of a layer, has there."""
    sparse = bool(values["num_moe_experts"] and values["moe_layer_freq"][layer])
    others = _LOCAL
    if engine and values["multi_latent_attention"]:
        others = {ours: name for ours, name in _LATENT.items() if name != _BEFORE_MLP or not sparse}
    elif engine:
        others = {ours: name for ours, name in _LOCAL.items() if ours == _BEFORE_MLP and sparse}
    for ours, theirs in others.items():
        if ours in name:
            return name.replace(ours, theirs)
    return name


def expert_names(name: str, expert: int) -> tuple[str, str] | None:
    """The names of an expert's part, one by one and grouped; None of what is no experts' tensor."""
    found = EXPERT.fullmatch(name)
    if found is None:
        return None
    before, layer, what = found.groups()
    return f"{before}local_experts.{expert}.{layer}.{what}", f"{before}{layer}.{what}{expert}"


@dataclass(frozen=True)
class Padded:
    """A tensor with rows of zeros behind its own."""

    tensor: Stored
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.tensor.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, region: Any) -> torch.Tensor:
        (begin, end), rest = region[0], region[1:]
        own = self.tensor.shape[0]
        found = self.tensor.read(((min(begin, own), min(end, own)), *rest))
        if end <= own:
            return found
        lost = end - max(begin, own)
        return torch.cat([found, found.new_zeros([lost, *found.shape[1:]])])


def cut(name: str, tensor: Stored, place: int, ranks: int, *, gated: bool, engine: bool) -> Stored:
    """The part of a tensor that one of several tensor-parallel ranks has.

    Raises:
        CheckpointError: it cannot be cut evenly, or nobody knows how it is cut.
    """
    if ranks == 1 or _WHOLE.fullmatch(name) or (engine and _DOWN.fullmatch(name)):
        return tensor
    if _DOWN.fullmatch(name):
        return _part(name, tensor, place, ranks)
    if _COLUMNS.fullmatch(name):
        return Transposed(_part(name, Transposed(tensor), place, ranks))
    if _HALVES.fullmatch(name) and gated:
        half = tensor.shape[0] // 2
        sides = (rows(tensor, begin, half) for begin in (0, half))
        return joined([_part(name, side, place, ranks) for side in sides])
    if _HALVES.fullmatch(name) or _ROWS.fullmatch(name):
        return _part(name, tensor, place, ranks)
    raise _unknown(name)


def _part(name: str, tensor: Stored, place: int, ranks: int) -> Stored:
    count = tensor.shape[0]
    if count % ranks:
        raise CheckpointError(f"{name}: {count} rows cannot be cut for {ranks} ranks")
    return rows(tensor, place * (count // ranks), count // ranks)


def uncut(name: str, parts: Sequence[Stored], rows_of: int, *, gated: bool) -> Stored:
    """A tensor of the parts that tensor-parallel ranks have; ``rows_of``: how many rows it has.

    Raises:
        CheckpointError: nobody knows how it is cut.
    """
    if len(parts) == 1:
        return parts[0]
    if _WHOLE.fullmatch(name) or (_DOWN.fullmatch(name) and parts[0].shape[0] == rows_of):
        return copies(name, parts)
    if _DOWN.fullmatch(name):
        return joined(parts)
    if _COLUMNS.fullmatch(name):
        return Transposed(joined([Transposed(part) for part in parts]))
    if _HALVES.fullmatch(name) and gated:
        half = parts[0].shape[0] // 2
        return joined([rows(part, begin, half) for begin in (0, half) for part in parts])
    if _HALVES.fullmatch(name) or _ROWS.fullmatch(name):
        return joined(parts)
    raise _unknown(name)


def copies(name: str, parts: Sequence[Stored]) -> Stored:
    """A tensor that several ranks hold, all of it."""
    if len(parts) == 1:
        return parts[0]
    return Copies(
        tuple(parts), f"{name}: the copies of it that ranks have differ, and none is the right one"
    )


def _unknown(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: it is not known here how Megatron-LM cuts it for tensor parallelism",
        hint="tensor_model_parallel_size: 1, or its torch_dist format, can be had",
    )
