"""What ranks do in tests. All ranks of a group call a function with the same arguments."""

from __future__ import annotations

import datetime
import os
import resource
import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flagscale.comm.fsccl

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
    rank: int,
    size: int,
    port: int,
    key: str,
    timeout: float,
    environment: dict[str, str],
    host: str = "",
) -> None:
    """Make this process a rank. The test keeps the store; with ``host``, rank 0 there does."""
    for name in [n for n in os.environ if n.startswith("FSCCL_") and n != "FSCCL_BUILD_DIR"]:
        del os.environ[name]
    os.environ.update(environment)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0  # the same names on ranks of different age
    keeps = bool(host) and rank == 0
    store = dist.PrefixStore(key, dist.TCPStore(host or "127.0.0.1", port, is_master=keeps))
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
    dist.reduce_scatter_single(out, given[me], op=reduction(case.red))
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
    dist.all_gather_single(out, on_stride(given[me], case.strided))
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
        elif op == "swap":
            sent = dist.isend(torch.ones(count), (me + n // 2) % n)
            dist.recv(x, (me + n // 2) % n)
            sent.wait()
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


def asynchronous() -> None:
    """Works of one group complete in order; synchronous calls come after those before them."""
    n, me = dist.get_world_size(), dist.get_rank()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    before = backend._get_sequence_number_for_group()
    buffers = [torch.full((50_000,), float(me + i)) for i in range(6)]
    works = [dist.all_reduce(b, async_op=True) for b in buffers[:5]]
    dist.all_reduce(buffers[5])
    assert all(w.is_completed() for w in works), "a later operation is done before an earlier one"
    for i, b in enumerate(buffers):
        assert b[0] == sum(r + i for r in range(n))
    for w in reversed(works):
        w.wait()
        assert w.is_success()
    chained = dist.all_reduce(torch.ones(4), async_op=True).get_future()
    assert chained.then(lambda f: f.value()[0] * 2).wait()[0] == 2 * n
    late = dist.all_reduce(torch.ones(4), async_op=True)
    late.wait()
    assert late.get_future().wait()[0][0] == n
    assert late.result()[0][0] == n
    assert backend._get_sequence_number_for_group() == before + 8


def two_groups_crossed() -> None:
    """Asynchronous operations of two groups, called in opposite orders by different ranks."""
    groups = [dist.new_group(), dist.new_group()]
    buffers = [torch.ones(10_000), torch.ones(10_000)]
    order = (0, 1) if dist.get_rank() % 2 == 0 else (1, 0)
    works = [dist.all_reduce(buffers[i], group=groups[i], async_op=True) for i in order]
    for w in works:
        w.wait()
    assert all(b[0] == dist.get_world_size() for b in buffers)


def messages(count: int) -> None:
    """Point-to-point: both directions at once, tags out of order, from anyone, batched."""
    n, me = dist.get_world_size(), dist.get_rank()
    right, left = (me + 1) % n, (me - 1) % n
    sends = [dist.isend(torch.full((count,), me * 10.0 + t), right, tag=t) for t in range(3)]
    for tag in (2, 0, 1):
        x = torch.empty(count)
        assert dist.recv(x, left, tag=tag) == left
        assert (x == left * 10 + tag).all()
    for s in sends:
        s.wait()
    for step in range(1, n):  # from anyone, on the last rank
        if me == n - 1:
            x = torch.empty(count)
            source = dist.recv(x, tag=step)
            assert source == step - 1
            assert (x == source).all()
        elif me == step - 1:
            dist.send(torch.full((count,), float(me)), n - 1, tag=step)
    into = torch.empty(count)
    ops = [
        dist.P2POp(dist.irecv, into, left),
        dist.P2POp(dist.isend, torch.full((count,), float(me)), right),
    ]
    for w in dist.batch_isend_irecv(ops):
        w.wait()
    assert (into == left).all()
    strided = torch.zeros(2 * count)[::2]
    w = dist.irecv(strided, left)
    dist.send(torch.full((count,), float(me)), right)
    w.wait()
    assert (strided == left).all()
    future = dist.irecv(into, left).get_future()
    dist.send(torch.full((count,), me + 0.5), right)
    assert (future.wait()[0] == left + 0.5).all()


def coalesced() -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    tensors = [torch.full((k,), float(me)) for k in (1, 100, 10_000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for t in tensors:
            dist.all_reduce(t)
    manager.wait()
    assert all((t == sum(range(n))).all() for t in tensors)
    outs = [torch.empty(n * k) for k in (3, 500)]
    with dist._coalescing_manager(device=torch.device("cpu")):
        for out in outs:
            dist.all_gather_single(out, torch.full((out.numel() // n,), float(me)))
    for out in outs:
        assert (out.view(n, -1)[:, 0] == torch.arange(n)).all()


def objects() -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, {"rank": me, "text": "x" * me})
    assert [e["rank"] for e in everyone] == list(range(n))
    one = ["from 0" if me == 0 else None]
    dist.broadcast_object_list(one, 0)
    assert one == ["from 0"]


def usage_errors() -> list[str]:
    """What a wrong call says; the group goes on afterwards."""
    n = dist.get_world_size()
    out = []
    wrong = [
        lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(3).to_sparse()),
        lambda: dist.all_to_all_single(torch.ones(n + 1), torch.ones(n + 1)),
        lambda: dist.all_gather_single(torch.ones(n), torch.ones(2)),
        lambda: dist.reduce_scatter_single(torch.ones(2), torch.ones(2 * n, dtype=torch.float64)),
    ]
    for call_wrongly in wrong:
        try:
            call_wrongly()
            out.append("no error")
        except (ValueError, TypeError, RuntimeError) as error:
            out.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return out


def abort_while_waiting() -> str:
    """Another thread gives up on what nobody else calls."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    threading.Timer(0.3, backend.abort).start()
    try:
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    return "done"
