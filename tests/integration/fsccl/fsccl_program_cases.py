"""Test cases of valid programs, run on ranks by fsccl_worker.py: callbacks, short-lived groups,
forks, sparse gradients.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

OTHER_GROUPS: list[Any] = []


def expected_sum() -> float:
    """Return the sum over ranks of rank + 1."""
    n = dist.get_world_size()
    return n * (n + 1) / 2


def create_input() -> torch.Tensor:
    return torch.full((1000,), dist.get_rank() + 1.0)


def is_reduced(x: torch.Tensor) -> bool:
    return bool((x == expected_sum()).all())


def call_operation(_: Any) -> torch.Tensor:
    x = create_input()
    dist.all_reduce(x)
    return x


def wait_for_new_work(_: Any) -> torch.Tensor:
    x = create_input()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x


def wait_for_new_future(_: Any) -> torch.Tensor:
    work = dist.all_reduce(create_input(), async_op=True)
    assert work is not None
    result: torch.Tensor = work.get_future().wait()[0]
    return result


def call_in_other_group(_: Any) -> torch.Tensor:
    x = create_input()
    dist.all_reduce(x, group=OTHER_GROUPS[-1])
    return x


CALLBACKS = (call_operation, wait_for_new_work, wait_for_new_future, call_in_other_group)


def check_collectives_in_callbacks() -> None:
    """Check collectives in callbacks, also while later operations of the group are queued."""
    group = dist.new_group()
    OTHER_GROUPS.append(group)
    for callback in CALLBACKS:
        first = create_input()
        chained = start_all_reduce(first).then(callback)
        later = [create_input() for _ in range(3)]
        works = [dist.all_reduce(x, async_op=True) for x in later]
        assert is_reduced(chained.wait()), callback.__name__
        for work in works:
            work.wait()
        assert all(map(is_reduced, later))
    OTHER_GROUPS.remove(group)
    dist.destroy_process_group(group)


def start_all_reduce(x: torch.Tensor) -> Any:
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    return work.get_future()


def check_later_works_in_callbacks() -> None:
    """Check callbacks that wait for operations called after their own."""
    for wait in (wait_for_work, wait_for_future, wait_for_existing_future):
        first, second = create_input(), create_input()
        works_and_futures: list[Any] = []

        def callback(
            _: Any,
            wait: Callable[..., None] = wait,
            works_and_futures: list[Any] = works_and_futures,
        ) -> None:
            if threading.current_thread() is threading.main_thread():
                return  # attached too late: the operation had completed
            while len(works_and_futures) < 2:
                time.sleep(0.001)
            wait(works_and_futures)

        chained = start_all_reduce(first).then(callback)
        work = dist.all_reduce(second, async_op=True)
        assert work is not None
        works_and_futures.extend([work, work.get_future()])
        chained.wait()
        work.wait()
        assert is_reduced(first)
        assert is_reduced(second)


def wait_for_work(works_and_futures: list[Any]) -> None:
    works_and_futures[0].wait()


def wait_for_future(works_and_futures: list[Any]) -> None:
    works_and_futures[0].get_future().wait()


def wait_for_existing_future(works_and_futures: list[Any]) -> None:
    works_and_futures[1].wait()


def check_message_callbacks() -> None:
    """Check that a receive's callback can call collectives and send messages.

    The main thread is in other operations meanwhile.
    """
    n, me = dist.get_world_size(), dist.get_rank()
    right, left = (me + 1) % n, (me - 1) % n
    group = dist.new_group()
    x = torch.zeros(3)
    sent = dist.isend(torch.full((3,), float(me)), right, tag=1)
    work = dist.irecv(x, left, tag=1)
    assert sent is not None
    assert work is not None

    def answer(_: Any) -> torch.Tensor:
        dist.send(x + 1, left, tag=2)
        total = create_input()
        dist.all_reduce(total, group=group)
        return total

    chained = work.get_future().then(answer)  # type: ignore[attr-defined]
    reply = torch.zeros(3)
    dist.recv(reply, right, tag=2)
    assert (reply == me + 1).all()
    assert is_reduced(chained.wait())
    sent.wait()
    dist.destroy_process_group(group)


def train_with_power_sgd(steps: int) -> None:
    """Train with DDP and a hook that calls collectives in callbacks of several buckets."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(steps):
        model.zero_grad()
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(8, 64)).square().mean().backward()
        for p in model.parameters():
            assert p.grad is not None
            gathered = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, p.grad)
            assert all(torch.equal(e, p.grad) for e in gathered)


def check_short_lived_groups(count: int, op: str) -> None:
    """Create groups whose first operation is their last, and whose root waits for no other rank."""
    n, me = dist.get_world_size(), dist.get_rank()
    for i in range(count):
        group = dist.new_group()
        x = torch.full((100,), float(me + i))
        if me != 0:
            time.sleep(0.05)
        if op == "broadcast":
            dist.broadcast(x, 0, group=group)
            assert (x == i).all()
        elif op == "scatter":
            parts = [torch.full((100,), float(p)) for p in range(n)] if me == 0 else None
            dist.scatter(x, parts, 0, group=group)
            assert (x == me).all()
        elif op == "send":
            if me == 0:
                for p in range(1, n):
                    dist.send(x, p, group=group)
            else:
                dist.recv(x, 0, group=group)
                assert (x == i).all()
        else:
            raise ValueError(op)
        dist.destroy_process_group(group)


