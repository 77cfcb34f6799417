"""Low-rank adapters beside parallel linear layers (Hu et al., "LoRA", 2021).

A layer's weight W does not change; trained are A ``[rank, in]`` and B ``[out, rank]``, and the
output is ``W x + alpha / rank * B A x``. B starts as zeros, so that training starts from the base.
Of the two the one on the side that tensor parallelism splits is split with W; the other is whole on
every rank, and what is summed or gathered between them is ``rank`` wide.

Where a layer is several of Hugging Face's and only some of them get an adapter, B's rows of the
others stay zeros: in every layout, for every optimizer, saved and merged, it is one more adapter.

What is dropped in training is a share of ``x``, or of what the adapter adds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import mappings, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional

from flagscale.config.arguments.adapters import FC1, QKV, THEIRS
from flagscale.train.layers import collectives
from flagscale.train.layers.latent import (
    AccumulatingKeyDownProjection,
    AccumulatingQueryDownProjection,
    KeyDownProjection,
    QueryDownProjection,
)
from flagscale.train.layers.linear import AccumulatingColumnLinear, AccumulatingRowLinear

A, B = "lora_a", "lora_b"
_SPLIT = {A: 1, B: 0}
"""The dimension in which each is split, if it is."""
_NEVER = ("experts", "shared_experts", "mtp")
"""Modules whose layers get no adapters."""


@dataclass(frozen=True)
class Adapter:
    """What an adapter is: its ``rank``; what it adds is multiplied by ``alpha`` over that; the
    share that is dropped in training, of its inputs or, with ``behind``, of what it adds; and how A
    is drawn (``lora_in_init_method``)."""

    rank: int
    alpha: float
    dropout: float = 0.0
    behind: bool = False
    drawn: str = "kaiming"

    def deviation(self, inputs: int) -> float:
        """Standard deviation that A is drawn with, of so many inputs."""
        known = {
            "kaiming": 1.0 / math.sqrt(3.0 * inputs),  # of peft's uniform distribution
            "xavier": math.sqrt(2.0 / (inputs + self.rank)),  # of Glorot and Bengio (2010)
            "normal": 0.2,  # of Megatron-Bridge
        }
        return known[self.drawn]


class _Adapted:
    """Goes before a parallel linear layer's class. What is split is ``split``."""

    split: str
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    training: bool
    sequence_parallel: bool
    config: Any
    tp_group: Any
    lora_a: torch.nn.Parameter
    lora_b: torch.nn.Parameter
    lora_without: torch.Tensor | None
    lora: Adapter

    def add_adapter(self, adapter: Adapter, without: torch.Tensor | None = None) -> None:
        """Give the layer A and B, not drawn yet, and freeze the rest.

        Args:
            adapter: what it is.
            without: which of this rank's rows of B stay zeros, ``[rows, 1]``.
        """
        module: Any = self
        module.requires_grad_(False)
        rows, columns = self.weight.shape
        self.lora_a = torch.nn.Parameter(self.weight.new_zeros(adapter.rank, columns))
        self.lora_b = torch.nn.Parameter(self.weight.new_zeros(rows, adapter.rank))
        module.register_buffer("lora_without", without, persistent=False)
        self.lora = adapter
        ranks = self.tp_group.size()
        for name, parameter in ((A, self.lora_a), (B, self.lora_b)):
            mine: Any = parameter
            if name == self.split:
                set_tensor_model_parallel_attributes(mine, True, _SPLIT[name], 1)
            elif self.sequence_parallel and ranks > 1:
                # Each rank has seen its part of the sequence.
                mine.sequence_parallel = True
        inward: Any = self.lora_a
        inward.spread = adapter.deviation(columns * (ranks if self.split == A else 1))

    def _down(self, input_: torch.Tensor) -> torch.Tensor:
        """``A x``, of a part of ``x`` or of all of it."""
        if not self.lora.behind:
            input_ = self._dropped(input_, split=self.split == A)
        return functional.linear(input_, self.lora_a)

    def _up(self, narrow: torch.Tensor) -> torch.Tensor:
        outward: torch.Tensor = self.lora_b
        if self.lora_without is not None:
            # So their gradients are zeros, of which no optimizer makes anything.
            outward = outward.masked_fill(self.lora_without, 0.0)
        added = functional.linear(narrow, outward) * (self.lora.alpha / self.lora.rank)
        if self.lora.behind:
            added = self._dropped(added, split=self.split == B)
        return added

    def _dropped(self, tensor: torch.Tensor, *, split: bool) -> torch.Tensor:
        """The tensor without a share of it, in training. Ranks that have parts of it, by ``split``
        or of the sequences, drop other things than each other."""
        if not (self.lora.dropout and self.training):
            return tensor
        fork: AbstractContextManager[Any] = nullcontext()
        if self.tp_group.size() > 1 and (split or self.sequence_parallel):
            fork = tensor_parallel.get_cuda_rng_tracker().fork()
        with fork:
            return functional.dropout(tensor, self.lora.dropout)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """The layer's weights by their places in the whole, the adapter's among them."""
        module: Any = self
        split = {"weight": 0, "bias": 0} if self.split == B else {"weight": 1}
        return make_sharded_tensors_for_checkpoint(
            module.state_dict(prefix="", keep_vars=True),
            prefix,
            {**split, self.split: _SPLIT[self.split]},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class _Column(_Adapted):
    split = B

    def forward(
        self, input_: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the layer's own, with what the adapter adds."""
        output, bias = super().forward(input_, *args, **options)  # type: ignore[misc]
        narrow, group = self._down(input_), self.tp_group
        if group.size() > 1 and self.sequence_parallel:
            narrow = collectives.all_gather(narrow, group)
        elif group.size() > 1:
            narrow = mappings.copy_to_tensor_model_parallel_region(narrow, group=group)
        return output + self._up(narrow), bias


class _Row(_Adapted):
    split = A

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the layer's own, with what the adapter adds."""
        output, bias = super().forward(input_)  # type: ignore[misc]
        narrow, group = self._down(input_), self.tp_group
        if group.size() > 1 and self.sequence_parallel:
            narrow = collectives.reduce_scatter(narrow, group)
        elif group.size() > 1:
            narrow = mappings.reduce_from_tensor_model_parallel_region(narrow, group=group)
        return output + self._up(narrow), bias


class LoraColumnLinear(_Column, ColumnParallelLinear):  # type: ignore[misc]
    """megatron.core's layer with an adapter."""


class LoraRowLinear(_Row, RowParallelLinear):  # type: ignore[misc]
    """megatron.core's layer with an adapter."""


class LoraAccumulatingColumnLinear(_Column, AccumulatingColumnLinear):
    """The faster layer with an adapter."""


class LoraAccumulatingRowLinear(_Row, AccumulatingRowLinear):
    """The faster layer with an adapter."""


class LoraQueryDownProjection(QueryDownProjection, LoraColumnLinear):
    """Multi-latent attention's, with an adapter that makes latent numbers before ranks gather
    them."""


class LoraAccumulatingQueryDownProjection(
    AccumulatingQueryDownProjection, LoraAccumulatingColumnLinear
):
    """The same of the faster layer."""


class LoraKeyDownProjection(KeyDownProjection, LoraColumnLinear):
    """Multi-latent attention's, with an adapter that makes latent numbers before ranks gather
    them."""


class LoraAccumulatingKeyDownProjection(
    AccumulatingKeyDownProjection, LoraAccumulatingColumnLinear
):
    """The same of the faster layer."""


_CLASSES: dict[type, type] = {
    ColumnParallelLinear: LoraColumnLinear,
    RowParallelLinear: LoraRowLinear,
    QueryDownProjection: LoraQueryDownProjection,
    AccumulatingQueryDownProjection: LoraAccumulatingQueryDownProjection,
    KeyDownProjection: LoraKeyDownProjection,
    AccumulatingKeyDownProjection: LoraAccumulatingKeyDownProjection,
    AccumulatingColumnLinear: LoraAccumulatingColumnLinear,
    AccumulatingRowLinear: LoraAccumulatingRowLinear,
}


def attach(model: Any, targets: Mapping[str, tuple[str, ...]], adapter: Adapter) -> None:
    """Freeze the bare ``model`` and give layers adapters, whose weights are still to be drawn.

    Args:
        model: a chunk of it, before data parallelism.
        targets: names of layers, and of each the parts that get an adapter
            (``config.arguments.adapters``).
        adapter: what each of them is.
    """
    model.requires_grad_(False)
    for name, module in _layers(model, targets):
        # The classes differ in methods alone.
        module.__class__ = _CLASSES[type(module)]
        module.add_adapter(adapter, _without(module, name, targets[name]))
    if model.pre_process:
        model.embedding.register_forward_hook(_ask_for_gradient)


def _without(module: Any, name: str, parts: tuple[str, ...]) -> torch.Tensor | None:
    """Which rows of a layer, that is several of Hugging Face's, are of none of these; None if all
    are of some, ``[rows, 1]``."""
    config, apart = module.config, tuple[torch.Tensor, ...]()
    rows = torch.zeros(len(module.weight), dtype=torch.bool, device=module.weight.device)
    if name == QKV:
        # Group by group: its queries, its keys, its values.
        groups = rows.view(config.num_query_groups // module.tp_group.size(), -1)
        width = config.kv_channels
        apart = groups[:, : -2 * width], groups[:, -2 * width : -width], groups[:, -width:]
    elif name == FC1 and config.gated_linear_unit:
        apart = rows.chunk(2)
    for part, own in zip(THEIRS[name] if apart else (), apart, strict=True):
        own.fill_(part not in parts)
    return rows[:, None] if rows.any() else None


def _layers(model: torch.nn.Module, targets: Collection[str]) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        *above, own = name.split(".")
        if own in targets and not set(above) & set(_NEVER) and type(module) in _CLASSES:
            yield own, module


def _ask_for_gradient(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
    """Layers that are recomputed, and pipeline stages, have a backward pass where their input asks
    for a gradient; frozen embeddings do not."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.rpartition(".")[2] in (A, B)


def spread(parameter: Any) -> float:
    """Standard deviation that A is drawn with."""
    own: float = parameter.spread
    return own
