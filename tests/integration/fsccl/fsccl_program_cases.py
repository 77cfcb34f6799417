"""What legal programs do beside single calls: callbacks, brief groups, forks, sparse gradients."""

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

KEPT: list[Any] = []


def all_ranks() -> float:
    """The sum over ranks of rank + 1."""
    n = dist.get_world_size()
    return n * (n + 1) / 2


def mine() -> torch.Tensor:
    return torch.full((1000,), dist.get_rank() + 1.0)


def summed(x: torch.Tensor) -> bool:
    return bool((x == all_ranks()).all())


def a_call(_: Any) -> torch.Tensor:
    x = mine()
    dist.all_reduce(x)
    return x


def a_work(_: Any) -> torch.Tensor:
    x = mine()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x


def a_future(_: Any) -> torch.Tensor:
    work = dist.all_reduce(mine(), async_op=True)
    assert work is not None
    found: torch.Tensor = work.get_future().wait()[0]
    return found


def a_call_of_another_group(_: Any) -> torch.Tensor:
    x = mine()
    dist.all_reduce(x, group=KEPT[-1])
    return x


IN_CALLBACKS = (a_call, a_work, a_future, a_call_of_another_group)


def collectives_in_callbacks() -> None:
    """Also while later operations of the group wait for their turn."""
    group = dist.new_group()
    KEPT.append(group)
    for call in IN_CALLBACKS:
        first = mine()
        chained = first_of(first).then(call)
        later = [mine() for _ in range(3)]
        works = [dist.all_reduce(x, async_op=True) for x in later]
        assert summed(chained.wait()), call.__name__
        for work in works:
            work.wait()
        assert all(map(summed, later))
    KEPT.remove(group)
    dist.destroy_process_group(group)


def first_of(x: torch.Tensor) -> Any:
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    return work.get_future()


def later_works_in_callbacks() -> None:
    """A callback that waits for what the program has called after its operation."""
    for wait in (wait_for_work, wait_for_future, wait_for_future_made_before):
        first, second = mine(), mine()
        held: list[Any] = []

        def call(_: Any, wait: Callable[..., None] = wait, held: list[Any] = held) -> None:
            if threading.current_thread() is threading.main_thread():
                return  # it was attached too late: the operation had ended
            while len(held) < 2:
                time.sleep(0.001)
            wait(held)

        chained = first_of(first).then(call)
        work = dist.all_reduce(second, async_op=True)
        assert work is not None
        held.extend([work, work.get_future()])
        chained.wait()
        work.wait()
        assert summed(first)
        assert summed(second)


def wait_for_work(held: list[Any]) -> None:
    held[0].wait()


def wait_for_future(held: list[Any]) -> None:
    held[0].get_future().wait()


def wait_for_future_made_before(held: list[Any]) -> None:
    held[1].wait()


def callbacks_of_messages() -> None:
    """A receive's callback answers by collectives and messages, while the program is in others."""
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
        total = mine()
        dist.all_reduce(total, group=group)
        return total

    chained = work.get_future().then(answer)  # type: ignore[attr-defined]
    back = torch.zeros(3)
    dist.recv(back, right, tag=2)
    assert (back == me + 1).all()
    assert summed(chained.wait())
    sent.wait()
    dist.destroy_process_group(group)


def power_sgd(steps: int) -> None:
    """DDP whose hook calls collectives in callbacks, several buckets at a time."""
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
            everyone = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, p.grad)
            assert all(torch.equal(e, p.grad) for e in everyone)


def brief_groups(count: int, op: str) -> None:
    """Groups whose first operation is their last, and for which a root need wait for nobody."""
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


def know_each_other() -> str:
    """The ranks learn who the others are; nothing is opened yet."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    path: str = backend.path_of(torch.ones(1))
    return path


def in_a_child(what: Callable[[], None], limit: float = 20) -> int:
    """Fork, do it there, and leave by way of the interpreter's exit functions.

    Returns its exit code; -9 when it hangs.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            what()
            import atexit

            atexit._run_exitfuncs()
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def leave_here() -> None:
    dist.destroy_process_group()


def call_here() -> None:
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
    backend.abort()  # which is its own affair


