"""Time and memory of Muon's orthogonalizations on a rank.

``args`` are a rank's resolved arguments with its own parallel sizes throughout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from flagscale.config.arguments.parameters import LayerParameter, list_layer_parameters
from flagscale.config.arguments.rules.muon import BLOCKWISE, DUPLICATED, is_muon_parameter
from flagscale.estimate.arithmetic import LayerKind, expert_tp
from flagscale.estimate.attention import head_dim

_PRODUCT_TIMES = {"medium": 1, "high": 2, "highest": 15}
"""Time of a product by muon_fp32_matmul_prec, relative to one of bf16 matrices: TF32 has half of
the peak and fp32, without tensor cores, 1/15, on an H100.
"""
_WORKSPACE_BYTES = 12
"""Bytes per element of a matrix while it is orthogonalized: the momentum, its normalized copy and
the operands and results of products.
"""
_KERNELS_PER_ITERATION = 3
_OTHER_KERNELS = 12
"""Kernels per matrix for copies, the norm and the update."""


class _Matrix(NamedTuple):
    """A matrix of a layer before it is split over tensor-parallel ranks.

    Attributes:
        rows: outputs.
        columns: inputs.
        ranks: tensor-parallel ranks that share it.
        are_columns_split: they share its columns, not its rows.
        is_expert: it belongs to an expert.
    """

    rows: int
    columns: int
    ranks: int
    are_columns_split: bool
    is_expert: bool


class OrthogonalizationLoad(NamedTuple):
    """Load of a step's orthogonalizations on a rank.

    Attributes:
        flops: FLOP as products of bf16 matrices.
        kernels: number of kernels.
    """

    flops: float
    kernels: float


def is_muon_weight(name: str) -> bool:
    """Return whether Muon trains a parameter of a global name."""
    is_matrix = name.endswith("weight") and "norm" not in name
    return is_matrix and is_muon_parameter(name, 2)


def orthogonalization_load(
    args: Any, layers: Iterable[LayerKind], replicas: tuple[int, int]
) -> OrthogonalizationLoad:
    """Return the load of a step.

    Args:
        args: see the module.
        layers: layers of the rank.
        replicas: data-parallel ranks of experts' matrices (second) and of others, which share the
            orthogonalizations if the optimizer is sharded.
    """
    shares = replicas if args.use_distributed_optimizer else (1, 1)
    flops = kernels = 0.0
    for layer in layers:
        for matrix in _list_matrices(args, is_moe=layer.is_moe):
            count = 1.0 / shares[matrix.is_expert]
            kernels += count * (_KERNELS_PER_ITERATION * args.muon_num_ns_steps + _OTHER_KERNELS)
            if matrix.is_expert:
                count *= args.num_moe_experts // args.expert_model_parallel_size
            flops += count * _count_flops(args, matrix)
    return OrthogonalizationLoad(flops * _PRODUCT_TIMES[args.muon_fp32_matmul_prec], kernels)


def workspace_bytes(args: Any, layers: Sequence[LayerKind]) -> float:
    """Return the memory for the orthogonalization of a rank's largest parameter."""
    largest = 0
    for layer in set(layers):
        for parameter in _matrix_parameters(args, is_moe=layer.is_moe):
            ranks = _count_ranks(args, parameter)
            size = parameter.size // ranks
            if parameter.is_expert and args.moe_grouped_gemm:
                size *= args.num_moe_experts // args.expert_model_parallel_size
            largest = max(largest, size * (ranks if args.muon_tp_mode == DUPLICATED else 1))
    return float(_WORKSPACE_BYTES * largest)


def _count_flops(args: Any, matrix: _Matrix) -> float:
    """Return the FLOP of a matrix on one rank."""
    rows, columns = matrix.rows, matrix.columns
    if matrix.ranks > 1 and args.muon_tp_mode != DUPLICATED:
        if matrix.are_columns_split:
            columns //= matrix.ranks
        else:
            rows //= matrix.ranks
    # Products of the smaller dimension, or of the one that is not split.
    small, large = sorted((rows, columns))
    if matrix.ranks > 1 and args.muon_tp_mode not in (DUPLICATED, BLOCKWISE):
        small, large = (rows, columns) if matrix.are_columns_split else (columns, rows)
    return float(args.muon_num_ns_steps * (4 * small**2 * large + 2 * small**3))


def _list_matrices(args: Any, *, is_moe: bool) -> Iterator[_Matrix]:
    """Yield the matrices of a layer that are orthogonalized; those of one expert stand for all."""
    for parameter in _matrix_parameters(args, is_moe=is_moe):
        rows = parameter.size // parameter.inputs
        blocks = [rows]
        if parameter.name.endswith("linear_qkv.weight") and args.muon_split_qkv:
            keys = head_dim(args) * (args.num_query_groups or args.num_attention_heads)
            blocks = [rows - 2 * keys, keys, keys]
        are_columns_split = parameter.name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        ranks = _count_ranks(args, parameter)
        for block in blocks:
            yield _Matrix(block, parameter.inputs, ranks, are_columns_split, parameter.is_expert)


def _matrix_parameters(args: Any, *, is_moe: bool) -> list[LayerParameter]:
    return [p for p in list_layer_parameters(vars(args), is_moe=is_moe) if p.inputs]


def _count_ranks(args: Any, parameter: LayerParameter) -> int:
    """Return the number of tensor-parallel ranks that share a parameter."""
    if not parameter.is_split:
        return 1
    return int(expert_tp(args) if parameter.is_expert else args.tensor_model_parallel_size)
