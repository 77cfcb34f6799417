"""Every collective against a reference, as all ranks of a group call it with the same arguments."""

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
FACTOR = 0.5  # of PREMUL_SUM

# torch 2.13 has new names for them, and warns of the old ones.
all_gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_whole = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def inputs(dtype: torch.dtype, count: int, seed: int) -> list[Tensor]:
    """What every rank holds: small whole numbers and halves, from which few types lose anything."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(dist.get_world_size()):
        # The same on every device.
        drawn = torch.randint(0, 7, (count,), generator=generator, device="cpu")
        values = drawn.to(torch.get_default_device())
        if dtype.is_floating_point or dtype.is_complex:
            out.append(((values - 3) / 2).to(dtype))
        else:
            out.append(values.to(dtype))
    return out


def reduction(name: str) -> Any:
    if name == "premul":
        return dist._make_nccl_premul_sum(FACTOR)
    return REDUCTIONS[name]


def reference(name: str, given: list[Tensor]) -> Tensor:
    """In float64 (complex128, int64), rounded to the type at the end."""
    first = given[0]
    wide = torch.complex128 if first.is_complex() else torch.float64
    if not (first.is_floating_point() or first.is_complex()):
        wide = torch.int64
    if first.dtype == torch.bool:
        name = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(name, name)
    stack = torch.stack([t.to(wide) for t in given])
    if name == "sum":
        total = stack.sum(0)
    elif name == "premul":
        total = (stack * FACTOR).sum(0)
    elif name == "avg":
        whole = wide == torch.int64
        total = stack.sum(0).div(len(given), rounding_mode="trunc" if whole else None)
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


def expect(found: Tensor, wanted: Tensor, what: str) -> None:
    exact = not (wanted.dtype.is_floating_point or wanted.dtype.is_complex)
    # Partial sums of clusters are rounded once each in a 16-bit type.
    loose = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
    tolerance = 0.0 if exact else loose.get(wanted.dtype, 1e-6)
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def expect_equal_bits(found: Tensor, what: str) -> None:
    # A fresh tensor: one element counts as contiguous whatever its stride, but cannot be viewed.
    mine = torch.empty(found.numel(), dtype=found.dtype).copy_(found).view(torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(e, mine) for e in everyone), f"{what}: ranks have different bits"


@dataclass(frozen=True)
class Case:
    """An operation and what it is called with."""

    kind: torch.dtype
    count: int
    red: str
    root: int
    seed: int
    strided: bool
    what: str


def check(op: str, dtype: str, count: int, red: str, root: int, seed: int, strided: bool) -> None:
    """One operation against the reference."""
    what = f"{op} {dtype}[{count}] {red} root {root}"
    root %= dist.get_world_size()
    CHECKS[op](Case(getattr(torch, dtype), count, red, root, seed, strided, what))


def on_stride(t: Tensor, strided: bool) -> Tensor:
    """The same values, every second element of a larger tensor if asked."""
    if not strided:
        return t.clone()
    return torch.stack([t, t], dim=-1).reshape(-1)[::2] if t.numel() else t.clone()


def all_reduce(case: Case) -> None:
    given = inputs(case.kind, case.count, case.seed)
    mine = on_stride(given[dist.get_rank()], case.strided)
    dist.all_reduce(mine, op=reduction(case.red))
    expect(mine, reference(case.red, given), case.what)
    expect_equal_bits(mine, case.what)


def reduce(case: Case) -> None:
    given = inputs(case.kind, case.count, case.seed)
    mine = on_stride(given[dist.get_rank()], case.strided)
    dist.reduce(mine, case.root, op=reduction(case.red))
    me = dist.get_rank()
    expect(mine, reference(case.red, given) if me == case.root else given[me], case.what)


def reduce_scatter(case: Case) -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    given = inputs(case.kind, case.count * n, case.seed)
    out = torch.empty(case.count, dtype=case.kind)
    reduce_scatter_whole(out, given[me], op=reduction(case.red))
    wanted = reference(case.red, given)
    expect(out, wanted[me * case.count : (me + 1) * case.count], case.what)
    # Lists may hold tensors of different sizes.
    sizes = [case.count + p for p in range(n)]
    given = inputs(case.kind, sum(sizes), case.seed + 1)
    parts = [on_stride(p, case.strided) for p in given[me].split(sizes)]
    out = torch.empty(sizes[me], dtype=case.kind)
    dist.reduce_scatter(out, parts, op=reduction(case.red))
    expect(out, reference(case.red, given).split(sizes)[me], case.what + " (list)")


def all_gather(case: Case) -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    given = inputs(case.kind, case.count, case.seed)
    out = torch.empty(n * case.count, dtype=case.kind)
    all_gather_whole(out, on_stride(given[me], case.strided))
    expect(out, torch.cat(given), case.what)
    sizes = [case.count + p for p in range(n)]
    ragged = [inputs(case.kind, s, case.seed + 1)[p] for p, s in enumerate(sizes)]
    outs = [torch.empty(2 * s, dtype=case.kind)[:: 2 if case.strided else 1][:s] for s in sizes]
    dist.all_gather(outs, ragged[me])
    for found, wanted in zip(outs, ragged, strict=True):
        expect(found, wanted, case.what + " (list)")


def broadcast(case: Case) -> None:
    given = inputs(case.kind, case.count, case.seed)
    mine = on_stride(given[dist.get_rank()], case.strided)
    dist.broadcast(mine, case.root)
    expect(mine, given[case.root], case.what)


def gather(case: Case) -> None:
    given = inputs(case.kind, case.count, case.seed)
    is_root = dist.get_rank() == case.root
    outs = [torch.empty(case.count, dtype=case.kind) for _ in given] if is_root else None
    dist.gather(on_stride(given[dist.get_rank()], case.strided), outs, dst=case.root)
    for found, wanted in zip(outs or [], given, strict=False):
        expect(found, wanted, case.what)


def scatter(case: Case) -> None:
    given = inputs(case.kind, case.count, case.seed)
    is_root = dist.get_rank() == case.root
    out = torch.empty(case.count, dtype=case.kind)
    parts = [on_stride(t, case.strided) for t in given] if is_root else None
    dist.scatter(out, parts, src=case.root)
    expect(out, given[dist.get_rank()], case.what)


def all_to_all(case: Case) -> None:
    """Rank r sends case.count + r * p rows to rank p, but nothing to the rank ``root``."""
    n, me = dist.get_world_size(), dist.get_rank()

    def rows(source: int, target: int) -> int:
        return 0 if target == case.root else case.count + source * target

    def sent(source: int) -> list[Tensor]:
        sizes = [rows(source, p) for p in range(n)]
        return list(inputs(case.kind, sum(sizes), case.seed + source)[source].split(sizes))

    mine, wanted = sent(me), [sent(p)[me] for p in range(n)]
    out = torch.empty(sum(w.numel() for w in wanted), dtype=case.kind)
    dist.all_to_all_single(
        out, torch.cat(mine), [w.numel() for w in wanted], [m.numel() for m in mine]
    )
    expect(out, torch.cat(wanted), case.what)
    outs = [torch.empty_like(w) for w in wanted]
    dist.all_to_all(outs, [on_stride(m, case.strided) for m in mine])
    for found, one in zip(outs, wanted, strict=True):
        expect(found, one, case.what + " (list)")


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


def check_many(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        check(**case)
