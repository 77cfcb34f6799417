"""Experts of a mixture whose matrix products are one grouped product.

The weights of a rank's experts lie in one tensor a matrix. Their checkpoints and initial weights
are those of megatron.core's sequential experts, one module an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from flagscale.errors import ConfigError
from flagscale.train.layers.accumulating import whole_gradient
from flagscale.train.layers.jit import compiled_if_faster

ALIGNMENT = 16
"""Rows of each expert are filled up to a multiple of it, as grouped products on GPUs want it."""


@dataclass(frozen=True)
class Laid:
    """Rows that are laid out for grouped products: ``ends [experts]`` (int32) has where each
    expert's end, a multiple of :data:`ALIGNMENT`; those without a token are 0."""

    ends: torch.Tensor


class _GroupedProduct(torch.autograd.Function):
    """``input [rows, in] x weight [expert, out, in]^T``; expert ``e`` has the rows before
    ``ends[e]`` that no earlier one has."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        accumulator: torch.Tensor | None,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, weight, accumulator, ends)
        return _product(input_, weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input_, weight, accumulator, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_input = _product(gradient, weight, ends)
        of_weight = _product(gradient.t(), input_, ends)
        return of_input, whole_gradient(accumulator, weight, of_weight), None, None


def _product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A product a group: of rows of ``left [rows, k]`` with ``right [group, k, n]``, or, of columns
    of ``left [m, rows]`` with rows of ``right [rows, n]``, to ``[group, m, n]``."""
    if left.dtype == torch.bfloat16:
        return torch._grouped_mm(left, right, offs=ends)
    # There are grouped products of 16-bit numbers with a wide range only.
    parts, begin = [], 0
    for group, end in enumerate(ends.tolist()):
        if right.dim() == 3:
            parts.append(left[begin:end] @ right[group])
        else:
            parts.append(left[:, begin:end] @ right[begin:end])
        begin = end
    if right.dim() == 2:
        return torch.stack(parts)
    rest = left.new_zeros(left.shape[0] - begin, right.shape[2])
    return torch.cat([*parts, rest])


