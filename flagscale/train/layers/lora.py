"""LoRA adapters for parallel linear layers (Hu et al., "LoRA", 2021).

The weight W of a layer is frozen. Trained are A [rank, in] and B [out, rank], and the output is
``W x + alpha / rank · B A x``. B starts at zero, so that training starts from the base model. The
matrix on the side that tensor parallelism splits is split with W. The other one is replicated, and
the tensor that ranks communicate between them has only ``rank`` features.

Each expert of a mixture has adapters of its own. The token dispatcher gathers the tokens for all
tensor-parallel ranks of experts and adds up their partial outputs, so an expert's layers do not
communicate. Only the gradient of the replicated matrix, a partial sum, is reduced over those ranks.
The same holds for shared experts that overlap with the dispatcher (``moe_shared_expert_overlap``).

A layer may combine several layers of Hugging Face's model, for example query, key and value
projection. If only some of them get an adapter, the rows of B for the others stay zero: in every
layout, for every optimizer, in checkpoints and when merged.

Dropout applies to ``x``, or to the output of the adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import mappings, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional

from flagscale.config.arguments.rules.adapters import FC1, HUGGINGFACE_LAYERS, QKV
from flagscale.train.layers import collectives
from flagscale.train.layers.grouped_experts import GroupedWeight, multiply_experts
from flagscale.train.layers.linear import AccumulatingColumnLinear, AccumulatingRowLinear
from flagscale.train.layers.mla import (
    AccumulatingKeyDownProjection,
    AccumulatingQueryDownProjection,
    KeyDownProjection,
    QueryDownProjection,
)

LORA_A, LORA_B = "lora_a", "lora_b"
_SPLIT_DIMENSION = {LORA_A: 1, LORA_B: 0}
"""Dimension along which a matrix is split over tensor-parallel ranks, if it is split."""
_UNSPLIT_DIMENSION = -1
"""megatron.core's dimension of a parameter that is not split."""
_GROUPED_RANK_MULTIPLE = 8
"""Multiple to which the rank is padded with zeros in grouped GEMMs, whose rows must be aligned."""
_EXCLUDED_MODULES = ("mtp",)
"""Modules whose layers get no adapters."""


