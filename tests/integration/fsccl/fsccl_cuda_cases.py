"""Test cases of ranks with a GPU, run by fsccl_worker.py. CPU ranks of the same group run the cases
of the other modules.

A rank's native library, such as NCCL, transfers tensors among ranks with the same library. fsccl's
own device engine transfers them between groups of such ranks. fsccl_bounded_cases tests the bounded
all_reduce, which excludes late contributions.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import fsccl_bounded_cases
import fsccl_cases
import fsccl_checks
import fsccl_device_cases
import fsccl_torch_cases
import torch
import torch.distributed as dist

MODULES = (
    fsccl_torch_cases,
    fsccl_cases,
    fsccl_checks,
    fsccl_device_cases,
    fsccl_bounded_cases,
)
CASES = {name: case for module in MODULES for name, case in vars(module).items()}
SLEEP_CYCLES = 2_000_000_000  # GPU clock cycles: about a second, longer than any call takes


def select_own_device() -> torch.device:
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def run_on_cuda(name: str, **arguments: Any) -> Any:
    """Run another case with tensors on this rank's GPU."""
    with select_own_device():
        result = CASES[name](**arguments)
    torch.cuda.synchronize()
    return result


def get_cuda_path() -> str:
    """Return which library runs collectives of CUDA tensors: ``engine`` (fsccl's device engine) or
    the name of the native library, such as ``nccl``.
    """
    backend = dist.group.WORLD._get_backend(select_own_device())  # type: ignore[union-attr]
    path: str = backend.path_of(torch.ones(1, device="cuda"))  # type: ignore[attr-defined]
    return path


def check_calls_return_early(count: int) -> None:
    """Check that calls return while the GPU still computes their input.

    wait() must block the current stream, not the host.
    """
    n, device = dist.get_world_size(), select_own_device()
    for async_op in (True, False):
        dist.all_reduce(torch.ones(count, device=device))  # connects the ranks
        warm_up = torch.zeros(count, device=device)
        warm_up += dist.get_rank()
        warm_up * 2  # loads the kernels, which would synchronize with the GPU later
        torch.cuda.synchronize()
        x = torch.zeros(count, device=device)
        torch.cuda._sleep(SLEEP_CYCLES)
        x += dist.get_rank()
        input_ready = torch.cuda.Event()
        input_ready.record()
        work = dist.all_reduce(x, async_op=async_op)
        if work is not None:
            assert not work.is_completed()
            work.wait()
        doubled = x * 2
        assert not input_ready.query(), "a call waited for the GPU"
        torch.cuda.synchronize()
        assert (doubled == 2 * sum(range(n))).all()


def check_side_streams(count: int) -> None:
    """Check that the current streams of the call and of wait() are used."""
    n, device = dist.get_world_size(), select_own_device()
    call_stream, wait_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(call_stream):
        torch.cuda._sleep(SLEEP_CYCLES // 20)
        x = torch.full((count,), float(dist.get_rank()), device=device)
        work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(wait_stream):
        work.wait()
        result = x + 1
        future = work.get_future().wait()[0] + 1
    torch.cuda.synchronize()
    for tensor in (result, future):
        assert (tensor == sum(range(n)) + 1).all()


def check_input_lifetime(count: int) -> None:
    """Check that inputs dropped by the caller are not reused before the GPU has read them."""
    n, device = dist.get_world_size(), select_own_device()
    outs, works = [], []
    for i in range(8):
        out = torch.empty(n * count, device=device)
        source = torch.full((count,), float(dist.get_rank() + i), device=device)
        torch.cuda._sleep(SLEEP_CYCLES // 100)
        works.append(fsccl_checks.all_gather_single(out, source, async_op=True))
        del source
        torch.full((count,), -1.0, device=device)  # reuses the memory if it was freed
        outs.append(out)
    for work in works:
        work.wait()
    for i, out in enumerate(outs):
        expected = torch.arange(n, device=device, dtype=torch.float32).unsqueeze(1) + i
        assert (out.view(n, -1) == expected).all()


def capture_all_reduce() -> str:
    """Return the error of capturing an operation in a CUDA graph."""
    x = torch.ones(1 << 16, device=select_own_device())
    dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    result = "captured"
    try:
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
    except (NotImplementedError, RuntimeError) as error:
        result = f"{error} {error.__context__}"  # ending the capture may raise, too
    return result


def check_graph_replay() -> None:
    """Check that a CUDA graph can contain operations of groups in which all ranks have the same
    native library.
    """
    n, x = dist.get_world_size(), torch.ones(1 << 16, device=select_own_device())
    dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
    x.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert (x == n).all()


def measure_all_reduce(size: int, repeats: int) -> float:
    """Return the median seconds of an all_reduce of ``size`` bytes of float32, including the GPU's
    work.
    """
    x = torch.ones(size // 4, device=select_own_device())
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


def is_barrier_failing() -> bool:
    try:
        dist.barrier()
    except RuntimeError:
        return True
    return False


def wait_for_absent_ranks(count: int) -> str:
    """Return the error of a barrier after an operation that no other rank calls.

    The error must not be limited to further operations on the GPU.
    """
    x = torch.ones(count, device=select_own_device())
    dist.all_reduce(x)
    torch.cuda.synchronize()
    try:
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    return "no error"


def destroy_group_while_waiting(count: int) -> bool:
    """Destroy the group during an operation that no other rank calls."""
    x = torch.ones(count, device=select_own_device())
    dist.all_reduce(x)
    dist.destroy_process_group()
    torch.cuda.synchronize()
    return True


def check_invalid_splits_rejected() -> None:
    n, device = dist.get_world_size(), select_own_device()
    for send_size, receive_size in ((n, 2 * n), (2 * n, n), (2 * n + 1, 2 * n + 1)):
        try:
            dist.all_to_all_single(
                torch.ones(receive_size, device=device), torch.ones(send_size, device=device)
            )
        except (RuntimeError, ValueError):
            continue
        raise AssertionError(f"{send_size} to {receive_size} was taken")
    out = torch.zeros(2 * n, device=device)
    dist.all_to_all_single(out, torch.full((2 * n,), float(dist.get_rank()), device=device))
    assert out.tolist() == [float(p) for p in range(n) for _ in range(2)]


def check_wait_ignores_later_works(count: int) -> None:
    """Check that waiting for an asynchronous operation does not wait for later ones."""
    n, device = dist.get_world_size(), select_own_device()
    first, second = (torch.ones(count, device=device) for _ in range(2))
    dist.all_reduce(first)
    torch.cuda.synchronize()
    first_work = dist.all_reduce(first, async_op=True)
    if dist.get_rank() > 0:
        torch.cuda._sleep(SLEEP_CYCLES)
    second_work = dist.all_reduce(second, async_op=True)
    first_work.wait()
    first_done = torch.cuda.Event()
    first_done.record()
    if dist.get_rank() == 0:
        first_done.synchronize()
        assert not second_work.is_completed(), "the second operation was waited for too"
    second_work.wait()
    assert (first == n * n).all()
    assert (second == n).all()


def run_until_a_rank_exits(count: int) -> str:
    """Run operations until one fails because another rank has exited. Return its error."""
    x = torch.ones(count, device=select_own_device())
    try:
        for _ in range(1_000_000):
            dist.all_reduce(x)
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return "no error"
