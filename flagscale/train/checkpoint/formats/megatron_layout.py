"""Megatron-LM's conventions: names of tensors and arguments, sharding, files of ranks.

"Local" layers are megatron.core's own implementation, in contrast to Transformer Engine's; norms
have other names in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
RANK_FILE = "model_optim_rng.pt"
"""File in each rank's directory."""
RELEASE_DIRECTORY = "release"
"""Directory of a checkpoint without an iteration. Megatron-LM loads only its weights."""
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
EXPERT_TENSOR = re.compile(r"(.*\.mlp\.experts\.)experts\.(linear_fc[12])\.(weight)")
"""Name of the tensor that stacks all experts of a layer."""
ARGUMENT_ALIASES = {
    "num_moe_experts": ("num_experts",),
    "layernorm_epsilon": ("layernorm_epsilon", "norm_epsilon"),
    "layernorm_zero_centered_gamma": ("layernorm_zero_centered_gamma", "apply_layernorm_1p"),
    "bias_activation_fusion": ("bias_gelu_fusion",),
}
"""Megatron-LM's names of arguments that differ from this project's. Later names are of older
versions.
"""
_FUSED_QKV_NORM = "self_attention.linear_qkv.layer_norm_"
_FUSED_MLP_NORM = "mlp.linear_fc1.layer_norm_"
_LOCAL_NORMS = {_FUSED_QKV_NORM: "input_layernorm.", _FUSED_MLP_NORM: "pre_mlp_layernorm."}
"""Names of norms in Transformer Engine's dense layers, and in local or mixture-of-experts layers.
"""
_LATENT_ATTENTION_NORMS = {
    "pre_mlp_layernorm.": _FUSED_MLP_NORM,
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
_LATENT_DOWN_PROJECTION = re.compile(r".*\.linear_(q|kv)_down_proj\.weight")
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


class RankCoordinates(NamedTuple):
    """Position of a rank in each kind of parallelism that divides the model."""

    tensor: int
    pipeline: int
    expert: int


@dataclass(frozen=True)
class MegatronLayout:
    """Parallel layout of a Megatron-LM checkpoint.

    Attributes:
        tensor_parallel: tensor-parallel size.
        pipeline_parallel: pipeline-parallel size.
        expert_parallel: expert-parallel size.
        chunks_per_stage: model chunks (virtual stages) per pipeline stage.
        first_stage_layers: number of layers of the first stage, if different from the others.
        last_stage_layers: number of layers of the last stage, if different from the others.
        transformer_engine: layers are Transformer Engine's, not local ones.
        grouped_gemm: experts of a layer are a grouped GEMM of Transformer Engine.
        vocabulary_multiple: each tensor-parallel rank's part of the vocabulary is padded to a
            multiple of this.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    chunks_per_stage: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    transformer_engine: bool = True
    grouped_gemm: bool = False
    vocabulary_multiple: int = 1

    def split_layers(self, layer_count: int) -> list[list[int]]:
        """Return the layer numbers of every model chunk, in the order of layers.

        Args:
            layer_count: number of layers of the model.

        Raises:
            CheckpointError: the layers cannot be distributed over the stages.
        """
        end_sizes = [self.first_stage_layers, self.last_stage_layers]
        fixed_sizes = [chunk_size for chunk_size in end_sizes if chunk_size is not None]
        if fixed_sizes and self.chunks_per_stage > 1:
            raise CheckpointError("stages of different sizes require one chunk per stage")
        chunks_left = self.pipeline_parallel * self.chunks_per_stage - len(fixed_sizes)
        layers_left = layer_count - sum(fixed_sizes)
        if (
            chunks_left < 0
            or min([layers_left, *fixed_sizes]) < 0
            or (layers_left % chunks_left if chunks_left else layers_left)
        ):
            raise CheckpointError(
                f"{layer_count} layers cannot be divided over {self.pipeline_parallel} stages "
                f"of {self.chunks_per_stage} chunks"
                f"{f', of which {fixed_sizes} are given' if fixed_sizes else ''}: "
                "expected a multiple"
            )
        sizes = [layers_left // chunks_left if chunks_left else 0] * chunks_left
        if fixed_sizes:
            sizes = [*end_sizes[:1], *sizes, *end_sizes[1:]]  # type: ignore[list-item]
        chunks, begin = [], 0
        for size in [size for size in sizes if size is not None]:
            chunks.append(list(range(begin, begin + size)))
            begin += size
        return chunks

    def directory_name(self, rank: RankCoordinates) -> str:
        """Return a rank's directory name."""
        name = f"mp_rank_{rank.tensor:02d}"
        name += f"_{rank.pipeline:03d}" if self.pipeline_parallel > 1 else ""
        return name + (f"_{rank.expert:03d}" if self.expert_parallel > 1 else "")

    def pad_vocabulary(self, vocabulary: int) -> int:
        """Return the number of rows of the embedding and the output layer for a vocabulary size."""
        multiple = self.vocabulary_multiple * self.tensor_parallel
        return -(-vocabulary // multiple) * multiple


def find_rank_file(path: Path, layout: MegatronLayout, rank: RankCoordinates) -> Path:
    """Return the path of a rank's file.

    Raises:
        CheckpointError: the file does not exist.
    """
    file = path / layout.directory_name(rank) / RANK_FILE
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    return file


def extract_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Extract the arguments that determine the model's function, under this project's names.

    The values are not validated; :mod:`.megatron_arguments` does that.
    """
    values = {}
    for name in MODEL_FUNCTION:
        candidates = (args.get(alias) for alias in ARGUMENT_ALIASES.get(name, (name,)))
        value = next((one for one in candidates if one is not None), None)
        if name in ARGUMENT_ALIASES and value is None:
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
    padded_size, token_count = (
        0 if isinstance(size, UnknownObject) else int(size or 0) for size in sizes
    )
    token_count = token_count or padded_size
    if args.get("tokenizer_type") in _TOKENIZERS_WITHOUT_EOD and token_count < padded_size:
        token_count += 1
    values["vocab_size"] = token_count
    return values


def build_megatron_arguments(values: Mapping[str, Any], layout: MegatronLayout) -> dict[str, Any]:
    """Build Megatron-LM's arguments of a checkpoint from this project's."""
    arguments = dict(values)
    for project_name, megatron_names in ARGUMENT_ALIASES.items():
        arguments.update(dict.fromkeys(megatron_names, values[project_name]))
    tensor, expert = layout.tensor_parallel, layout.expert_parallel
    return {
        **arguments,
        "add_position_embedding": True,  # Megatron-LM's default, whatever the embedding
        "ckpt_format": "torch",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "decoder_first_pipeline_num_layers": layout.first_stage_layers,
        "decoder_last_pipeline_num_layers": layout.last_stage_layers,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": tensor,
        "group_query_attention": values["num_query_groups"] != values["num_attention_heads"],
        "make_vocab_size_divisible_by": layout.vocabulary_multiple,
        "moe_grouped_gemm": layout.grouped_gemm,
        "padded_vocab_size": layout.pad_vocabulary(values["vocab_size"]),
        "pipeline_model_parallel_size": layout.pipeline_parallel,
        "tensor_model_parallel_size": tensor,
        "transformer_impl": "transformer_engine" if layout.transformer_engine else "local",
        "virtual_pipeline_model_parallel_size": layout.chunks_per_stage
        if layout.chunks_per_stage > 1
        else None,
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

    Training state is not needed. Multi-token prediction layers are not needed either, if the
    arguments announce some.
    """
    return not _NOT_WEIGHTS.fullmatch(name) and not (
        args.get(MTP_LAYERS) and name.startswith("mtp.")
    )


def iter_spellings(name: str) -> Iterator[str]:
    """Yield the names that a tensor may have in Megatron-LM, depending on the implementation."""
    yield name
    for local_name, alternative in (*_LOCAL_NORMS.items(), *_LATENT_ATTENTION_NORMS.items()):
        if local_name in name:
            yield name.replace(local_name, alternative)


def spell_for_layer(
    name: str, values: Mapping[str, Any], layer_number: int, *, transformer_engine: bool
) -> str:
    """Return the name that a layer's tensor has in Megatron-LM.

    Args:
        name: this project's name.
        values: the model's arguments.
        layer_number: number of the layer in the model.
        transformer_engine: the layer is Transformer Engine's.
    """
    has_experts = bool(values["num_moe_experts"] and values["moe_layer_freq"][layer_number])
    new_names = _LOCAL_NORMS
    if transformer_engine and values["multi_latent_attention"]:
        new_names = {
            old: new
            for old, new in _LATENT_ATTENTION_NORMS.items()
            if new != _FUSED_MLP_NORM or not has_experts
        }
    elif transformer_engine:
        new_names = {
            old: new for old, new in _LOCAL_NORMS.items() if old == _FUSED_MLP_NORM and has_experts
        }
    for old, new in new_names.items():
        if old in name:
            return name.replace(old, new)
    return name


class ExpertNames(NamedTuple):
    """Names of one expert's tensor."""

    separate: str
    """With a separate layer for each expert."""
    grouped: str
    """With a grouped GEMM of all experts."""


def spell_expert(name: str, expert: int) -> ExpertNames | None:
    """Return the names of one expert's tensor; None if ``name`` is not a tensor of experts."""
    match = EXPERT_TENSOR.fullmatch(name)
    if match is None:
        return None
    prefix, layer, kind = match.groups()
    return ExpertNames(
        separate=f"{prefix}local_experts.{expert}.{layer}.{kind}",
        grouped=f"{prefix}{layer}.{kind}{expert}",
    )


@dataclass(frozen=True)
class PaddedTensor:
    """A tensor with rows of zeros appended, up to ``padded_rows`` rows."""

    tensor: LazyTensor
    padded_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.padded_rows, *self.tensor.shape[1:])

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
    name: str,
    tensor: LazyTensor,
    rank: int,
    rank_count: int,
    *,
    gated: bool,
    transformer_engine: bool,
) -> LazyTensor:
    """Return a tensor-parallel rank's shard of a tensor.

    Args:
        name: name of the tensor.
        tensor: the whole tensor.
        rank: tensor-parallel rank.
        rank_count: tensor-parallel size.
        gated: fc1 is a gate and an up projection, each sharded separately.
        transformer_engine: the layers are Transformer Engine's.

    Raises:
        CheckpointError: the tensor cannot be sharded evenly, or its sharding is unknown.
    """
    if (
        rank_count == 1
        or _REPLICATED.fullmatch(name)
        or (transformer_engine and _LATENT_DOWN_PROJECTION.fullmatch(name))
    ):
        return tensor
    if _LATENT_DOWN_PROJECTION.fullmatch(name):
        return _shard_rows(name, tensor, rank, rank_count)
    if _ROW_PARALLEL.fullmatch(name):
        return TransposedTensor(_shard_rows(name, TransposedTensor(tensor), rank, rank_count))
    if _FC1.fullmatch(name) and gated:
        half_rows = tensor.shape[0] // 2
        halves = (slice_rows(tensor, begin, half_rows) for begin in (0, half_rows))
        return concatenate_rows([_shard_rows(name, side, rank, rank_count) for side in halves])
    if _FC1.fullmatch(name) or _COLUMN_PARALLEL.fullmatch(name):
        return _shard_rows(name, tensor, rank, rank_count)
    raise _unknown_sharding(name)


