"""Checks of every collective against a float64 reference, run on ranks by fsccl_worker.py.

All ranks of a group call a function with the same arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
PREMUL_FACTOR = 0.5  # factor of PREMUL_SUM

# torch 2.13 renamed both functions and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def generate_inputs(dtype: torch.dtype, count: int, seed: int) -> list[Tensor]:
    """Return the inputs of all ranks: small integers and halves, exact in most data types."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(dist.get_world_size()):
        # Drawn on the CPU, so that values are the same for every device.
        integers = torch.randint(0, 7, (count,), generator=generator, device="cpu")
        values = integers.to(torch.get_default_device())
        if dtype.is_floating_point or dtype.is_complex:
            out.append(((values - 3) / 2).to(dtype))
        else:
            out.append(values.to(dtype))
    return out


def make_reduce_op(name: str) -> Any:
    if name == "premul":
        return dist._make_nccl_premul_sum(PREMUL_FACTOR)
    return REDUCTIONS[name]


def compute_reference(name: str, tensors: list[Tensor]) -> Tensor:
    """Compute the reduction in float64 (complex128, int64) and round it to the data type."""
    first = tensors[0]
    wide_dtype = torch.complex128 if first.is_complex() else torch.float64
    if not (first.is_floating_point() or first.is_complex()):
        wide_dtype = torch.int64
    if first.dtype == torch.bool:
        name = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(name, name)
    stack = torch.stack([t.to(wide_dtype) for t in tensors])
    if name == "sum":
        total = stack.sum(0)
    elif name == "premul":
        total = (stack * PREMUL_FACTOR).sum(0)
    elif name == "avg":
        is_integer = wide_dtype == torch.int64
        total = stack.sum(0).div(len(tensors), rounding_mode="trunc" if is_integer else None)
    elif name == "product":
        total = stack.prod(0)
    elif name in ("min", "max"):
        total = getattr(stack, "a" + name)(0)
    else:
        fold = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[name]
        total = stack[0]
        for row in stack[1:]:
            total = fold(total, row)
    return total.to(first.dtype)


def assert_close(result: Tensor, expected: Tensor, label: str) -> None:
    exact = not (expected.dtype.is_floating_point or expected.dtype.is_complex)
    # Partial sums of nodes are rounded once each in 16-bit types.
    tolerances = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
    tolerance = 0.0 if exact else tolerances.get(expected.dtype, 1e-6)
    torch.testing.assert_close(
        result,
        expected,
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda m: f"{label}: {m}",
    )