@dataclass(frozen=True)
class LoraConfig:
    """Configuration of an adapter.

    Attributes:
        rank: inner dimension.
        alpha: the output is scaled by ``alpha / rank``.
        dropout: dropout probability in training.
        dropout_on_output: whether dropout applies to the adapter's output instead of its input.
        init_method: initialization of A (``lora_in_init_method``).
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    dropout_on_output: bool = False
    init_method: str = "kaiming"

    def initial_std(self, in_features: int) -> float:
        """Return the standard deviation of A's initial values for a number of input features."""
        standard_deviations = {
            "kaiming": 1.0 / math.sqrt(3.0 * in_features),  # as of peft's uniform distribution
            "xavier": math.sqrt(2.0 / (in_features + self.rank)),  # Glorot and Bengio (2010)
            "normal": 0.2,  # as in Megatron-Bridge
        }
        return standard_deviations[self.init_method]


Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of tokens and a matrix, such as ``torch.nn.functional.linear``."""


class _LoraMixin:
    """Mixin that precedes the class of a parallel linear layer, or of the matrices of all experts.

    ``lora_split`` names the matrix that is split over tensor-parallel ranks.
    """

    lora_split: str
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    training: bool
    sequence_parallel: bool
    is_expert: bool
    explicit_expert_comm: bool
    config: Any
    tp_group: Any
    lora_a: torch.nn.Parameter
    lora_b: torch.nn.Parameter
    lora_zero_rows: torch.Tensor | None
    lora_config: LoraConfig
    lora_gated: bool

    def add_adapter(
        self,
        adapter: LoraConfig,
        zero_rows: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> None:
        """Add uninitialized A and B to the layer and freeze its other parameters.

        Args:
            adapter: configuration.
            zero_rows: rows of this rank's B that stay zero, [rows, 1], or None.
            gated: the layer is a gate and an up projection, which are split over ranks separately.
        """
        module: Any = self
        module.requires_grad_(False)
        *experts, rows, columns = self.weight.shape
        self.lora_a = torch.nn.Parameter(self.weight.new_zeros(*experts, adapter.rank, columns))
        self.lora_b = torch.nn.Parameter(self.weight.new_zeros(*experts, rows, adapter.rank))
        module.register_buffer("lora_zero_rows", zero_rows, persistent=False)
        self.lora_config, self.lora_gated = adapter, gated
        ranks = self.tp_group.size()
        for name, parameter in ((LORA_A, self.lora_a), (LORA_B, self.lora_b)):
            attributes: Any = parameter
            if name == self.lora_split:
                dimension = len(experts) + _SPLIT_DIMENSION[name]
                set_tensor_model_parallel_attributes(attributes, True, dimension, 1)
            elif self.is_expert:
                # Without these marks the gradient norm would count the experts of those ranks that
                # are the first tensor-parallel rank of other layers, and no others.
                set_tensor_model_parallel_attributes(attributes, True, _UNSPLIT_DIMENSION, 1)
                attributes.shared = self.tp_group.rank() > 0
            elif self._splits_sequence():
                # The gradient is a partial sum over this rank's part of the sequence.
                attributes.sequence_parallel = True
        lora_a: Any = self.lora_a
        lora_a.initial_std = adapter.initial_std(
            columns * (ranks if self.lora_split == LORA_A else 1)
        )

    def _communicates(self) -> bool:
        """Return whether tensor-parallel ranks communicate in the layer, not around it."""
        return self.tp_group.size() > 1 and not self.explicit_expert_comm

    def _splits_sequence(self) -> bool:
        """Return whether tokens outside of the layer are split over tensor-parallel ranks."""
        return self._communicates() and self.sequence_parallel

    def _use_matrix(self, name: str) -> torch.Tensor:
        """Return a matrix for this rank's computation.

        If the layer does not communicate, this rank's gradient of the replicated matrix is a
        partial sum, which is reduced in the backward pass.
        """
        matrix: torch.Tensor = getattr(self, name)
        if name == self.lora_split or self.tp_group.size() == 1 or self._communicates():
            return matrix
        reduced: torch.Tensor = mappings.copy_to_tensor_model_parallel_region(
            matrix, group=self.tp_group
        )
        return reduced

    def _project_down(
        self, input_: torch.Tensor, multiply: Multiply = functional.linear
    ) -> torch.Tensor:
        """Return ``A x``, where ``x`` is this rank's input of the layer."""
        if not self.lora_config.dropout_on_output:
            input_ = self._apply_dropout(input_, split=self.lora_split == LORA_A)
        return multiply(input_, self._use_matrix(LORA_A))

    def _project_up(
        self, low_rank: torch.Tensor, multiply: Multiply = functional.linear
    ) -> torch.Tensor:
        """Return ``alpha / rank · B low_rank``."""
        lora_b = self._use_matrix(LORA_B)
        if self.lora_zero_rows is not None:
            # The gradients of masked rows are zero, so no optimizer changes them.
            lora_b = lora_b.masked_fill(self.lora_zero_rows, 0.0)
        # Scaling the output, and its gradient, would read and write larger tensors.
        output = multiply(low_rank * (self.lora_config.alpha / self.lora_config.rank), lora_b)
        if self.lora_config.dropout_on_output:
            output = self._apply_dropout(output, split=self.lora_split == LORA_B)
        return output

    def _apply_dropout(self, tensor: torch.Tensor, *, split: bool) -> torch.Tensor:
        """Apply dropout in training.

        Ranks that hold different parts of the tensor, by ``split`` or by sequence, draw different
        masks.
        """
        if not (self.lora_config.dropout and self.training):
            return tensor
        rng_context: AbstractContextManager[Any] = nullcontext()
        if self.is_expert:
            # Ranks with other experts draw another number of values.
            name = get_expert_parallel_rng_tracker_name()
            rng_context = tensor_parallel.get_cuda_rng_tracker().fork(name)
        elif self.tp_group.size() > 1 and (split or self._splits_sequence()):
            rng_context = tensor_parallel.get_cuda_rng_tracker().fork()
        with rng_context:
            return functional.dropout(tensor, self.lora_config.dropout)


