"""What ranks with a GPU do in tests. Ranks of the host in the same group call the plain cases."""

from __future__ import annotations

import statistics
import time
from typing import Any

import fsccl_cases
import fsccl_checks
import fsccl_device_cases
import fsccl_tail_cases
import fsccl_torch_cases
import torch
import torch.distributed as dist

MODULES = (
    fsccl_torch_cases,
    fsccl_cases,
    fsccl_checks,
    fsccl_device_cases,
    fsccl_tail_cases,
)
CALLABLE = {name: case for module in MODULES for name, case in vars(module).items()}
CYCLES = 2_000_000_000  # about a second of a GPU: longer than any call takes


def own_device() -> torch.device:
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def on_cuda(name: str, **arguments: Any) -> Any:
    """Another case, with tensors on this rank's GPU."""
    with own_device():
        result = CALLABLE[name](**arguments)
    torch.cuda.synchronize()
    return result


def cuda_path() -> str:
    backend = dist.group.WORLD._get_backend(own_device())  # type: ignore[union-attr]
    path: str = backend.path_of(torch.ones(1, device="cuda"))  # type: ignore[attr-defined]
    return path


def calls_return_early(count: int) -> None:
    """Asynchronous and synchronous calls return while the GPU still makes their input; wait()
    orders the current stream and not the host."""
    n, device = dist.get_world_size(), own_device()
    for async_op in (True, False):
        dist.all_reduce(torch.ones(count, device=device))  # connects
        loaded = torch.zeros(count, device=device)
        loaded += dist.get_rank()
        loaded * 2  # kernels are loaded when they are first called, which waits for the GPU
        torch.cuda.synchronize()
        x = torch.zeros(count, device=device)
        torch.cuda._sleep(CYCLES)
        x += dist.get_rank()
        made = torch.cuda.Event()
        made.record()
        work = dist.all_reduce(x, async_op=async_op)
        if work is not None:
            assert not work.is_completed()
            work.wait()
        doubled = x * 2
        assert not made.query(), "a call waited for the GPU"
        torch.cuda.synchronize()
        assert (doubled == 2 * sum(range(n))).all()


def works_on_side_streams(count: int) -> None:
    """The stream that is current at the call, and the one at wait(), are the ones that count."""
    n, device = dist.get_world_size(), own_device()
    one, other = torch.cuda.Stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(one):
        torch.cuda._sleep(CYCLES // 20)
        x = torch.full((count,), float(dist.get_rank()), device=device)
        work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(other):
        work.wait()
        result = x + 1
        future = work.get_future().wait()[0] + 1
    torch.cuda.synchronize()
    for found in (result, future):
        assert (found == sum(range(n)) + 1).all()


def memory_is_kept(count: int) -> None:
    """Inputs that the caller drops at once are not given to anyone before the GPU has read them."""
    n, device = dist.get_world_size(), own_device()
    outs, works = [], []
    for i in range(8):
        out = torch.empty(n * count, device=device)
        given = torch.full((count,), float(dist.get_rank() + i), device=device)
        torch.cuda._sleep(CYCLES // 100)
        works.append(fsccl_checks.all_gather_whole(out, given, async_op=True))
        del given
        torch.full((count,), -1.0, device=device)  # takes the memory if it is free
        outs.append(out)
    for work in works:
        work.wait()
    for i, out in enumerate(outs):
        wanted = torch.arange(n, device=device, dtype=torch.float32).unsqueeze(1) + i
        assert (out.view(n, -1) == wanted).all()


def capture() -> str:
    """What a captured operation says; afterwards the group works."""
    x = torch.ones(1 << 16, device=own_device())
    dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    said = "captured"
    try:
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
    except (NotImplementedError, RuntimeError) as error:
        said = f"{error} {error.__context__}"  # ending the capture may fail on its own
    return said


def captured_graph_replays() -> None:
    """Where the native library does all, a graph may hold its operations."""
    n, x = dist.get_world_size(), torch.ones(1 << 16, device=own_device())
    dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
    x.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert (x == n).all()


def all_reduce_seconds(size: int, repeats: int) -> float:
    """The median of calls of ``size`` bytes of float32, each to its end on the GPU."""
    x = torch.ones(size // 4, device=own_device())
    times = []
    for i in range(repeats + 3):
        x.fill_(1)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        torch.cuda.synchronize()
        if i >= 3:
            times.append(time.perf_counter() - start)
    assert (x == dist.get_world_size()).all()
    slowest = torch.tensor(times, dtype=torch.float64, device=x.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def says_that_it_failed() -> bool:
    try:
        dist.barrier()
    except RuntimeError:
        return True
    return False


def waits_in_vain(count: int) -> str:
    """What the group says after an operation that no other rank calls: not only to the next
    operation on the GPU."""
    x = torch.ones(count, device=own_device())
    dist.all_reduce(x)
    torch.cuda.synchronize()
    try:
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    return "no error"


def leaves_while_it_waits(count: int) -> bool:
    """Ends the group with an operation under way that no other rank calls."""
    x = torch.ones(count, device=own_device())
    dist.all_reduce(x)
    dist.destroy_process_group()
    torch.cuda.synchronize()
    return True


def parts_that_do_not_fit_are_refused() -> None:
    n, device = dist.get_world_size(), own_device()
    for given, wanted in ((n, 2 * n), (2 * n, n), (2 * n + 1, 2 * n + 1)):
        try:
            dist.all_to_all_single(
                torch.ones(wanted, device=device), torch.ones(given, device=device)
            )
        except (RuntimeError, ValueError):
            continue
        raise AssertionError(f"{given} to {wanted} was taken")
    out = torch.zeros(2 * n, device=device)
    dist.all_to_all_single(out, torch.full((2 * n,), float(dist.get_rank()), device=device))
    assert out.tolist() == [float(p) for p in range(n) for _ in range(2)]


def earlier_works_are_waited_for_alone(count: int) -> None:
    """Who waits for an asynchronous operation does not wait for those after it."""
    n, device = dist.get_world_size(), own_device()
    first, second = (torch.ones(count, device=device) for _ in range(2))
    dist.all_reduce(first)
    torch.cuda.synchronize()
    one = dist.all_reduce(first, async_op=True)
    if dist.get_rank() > 0:
        torch.cuda._sleep(CYCLES)
    other = dist.all_reduce(second, async_op=True)
    one.wait()
    done = torch.cuda.Event()
    done.record()
    if dist.get_rank() == 0:
        done.synchronize()
        assert not other.is_completed(), "the second operation was waited for too"
    other.wait()
    assert (first == n * n).all()
    assert (second == n).all()


def fails_when_a_rank_ends(count: int) -> str:
    """Until the error of an operation whose partner is gone."""
    x = torch.ones(count, device=own_device())
    try:
        for _ in range(1_000_000):
            dist.all_reduce(x)
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return "no error"