def assert_same_bits_on_ranks(result: Tensor, label: str) -> None:
    # A new tensor: a single element counts as contiguous with any stride, but cannot be viewed.
    mine = torch.empty(result.numel(), dtype=result.dtype).copy_(result).view(torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    assert all(torch.equal(e, mine) for e in gathered), f"{label}: ranks have different bits"


@dataclass(frozen=True)
class OperationCase:
    """Arguments of a check of one operation."""

    dtype: torch.dtype
    count: int
    """Elements of a rank's input, or of the smallest part if there is a part per rank."""
    red: str
    """Reduction: a key of :data:`REDUCTIONS`, or ``premul``."""
    root: int
    seed: int
    strided: bool
    """Use tensors that are not contiguous."""
    label: str
    """Description of the case, for messages."""


def check_operation(
    op: str, dtype: str, count: int, red: str, root: int, seed: int, strided: bool
) -> None:
    """Check one operation against the reference."""
    label = f"{op} {dtype}[{count}] {red} root {root}"
    root %= dist.get_world_size()
    CHECKS[op](OperationCase(getattr(torch, dtype), count, red, root, seed, strided, label))


def make_strided(t: Tensor, strided: bool) -> Tensor:
    """Return the same values, as every second element of a larger tensor if ``strided``."""
    if not strided:
        return t.clone()
    return torch.stack([t, t], dim=-1).reshape(-1)[::2] if t.numel() else t.clone()


def all_reduce(case: OperationCase) -> None:
    tensors = generate_inputs(case.dtype, case.count, case.seed)
    mine = make_strided(tensors[dist.get_rank()], case.strided)
    dist.all_reduce(mine, op=make_reduce_op(case.red))
    assert_close(mine, compute_reference(case.red, tensors), case.label)
    assert_same_bits_on_ranks(mine, case.label)


def reduce(case: OperationCase) -> None:
    tensors = generate_inputs(case.dtype, case.count, case.seed)
    mine = make_strided(tensors[dist.get_rank()], case.strided)
    dist.reduce(mine, case.root, op=make_reduce_op(case.red))
    me = dist.get_rank()
    assert_close(
        mine, compute_reference(case.red, tensors) if me == case.root else tensors[me], case.label
    )


def reduce_scatter(case: OperationCase) -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    tensors = generate_inputs(case.dtype, case.count * n, case.seed)
    out = torch.empty(case.count, dtype=case.dtype)
    reduce_scatter_single(out, tensors[me], op=make_reduce_op(case.red))
    expected = compute_reference(case.red, tensors)
    assert_close(out, expected[me * case.count : (me + 1) * case.count], case.label)
    # Lists may contain tensors of different sizes.
    sizes = [case.count + p for p in range(n)]
    tensors = generate_inputs(case.dtype, sum(sizes), case.seed + 1)
    parts = [make_strided(p, case.strided) for p in tensors[me].split(sizes)]
    out = torch.empty(sizes[me], dtype=case.dtype)
    dist.reduce_scatter(out, parts, op=make_reduce_op(case.red))
    assert_close(out, compute_reference(case.red, tensors).split(sizes)[me], case.label + " (list)")


def all_gather(case: OperationCase) -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    tensors = generate_inputs(case.dtype, case.count, case.seed)
    out = torch.empty(n * case.count, dtype=case.dtype)
    all_gather_single(out, make_strided(tensors[me], case.strided))
    assert_close(out, torch.cat(tensors), case.label)
    sizes = [case.count + p for p in range(n)]
    ragged = [generate_inputs(case.dtype, s, case.seed + 1)[p] for p, s in enumerate(sizes)]
    outs = [torch.empty(2 * s, dtype=case.dtype)[:: 2 if case.strided else 1][:s] for s in sizes]
    dist.all_gather(outs, ragged[me])
    for result, expected in zip(outs, ragged, strict=True):
        assert_close(result, expected, case.label + " (list)")


def broadcast(case: OperationCase) -> None:
    tensors = generate_inputs(case.dtype, case.count, case.seed)
    mine = make_strided(tensors[dist.get_rank()], case.strided)
    dist.broadcast(mine, case.root)
    assert_close(mine, tensors[case.root], case.label)


def gather(case: OperationCase) -> None:
    tensors = generate_inputs(case.dtype, case.count, case.seed)
    is_root = dist.get_rank() == case.root
    outs = [torch.empty(case.count, dtype=case.dtype) for _ in tensors] if is_root else None
    dist.gather(make_strided(tensors[dist.get_rank()], case.strided), outs, dst=case.root)
    for result, expected in zip(outs or [], tensors, strict=False):
        assert_close(result, expected, case.label)


def scatter(case: OperationCase) -> None:
    tensors = generate_inputs(case.dtype, case.count, case.seed)
    is_root = dist.get_rank() == case.root
    out = torch.empty(case.count, dtype=case.dtype)
    parts = [make_strided(t, case.strided) for t in tensors] if is_root else None
    dist.scatter(out, parts, src=case.root)
    assert_close(out, tensors[dist.get_rank()], case.label)


def all_to_all(case: OperationCase) -> None:
    """Send ``case.count + source * target`` rows between ranks, but none to the rank ``root``."""
    n, me = dist.get_world_size(), dist.get_rank()

    def rows(source: int, target: int) -> int:
        return 0 if target == case.root else case.count + source * target

    def sent(source: int) -> list[Tensor]:
        sizes = [rows(source, p) for p in range(n)]
        return list(
            generate_inputs(case.dtype, sum(sizes), case.seed + source)[source].split(sizes)
        )

    mine, expected = sent(me), [sent(p)[me] for p in range(n)]
    out = torch.empty(sum(w.numel() for w in expected), dtype=case.dtype)
    dist.all_to_all_single(
        out, torch.cat(mine), [w.numel() for w in expected], [m.numel() for m in mine]
    )
    assert_close(out, torch.cat(expected), case.label)
    outs = [torch.empty_like(w) for w in expected]
    dist.all_to_all(outs, [make_strided(m, case.strided) for m in mine])
    for result, tensor in zip(outs, expected, strict=True):
        assert_close(result, tensor, case.label + " (list)")


CHECKS = {
    f.__name__: f
    for f in (
        all_reduce,
        reduce,
        reduce_scatter,
        all_gather,
        broadcast,
        gather,
        scatter,
        all_to_all,
    )
}


def check_operations(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        check_operation(**case)
