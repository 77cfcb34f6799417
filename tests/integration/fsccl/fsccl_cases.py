"""What ranks do in tests. Every function is called by all ranks of a group with the same arguments."""

from __future__ import annotations

import datetime
import os
import resource
from typing import Any

import flagscale.comm.fsccl
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

assert flagscale.comm.fsccl  # importing it registers the backend


def join(
    rank: int, size: int, port: int, key: str, timeout: float, environment: dict[str, str]
) -> None:
    for name in [n for n in os.environ if n.startswith("FSCCL_") and n != "FSCCL_BUILD_DIR"]:
        del os.environ[name]
    os.environ.update(environment)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0  # the same names on ranks of different age
    store = dist.PrefixStore(key, dist.TCPStore("127.0.0.1", port, is_master=False))
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("fsccl", store=store, rank=rank, world_size=size, timeout=limit)


def leave() -> None:
    dist.destroy_process_group()


def inputs(dtype: torch.dtype, count: int, seed: int) -> list[Tensor]:
    """What every rank holds: small whole numbers and halves, from which few types lose anything."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(dist.get_world_size()):
        values = torch.randint(0, 7, (count,), generator=generator)
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
    mine = found.contiguous().view(torch.uint8) if found.numel() else found.new_zeros(0).byte()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(e, mine) for e in everyone), f"{what}: ranks have different bits"


def check(op: str, dtype: str, count: int, red: str, root: int, seed: int, strided: bool) -> None:
    """One operation against the reference."""
    kind = getattr(torch, dtype)
    what = f"{op} {dtype}[{count}] {red} root {root}"
    root %= dist.get_world_size()
    CHECKS[op](kind, count, red, root, seed, strided, what)


def on_stride(t: Tensor, strided: bool) -> Tensor:
    """The same values, every second element of a larger tensor if asked."""
    if not strided:
        return t.clone()
    return torch.stack([t, t], dim=-1).reshape(-1)[::2] if t.numel() else t.clone()


def all_reduce(kind, count, red, root, seed, strided, what) -> None:  # type: ignore[no-untyped-def]
    given = inputs(kind, count, seed)
    mine = on_stride(given[dist.get_rank()], strided)
    dist.all_reduce(mine, op=reduction(red))
    expect(mine, reference(red, given), what)
    expect_equal_bits(mine, what)


def reduce(kind, count, red, root, seed, strided, what) -> None:  # type: ignore[no-untyped-def]
    given = inputs(kind, count, seed)
    mine = on_stride(given[dist.get_rank()], strided)
    dist.reduce(mine, root, op=reduction(red))
    me = dist.get_rank()
    expect(mine, reference(red, given) if me == root else given[me], what)


def reduce_scatter(kind, count, red, root, seed, strided, what) -> None:  # type: ignore[no-untyped-def]
    n, me = dist.get_world_size(), dist.get_rank()
    given = inputs(kind, count * n, seed)
    out = torch.empty(count, dtype=kind)
    dist.reduce_scatter_single(out, given[me], op=reduction(red))
    wanted = reference(red, given)
    expect(out, wanted[me * count : (me + 1) * count], what)
    # Lists may hold tensors of different sizes.
    sizes = [count + p for p in range(n)]
    given = inputs(kind, sum(sizes), seed + 1)
    parts = [on_stride(p, strided) for p in given[me].split(sizes)]
    out = torch.empty(sizes[me], dtype=kind)
    dist.reduce_scatter(out, parts, op=reduction(red))
    expect(out, reference(red, given).split(sizes)[me], what + " (list)")


def all_gather(kind, count, red, root, seed, strided, what) -> None:  # type: ignore[no-untyped-def]
    n, me = dist.get_world_size(), dist.get_rank()
    given = inputs(kind, count, seed)
    out = torch.empty(n * count, dtype=kind)
    dist.all_gather_single(out, on_stride(given[me], strided))
    expect(out, torch.cat(given), what)
    sizes = [count + p for p in range(n)]
    ragged = [inputs(kind, s, seed + 1)[p] for p, s in enumerate(sizes)]
    outs = [torch.empty(2 * s, dtype=kind)[:: 2 if strided else 1][:s] for s in sizes]
    dist.all_gather(outs, ragged[me])
    for found, wanted in zip(outs, ragged, strict=True):
        expect(found, wanted, what + " (list)")


def broadcast(kind, count, red, root, seed, strided, what) -> None:  # type: ignore[no-untyped-def]
    given = inputs(kind, count, seed)
    mine = on_stride(given[dist.get_rank()], strided)
    dist.broadcast(mine, root)
    expect(mine, given[root], what)


def gather(kind, count, red, root, seed, strided, what) -> None:  # type: ignore[no-untyped-def]
    given = inputs(kind, count, seed)
    is_root = dist.get_rank() == root
    outs = [torch.empty(count, dtype=kind) for _ in given] if is_root else None
    dist.gather(on_stride(given[dist.get_rank()], strided), outs, dst=root)
    for found, wanted in zip(outs or [], given, strict=False):
        expect(found, wanted, what)


def scatter(kind, count, red, root, seed, strided, what) -> None:  # type: ignore[no-untyped-def]
    given = inputs(kind, count, seed)
    is_root = dist.get_rank() == root
    out = torch.empty(count, dtype=kind)
    parts = [on_stride(t, strided) for t in given] if is_root else None
    dist.scatter(out, parts, src=root)
    expect(out, given[dist.get_rank()], what)


def all_to_all(kind, count, red, root, seed, strided, what) -> None:  # type: ignore[no-untyped-def]
    """Rank r sends count + r * p rows to rank p, but nothing to the rank ``root``."""
    n, me = dist.get_world_size(), dist.get_rank()

    def rows(source: int, target: int) -> int:
        return 0 if target == root else count + source * target

    def sent(source: int) -> list[Tensor]:
        sizes = [rows(source, p) for p in range(n)]
        return list(inputs(kind, sum(sizes), seed + source)[source].split(sizes))

    mine, wanted = sent(me), [sent(p)[me] for p in range(n)]
    out = torch.empty(sum(w.numel() for w in wanted), dtype=kind)
    dist.all_to_all_single(
        out, torch.cat(mine), [w.numel() for w in wanted], [m.numel() for m in mine]
    )
    expect(out, torch.cat(wanted), what)
    outs = [torch.empty_like(w) for w in wanted]
    dist.all_to_all(outs, [on_stride(m, strided) for m in mine])
    for found, one in zip(outs, wanted, strict=True):
        expect(found, one, what + " (list)")


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


def call(op: str, count: int = 1 << 18, repeat: int = 1) -> str:
    """An operation whose failure is what the test is about."""
    n, me = dist.get_world_size(), dist.get_rank()
    x = torch.ones(count)
    for _ in range(repeat):
        if op == "all_reduce":
            dist.all_reduce(x)
        elif op == "barrier":
            dist.barrier()
        elif op == "broadcast":
            dist.broadcast(x, 0)
            dist.barrier()  # a root may finish alone
        elif op == "recv_last":
            if me != n - 1:
                dist.recv(x, n - 1)
        elif op == "all_to_all":
            dist.all_to_all_single(torch.empty(n * count), torch.ones(n * count))
        else:
            raise ValueError(op)
    return "done"


def limit_file_size(bytes_: int) -> None:
    """As ``ulimit -f``; -1 lifts the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if bytes_ < 0 else bytes_, hard))


def shared_files() -> list[str]:
    return sorted(p for p in os.listdir("/dev/shm") if "fsccl" in p)  # noqa: PTH208