def exchange_identities() -> str:
    """Let the ranks exchange their identities, without opening connections."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    path: str = backend.path_of(torch.ones(1))
    return path


def run_in_child(function: Callable[[], None], timeout_seconds: float = 20) -> int:
    """Fork, run ``function`` in the child, and run the interpreter's exit functions there.

    Returns the child's exit code, or -9 if it hangs.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            import atexit

            atexit._run_exitfuncs()
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def destroy_group() -> None:
    dist.destroy_process_group()


def check_calls_raise() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(1000)),
        lambda: dist.all_reduce(torch.ones(1000), async_op=True),
        dist.barrier,
        lambda: dist.send(torch.ones(1000), (dist.get_rank() + 1) % dist.get_world_size()),
        lambda: dist.irecv(torch.ones(1000), (dist.get_rank() + 1) % dist.get_world_size()),
    ]
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError("no error")
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    backend.abort()  # affects only the child


def create_own_group() -> None:
    dist.destroy_process_group()
    os.environ.pop("FSCCL_CLUSTERS", None)
    dist.init_process_group("fsccl", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(3)
    dist.all_reduce(x, async_op=True).wait()  # type: ignore[union-attr]
    assert (x == 1).all()


def do_nothing() -> None:
    pass


CHILD_FUNCTIONS = (destroy_group, check_calls_raise, create_own_group, do_nothing)


def check_forks() -> None:
    """Check children of a rank that has used asynchronous operations, with and without one in
    flight.
    """
    me = dist.get_rank()
    warm_up = dist.all_reduce(torch.ones(10), async_op=True)
    assert warm_up is not None
    warm_up.wait()
    for function in CHILD_FUNCTIONS:
        x = torch.ones(100_000)
        work = None
        if me == 0:
            work = dist.all_reduce(x, async_op=True)  # not called by other ranks yet
            code = run_in_child(function)
            assert code == 0, f"{function.__name__}: {code}"
        dist.new_group([0])  # synchronizes through the store: other ranks continue when rank 0 does
        if work is None:
            work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        assert (x == dist.get_world_size()).all()
    dist.barrier()


def fork_sleeping_child(seconds: float) -> int:
    """Fork a child like a data loader. It has copies of the rank's descriptors and outlives it."""
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os._exit(0)
    return child


def exchange_messages() -> None:
    """Exchange messages between all pairs of ranks."""
    n, me = dist.get_world_size(), dist.get_rank()
    works = [dist.isend(torch.ones(1), p) for p in range(n) if p != me]
    for p in range(n):
        if p != me:
            dist.recv(torch.zeros(1), p)
    for work in works:
        assert work is not None
        work.wait()


def all_reduce_in_order(*tensors: torch.Tensor) -> None:
    for t in tensors:
        dist.all_reduce(t)


def gather_to_first_rank() -> None:
    dist.gather(torch.ones(1), [torch.ones(1) for _ in range(dist.get_world_size())], 0)


# Calls of rank 0 and of rank 1.
MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "size": (lambda: dist.all_reduce(torch.ones(3000)), lambda: dist.all_reduce(torch.ones(6000))),
    "nothing": (lambda: dist.all_reduce(torch.ones(0)), lambda: dist.all_reduce(torch.ones(3000))),
    "type": (
        lambda: dist.all_reduce(torch.ones(3000, dtype=torch.int32)),
        lambda: dist.all_reduce(torch.ones(3000)),
    ),
    "reduction": (
        lambda: dist.all_reduce(torch.ones(3000)),
        lambda: dist.all_reduce(torch.ones(3000), op=dist.ReduceOp.MAX),
    ),
    "root": (
        lambda: dist.broadcast(torch.ones(3000), 0),
        lambda: dist.broadcast(torch.ones(3000), 1),
    ),
    "operation": (
        lambda: dist.all_reduce(torch.ones(3000)),
        lambda: dist.broadcast(torch.ones(3000), 0),
    ),
    "order": (
        lambda: all_reduce_in_order(torch.ones(10), torch.ones(3000)),
        lambda: all_reduce_in_order(torch.ones(3000), torch.ones(10)),
    ),
    "barrier": (lambda: dist.all_reduce(torch.ones(3000)), dist.barrier),
    "gather": (gather_to_first_rank, lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2))),
}


def call_mismatched(kind: str) -> None:
    """Call operations that do not match on ranks 0 and 1."""
    dist.barrier()
    MISMATCHES[kind][dist.get_rank()]()
    for _ in range(2):  # a rank that completed its operation gets the error in one of these
        dist.barrier()


