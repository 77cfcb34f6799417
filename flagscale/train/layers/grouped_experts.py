"""MoE experts of a rank computed by grouped GEMMs, each of which covers all experts of the rank.

The weights of all experts of a rank are one tensor per matrix. Checkpoints and initial weights are
the same as of megatron.core's sequential experts, which have one module per expert.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from flagscale.accelerators.device import current_device
from flagscale.errors import ConfigError
from flagscale.train.layers.jit import compiled_if_faster
from flagscale.train.layers.selective_recompute import OutputCheckpoint
from flagscale.train.layers.wgrad_accumulation import accumulate_gradient

ROW_ALIGNMENT = 16
"""Multiple to which the rows of each expert are padded, as grouped GEMMs on GPUs require."""


@dataclass(frozen=True)
class GroupedRows:
    """Layout of the rows of a grouped GEMM: one row per token and expert, ordered by expert.

    Attributes:
        ends: row after the last one of each expert, [experts] (int32), multiples of
            :data:`ROW_ALIGNMENT`. Padding rows are 0.
    """

    ends: torch.Tensor


class _GroupedLinear(torch.autograd.Function):
    """Compute ``input [rows, in] · weight [expert, out, in]^T``.

    Expert e has the rows from ``ends[e - 1]`` to ``ends[e]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        accumulator: torch.Tensor | None,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, weight, accumulator, ends)
        return _grouped_matmul(input_, weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input_, weight, accumulator, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        input_gradient = _grouped_matmul(gradient, weight, ends)
        if not ctx.needs_input_grad[1]:  # frozen weight
            return input_gradient, None, None, None
        weight_gradient = _grouped_matmul(gradient.t(), input_, ends)
        return input_gradient, accumulate_gradient(accumulator, weight, weight_gradient), None, None


def _grouped_matmul(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute one GEMM per group, of which each is the rows up to an entry of ``ends``.

    Either ``left`` [rows, k] · ``right`` [group, k, n] by rows, or ``left`` [m, rows] · ``right``
    [rows, n] by the shared dimension, with the result [group, m, n].
    """
    if left.dtype == torch.bfloat16:
        return torch._grouped_mm(left, right, offs=ends)
    # torch's grouped GEMM supports bf16 only.
    results, begin = [], 0
    for group, end in enumerate(ends.tolist()):
        if right.dim() == 3:
            results.append(left[begin:end] @ right[group])
        else:
            results.append(left[:, begin:end] @ right[begin:end])
        begin = end
    if right.dim() == 2:
        return torch.stack(results)
    padding = left.new_zeros(left.shape[0] - begin, right.shape[2])
    return torch.cat([*results, padding])


class GroupedWeight(torch.nn.Module):
    """The same weight matrix of all experts of a rank, [expert, out, in]."""

    accumulator: torch.Tensor | None = None

    def __init__(
        self, shape: tuple[int, int, int], dimension: int, config: Any, tp_group: Any
    ) -> None:
        """Create the parameter; ``dimension`` is split over the ranks of ``tp_group``."""
        super().__init__()
        self.config, self.tp_group = config, tp_group
        device = current_device().torch_device
        self.weight = torch.nn.Parameter(
            torch.empty(shape, dtype=config.params_dtype, device=device)
        )
        set_tensor_model_parallel_attributes(self.weight, True, dimension, 1)

    def accumulated_weight(self) -> torch.nn.Parameter:
        return self.weight

    def forward(self, input_: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return multiply_experts(input_, self.weight, ends, self.accumulator)


def multiply_experts(
    input_: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    accumulator: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``input_`` [rows, in] times the matrix of each row's expert, [expert, out, in]."""
    output: torch.Tensor = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
        input_, weight, accumulator, ends
    )
    return output


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """Experts of a rank, in place of megatron.core's ``SequentialMLP``.

    With ``recompute_activation`` the outputs of the activation function are recomputed in the
    backward pass. ``activation_context`` is entered while that function runs.
    """

    recompute_activation = False
    activation_context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __init__(
        self, num_local_experts: int, config: Any, submodules: Any = None, *, pg_collection: Any
    ) -> None:
        super().__init__(config=config)
        if config.add_bias_linear:
            raise ConfigError(
                "moe_grouped_gemm: the grouped experts have no biases",
                hint="set disable_bias_linear: true, or leave moe_grouped_gemm out",
            )
        self.num_local_experts = num_local_experts
        self.process_groups = pg_collection
        ranks = pg_collection.expt_tp.size()
        ffn_width, hidden = config.moe_ffn_hidden_size // ranks, config.hidden_size
        rows = 2 * ffn_width if config.gated_linear_unit else ffn_width
        tp_group = pg_collection.expt_tp
        self.linear_fc1 = GroupedWeight((num_local_experts, rows, hidden), 1, config, tp_group)
        self.linear_fc2 = GroupedWeight((num_local_experts, hidden, ffn_width), 2, config, tp_group)
        self._register_load_state_dict_pre_hook(_drop_extra_state)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor | GroupedRows,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Run each token through its expert.

        Args:
            permuted_local_hidden_states: [tokens, h], ordered by expert.
            tokens_per_expert: [experts of this rank], or the layout of rows if they are padded
                already.
            permuted_probs: router probabilities [tokens].

        Returns:
            [tokens, h], partial sums with expert tensor parallelism, and None for the bias.
        """
        tokens, weights = permuted_local_hidden_states, permuted_probs
        if isinstance(tokens_per_expert, GroupedRows):
            return self._run_experts(tokens, weights, tokens_per_expert.ends), None
        rows, ends = pad_expert_rows(tokens_per_expert.to(tokens.device), len(tokens))
        padded_rows = len(tokens) + self.num_local_experts * ROW_ALIGNMENT
        padded = tokens.new_zeros(padded_rows, tokens.shape[1]).index_copy(0, rows, tokens)
        weights = weights.new_zeros(padded_rows).index_copy(0, rows, weights)
        return self._run_experts(padded, weights, ends).index_select(0, rows), None

    def _run_experts(
        self, tokens: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Run padded rows through the experts.

        Outputs of padding rows are 0; rows after the last expert's are undefined.
        """
        config = self.config
        if config.moe_apply_probs_on_input:
            tokens = (tokens * weights[:, None]).to(tokens.dtype)
            weights = torch.ones_like(weights)
        hidden = self.linear_fc1(tokens, ends)
        activate = partial(
            _weighted_activation,
            activation=config.activation_func,
            gated=config.gated_linear_unit,
        )
        if not self.recompute_activation:
            with self.activation_context():
                hidden = activate(hidden, weights)
            output: torch.Tensor = self.linear_fc2(hidden, ends)
            return output
        checkpoint = OutputCheckpoint()
        output = self.linear_fc2(checkpoint.checkpoint(activate, hidden, weights), ends)
        checkpoint.discard_output_and_register_recompute(output)
        return output

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are not delayed."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the sharded state of sequential experts.

        It has one array per matrix, which contains all experts of the model.
        """
        sharded_state = {}
        for name in ("linear_fc1", "linear_fc2"):
            gated = self.config.gated_linear_unit and name == "linear_fc1"
            for matrix, parameter in getattr(self, name).named_parameters():
                sharded_state[f"{prefix}{name}.{matrix}"] = self._shard_matrix(
                    f"{prefix}experts.{name}.{matrix}", parameter, sharded_offsets, gated=gated
                )
            for index in range(self.num_local_experts):
                sharded_state[f"{prefix}{name}._extra_state{index}"] = self._empty_extra_state(
                    f"{prefix}experts.{name}._extra_state", index, sharded_offsets
                )
        return sharded_state

    def _empty_extra_state(self, key: str, index: int, offsets: Any) -> Any:
        """Return the extra state that sequential experts save with a weight and require on load."""
        process_groups = self.process_groups
        expert_offset = (
            len(offsets),
            process_groups.ep.rank() * self.num_local_experts + index,
            process_groups.ep.size() * self.num_local_experts,
        )
        replica = (0, process_groups.expt_tp.rank(), process_groups.expt_dp.rank())
        return make_sharded_object_for_checkpoint(None, key, (*offsets, expert_offset), replica)

    def _shard_matrix(self, key: str, matrix: Any, offsets: Any, *, gated: bool) -> Any:
        """Return ``matrix`` [expert, …] as a shard of the array ``key``.

        With ``gated``, gate and up projection are split over tensor-parallel ranks separately.
        """
        dimension: int = matrix.partition_dim
        groups, prepended_axes = self.process_groups, len(offsets)
        expert_offset = (prepended_axes, groups.ep.rank(), groups.ep.size())
        rank, ranks = groups.expt_tp.rank(), groups.expt_tp.size()
        replica, axis = (0, 0, groups.expt_dp.rank()), prepended_axes + dimension

        def build_shard(
            name: str, tensor: torch.Tensor, replica_id: Any, *split: tuple[int, int, int]
        ) -> Any:
            return ShardedTensor.from_rank_offsets(
                name,
                tensor,
                *offsets,
                expert_offset,
                *split,
                replica_id=replica_id,
                prepend_axis_num=prepended_axes,
            )

        def build(name: str, tensor: torch.Tensor, replica_id: Any, _: Any) -> list[Any]:
            gate, up = tensor.chunk(2, dimension)
            return [
                build_shard(name, gate, replica_id, (axis, rank, 2 * ranks)),
                build_shard(name, up, replica_id, (axis, rank + ranks, 2 * ranks)),
            ]

        if dimension < 0:  # a replicated matrix of adapters
            return build_shard(key, matrix, (0, rank, groups.expt_dp.rank()))
        if not gated:
            return build_shard(key, matrix, replica, (axis, rank, ranks))
        merge: Callable[[Any], torch.Tensor] = lambda parts: torch.cat(parts, dimension)  # noqa: E731
        return ShardedTensorFactory(key, matrix, build, merge, replica)


def _drop_extra_state(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove the extra state of :meth:`GroupedExperts._empty_extra_state` before loading."""
    for key in [key for key in state if key.startswith(prefix) and "._extra_state" in key]:
        del state[key]


def pad_expert_rows(counts: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Assign rows to tokens so that each expert's rows begin at a multiple of
    :data:`ROW_ALIGNMENT`.

    Args:
        counts: number of tokens of each expert, [experts].
        tokens: their sum, which the caller knows without synchronizing the device.

    Returns:
        The row of each token, and the end row of each expert (int32).
    """
    padded_counts = (counts + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
    ends = padded_counts.cumsum(0)
    padding_before = (ends - padded_counts) - (counts.cumsum(0) - counts)
    rows = torch.arange(tokens, device=counts.device)
    rows = rows + torch.repeat_interleave(padding_before, counts, output_size=tokens)
    return rows, ends.to(torch.int32)


@compiled_if_faster(dynamic=True)
def _weighted_activation(
    hidden: torch.Tensor, weights: torch.Tensor, activation: Callable[..., Any], gated: bool
) -> torch.Tensor:
    """Return ``activation(hidden)`` times the router probability of each row."""
    if gated:
        gate, up = hidden.chunk(2, -1)
        activated = activation(gate) * up
    else:
        activated = activation(hidden)
    weighted: torch.Tensor = activated * weights[:, None]
    return weighted.to(hidden.dtype)
