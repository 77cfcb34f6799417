"""What ranks do in tests of all_reduce in bounded time."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def _backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def tail_statistics() -> dict[str, float]:
    found: dict[str, float] = _backend().tail_statistics()
    return found


def bounded(
    count: int, rounds: int, dtype: str = "float32", red: str = "sum", pause: float = 0
) -> list[list[Any]]:
    """Of each all_reduce: the algorithm, and whether its result is the exact one. That all ranks
    have the same bits is checked here; whoever has others raises."""
    out = []
    ranks, me = dist.get_world_size(), dist.get_rank()
    for k in range(rounds):
        torch.manual_seed(100 * k + me)
        # Whole numbers, of which sums are exact in every type.
        mine = torch.randint(-8, 8, (count,)).to(getattr(torch, dtype))
        found = mine.clone()
        dist.all_reduce(found, getattr(dist.ReduceOp, red.upper()))
        algorithm = _backend().last_algorithm()
        every = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(every, found)
        if not all(torch.equal(one, found) for one in every):
            raise AssertionError(f"all_reduce {k}, {algorithm}: replicas differ")
        dist.all_gather(every, mine)
        exact = torch.stack([one.double() for one in every]).sum(0)
        if red == "avg":
            exact /= ranks
        out.append([algorithm, torch.equal(found.double(), exact)])
        time.sleep(pause)
    return out


def bounded_works(count: int) -> None:
    """Several under way, waited for in another order; a future; strided memory; several in one
    call; and one that is dropped."""
    n, me = dist.get_world_size(), dist.get_rank()
    wanted = sum(range(n))
    many = [torch.full((count,), float(me + i)) for i in range(4)]
    works = [dist.all_reduce(x, async_op=True) for x in many]
    for i in (2, 0, 3, 1):
        works[i].wait()
        assert (many[i] == wanted + n * i).all()
    x = torch.full((count,), float(me))
    future = dist.all_reduce(x, async_op=True).get_future()
    assert (future.wait()[0] == wanted).all()
    strided = torch.full((count, 2), float(me))
    dist.all_reduce(strided[:, 0])
    assert (strided[:, 0] == wanted).all()
    assert (strided[:, 1] == me).all()
    one, small = torch.full((count,), float(me)), torch.full((5,), float(me))
    with dist._coalescing_manager(async_ops=True) as both:
        dist.all_reduce(one)
        dist.all_reduce(small)
    both.wait()
    assert (one == wanted).all()
    assert (small == wanted).all()
    dist.all_reduce(torch.full((count,), float(me)), async_op=True)
    dist.barrier()


def one_all_reduce(count: int) -> None:
    """What a rank of the host does beside one on a GPU."""
    x = torch.full((count,), float(dist.get_rank()))
    dist.all_reduce(x)
    assert (x == sum(range(dist.get_world_size()))).all()


def exact_beside() -> list[str]:
    """What takes the exact way whatever the settings are."""
    x = torch.ones(1 << 18)
    algorithms = []
    for tensor, op in (
        (x.to(torch.int32), dist.ReduceOp.SUM),
        (x, dist.ReduceOp.MAX),
        (x, dist.ReduceOp.PRODUCT),
        (x[:64], dist.ReduceOp.SUM),
    ):
        dist.all_reduce(tensor, op)
        algorithms.append(_backend().last_algorithm())
    dist.broadcast(x, 0)
    algorithms.append(_backend().last_algorithm())
    return algorithms


def unlike_sizes(warm: int) -> None:
    for _ in range(warm):
        dist.all_reduce(torch.ones(1 << 18))
    dist.all_reduce(torch.ones((1 << 18) + dist.get_rank()))


def bounded_of_a_group(tail: str) -> list[str]:
    """By ``pg_options`` of one group, whatever the environment says."""
    from flagscale.comm.fsccl import load_extension

    group = dist.new_group(backend="fsccl", pg_options=load_extension().Options(tail=tail))
    backend = group._get_backend(torch.device("cpu"))
    said = []
    for _ in range(6):
        dist.all_reduce(torch.ones(1 << 18), group=group)
        said.append(backend.last_algorithm())
    dist.barrier()
    dist.destroy_process_group(group)
    return said


def bounded_of_descriptions(descriptions: Sequence[str]) -> dict[str, str]:
    """What the fifth all_reduce of a group takes that is described so."""
    said = {}
    for description in descriptions:
        group = dist.new_group(group_desc=description)
        for _ in range(5):
            dist.all_reduce(torch.ones(1 << 18), group=group)
        said[description] = group._get_backend(torch.device("cpu")).last_algorithm()
        dist.destroy_process_group(group)
    return said


def blow(to: Sequence[str], port: int, mbit: float, seconds: float) -> None:
    """Background datagrams to hosts, at a rate for each."""
    data, each = bytes(1400), len(to) * 1400 * 8 / (mbit * 1e6)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        end = time.monotonic() + seconds
        due = time.monotonic()
        while due < end:
            for _ in range(16):
                for host in to:
                    out.sendto(data, (host, port))
            due += 16 * each / len(to)
            time.sleep(max(0.0, due - time.monotonic()))
