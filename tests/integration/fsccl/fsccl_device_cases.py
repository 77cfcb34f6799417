"""What ranks do in tests of clusters by native library."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import fsccl_cases
import torch
import torch.distributed as dist
from fsccl_checks import all_gather_whole


def paths() -> str:
    """How CPU tensors move in the default group: core, engine, or a native library's name."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    path: str = backend.path_of(torch.ones(1))  # type: ignore[attr-defined]
    return path


def nan_wins(count: int) -> None:
    """A NaN of any rank is in every rank's MIN and MAX, by whichever algorithm."""
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        for source in range(dist.get_world_size()):
            x = torch.full((count,), float(dist.get_rank()))
            if dist.get_rank() == source:
                x[count // 2] = float("nan")
            dist.all_reduce(x, op=op)
            assert x.isnan().nonzero().flatten().tolist() == [count // 2]


def rounding_is_alike(count: int) -> None:
    """Values that every order of summation rounds otherwise: all ranks get the same bits."""
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            generator = torch.Generator().manual_seed(dist.get_rank())
            drawn = torch.randn(count, generator=generator, device="cpu")
            x = drawn.to(torch.get_default_device(), kind)
            dist.all_reduce(x, op=op)
            mine = x.view(torch.uint8)
            everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, mine)
            assert all(torch.equal(mine, other) for other in everyone), (kind, op)


def unsigned(count: int) -> None:
    """Types that torch hardly computes with."""
    n, me = dist.get_world_size(), dist.get_rank()
    for kind in (torch.uint16, torch.uint32, torch.uint64):
        top = (1 << (8 * kind.itemsize)) - 1  # the sign bit of the signed type is set
        for op, given, wanted in (
            (dist.ReduceOp.SUM, me + 1, n * (n + 1) // 2),
            (dist.ReduceOp.BXOR, 1 << me, (1 << n) - 1),
            (dist.ReduceOp.MAX, top if me == 0 else 1, top),
            (dist.ReduceOp.MIN, top if me == 0 else 1, 1),
            (dist.ReduceOp.AVG, top // n, top // n),
        ):
            if kind == torch.uint64 and op in (
                dist.ReduceOp.MAX,
                dist.ReduceOp.MIN,
                dist.ReduceOp.AVG,
            ):
                continue  # refused()
            x = torch.full((count,), given, dtype=kind)
            dist.all_reduce(x, op=op)
            assert x.tolist() == [wanted] * count, (kind, op)


def many_in_flight(count: int) -> None:
    """Asynchronous operations of all kinds at once, waited for in the opposite order."""
    n, me = dist.get_world_size(), dist.get_rank()
    sums = [torch.full((count + i,), float(me + i)) for i in range(4)]
    gathered = torch.empty(n * count)
    works = [dist.all_reduce(x, async_op=True) for x in sums]
    works.append(all_gather_whole(gathered, torch.full((count,), float(me)), async_op=True))
    futures = [w.get_future() for w in works]
    for w in reversed(works):
        w.wait()
    for i, x in enumerate(sums):
        assert (x == sum(r + i for r in range(n))).all()
    assert (gathered.view(n, -1) == torch.arange(n).unsqueeze(1)).all()
    for f in futures:
        f.wait()


def refused() -> str:
    """What a wrong call says; the group goes on afterwards."""
    try:
        dist.all_reduce(torch.ones(3, dtype=torch.uint64), op=dist.ReduceOp.MAX)
    except ValueError as error:
        dist.barrier()
        return str(error)
    return "no error"


def abort_while_waiting_for(op: str) -> str:
    """Another thread gives up on what nobody else calls."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    threading.Timer(0.5, backend.abort).start()
    try:
        fsccl_cases.call(op)
    except RuntimeError as error:
        return str(error)
    return "done"


def call_without_memory(count: int) -> str:
    """No memory but for the tensor itself."""
    tensor = torch.ones(count)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), limits[1]))
    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return "done"


def messages_alike(count: int) -> None:
    """Sends and receives between all pairs, with tags; ranks may be of different kinds."""
    n, me = dist.get_world_size(), dist.get_rank()
    for source in range(n):
        for target in range(n):
            tag = source * n + target
            if source == target or me not in (source, target):
                continue
            if me == source:
                dist.send(torch.full((count,), float(tag)), target, tag=tag)
            else:
                x = torch.empty(count)
                assert dist.recv(x, source, tag=tag) == source
                assert (x == tag).all()


def coalesced_alike(count: int) -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    tensors = [torch.full((k,), float(me)) for k in (1, 100, count)]
    with dist._coalescing_manager(device=tensors[0].device, async_ops=True) as manager:
        for t in tensors:
            dist.all_reduce(t)
    manager.wait()
    assert all((t == sum(range(n))).all() for t in tensors)