def check_sparse_all_reduce() -> None:
    """Check sparse all_reduce, like gloo's: common indices are summed, others copied.

    Ranks may have no elements.
    """
    n, me = dist.get_world_size(), dist.get_rank()
    for kind in (torch.float32, torch.int64, torch.bfloat16):
        rows = torch.tensor([[0, me + 1]])
        values = torch.tensor([[1, 2], [3, 4]], dtype=kind)
        sparse = torch.sparse_coo_tensor(rows, values, (n + 2, 2), check_invariants=True)
        dense = torch.zeros(n + 2, 2, dtype=kind)
        dense[0] = torch.tensor([n, 2 * n], dtype=kind)
        dense[1 : n + 1] = torch.tensor([3, 4], dtype=kind)
        dist.all_reduce(sparse)
        assert sparse.is_sparse
        assert sparse.is_coalesced()
        assert torch.equal(sparse.to_dense(), dense)
    no_indices = torch.zeros(1, 0, dtype=torch.int64)
    small = torch.sparse_coo_tensor(no_indices, torch.zeros(0), (5,), check_invariants=True)
    if me == n - 1:
        repeated_indices = torch.tensor([[1, 1]])
        small = torch.sparse_coo_tensor(
            repeated_indices, torch.tensor([2.0, 3.0]), (5,), check_invariants=True
        )
    dist.all_reduce(small)
    assert small.to_dense().tolist() == [0, 5, 0, 0, 0]


def train_with_sparse_gradients(steps: int) -> None:
    """Train an embedding with sparse gradients by DDP and compare it with a single process."""
    from torch.nn.parallel import DistributedDataParallel

    n, me = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    reference = torch.nn.Embedding(20, 4, sparse=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Embedding(20, 4, sparse=True))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (reference, model)]
    for step in range(steps):
        ids = torch.arange(3 * n).reshape(n, 3) * (step + 3) % 20
        for m, batch in ((reference, ids), (model, ids[me : me + 1])):
            m.zero_grad()
            m(batch).square().sum(-1).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(model.module.weight, reference.weight)


def collect_root_errors() -> list[str]:
    """Return the errors of a root outside the group. The call itself must raise, not the wait."""
    n = dist.get_world_size()
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    x = [torch.ones(3)]
    calls = {
        "broadcast": (dist.BroadcastOptions(), lambda o: backend.broadcast(x, o)),
        "reduce": (dist.ReduceOptions(), lambda o: backend.reduce(x, o)),
        "gather": (dist.GatherOptions(), lambda o: backend.gather([], x, o)),
        "scatter": (dist.ScatterOptions(), lambda o: backend.scatter(x, [], o)),
    }
    errors = []
    for name, (options, call) in calls.items():
        options.rootRank = n + 2
        options.asyncOp = True
        try:
            call(options)
            errors.append(f"{name}: no error")
        except ValueError as error:
            errors.append(f"{name}: {error}")
    dist.barrier()
    return errors


def collect_gather_errors() -> list[str]:
    """Return the errors of all_gather_coalesced into tensors of another data type or size."""
    n = dist.get_world_size()
    group: Any = dist.group.WORLD
    errors = []
    for out in (torch.ones(2, dtype=torch.int32), torch.ones(1, dtype=torch.float64)):
        try:
            group.allgather_coalesced([[out.clone()] for _ in range(n)], [torch.ones(2)]).wait()
            errors.append("no error")
        except (ValueError, TypeError) as error:
            errors.append(str(error))
    dist.barrier()
    return errors


def all_reduce_mismatched_sparse() -> str:
    """Return the error of a sparse all_reduce with another size on rank 1. The group must keep
    working.
    """
    size = 6 if dist.get_rank() == 1 else 5
    x = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.tensor([1.0]), (size,), check_invariants=True
    )
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        dist.barrier()
        return str(error)
    return "no error"


def receive_unexpected_messages(count: int) -> None:
    """Receive many messages that arrived before their receives were called, last tag first."""
    n, me = dist.get_world_size(), dist.get_rank()
    if me == 0:
        works = [
            dist.isend(torch.full((1,), float(tag)), p, tag=tag)
            for tag in range(count // n)
            for p in range(1, n)
        ]
        for work in works:
            assert work is not None
            work.wait()
        dist.barrier()
    else:
        dist.barrier()
        x = torch.zeros(1)
        for tag in reversed(range(count // n)):
            dist.recv(x, 0, tag=tag)
            assert x == tag
    dist.barrier()


def wait_for_all_ranks(op: str) -> None:
    """Run an operation that waits for every rank."""
    n = dist.get_world_size()
    if op == "all_reduce":
        dist.all_reduce(torch.ones(100))
    elif op == "all_gather":
        dist.all_gather([torch.ones(10) for _ in range(n)], torch.ones(10))
    elif op == "recv_any":
        dist.recv(torch.ones(1))
    else:
        raise ValueError(op)


def sleep_for(seconds: float) -> None:
    time.sleep(seconds)