def group_of_its_own() -> None:
    dist.destroy_process_group()
    os.environ.pop("FSCCL_CLUSTERS", None)
    dist.init_process_group("fsccl", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(3)
    dist.all_reduce(x, async_op=True).wait()  # type: ignore[union-attr]
    assert (x == 1).all()


def do_nothing() -> None:
    pass


IN_CHILDREN = (leave_here, call_here, group_of_its_own, do_nothing)


def forks() -> None:
    """Children of a rank that has been asynchronous, with an operation in flight and without."""
    me = dist.get_rank()
    warm = dist.all_reduce(torch.ones(10), async_op=True)
    assert warm is not None
    warm.wait()
    for what in IN_CHILDREN:
        x = torch.ones(100_000)
        work = None
        if me == 0:
            work = dist.all_reduce(x, async_op=True)  # which the others have yet to call
            code = in_a_child(what)
            assert code == 0, f"{what.__name__}: {code}"
        dist.new_group([0])  # by the store: the others go on when rank 0 does
        if work is None:
            work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        assert (x == dist.get_world_size()).all()
    dist.barrier()


def fork_a_sleeper(seconds: float) -> int:
    """As a loader of data: it has copies of all that the rank has open, and outlives it."""
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os._exit(0)
    return child


def meet_in_messages() -> None:
    """Every pair has talked."""
    n, me = dist.get_world_size(), dist.get_rank()
    works = [dist.isend(torch.ones(1), p) for p in range(n) if p != me]
    for p in range(n):
        if p != me:
            dist.recv(torch.zeros(1), p)
    for work in works:
        assert work is not None
        work.wait()


def in_order(*tensors: torch.Tensor) -> None:
    for t in tensors:
        dist.all_reduce(t)


def gather_here() -> None:
    dist.gather(torch.ones(1), [torch.ones(1) for _ in range(dist.get_world_size())], 0)


# What rank 0 calls, and what rank 1 does.
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
        lambda: in_order(torch.ones(10), torch.ones(3000)),
        lambda: in_order(torch.ones(3000), torch.ones(10)),
    ),
    "barrier": (lambda: dist.all_reduce(torch.ones(3000)), dist.barrier),
    "gather": (gather_here, lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2))),
}


def mismatch(kind: str) -> None:
    """Ranks 0 and 1 call what does not fit together."""
    dist.barrier()
    MISMATCHES[kind][dist.get_rank()]()
    for _ in range(2):  # who had all it needed learns of it here, or by the next
        dist.barrier()


def sparse_sums() -> None:
    """As gloo does: indices that ranks share are summed, others are kept; ranks may have none."""
    n, me = dist.get_world_size(), dist.get_rank()
    for kind in (torch.float32, torch.int64, torch.bfloat16):
        rows = torch.tensor([[0, me + 1]])
        values = torch.tensor([[1, 2], [3, 4]], dtype=kind)
        given = torch.sparse_coo_tensor(rows, values, (n + 2, 2), check_invariants=True)
        dense = torch.zeros(n + 2, 2, dtype=kind)
        dense[0] = torch.tensor([n, 2 * n], dtype=kind)
        dense[1 : n + 1] = torch.tensor([3, 4], dtype=kind)
        dist.all_reduce(given)
        assert given.is_sparse
        assert given.is_coalesced()
        assert torch.equal(given.to_dense(), dense)
    none = torch.zeros(1, 0, dtype=torch.int64)
    few = torch.sparse_coo_tensor(none, torch.zeros(0), (5,), check_invariants=True)
    if me == n - 1:
        twice = torch.tensor([[1, 1]])
        few = torch.sparse_coo_tensor(twice, torch.tensor([2.0, 3.0]), (5,), check_invariants=True)
    dist.all_reduce(few)
    assert few.to_dense().tolist() == [0, 5, 0, 0, 0]


def sparse_gradients(steps: int) -> None:
    """DDP with an embedding whose gradient is sparse, beside one process that sees all."""
    from torch.nn.parallel import DistributedDataParallel

    n, me = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    alone = torch.nn.Embedding(20, 4, sparse=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Embedding(20, 4, sparse=True))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (alone, model)]
    for step in range(steps):
        ids = torch.arange(3 * n).reshape(n, 3) * (step + 3) % 20
        for m, which in ((alone, ids), (model, ids[me : me + 1])):
            m.zero_grad()
            m(which).square().sum(-1).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(model.module.weight, alone.weight)


def wrong_roots() -> list[str]:
    """A root that is not in the group is refused by the call, not by the wait."""
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
    said = []
    for name, (options, call) in calls.items():
        options.rootRank = n + 2
        options.asyncOp = True
        try:
            call(options)
            said.append(f"{name}: no error")
        except ValueError as error:
            said.append(f"{name}: {error}")
    dist.barrier()
    return said


def gathered_into_others() -> list[str]:
    """all_gather_coalesced into tensors of another type, or of another size."""
    n = dist.get_world_size()
    group: Any = dist.group.WORLD
    said = []
    for out in (torch.ones(2, dtype=torch.int32), torch.ones(1, dtype=torch.float64)):
        try:
            group.allgather_coalesced([[out.clone()] for _ in range(n)], [torch.ones(2)]).wait()
            said.append("no error")
        except (ValueError, TypeError) as error:
            said.append(str(error))
    dist.barrier()
    return said


def unlike_sparse() -> str:
    """Rank 1 has other sizes; the group is as good as before."""
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


def many_unexpected(count: int) -> None:
    """Rank 0 sends to each of the others what they call for when all has come, last tag first."""
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


def wait_for_all(op: str) -> None:
    """What needs every rank."""
    n = dist.get_world_size()
    if op == "all_reduce":
        dist.all_reduce(torch.ones(100))
    elif op == "all_gather":
        dist.all_gather([torch.ones(10) for _ in range(n)], torch.ones(10))
    elif op == "recv_any":
        dist.recv(torch.ones(1))
    else:
        raise ValueError(op)


def nap(seconds: float) -> None:
    time.sleep(seconds)
