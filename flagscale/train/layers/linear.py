"""megatron.core's two parallel linear layers, adding their weights' gradients themselves.

``weight.grad`` would be written in 16 bits, read, and added to the fp32 accumulator; here the
matrix product adds to the accumulator. Construction, sharding attributes and checkpoint keys are
megatron.core's: only ``forward`` differs.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch.nn import functional

from flagscale.train.layers import collectives
from flagscale.train.layers.accumulating import product_gradient
from flagscale.train.layers.collectives import Sharing, name_of
from flagscale.train.layers.fp8 import Cast, Fp8Linear, Recipe
from flagscale.train.layers.overlapped import GatheredLinear, ScatteredLinear


class _Linear(torch.autograd.Function):
    """``input [..., in] x weight [out, in]^T``.

    With ``sharing`` the input's gradient is summed over the ranks of ``group`` while the weight's
    is computed; ``gather`` starts from a part of the sequence and keeps no more than that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        accumulator: torch.Tensor | None,
        sharing: Sharing,
        size: int,
        group: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_, weight, accumulator)
        ctx.sharing, ctx.size, ctx.group = sharing, size, group
        if sharing == "gather":
            input_ = collectives.wait(collectives.start_all_gather(input_, size, group))
        return functional.linear(input_, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input_, weight, accumulator = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:  # frozen
            shared = collectives.input_gradient(gradient @ weight, ctx.sharing, ctx.size, ctx.group)
            return shared, None, None, None, None, None

        def of_weight(whole: torch.Tensor) -> torch.Tensor | None:
            return product_gradient(accumulator, weight, gradient, whole)

        both = collectives.gradients(
            input_, lambda: gradient @ weight, of_weight, ctx.sharing, ctx.size, ctx.group
        )
        return *both, None, None, None, None


class _Product:
    """What both layers share: the accumulator, the precision of the product, and whether it hides
    what ranks exchange for it (see :mod:`flagscale.train.layers.overlapped`)."""

    weight: Any
    accumulator: torch.Tensor | None = None
    recipe: Recipe | None = None
    cast: Cast | None = None
    exchanges_hidden: bool = False
    explicit_expert_comm: bool
    sequence_parallel: bool
    tp_group: Any

    def accumulated_weight(self) -> torch.nn.Parameter | None:
        weight: torch.nn.Parameter | None = self.weight
        return weight

    def is_shared(self) -> bool:
        """Whether ranks have parts of this layer, and exchange tokens for its product."""
        # The experts' dispatcher shares their tokens itself.
        return not (self.explicit_expert_comm or self.tp_group is None or self.tp_group.size() == 1)

    def exchanges(self) -> bool:
        """Whether what ranks exchange are parts of the sequence."""
        return self.is_shared() and self.sequence_parallel

    def _product(
        self, input_: torch.Tensor, weight: torch.Tensor, sharing: Sharing, group: Any
    ) -> torch.Tensor:
        if sharing == "gather" and self.exchanges_hidden:
            gathered: torch.Tensor = GatheredLinear.apply(  # type: ignore[no-untyped-call]
                input_, weight, self.accumulator, group.size(), name_of(group)
            )
            return gathered
        shared = (sharing, *((group.size(), name_of(group)) if sharing != "none" else (1, "")))
        total = self.accumulator
        if self.recipe is None or self.cast is None:
            output: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
                input_, weight, total, *shared
            )
        else:
            output = Fp8Linear.apply(  # type: ignore[no-untyped-call]
                input_, weight, total, *self.cast, *self.recipe, *shared
            )
        return output


class AccumulatingColumnLinear(_Product, ColumnParallelLinear):  # type: ignore[misc]
    """Each rank holds some of the output's features."""

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output ``[sequence, batch, features of this rank]``, and the bias where it is left to
        the caller."""
        output = self._product(
            input_, self.weight if weight is None else weight, self._sharing(), self.tp_group
        )
        if self.bias is not None and not self.skip_bias_add:
            output = output + self.bias
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            output = mappings.gather_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output, self.bias if self.skip_bias_add else None

    def _sharing(self) -> Sharing:
        if self.exchanges():
            return "gather"
        return "reduce" if self.is_shared() and self.allreduce_dgrad else "none"


class AccumulatingRowLinear(_Product, RowParallelLinear):  # type: ignore[misc]
    """Each rank holds some of the input's features; outputs are summed over ranks."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output ``[sequence, batch, features]`` (with sequence parallelism this rank's part of
        the sequence), and the bias where it is left to the caller."""
        group = self.tp_group
        if not self.input_is_parallel:
            input_ = mappings.scatter_to_tensor_model_parallel_region(input_, group=group)
        if self.exchanges_hidden:
            part: torch.Tensor = ScatteredLinear.apply(  # type: ignore[no-untyped-call]
                input_, self.weight, self.accumulator, group.size(), name_of(group)
            )
            return self._with_bias(part)
        output = self._product(input_, self.weight, "none", None)
        if self.is_shared():
            if self.sequence_parallel:
                output = collectives.reduce_scatter(output, group)
            else:
                output = mappings.reduce_from_tensor_model_parallel_region(output, group=group)
        return self._with_bias(output)

    def _with_bias(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None
