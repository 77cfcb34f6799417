"""Test cases of groups whose ranks use native libraries, run by fsccl_worker.py."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import fsccl_cases
import torch
import torch.distributed as dist
from fsccl_checks import all_gather_single


def get_cpu_path() -> str:
    """Return the library that runs collectives of CPU tensors in the default group: ``core``,
    ``engine``, or a native library's name.
    """
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    path: str = backend.path_of(torch.ones(1))  # type: ignore[attr-defined]
    return path


def check_nan_propagation(count: int) -> None:
    """Check that a NaN of any rank is in every rank's MIN and MAX."""
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        for source in range(dist.get_world_size()):
            x = torch.full((count,), float(dist.get_rank()))
            if dist.get_rank() == source:
                x[count // 2] = float("nan")
            dist.all_reduce(x, op=op)
            assert x.isnan().nonzero().flatten().tolist() == [count // 2]


def check_identical_rounding(count: int) -> None:
    """Check that all ranks get the same bits for values that round differently in each summation
    order.
    """
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            generator = torch.Generator().manual_seed(dist.get_rank())
            values = torch.randn(count, generator=generator, device="cpu")
            x = values.to(torch.get_default_device(), kind)
            dist.all_reduce(x, op=op)
            mine = x.view(torch.uint8)
            gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, mine)
            assert all(torch.equal(mine, theirs) for theirs in gathered), (kind, op)


def check_unsigned_types(count: int) -> None:
    """Check unsigned types, for which torch has few operations."""
    n, me = dist.get_world_size(), dist.get_rank()
    for kind in (torch.uint16, torch.uint32, torch.uint64):
        top = (1 << (8 * kind.itemsize)) - 1  # sets the sign bit of the signed type
        for op, value, expected in (
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
                continue  # see run_unsupported_reduction()
            x = torch.full((count,), value, dtype=kind)
            dist.all_reduce(x, op=op)
            assert x.tolist() == [expected] * count, (kind, op)


def check_many_in_flight(count: int) -> None:
    """Check asynchronous operations of several kinds at once, waited for in reverse order."""
    n, me = dist.get_world_size(), dist.get_rank()
    sums = [torch.full((count + i,), float(me + i)) for i in range(4)]
    gathered = torch.empty(n * count)
    works = [dist.all_reduce(x, async_op=True) for x in sums]
    works.append(all_gather_single(gathered, torch.full((count,), float(me)), async_op=True))
    futures = [w.get_future() for w in works]
    for w in reversed(works):
        w.wait()
    for i, x in enumerate(sums):
        assert (x == sum(r + i for r in range(n))).all()
    assert (gathered.view(n, -1) == torch.arange(n).unsqueeze(1)).all()
    for f in futures:
        f.wait()


def run_unsupported_reduction() -> str:
    """Return the error of an unsupported reduction. The group must keep working."""
    try:
        dist.all_reduce(torch.ones(3, dtype=torch.uint64), op=dist.ReduceOp.MAX)
    except ValueError as error:
        dist.barrier()
        return str(error)
    return "no error"


def abort_while_waiting_for(op: str) -> str:
    """Abort the group from another thread while an operation waits for other ranks."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    threading.Timer(0.5, backend.abort).start()
    try:
        fsccl_cases.run_operation(op)
    except RuntimeError as error:
        return str(error)
    return "done"


def all_reduce_without_memory(count: int) -> str:
    """Return the error of an all_reduce for which no memory can be allocated."""
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


def check_messages_of_all_pairs(count: int) -> None:
    """Check messages with tags between all pairs of ranks, also of different device types."""
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


def check_coalesced_all_reduces(count: int) -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    tensors = [torch.full((k,), float(me)) for k in (1, 100, count)]
    with dist._coalescing_manager(device=tensors[0].device, async_ops=True) as manager:
        for t in tensors:
            dist.all_reduce(t)
    manager.wait()
    assert all((t == sum(range(n))).all() for t in tensors)
