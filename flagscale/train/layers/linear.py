"""megatron.core's parallel linear layers with in-place accumulation of weight gradients.

megatron.core writes ``weight.grad`` in 16 bits, reads it, and adds it to the fp32 accumulator. Here
the GEMM adds to the accumulator. Construction, sharding attributes and checkpoint keys
are megatron.core's: only ``forward`` differs.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from flagscale.train.layers import collectives, unaligned_gemm
from flagscale.train.layers.collectives import InputSharing, get_group_name
from flagscale.train.layers.fp8 import Fp8Linear, Fp8Recipe, Fp8Weight
from flagscale.train.layers.tp_comm_overlap import AllGatherLinear, LinearReduceScatter
from flagscale.train.layers.wgrad_accumulation import accumulate_wgrad_gemm


class _LinearFunction(torch.autograd.Function):
    """Compute ``input [..., in] · weight [out, in]^T``.

    With ``sharing``, the gradient of the input is reduced over the ranks of ``group`` while the
    gradient of the weight is computed. With ``gather`` the input is a part of the sequence, and
    only this part is saved for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        accumulator: torch.Tensor | None,
        sharing: InputSharing,
        group_size: int,
        group: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, weight, accumulator)
        ctx.sharing, ctx.group_size, ctx.group = sharing, group_size, group
        if sharing == "gather":
            input_ = collectives.wait(collectives.start_all_gather(input_, group_size, group))
        return unaligned_gemm.linear(input_, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input_, weight, accumulator = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:  # frozen weight
            input_gradient = collectives.reduce_input_gradient(
                unaligned_gemm.multiply_gradient(gradient, weight),
                ctx.sharing,
                ctx.group_size,
                ctx.group,
            )
            return input_gradient, None, None, None, None, None

        def compute_weight_gradient(gathered_input: torch.Tensor) -> torch.Tensor | None:
            return accumulate_wgrad_gemm(accumulator, weight, gradient, gathered_input)

        input_and_weight_gradients = collectives.compute_gradients(
            input_,
            lambda: unaligned_gemm.multiply_gradient(gradient, weight),
            compute_weight_gradient,
            ctx.sharing,
            ctx.group_size,
            ctx.group,
        )
        return *input_and_weight_gradients, None, None, None, None


class _ParallelLinearMixin:
    """Common part of column- and row-parallel layers: gradient accumulation, FP8 and overlap.

    Attributes:
        weight: the rank's part of the weight [out, in].
        accumulator: fp32 accumulator of the weight gradient (:mod:`.wgrad_accumulation`), or None.
        fp8_recipe: FP8 settings, or None for 16-bit GEMMs.
        fp8_weight: current FP8 values of the weight (:mod:`.fp8_layers`), or None. If weights are
            sharded, they have memory only during passes.
        overlaps_communication: whether communication overlaps with the GEMM
            (:mod:`.tp_comm_overlap`).
        explicit_expert_comm: whether the token dispatcher of experts communicates, not the layer.
        sequence_parallel: whether activations outside the layer are split along the sequence.
        tp_group: tensor-parallel process group, or None.
    """

    weight: Any
    accumulator: torch.Tensor | None = None
    fp8_recipe: Fp8Recipe | None = None
    fp8_weight: Fp8Weight | None = None
    overlaps_communication: bool = False
    explicit_expert_comm: bool
    sequence_parallel: bool
    tp_group: Any

    def accumulated_weight(self) -> torch.nn.Parameter | None:
        weight: torch.nn.Parameter | None = self.weight
        return weight

    def is_tensor_parallel(self) -> bool:
        """Return whether the layer is split over several ranks that communicate in it."""
        # The token dispatcher of experts communicates instead of the layer.
        return not (self.explicit_expert_comm or self.tp_group is None or self.tp_group.size() == 1)

    def communicates_sequence(self) -> bool:
        """Return whether the communication is sequence-parallel."""
        return self.is_tensor_parallel() and self.sequence_parallel

    def _multiply(
        self, input_: torch.Tensor, weight: torch.Tensor, sharing: InputSharing, group: Any
    ) -> torch.Tensor:
        if sharing == "gather" and self.overlaps_communication:
            gathered: torch.Tensor = AllGatherLinear.apply(  # type: ignore[no-untyped-call]
                input_, weight, self.accumulator, group.size(), get_group_name(group)
            )
            return gathered
        sharing_settings = (
            sharing,
            *((group.size(), get_group_name(group)) if sharing != "none" else (1, "")),
        )
        accumulator = self.accumulator
        if self.fp8_recipe is None or self.fp8_weight is None:
            output: torch.Tensor = _LinearFunction.apply(  # type: ignore[no-untyped-call]
                input_, weight, accumulator, *sharing_settings
            )
        else:
            output = Fp8Linear.apply(  # type: ignore[no-untyped-call]
                input_, weight, accumulator, *self.fp8_weight, *self.fp8_recipe, *sharing_settings
            )
        return output


class AccumulatingColumnLinear(_ParallelLinearMixin, ColumnParallelLinear):  # type: ignore[misc]
    """Column-parallel linear layer: output features are split over tensor-parallel ranks."""

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [s, b, features of this rank], and the bias if ``skip_bias_add``."""
        output = self._multiply(
            input_, self.weight if weight is None else weight, self._input_sharing(), self.tp_group
        )
        if self.bias is not None and not self.skip_bias_add:
            output = output + self.bias
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            output = mappings.gather_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output, self.bias if self.skip_bias_add else None

    def _input_sharing(self) -> InputSharing:
        if self.communicates_sequence():
            return "gather"
        return "reduce" if self.is_tensor_parallel() and self.allreduce_dgrad else "none"


class AccumulatingRowLinear(_ParallelLinearMixin, RowParallelLinear):  # type: ignore[misc]
    """Row-parallel linear layer: input features are split over ranks, outputs are reduced."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [s, b, features], and the bias if ``skip_bias_add``.

        With sequence parallelism the output is this rank's part of the sequence.
        """
        group = self.tp_group
        if not self.input_is_parallel:
            input_ = mappings.scatter_to_tensor_model_parallel_region(input_, group=group)
        if self.overlaps_communication:
            scattered: torch.Tensor = LinearReduceScatter.apply(  # type: ignore[no-untyped-call]
                input_, self.weight, self.accumulator, group.size(), get_group_name(group)
            )
            return self._add_bias(scattered)
        output = self._multiply(input_, self.weight, "none", None)
        if self.is_tensor_parallel():
            if self.sequence_parallel:
                output = collectives.reduce_scatter(output, group)
            else:
                output = mappings.reduce_from_tensor_model_parallel_region(output, group=group)
        return self._add_bias(output)

    def _add_bias(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None
