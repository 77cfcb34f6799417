"""Test cases of bounded all_reduce, run on ranks by fsccl_worker.py."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def _backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def get_tail_statistics() -> dict[str, float]:
    statistics: dict[str, float] = _backend().tail_statistics()
    return statistics


def run_all_reduces(
    count: int, rounds: int, dtype: str = "float32", red: str = "sum", pause: float = 0
) -> list[list[Any]]:
    """Run all_reduces. Return the algorithm of each, and whether its result is exact.

    Raises:
        AssertionError: The ranks' results differ.
    """
    out = []
    ranks, me = dist.get_world_size(), dist.get_rank()
    for k in range(rounds):
        torch.manual_seed(100 * k + me)
        # Integers, whose sums are exact in every data type.
        mine = torch.randint(-8, 8, (count,)).to(getattr(torch, dtype))
        result = mine.clone()
        dist.all_reduce(result, getattr(dist.ReduceOp, red.upper()))
        algorithm = _backend().last_algorithm()
        gathered = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(gathered, result)
        if not all(torch.equal(tensor, result) for tensor in gathered):
            raise AssertionError(f"all_reduce {k}, {algorithm}: replicas differ")
        dist.all_gather(gathered, mine)
        exact = torch.stack([tensor.double() for tensor in gathered]).sum(0)
        if red == "avg":
            exact /= ranks
        out.append([algorithm, torch.equal(result.double(), exact)])
        time.sleep(pause)
    return out


def check_works(count: int) -> None:
    """Check works that overlap and are waited for out of order, futures, strided and coalesced
    tensors.

    A work that is dropped without waiting is covered as well.
    """
    n, me = dist.get_world_size(), dist.get_rank()
    expected = sum(range(n))
    tensors = [torch.full((count,), float(me + i)) for i in range(4)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for i in (2, 0, 3, 1):
        works[i].wait()
        assert (tensors[i] == expected + n * i).all()
    x = torch.full((count,), float(me))
    future = dist.all_reduce(x, async_op=True).get_future()
    assert (future.wait()[0] == expected).all()
    strided = torch.full((count, 2), float(me))
    dist.all_reduce(strided[:, 0])
    assert (strided[:, 0] == expected).all()
    assert (strided[:, 1] == me).all()
    large, small = torch.full((count,), float(me)), torch.full((5,), float(me))
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(large)
        dist.all_reduce(small)
    manager.wait()
    assert (large == expected).all()
    assert (small == expected).all()
    dist.all_reduce(torch.full((count,), float(me)), async_op=True)
    dist.barrier()


def check_all_reduce(count: int) -> None:
    """Check one all_reduce of a CPU rank in a group with a GPU rank."""
    x = torch.full((count,), float(dist.get_rank()))
    dist.all_reduce(x)
    assert (x == sum(range(dist.get_world_size()))).all()


def list_exact_algorithms() -> list[str]:
    """Return the algorithms of operations that are exact with any settings."""
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


def all_reduce_mismatched_sizes(warm_up: int) -> None:
    for _ in range(warm_up):
        dist.all_reduce(torch.ones(1 << 18))
    dist.all_reduce(torch.ones((1 << 18) + dist.get_rank()))


def run_group_with_options(tail: str) -> list[str]:
    """Return the algorithms of a group whose ``pg_options`` override the environment."""
    from flagscale.comm.fsccl import load_extension

    group = dist.new_group(backend="fsccl", pg_options=load_extension().Options(tail=tail))
    backend = group._get_backend(torch.device("cpu"))
    algorithms = []
    for _ in range(6):
        dist.all_reduce(torch.ones(1 << 18), group=group)
        algorithms.append(backend.last_algorithm())
    dist.barrier()
    dist.destroy_process_group(group)
    return algorithms


def run_groups_by_description(descriptions: Sequence[str]) -> dict[str, str]:
    """Return the algorithm of the fifth all_reduce of a group with each description."""
    algorithms = {}
    for description in descriptions:
        group = dist.new_group(group_desc=description)
        for _ in range(5):
            dist.all_reduce(torch.ones(1 << 18), group=group)
        algorithms[description] = group._get_backend(torch.device("cpu")).last_algorithm()
        dist.destroy_process_group(group)
    return algorithms


def send_background_traffic(
    addresses: Sequence[str], port: int, mbit: float, seconds: float
) -> None:
    """Send background datagrams to hosts, at a rate in Mbit/s for each."""
    data, interval = bytes(1400), len(addresses) * 1400 * 8 / (mbit * 1e6)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        end = time.monotonic() + seconds
        due = time.monotonic()
        while due < end:
            for _ in range(16):
                for host in addresses:
                    out.sendto(data, (host, port))
            due += 16 * interval / len(addresses)
            time.sleep(max(0.0, due - time.monotonic()))
