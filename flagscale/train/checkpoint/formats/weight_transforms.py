"""Transforms between megatron.core's weights and Hugging Face's: fusing, transposing, stacking.

All are lossless and work on lazy tensors. :mod:`.weight_mappings` assigns them to tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flagscale.train.checkpoint.formats.lazy_tensors import (
    ConcatenatedRows,
    LazyTensor,
    MtpSharedTensor,
    RowSlice,
    Shape,
    StackedTensor,
    TensorItem,
    TransposedTensor,
    concatenate_rows,
    slice_rows,
)


@dataclass(frozen=True)
class ModelSizes:
    """Dimensions of a model from which the shapes of its tensors follow.

    ``groups`` is the number of query groups, which equals the number of key (or value) heads.
    """

    vocabulary: int
    positions: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn_hidden: int
    expert_ffn_hidden: int
    experts: int
    shared_expert_ffn_hidden: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    @classmethod
    def from_arguments(cls, values: Mapping[str, Any]) -> ModelSizes:
        """Take the sizes from fully resolved arguments (``huggingface.models.effective``)."""
        return cls(
            vocabulary=values["vocab_size"],
            positions=values["max_position_embeddings"] or 0,
            hidden=values["hidden_size"],
            heads=values["num_attention_heads"],
            groups=values["num_query_groups"],
            head_dim=values["kv_channels"],
            ffn_hidden=values["ffn_hidden_size"],
            expert_ffn_hidden=values["moe_ffn_hidden_size"] or 0,
            experts=values["num_moe_experts"] or 0,
            shared_expert_ffn_hidden=values["moe_shared_expert_intermediate_size"] or 0,
            q_lora_rank=values["q_lora_rank"] or 0,
            kv_lora_rank=values["kv_lora_rank"],
            qk_nope_head_dim=values["qk_head_dim"],
            qk_rope_head_dim=values["qk_pos_emb_head_dim"],
            v_head_dim=values["v_head_dim"],
        )

    def shape(self, dimensions: str) -> Shape:
        """Evaluate a shape such as ``V,H``, written in the letters of :mod:`.weight_mappings`."""
        sizes = {
            "V": self.vocabulary,
            "P": self.positions,
            "H": self.hidden,
            "A": self.heads * self.head_dim,
            "G": self.groups * self.head_dim,
            "D": self.head_dim,
            "F": self.ffn_hidden,
            "E": self.expert_ffn_hidden,
            "N": self.experts,
            "S": self.shared_expert_ffn_hidden,
            "Q": self.q_lora_rank,
            "L": self.kv_lora_rank,
            "M": self.kv_lora_rank + self.qk_rope_head_dim,
            "T": self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim),
            "U": self.heads * (self.qk_nope_head_dim + self.v_head_dim),
            "W": self.heads * self.v_head_dim,
        }
        return tuple(
            int(dimension[:-1] or 1) * sizes[dimension[-1]] for dimension in dimensions.split(",")
        )


class WeightTransform(Protocol):
    """Lossless transform between one megatron.core tensor and one or more Hugging Face tensors."""

    def to_megatron(self, parts: Sequence[LazyTensor], sizes: ModelSizes) -> LazyTensor:
        """Build megatron.core's tensor from Hugging Face's."""

    def to_huggingface(self, tensor: LazyTensor, sizes: ModelSizes) -> Sequence[LazyTensor]:
        """Build Hugging Face's tensors from megatron.core's."""


class _Identity:
    """Transform for a tensor that is the same in both programs."""

    def to_megatron(self, parts: Sequence[LazyTensor], sizes: ModelSizes) -> LazyTensor:
        return parts[0]

    def to_huggingface(self, tensor: LazyTensor, sizes: ModelSizes) -> Sequence[LazyTensor]:
        return [tensor]


class _Transpose:
    """Transform for a matrix that Hugging Face stores transposed (GPT-2's ``Conv1D``)."""

    def to_megatron(self, parts: Sequence[LazyTensor], sizes: ModelSizes) -> LazyTensor:
        return TransposedTensor(parts[0])

    def to_huggingface(self, tensor: LazyTensor, sizes: ModelSizes) -> Sequence[LazyTensor]:
        return [TransposedTensor(tensor)]


class _TrimVocabulary:
    """Transform for a tensor to which megatron.core may add rows that pad the vocabulary."""

    def to_megatron(self, parts: Sequence[LazyTensor], sizes: ModelSizes) -> LazyTensor:
        return parts[0]

    def to_huggingface(self, tensor: LazyTensor, sizes: ModelSizes) -> Sequence[LazyTensor]:
        if tensor.shape[0] == sizes.vocabulary:
            return [tensor]
        return [slice_rows(tensor, 0, min(sizes.vocabulary, tensor.shape[0]))]


class _GateAndUp:
    """Transform for gate and up projection, which megatron.core concatenates."""

    def to_megatron(self, parts: Sequence[LazyTensor], sizes: ModelSizes) -> LazyTensor:
        return concatenate_rows(parts)

    def to_huggingface(self, tensor: LazyTensor, sizes: ModelSizes) -> Sequence[LazyTensor]:
        half = tensor.shape[0] // 2
        return [slice_rows(tensor, 0, half), slice_rows(tensor, half, half)]


class _GroupedQkv:
    """Transform for query, key and value: separate in Hugging Face, interleaved in megatron.core.

    megatron.core stores one query group after the other, each with its queries, its key and its
    value.
    """

    def to_megatron(self, parts: Sequence[LazyTensor], sizes: ModelSizes) -> LazyTensor:
        queries, keys, values = parts
        head_rows = sizes.head_dim
        query_rows = sizes.heads // sizes.groups * head_rows
        return ConcatenatedRows(
            tuple(
                row_slice
                for group in range(sizes.groups)
                for row_slice in (
                    RowSlice(queries, group * query_rows, query_rows),
                    RowSlice(keys, group * head_rows, head_rows),
                    RowSlice(values, group * head_rows, head_rows),
                )
            )
        )

    def to_huggingface(self, tensor: LazyTensor, sizes: ModelSizes) -> Sequence[LazyTensor]:
        head_rows = sizes.head_dim
        query_rows = sizes.heads // sizes.groups * head_rows
        group_rows = query_rows + 2 * head_rows
        return [
            ConcatenatedRows(
                tuple(
                    RowSlice(tensor, group * group_rows + begin, count)
                    for group in range(sizes.groups)
                )
            )
            for begin, count in (
                (0, query_rows),
                (query_rows, head_rows),
                (query_rows + head_rows, head_rows),
            )
        ]


class _Conv1dQkv:
    """Transform for query, key and value projection that are one tensor in Hugging Face (GPT-2).

    Weights are ``[in, out]``, with all queries before all keys and all values.
    """

    def to_megatron(self, parts: Sequence[LazyTensor], sizes: ModelSizes) -> LazyTensor:
        fused = TransposedTensor(parts[0]) if len(parts[0].shape) == 2 else parts[0]
        query_rows = sizes.heads * sizes.head_dim
        key_rows = sizes.groups * sizes.head_dim
        separate = [
            slice_rows(fused, 0, query_rows),
            slice_rows(fused, query_rows, key_rows),
            slice_rows(fused, query_rows + key_rows, key_rows),
        ]
        return GROUPED_QKV.to_megatron(separate, sizes)

    def to_huggingface(self, tensor: LazyTensor, sizes: ModelSizes) -> Sequence[LazyTensor]:
        fused = concatenate_rows(GROUPED_QKV.to_huggingface(tensor, sizes))
        return [TransposedTensor(fused) if len(tensor.shape) == 2 else fused]


@dataclass(frozen=True)
class _PerExpert:
    """Transform for all experts of a layer, which megatron.core stacks in one tensor.

    Attributes:
        transform: transform for one expert.
        tensors_per_expert: number of Hugging Face tensors per expert.
    """

    transform: WeightTransform
    tensors_per_expert: int

    def to_megatron(self, parts: Sequence[LazyTensor], sizes: ModelSizes) -> LazyTensor:
        experts = [
            parts[i : i + self.tensors_per_expert]
            for i in range(0, len(parts), self.tensors_per_expert)
        ]
        return StackedTensor(tuple(self.transform.to_megatron(expert, sizes) for expert in experts))

    def to_huggingface(self, tensor: LazyTensor, sizes: ModelSizes) -> Sequence[LazyTensor]:
        tensors: list[LazyTensor] = []
        for expert in range(tensor.shape[0]):
            tensors += self.transform.to_huggingface(TensorItem(tensor, expert), sizes)
        return tensors


@dataclass(frozen=True)
class MtpRepeated:
    """Transform for a tensor that Hugging Face repeats in each multi-token prediction layer.

    Attributes:
        transform: transform for one tensor.
        repetitions: number of repetitions, including the model's own tensor.
    """

    transform: WeightTransform
    repetitions: int

    def to_megatron(self, parts: Sequence[LazyTensor], sizes: ModelSizes) -> LazyTensor:
        return self.transform.to_megatron([MtpSharedTensor(tuple(parts))], sizes)

    def to_huggingface(self, tensor: LazyTensor, sizes: ModelSizes) -> Sequence[LazyTensor]:
        return [*self.transform.to_huggingface(tensor, sizes)] * self.repetitions


IDENTITY = _Identity()
TRANSPOSE = _Transpose()
TRIM_VOCABULARY = _TrimVocabulary()
GATE_AND_UP = _GateAndUp()
GROUPED_QKV = _GroupedQkv()
CONV1D_QKV = _Conv1dQkv()


def apply_per_expert(transform: WeightTransform) -> WeightTransform:
    """Return a transform that applies ``transform`` to every expert of a layer."""
    return _PerExpert(transform, 2 if transform is GATE_AND_UP else 1)