class _Weights(torch.nn.Module):
    """One matrix of all experts of a rank, ``[expert, out, in]``."""

    accumulator: torch.Tensor | None = None

    def __init__(self, shape: tuple[int, int, int], dimension: int, config: Any) -> None:
        """``dimension`` is split over tensor-parallel ranks."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, dimension, 1)

    def accumulated_weight(self) -> torch.nn.Parameter:
        return self.weight

    def forward(self, input_: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _GroupedProduct.apply(  # type: ignore[no-untyped-call]
            input_, self.weight, self.accumulator, ends
        )
        return output


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """A rank's experts, in place of megatron.core's ``SequentialMLP``."""

    def __init__(
        self, num_local_experts: int, config: Any, submodules: Any = None, *, pg_collection: Any
    ) -> None:
        super().__init__(config=config)
        if config.add_bias_linear:
            raise ConfigError(
                "moe_grouped_gemm: the grouped experts have no biases",
                hint="set disable_bias_linear: true, or leave moe_grouped_gemm out",
            )
        self.count = num_local_experts
        self.groups = pg_collection
        ranks = pg_collection.expt_tp.size()
        wide, hidden = config.moe_ffn_hidden_size // ranks, config.hidden_size
        rows = 2 * wide if config.gated_linear_unit else wide
        self.linear_fc1 = _Weights((self.count, rows, hidden), 1, config)
        self.linear_fc2 = _Weights((self.count, hidden, wide), 2, config)
        self._register_load_state_dict_pre_hook(_drop_nothing)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor | Laid,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Each token through its expert.

        Args:
            permuted_local_hidden_states: ``[tokens, hidden]``, expert after expert.
            tokens_per_expert: ``[experts of this rank]``; or where their rows end, if they are
                laid out as :func:`places` does already.
            permuted_probs: ``[tokens]``, what the router weighs each with.

        Returns:
            ``[tokens, hidden]``, with tensor parallelism of experts partial sums, and no bias.
        """
        tokens, weights = permuted_local_hidden_states, permuted_probs
        if isinstance(tokens_per_expert, Laid):
            return self._through(tokens, weights, tokens_per_expert.ends), None
        rows, ends = places(tokens_per_expert.to(tokens.device), len(tokens))
        room = len(tokens) + self.count * ALIGNMENT
        padded = tokens.new_zeros(room, tokens.shape[1]).index_copy(0, rows, tokens)
        weights = weights.new_zeros(room).index_copy(0, rows, weights)
        return self._through(padded, weights, ends).index_select(0, rows), None

    def _through(
        self, tokens: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Rows through the experts; what fills up comes out as 0, what is behind the last expert's
        rows as anything."""
        config = self.config
        if config.moe_apply_probs_on_input:
            tokens = (tokens * weights[:, None]).to(tokens.dtype)
            weights = torch.ones_like(weights)
        inside = self.linear_fc1(tokens, ends)
        inside = _weighted_activation(
            inside, weights, config.activation_func, config.gated_linear_unit
        )
        done: torch.Tensor = self.linear_fc2(inside, ends)
        return done

    def backward_dw(self) -> None:
        """Nothing is left for later."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """As the sequential experts have it: all experts of the model in one array a matrix."""
        gated = self.config.gated_linear_unit
        found = {
            f"{prefix}linear_fc1.weight": self._sharded(
                f"{prefix}experts.linear_fc1.weight", self.linear_fc1.weight, 1, sharded_offsets,
                halves=gated,
            ),
            f"{prefix}linear_fc2.weight": self._sharded(
                f"{prefix}experts.linear_fc2.weight", self.linear_fc2.weight, 2, sharded_offsets,
                halves=False,
            ),
        }  # fmt: skip
        for name in ("linear_fc1", "linear_fc2"):
            for index in range(self.count):
                found[f"{prefix}{name}._extra_state{index}"] = self._nothing(
                    f"{prefix}experts.{name}._extra_state", index, sharded_offsets
                )
        return found

    def _nothing(self, key: str, index: int, offsets: Any) -> Any:
        """What one of the sequential experts keeps beside a weight, which it insists on finding."""
        groups = self.groups
        place = (len(offsets), groups.ep.rank() * self.count + index, groups.ep.size() * self.count)
        replica = (0, groups.expt_tp.rank(), groups.expt_dp.rank())
        return make_sharded_object_for_checkpoint(None, key, (*offsets, place), replica)

    def _sharded(
        self, key: str, weight: torch.Tensor, dimension: int, offsets: Any, *, halves: bool
    ) -> Any:
        """``weight`` as a part of the array ``key``; ``halves``: its gate and its up projection
        are each split over tensor-parallel ranks."""
        groups, ahead = self.groups, len(offsets)
        own = (ahead, groups.ep.rank(), groups.ep.size())
        rank, ranks = groups.expt_tp.rank(), groups.expt_tp.size()
        replica = (0, 0, groups.expt_dp.rank())

        def part(name: str, tensor: torch.Tensor, replica_id: Any, place: int, of: int) -> Any:
            split = (ahead + dimension, place, of)
            return ShardedTensor.from_rank_offsets(
                name, tensor, *offsets, own, split, replica_id=replica_id, prepend_axis_num=ahead
            )

        def build(name: str, tensor: torch.Tensor, replica_id: Any, _: Any) -> list[Any]:
            gate, up = tensor.chunk(2, dimension)
            return [
                part(name, gate, replica_id, rank, 2 * ranks),
                part(name, up, replica_id, rank + ranks, 2 * ranks),
            ]

        if not halves:
            return part(key, weight, replica, rank, ranks)
        merge: Callable[[Any], torch.Tensor] = lambda parts: torch.cat(parts, dimension)  # noqa: E731
        return ShardedTensorFactory(key, weight, build, merge, replica)


def _drop_nothing(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """What :meth:`GroupedExperts._nothing` has written is no state of this module."""
    for key in [key for key in state if key.startswith(prefix) and "._extra_state" in key]:
        del state[key]


def places(counts: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where tokens go so that each expert's rows begin at a multiple of :data:`ALIGNMENT`.

    Args:
        counts: tokens of each expert.
        tokens: their sum, known without asking the device.

    Returns:
        The row of each token, and each expert's end (int32).
    """
    filled = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = filled.cumsum(0)
    shift = (ends - filled) - (counts.cumsum(0) - counts)
    rows = torch.arange(tokens, device=counts.device)
    rows = rows + torch.repeat_interleave(shift, counts, output_size=tokens)
    return rows, ends.to(torch.int32)


@compiled_if_faster(dynamic=True)
def _weighted_activation(
    inside: torch.Tensor, weights: torch.Tensor, activation: Callable[..., Any], gated: bool
) -> torch.Tensor:
    if gated:
        gate, up = inside.chunk(2, -1)
        done = activation(gate) * up
    else:
        done = activation(inside)
    weighted: torch.Tensor = done * weights[:, None]
    return weighted.to(inside.dtype)
