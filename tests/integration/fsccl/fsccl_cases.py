"""Basic test cases, run on ranks by fsccl_worker.py.

All ranks of a group call a function with the same arguments.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import resource
import threading
import time
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsccl_checks import all_gather_single, reduce_scatter_single

import flagscale.comm.fsccl

assert flagscale.comm.fsccl  # importing it registers the backend


def join(
    rank: int,
    size: int,
    port: int,
    key: str,
    timeout: float,
    environment: dict[str, str],
    host: str = "",
    backend: str = "fsccl",
) -> None:
    """Initialize the default process group. The test hosts the store, or rank 0 on ``host`` if
    given.
    """
    for name in [n for n in os.environ if n.startswith("FSCCL_") and n != "FSCCL_BUILD_DIR"]:
        del os.environ[name]
    # CPU tensors by default, also on a machine with GPUs, unless the test overrides it.
    os.environ.update({"FSCCL_DEVICE": "cpu", **environment})
    if dist.is_initialized():
        dist.destroy_process_group()
    # same group names on ranks that have joined different numbers of groups
    dist.distributed_c10d._world.group_count = 0
    is_master = bool(host) and rank == 0
    store = dist.PrefixStore(key, dist.TCPStore(host or "127.0.0.1", port, is_master=is_master))
    timeout_delta = datetime.timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout_delta)


def set_operation_timeout(seconds: float) -> None:
    """Set how long operations wait. It can be shorter than ranks may need to join."""
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    backend._set_default_timeout(datetime.timedelta(seconds=seconds))


def barrier_in_new_group() -> None:
    dist.barrier(group=dist.new_group(backend="fsccl"))


def fork_child_that_destroys_group() -> None:
    """Destroy a forked child's copy of the group: the parent's group must keep working."""
    dist.barrier()
    if dist.get_rank() == 0:
        child = os.fork()
        if child == 0:
            dist.destroy_process_group()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(torch.ones(100))
    dist.barrier()


def leave() -> None:
    dist.destroy_process_group()


_second_group: list[Any] = []


def create_second_group() -> None:
    """Create a second group of all ranks and exchange a message with both neighbours in it."""
    me, n = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(n)))
    sent = dist.isend(torch.ones(1), (me + 1) % n, group=group)
    dist.recv(torch.ones(1), (me - 1) % n, group=group)
    sent.wait()
    _second_group[:] = [group]


def receive_in_second_group(source: int) -> None:
    dist.recv(torch.ones(1), source, group=_second_group[0])


def run_operation(op: str, count: int = 1 << 18, repeat: int = 1) -> str:
    """Run an operation that the test expects to fail."""
    n, me = dist.get_world_size(), dist.get_rank()
    x = torch.ones(count)
    for _ in range(repeat):
        if op == "all_reduce":
            dist.all_reduce(x)
        elif op == "barrier":
            dist.barrier()
        elif op == "broadcast":
            dist.broadcast(x, 0)
            dist.barrier()  # because a root may finish before the others start
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


def send_self_mismatched(kind: str, sent: int, expected: int, at: int = 0) -> None:
    """Let rank ``at`` send itself ``sent`` elements but expect ``expected``. Other ranks' sizes
    match.
    """
    n, me = dist.get_world_size(), dist.get_rank()
    is_mismatched = me == at
    rows_in, rows_out = [4] * n, [4] * n
    if is_mismatched:
        rows_in[at], rows_out[at] = sent, expected
    send_parts = [torch.ones(rows) for rows in rows_in]
    receive_parts = [torch.zeros(rows) for rows in rows_out]
    if kind == "all_to_all_single":
        dist.all_to_all_single(torch.cat(receive_parts), torch.cat(send_parts), rows_out, rows_in)
    elif kind == "all_to_all":
        dist.all_to_all(receive_parts, send_parts)
    elif kind == "gather":
        dist.gather(send_parts[at], receive_parts if is_mismatched else None, dst=at)
    elif kind == "scatter":
        dist.scatter(receive_parts[at], send_parts if is_mismatched else None, src=at)
    else:
        raise ValueError(kind)
    dist.barrier()  # ranks that are not involved get the error here


def call_with_mismatched_lists(op: str) -> None:
    """Call a list operation with parts of different sizes but equal totals on all ranks."""
    n, me = dist.get_world_size(), dist.get_rank()
    parts = [torch.ones(3 if p == me else 2) for p in range(n)]
    if op == "all_gather":
        dist.all_gather(parts, torch.ones(3))
    elif op == "reduce_scatter":
        dist.reduce_scatter(torch.ones(3), parts)
    else:
        raise ValueError(op)
    dist.barrier()


def limit_file_size(bytes_: int) -> None:
    """Limit the size of written files, like ``ulimit -f``. -1 removes the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if bytes_ < 0 else bytes_, hard))