class _LinearLoraMixin(_LoraMixin):
    """Mixin of linear layers, which save their state themselves."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the sharded state of the layer, including its adapter."""
        module: Any = self
        split = {"weight": 0, "bias": 0} if self.lora_split == LORA_B else {"weight": 1}
        state = make_sharded_tensors_for_checkpoint(
            module.state_dict(prefix="", keep_vars=True),
            prefix,
            {**split, self.lora_split: _SPLIT_DIMENSION[self.lora_split]},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        if self.lora_gated:
            # megatron.core does this for the layer's own weights.
            key = f"{prefix}{LORA_B}"
            state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets)
        return state


class _ColumnLoraMixin(_LinearLoraMixin):
    lora_split = LORA_B

    def forward(
        self, input_: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add the adapter's output to the layer's output."""
        output, bias = super().forward(input_, *args, **options)  # type: ignore[misc]
        low_rank, group = self._project_down(input_), self.tp_group
        if self._splits_sequence():
            low_rank = collectives.all_gather(low_rank, group)
        elif self._communicates():
            low_rank = mappings.copy_to_tensor_model_parallel_region(low_rank, group=group)
        return output + self._project_up(low_rank), bias


class _RowLoraMixin(_LinearLoraMixin):
    lora_split = LORA_A

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add the adapter's output to the layer's output."""
        output, bias = super().forward(input_)  # type: ignore[misc]
        low_rank, group = self._project_down(input_), self.tp_group
        if self._splits_sequence():
            low_rank = collectives.reduce_scatter(low_rank, group)
        elif self._communicates():
            low_rank = mappings.reduce_from_tensor_model_parallel_region(low_rank, group=group)
        return output + self._project_up(low_rank), bias


class LoraColumnLinear(_ColumnLoraMixin, ColumnParallelLinear):  # type: ignore[misc]
    """megatron.core's column-parallel layer with an adapter."""


class LoraRowLinear(_RowLoraMixin, RowParallelLinear):  # type: ignore[misc]
    """megatron.core's row-parallel layer with an adapter."""


class LoraAccumulatingColumnLinear(_ColumnLoraMixin, AccumulatingColumnLinear):
    """Optimized column-parallel layer with an adapter."""


class LoraAccumulatingRowLinear(_RowLoraMixin, AccumulatingRowLinear):
    """Optimized row-parallel layer with an adapter."""


class LoraQueryDownProjection(QueryDownProjection, LoraColumnLinear):
    """MLA down-projection with an adapter.

    The adapter's output is added before ranks gather the latent vector.
    """


class LoraAccumulatingQueryDownProjection(
    AccumulatingQueryDownProjection, LoraAccumulatingColumnLinear
):
    """Optimized version of :class:`LoraQueryDownProjection`."""


class LoraKeyDownProjection(KeyDownProjection, LoraColumnLinear):
    """MLA down-projection with an adapter.

    The adapter's output is added before ranks gather the latent vector.
    """


class LoraAccumulatingKeyDownProjection(
    AccumulatingKeyDownProjection, LoraAccumulatingColumnLinear
):
    """Optimized version of :class:`LoraKeyDownProjection`."""


class LoraGroupedWeight(_LoraMixin, GroupedWeight):
    """Matrices of all experts of a rank with an adapter for each."""

    is_expert = explicit_expert_comm = True
    sequence_parallel = False

    def add_adapter(
        self,
        adapter: LoraConfig,
        zero_rows: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> None:
        """Add adapters of all experts; see the base class."""
        split_dimension = self.weight.partition_dim  # type: ignore[attr-defined]
        self.lora_split = LORA_B if split_dimension == 1 else LORA_A
        super().add_adapter(adapter, zero_rows, gated=gated)

    def forward(self, input_: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Add the adapters' output to the experts' output."""

        def multiply(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
            return multiply_experts(rows, matrices, ends)

        low_rank = self._project_down(input_, multiply)
        return super().forward(input_, ends) + self._project_up(low_rank, multiply)

    def _use_matrix(self, name: str) -> torch.Tensor:
        matrices, padding = super()._use_matrix(name), -self.lora_config.rank
        padding %= _GROUPED_RANK_MULTIPLE
        if not padding:  # pad() would copy
            return matrices
        return functional.pad(matrices, (0, 0, 0, padding) if name == LORA_A else (0, padding))


_LORA_CLASSES: dict[type, type] = {
    GroupedWeight: LoraGroupedWeight,
    ColumnParallelLinear: LoraColumnLinear,
    RowParallelLinear: LoraRowLinear,
    QueryDownProjection: LoraQueryDownProjection,
    AccumulatingQueryDownProjection: LoraAccumulatingQueryDownProjection,
    KeyDownProjection: LoraKeyDownProjection,
    AccumulatingKeyDownProjection: LoraAccumulatingKeyDownProjection,
    AccumulatingColumnLinear: LoraAccumulatingColumnLinear,
    AccumulatingRowLinear: LoraAccumulatingRowLinear,
}


def attach_adapters(
    model: Any, targets: Mapping[str, tuple[str, ...]], adapter: LoraConfig
) -> None:
    """Freeze ``model`` and add uninitialized adapters to its layers.

    Args:
        model: unwrapped model chunk, before it is wrapped in DDP.
        targets: names of layers, and for each the parts that get an adapter
            (``config.arguments.rules.adapters``).
        adapter: configuration of all adapters.
    """
    model.requires_grad_(False)
    for name, module in _find_target_layers(model, targets):
        # The new class differs only in methods from the old one.
        module.__class__ = _LORA_CLASSES[type(module)]
        module.add_adapter(
            adapter,
            _mask_rows_without_adapter(module, name, targets[name]),
            gated=name == FC1 and module.config.gated_linear_unit,
        )
    if model.pre_process:
        model.embedding.register_forward_hook(require_output_grad)


def _mask_rows_without_adapter(
    module: Any, name: str, parts: tuple[str, ...]
) -> torch.Tensor | None:
    """Return the mask [rows, 1] of rows without an adapter, or None if all rows have one.

    A layer may combine several layers of Hugging Face's model. ``parts`` names those with an
    adapter.
    """
    config, part_rows = module.config, tuple[torch.Tensor, ...]()
    rows = torch.zeros(module.weight.shape[-2], dtype=torch.bool, device=module.weight.device)
    if name == QKV:
        # One group after the other: queries, keys, values.
        groups = rows.view(config.num_query_groups // module.tp_group.size(), -1)
        width = config.kv_channels
        part_rows = groups[:, : -2 * width], groups[:, -2 * width : -width], groups[:, -width:]
    elif name == FC1 and config.gated_linear_unit:
        part_rows = rows.chunk(2)
    for part, part_mask in zip(
        HUGGINGFACE_LAYERS[name] if part_rows else (), part_rows, strict=True
    ):
        part_mask.fill_(part not in parts)
    return rows[:, None] if rows.any() else None


def _find_target_layers(
    model: torch.nn.Module, targets: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Yield name and module of the layers that get an adapter."""
    for name, module in model.named_modules():
        *parents, leaf = name.split(".")
        if (
            leaf in targets
            and not set(parents) & set(_EXCLUDED_MODULES)
            and type(module) in _LORA_CLASSES
        ):
            yield leaf, module


def require_output_grad(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
    """Make the output of frozen embeddings require a gradient.

    Recomputed layers and pipeline stages have a backward pass only if their input requires one.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def is_adapter(name: str) -> bool:
    """Return whether the parameter ``name`` belongs to an adapter."""
    return name.rpartition(".")[2] in (LORA_A, LORA_B)


def get_initial_std(parameter: Any) -> float:
    """Return the standard deviation of the initial values of A."""
    std: float = parameter.initial_std
    return std