def _shard_rows(name: str, tensor: LazyTensor, rank: int, rank_count: int) -> LazyTensor:
    row_count = tensor.shape[0]
    if row_count % rank_count:
        raise CheckpointError(
            f"{name}: {row_count} rows cannot be divided between {rank_count} ranks"
        )
    return slice_rows(tensor, rank * (row_count // rank_count), row_count // rank_count)


def unshard_tensor(
    name: str, shards: Sequence[LazyTensor], whole_rows: int, *, gated: bool
) -> LazyTensor:
    """Assemble a tensor from the shards of all tensor-parallel ranks.

    Args:
        name: name of the tensor.
        shards: shards in the order of ranks.
        whole_rows: number of rows of the whole tensor.
        gated: fc1 is a gate and an up projection, each sharded separately.

    Raises:
        CheckpointError: the sharding of the tensor is unknown.
    """
    if len(shards) == 1:
        return shards[0]
    if _REPLICATED.fullmatch(name) or (
        _LATENT_DOWN_PROJECTION.fullmatch(name) and shards[0].shape[0] == whole_rows
    ):
        return merge_replicas(name, shards)
    if _LATENT_DOWN_PROJECTION.fullmatch(name):
        return concatenate_rows(shards)
    if _ROW_PARALLEL.fullmatch(name):
        return TransposedTensor(concatenate_rows([TransposedTensor(shard) for shard in shards]))
    if _FC1.fullmatch(name) and gated:
        half_rows = shards[0].shape[0] // 2
        return concatenate_rows(
            [slice_rows(part, begin, half_rows) for begin in (0, half_rows) for part in shards]
        )
    if _FC1.fullmatch(name) or _COLUMN_PARALLEL.fullmatch(name):
        return concatenate_rows(shards)
    raise _unknown_sharding(name)


def merge_replicas(name: str, replicas: Sequence[LazyTensor]) -> LazyTensor:
    """Return a tensor that several ranks hold completely; its copies are compared as it is read."""
    if len(replicas) == 1:
        return replicas[0]
    return ReplicatedTensor(
        tuple(replicas),
        f"{name}: the copies of it that ranks have differ, and none is the right one",
    )


def _unknown_sharding(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: its sharding for tensor parallelism in Megatron-LM is unknown",
        hint="use tensor_model_parallel_size: 1, or Megatron-LM's torch_dist format",
    )