def count_segments() -> tuple[int, list[str]]:
    """Count this process's maps and descriptors of shared segments, and list those in /dev/shm."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:fsccl")
    descriptors = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the directory being listed
            descriptors += "memfd:fsccl" in str(link.readlink())
    return maps + descriptors, sorted(p.name for p in Path("/dev/shm").glob("*fsccl*"))


def check_asynchronous() -> None:
    """Check that works of a group complete in order, and synchronous calls after earlier ones."""
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
    completed = dist.all_reduce(torch.ones(4), async_op=True)
    completed.wait()
    assert completed.get_future().wait()[0][0] == n
    assert completed.result()[0][0] == n
    assert backend._get_sequence_number_for_group() == before + 8


def check_futures_beside_ended_works() -> None:
    """Request futures while the worker thread drops the last references to earlier tensors.

    torch takes Python's lock for the last reference but that of a tensor's Python object.
    """
    n = dist.get_world_size()
    dropped, kept = torch.ones(4), torch.ones(4)
    for _ in range(500):
        kept.fill_(1)
        works = [dist.all_reduce(dropped, async_op=True) for _ in range(3)]
        works[0].wait()
        del works
        work = dist.all_reduce(kept, async_op=True)
        assert work.get_future().wait()[0][0] == n


def check_crossed_groups() -> None:
    """Check asynchronous operations of two groups, called in opposite orders by different ranks."""
    groups = [dist.new_group(), dist.new_group()]
    buffers = [torch.ones(10_000), torch.ones(10_000)]
    order = (0, 1) if dist.get_rank() % 2 == 0 else (1, 0)
    works = [dist.all_reduce(buffers[i], group=groups[i], async_op=True) for i in order]
    for w in works:
        w.wait()
    assert all(b[0] == dist.get_world_size() for b in buffers)


TIMED_OUT_WORKS: list[dist.Work] = []


def wait_with_timeout(seconds: float) -> str:
    """Wait with a timeout for an operation that other ranks have yet to call, and keep its work."""
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert work is not None
    TIMED_OUT_WORKS.append(work)
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def finish_pending() -> float:
    """Wait for the kept work, or call the operation: a timed-out wait does not affect the group."""
    if TIMED_OUT_WORKS:
        work = TIMED_OUT_WORKS.pop()
        assert work.wait(datetime.timedelta(seconds=60))
        result: float = work.result()[0][0].item()
    else:
        x = torch.ones(4)
        dist.all_reduce(x)
        result = x[0].item()
    dist.barrier()
    return result


def check_messages(count: int) -> None:
    """Check point-to-point messages: in both directions, with tags out of order, any-source,
    batched.
    """
    n, me = dist.get_world_size(), dist.get_rank()
    right, left = (me + 1) % n, (me - 1) % n
    sends = [dist.isend(torch.full((count,), me * 10.0 + t), right, tag=t) for t in range(3)]
    for tag in (2, 0, 1):
        x = torch.empty(count)
        assert dist.recv(x, left, tag=tag) == left
        assert (x == left * 10 + tag).all()
    for s in sends:
        s.wait()
    for step in range(1, n):  # any-source, on the last rank
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
    polled = torch.zeros(2 * count)[::2]
    w = dist.irecv(polled, left)
    dist.send(torch.full((count,), me + 0.25), right)
    while not w.is_completed():
        time.sleep(0.001)
    assert (polled == left + 0.25).all()
    polled.fill_(-1.0)
    w.wait()  # must not copy the result again
    assert (polled == -1).all()
    w = dist.irecv(into, left)
    futures = [w.get_future(), w.get_future()]
    dist.send(torch.full((count,), me + 0.5), right)
    assert all((future.wait()[0] == left + 0.5).all() for future in futures)


def check_coalesced() -> None:
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
            all_gather_single(out, torch.full((out.numel() // n,), float(me)))
    for out in outs:
        assert (out.view(n, -1)[:, 0] == torch.arange(n)).all()


def check_objects() -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, {"rank": me, "text": "x" * me})
    assert [e["rank"] for e in gathered] == list(range(n))
    broadcasted = ["from 0" if me == 0 else None]
    dist.broadcast_object_list(broadcasted, 0)
    assert broadcasted == ["from 0"]


def list_algorithms() -> list[str]:
    """Return the backend's algorithms for a small and a large all_reduce and for a barrier."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    names = [backend.last_algorithm()]  # type: ignore[attr-defined]
    for count in (16, 1 << 20):
        dist.all_reduce(torch.ones(count))
        names.append(backend.last_algorithm())  # type: ignore[attr-defined]
    dist.barrier()
    return [*names, backend.last_algorithm()]  # type: ignore[attr-defined]


