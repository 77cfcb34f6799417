"""Megatron-LM's conventions: names of tensors and arguments, sharding, files of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flagscale.config.arguments.compat.huggingface.models import MODEL_FUNCTION, MTP_LAYERS
from flagscale.config.arguments.spec.model_arguments import ARCHITECTURE_OPTIONS
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.lazy_tensors import (
    LazyTensor,
    ReplicatedTensor,
    TransposedTensor,
    concatenate_rows,
    slice_rows,
)
from flagscale.train.checkpoint.formats.megatron_unpickler import UnknownObject

_TOKENIZERS_WITHOUT_EOD = ("NullTokenizer", "NullMultimodalTokenizer")
"""Tokenizers whose ``vocab_size`` does not include the end-of-document token."""
FILE = "model_optim_rng.pt"
"""File in each rank's directory."""
RELEASE = "release"
"""Directory of a checkpoint without an iteration. Megatron-LM loads only its weights."""
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
EXPERT = re.compile(r"(.*\.mlp\.experts\.)experts\.(linear_fc[12])\.(weight)")
"""Name of the tensor that stacks all experts of a layer."""
ALIASES = {
    "num_moe_experts": ("num_experts",),
    "layernorm_epsilon": ("layernorm_epsilon", "norm_epsilon"),
    "layernorm_zero_centered_gamma": ("layernorm_zero_centered_gamma", "apply_layernorm_1p"),
    "bias_activation_fusion": ("bias_gelu_fusion",),
}
"""Megatron-LM's names of arguments that differ from this project's. Later names are of older
versions.
"""
_QUERIES_AND_KEYS = "self_attention.linear_qkv.layer_norm_"
_BEFORE_MLP = "mlp.linear_fc1.layer_norm_"
_LOCAL_NORMS = {_QUERIES_AND_KEYS: "input_layernorm.", _BEFORE_MLP: "pre_mlp_layernorm."}
"""Names of norms in Transformer Engine's dense layers, and in local or mixture-of-experts layers.
"""
_LATENT_ATTENTION_NORMS = {
    "pre_mlp_layernorm.": _BEFORE_MLP,
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Names of norms in local and in Transformer Engine layers, with multi-latent attention."""
_MISSING_FEATURES = {
    "sandwich_norm": "norms behind attention and MLP",
    "scale_embeddings": "embeddings that are multiplied by the root of the width",
    "attn_logit_softcapping": "a bound of attention's scores",
    "final_logit_softcapping": "a bound of the logits",
    "window_rotary_base": "a rotary base of layers with windows",
}
"""Features of :data:`OWN` that Megatron-LM's layers lack."""
_LATENT_DOWN = re.compile(r".*\.linear_(q|kv)_down_proj\.weight")
"""Replicated with Transformer Engine, sharded by rows in local layers."""
_COLUMN_PARALLEL = re.compile(
    r".*(linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|word_embeddings|output_layer)"
    r"\.(weight|bias)"
)
_FC1 = re.compile(r".*linear_fc1\.(weight|bias)")
_ROW_PARALLEL = re.compile(r".*(linear_proj|linear_fc2)\.weight")
_REPLICATED = re.compile(r".*(norm|router|position_embeddings).*|.*(linear_proj|linear_fc2)\.bias")

_NOT_WEIGHTS = re.compile(
    r"(.*\.)?(_extra_state.*|inv_freq|(cos|sin)_cached|(local|global)_tokens_per_expert|ga_steps)"
    r"|(chained_\d+\.)?optimizer\..*|rng_state.*|opt_param_scheduler.*|rerun_state_machine.*"
)
"""Tensors next to a model's weights that do not affect its function."""


@dataclass(frozen=True)
class MegatronLayout:
    """Parallel layout of a Megatron-LM checkpoint.

    Attributes:
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        expert: expert-parallel size.
        chunks: model chunks (virtual stages) per pipeline stage.
        first: number of layers of the first stage, if it differs.
        last: number of layers of the last stage, if it differs.
        transformer_engine: layers are Transformer Engine's, not local ones.
        grouped_gemm: experts of a layer are a grouped GEMM of Transformer Engine.
        rows: the vocabulary is padded to a multiple of this per tensor-parallel rank.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    chunks: int = 1
    first: int | None = None
    last: int | None = None
    transformer_engine: bool = True
    grouped_gemm: bool = False
    rows: int = 1

    def split_layers(self, count: int) -> list[list[int]]:
        """List the layers of every model chunk, in the order of layers.

        Raises:
            CheckpointError: ``count`` layers cannot be distributed over the stages.
        """
        ends = [self.first, self.last]
        fixed = [size for size in ends if size is not None]
        if fixed and self.chunks > 1:
            raise CheckpointError("stages of unlike sizes are written with one chunk a stage")
        chunks_left = self.pipeline * self.chunks - len(fixed)
        layers_left = count - sum(fixed)
        if (
            chunks_left < 0
            or min([layers_left, *fixed]) < 0
            or (layers_left % chunks_left if chunks_left else layers_left)
        ):
            raise CheckpointError(
                f"{count} layers cannot be shared out over {self.pipeline} stages of {self.chunks} "
                f"chunks{f', of which {fixed} are given' if fixed else ''}: expected a multiple"
            )
        sizes = [layers_left // chunks_left if chunks_left else 0] * chunks_left
        sizes = [*ends[:1], *sizes, *ends[1:]] if fixed else sizes  # type: ignore[list-item]
        chunks, begin = [], 0
        for size in [size for size in sizes if size is not None]:
            chunks.append(list(range(begin, begin + size)))
            begin += size
        return chunks

    def directory(self, coordinates: Sequence[int]) -> str:
        """Return a rank's directory name; ``coordinates``: tensor, pipeline and expert-parallel
        rank.
        """
        name = f"mp_rank_{coordinates[0]:02d}"
        name += f"_{coordinates[1]:03d}" if self.pipeline > 1 else ""
        return name + (f"_{coordinates[2]:03d}" if self.expert > 1 else "")

    def pad_vocabulary(self, vocabulary: int) -> int:
        """Return the number of rows of the embedding and the output layer for a vocabulary size."""
        step = self.rows * self.tensor
        return -(-vocabulary // step) * step


def find_rank_file(path: Path, layout: MegatronLayout, coordinates: Sequence[int]) -> Path:
    """Return the path of a rank's file.

    Raises:
        CheckpointError: the file does not exist.
    """
    file = path / layout.directory(coordinates) / FILE
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    return file


def extract_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Extract the arguments that determine the model's function, under this project's names.

    The values are not validated; :mod:`.megatron_arguments` does that.
    """
    values = {}
    for name in MODEL_FUNCTION:
        candidates = (args.get(alias) for alias in ALIASES.get(name, (name,)))
        value = next((one for one in candidates if one is not None), None)
        if name in ALIASES and value is None:
            value = args.get(name)
        if value is not None and not isinstance(value, UnknownObject):
            values[name] = list(value) if isinstance(value, tuple) else value
    if not args.get("group_query_attention"):
        values["num_query_groups"] = values.get("num_attention_heads")
    if args.get("q_lora_rank", 0) is None:
        values["q_lora_rank"] = (
            None  # None differs from a missing value: queries are not compressed
        )
    # The number of tokens without padding, if the checkpoint records it.
    sizes = (args.get("padded_vocab_size"), args.get("vocab_size"))
    padded, tokens = (0 if isinstance(size, UnknownObject) else int(size or 0) for size in sizes)
    tokens = tokens or padded
    if args.get("tokenizer_type") in _TOKENIZERS_WITHOUT_EOD and tokens < padded:
        tokens += 1
    values["vocab_size"] = tokens
    return values


def build_megatron_arguments(values: Mapping[str, Any], layout: MegatronLayout) -> dict[str, Any]:
    """Build Megatron-LM's arguments of a checkpoint from this project's."""
    arguments = dict(values)
    for ours, theirs in ALIASES.items():
        arguments.update(dict.fromkeys(theirs, values[ours]))
    tensor, expert = layout.tensor, layout.expert
    return {
        **arguments,
        "add_position_embedding": True,  # Megatron-LM's default, whatever the embedding
        "ckpt_format": "torch",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "decoder_first_pipeline_num_layers": layout.first,
        "decoder_last_pipeline_num_layers": layout.last,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": tensor,
        "group_query_attention": values["num_query_groups"] != values["num_attention_heads"],
        "make_vocab_size_divisible_by": layout.rows,
        "moe_grouped_gemm": layout.grouped_gemm,
        "padded_vocab_size": layout.pad_vocabulary(values["vocab_size"]),
        "pipeline_model_parallel_size": layout.pipeline,
        "tensor_model_parallel_size": tensor,
        "transformer_impl": "transformer_engine" if layout.transformer_engine else "local",
        "virtual_pipeline_model_parallel_size": layout.chunks if layout.chunks > 1 else None,
    }


def build_precision_arguments(dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments that record the dtype of the tensors."""
    return {
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }


def require_megatron_support(values: Mapping[str, Any], path: Path) -> None:
    """Refuse a model with features that Megatron-LM does not have.

    Raises:
        CheckpointError: the model has such features; ``path`` is named.
    """
    problems = [
        f"{name}: its layers lack {_MISSING_FEATURES.get(name, name)}"
        for name in ARCHITECTURE_OPTIONS
        if values[name]
    ]
    if problems:
        raise CheckpointError(
            f"{path}: Megatron-LM has no such model: {'; '.join(problems)}",
            hint="Hugging Face's format and this project's have it",
        )


def is_weight(name: str, args: Mapping[str, Any]) -> bool:
    """Return whether a tensor is needed for the model's function.

    Training state is not, and neither are multi-token prediction layers if the arguments have some.
    """
    return not _NOT_WEIGHTS.fullmatch(name) and not (
        args.get(MTP_LAYERS) and name.startswith("mtp.")
    )


def iter_spellings(name: str) -> Iterator[str]:
    """Yield the names that a tensor may have in Megatron-LM."""
    yield name
    for local_name, alternative in (*_LOCAL_NORMS.items(), *_LATENT_ATTENTION_NORMS.items()):
        if local_name in name:
            yield name.replace(local_name, alternative)


def spell_for_layer(
    name: str, values: Mapping[str, Any], layer: int, *, transformer_engine: bool
) -> str:
    """Return the name that a layer's tensor has in Megatron-LM.

    Args:
        name: this project's name.
        values: the model's arguments.
        layer: number of the layer in the model.
        transformer_engine: the layer is Transformer Engine's.
    """
    sparse = bool(values["num_moe_experts"] and values["moe_layer_freq"][layer])
    renamed = _LOCAL_NORMS
    if transformer_engine and values["multi_latent_attention"]:
        renamed = {
            old: new
            for old, new in _LATENT_ATTENTION_NORMS.items()
            if new != _BEFORE_MLP or not sparse
        }
    elif transformer_engine:
        renamed = {old: new for old, new in _LOCAL_NORMS.items() if old == _BEFORE_MLP and sparse}
    for old, new in renamed.items():
        if old in name:
            return name.replace(old, new)
    return name


def spell_expert(name: str, expert: int) -> tuple[str, str] | None:
    """Return the names of one expert's tensor: as a separate layer, and in a grouped GEMM.

    Returns:
        None if ``name`` is not a tensor of experts.
    """
    match = EXPERT.fullmatch(name)
    if match is None:
        return None
    prefix, layer, kind = match.groups()
    return f"{prefix}local_experts.{expert}.{layer}.{kind}", f"{prefix}{layer}.{kind}{expert}"


@dataclass(frozen=True)
class PaddedTensor:
    """A tensor with additional rows of zeros at its end."""

    tensor: LazyTensor
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.tensor.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, region: Any) -> torch.Tensor:
        (begin, end), columns = region[0], region[1:]
        stored_rows = self.tensor.shape[0]
        stored = self.tensor.read(((min(begin, stored_rows), min(end, stored_rows)), *columns))
        if end <= stored_rows:
            return stored
        padding = end - max(begin, stored_rows)
        return torch.cat([stored, stored.new_zeros([padding, *stored.shape[1:]])])


def shard_tensor(
    name: str, tensor: LazyTensor, rank: int, ranks: int, *, gated: bool, transformer_engine: bool
) -> LazyTensor:
    """Return a tensor-parallel rank's shard of a tensor.

    Args:
        rank: tensor-parallel rank.
        ranks: tensor-parallel size.
        gated: fc1 is a gate and an up projection, each sharded separately.
        transformer_engine: the layers are Transformer Engine's.

    Raises:
        CheckpointError: the tensor cannot be sharded evenly, or its sharding is unknown.
    """
    if (
        ranks == 1
        or _REPLICATED.fullmatch(name)
        or (transformer_engine and _LATENT_DOWN.fullmatch(name))
    ):
        return tensor
    if _LATENT_DOWN.fullmatch(name):
        return _shard_rows(name, tensor, rank, ranks)
    if _ROW_PARALLEL.fullmatch(name):
        return TransposedTensor(_shard_rows(name, TransposedTensor(tensor), rank, ranks))
    if _FC1.fullmatch(name) and gated:
        half = tensor.shape[0] // 2
        sides = (slice_rows(tensor, begin, half) for begin in (0, half))
        return concatenate_rows([_shard_rows(name, side, rank, ranks) for side in sides])
    if _FC1.fullmatch(name) or _COLUMN_PARALLEL.fullmatch(name):
        return _shard_rows(name, tensor, rank, ranks)
    raise _unknown_sharding(name)


def _shard_rows(name: str, tensor: LazyTensor, rank: int, ranks: int) -> LazyTensor:
    count = tensor.shape[0]
    if count % ranks:
        raise CheckpointError(f"{name}: {count} rows cannot be cut for {ranks} ranks")
    return slice_rows(tensor, rank * (count // ranks), count // ranks)


def unshard_tensor(
    name: str, shards: Sequence[LazyTensor], whole_rows: int, *, gated: bool
) -> LazyTensor:
    """Assemble a tensor from the shards of all tensor-parallel ranks.

    Args:
        shards: shards in the order of ranks.
        whole_rows: number of rows of the whole tensor.
        gated: fc1 is a gate and an up projection, each sharded separately.

    Raises:
        CheckpointError: the sharding of the tensor is unknown.
    """
    if len(shards) == 1:
        return shards[0]
    if _REPLICATED.fullmatch(name) or (
        _LATENT_DOWN.fullmatch(name) and shards[0].shape[0] == whole_rows
    ):
        return merge_replicas(name, shards)
    if _LATENT_DOWN.fullmatch(name):
        return concatenate_rows(shards)
    if _ROW_PARALLEL.fullmatch(name):
        return TransposedTensor(concatenate_rows([TransposedTensor(part) for part in shards]))
    if _FC1.fullmatch(name) and gated:
        half = shards[0].shape[0] // 2
        return concatenate_rows(
            [slice_rows(part, begin, half) for begin in (0, half) for part in shards]
        )
    if _FC1.fullmatch(name) or _COLUMN_PARALLEL.fullmatch(name):
        return concatenate_rows(shards)
    raise _unknown_sharding(name)


def merge_replicas(name: str, parts: Sequence[LazyTensor]) -> LazyTensor:
    """Return a tensor that several ranks hold completely; its copies are compared as it is read."""
    if len(parts) == 1:
        return parts[0]
    return ReplicatedTensor(
        tuple(parts), f"{name}: the copies of it that ranks have differ, and none is the right one"
    )


def _unknown_sharding(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: it is not known here how Megatron-LM cuts it for tensor parallelism",
        hint="tensor_model_parallel_size: 1, or its torch_dist format, can be had",
    )