def run_named_algorithms(count: int) -> list[tuple[str, dict[int, int]]]:
    """Return each algorithm of a group and the bytes that its all_reduce sends per rank."""
    options: Any = flagscale.comm.fsccl.load_extension().Options
    out = []
    for name in ("ring", "tree", "transpose", None):
        group_options = options() if name is None else options(algorithm=name)
        group: Any = dist.new_group(pg_options=group_options)
        tensor = torch.full((count,), dist.get_rank() + 1, dtype=torch.bfloat16)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        assert (tensor == dist.get_world_size()).all()
        backend = group._get_backend(torch.device("cpu"))
        sent = {rank: size for rank, (_, size) in backend.traffic().items() if size}
        out.append((backend.last_algorithm().split()[0], sent))
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    return out


def get_registration_errors() -> list[str]:
    """Return the errors of registering GPU memory with a group of CPU ranks."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert backend.mem_allocator is None
    segment = {"address": 4096, "total_size": 64, "blocks": [{"size": 64}]}
    pool = types.SimpleNamespace(id=(0, 1), snapshot=lambda: [segment])
    errors = []
    for symmetric in (False, True):
        try:
            backend.register_mem_pool(pool, symm=symmetric)
        except NotImplementedError as error:
            errors.append(str(error))
    dist.barrier()
    return errors


def collect_usage_errors() -> list[str]:
    """Return the errors of invalid calls. The group must keep working."""
    n = dist.get_world_size()
    world: Any = dist.group.WORLD
    out = []
    invalid_calls = [
        lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(3).to_sparse(), op=dist.ReduceOp.MAX),
        lambda: dist.all_to_all_single(torch.ones(n + 1), torch.ones(n + 1)),
        lambda: all_gather_single(torch.ones(n), torch.ones(2)),
        lambda: reduce_scatter_single(torch.ones(2), torch.ones(2 * n, dtype=torch.float64)),
        lambda: world.allgather_coalesced([[torch.ones(2)]] * n, [torch.ones(9)]).wait(),
    ]
    for invalid_call in invalid_calls:
        try:
            invalid_call()
            out.append("no error")
        except (ValueError, TypeError, RuntimeError) as error:
            out.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return out


def abort_while_waiting() -> str:
    """Abort the group from another thread while an operation waits for other ranks."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    threading.Timer(0.3, backend.abort).start()
    try:
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    return "done"
