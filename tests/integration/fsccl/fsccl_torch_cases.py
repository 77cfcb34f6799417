"""Test cases of torch's features beyond single collectives, run on ranks by fsccl_worker.py."""

from __future__ import annotations

import contextlib
import datetime
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flagscale.comm.fsccl


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)]
    return torch.nn.Sequential(*layers)


def make_batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(8, 16, generator=generator, device="cpu")
    return batch.to(torch.get_default_device())


def train_on_one_process(steps: int) -> list[Tensor]:
    """Return the weights of one process that trains on all ranks' batches."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        global_batch = torch.cat([make_batch(r, step) for r in range(dist.get_world_size())])
        model(global_batch).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_ddp(steps: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(make_batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
    for parameter, expected in zip(model.parameters(), train_on_one_process(steps), strict=True):
        torch.testing.assert_close(parameter.detach(), expected)


def train_fsdp(steps: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    model = make_model()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(make_batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
    for parameter, expected in zip(model.parameters(), train_on_one_process(steps), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected)  # type: ignore[attr-defined]


def check_dtensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(64.0).reshape(8, 8)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(x.full_tensor(), whole)
    assert torch.equal(x.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(), whole)
    torch.testing.assert_close((x @ x.T).full_tensor(), whole @ whole.T)
    assert x.sum().full_tensor() == whole.sum()


def check_functional_collectives() -> None:
    import torch.distributed._functional_collectives as funcol

    n, me = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert funcol.all_reduce(torch.ones(3), "sum", group)[0] == n
    gathered = funcol.all_gather_tensor(torch.full((2,), float(me)), 0, group)
    assert gathered.tolist() == [float(r) for r in range(n) for _ in range(2)]
    scattered = funcol.reduce_scatter_tensor(torch.ones(2 * n), "avg", 0, group)
    assert scattered.tolist() == [1.0, 1.0]


def check_overlapping_groups() -> None:
    """Check operations of overlapping groups in turn."""
    n, me = dist.get_world_size(), dist.get_rank()
    lists = [list(range(0, n, 2)), list(range(1, n, 2)), [0, n - 1], list(range(n))]
    groups = [dist.new_group(members) for members in lists]
    for round_ in range(3):
        for members, group in zip(lists, groups, strict=True):
            if me not in members:
                continue
            x = torch.full((1000 * (round_ + 1),), float(me))
            dist.all_reduce(x, group=group)
            assert torch.equal(x, torch.full_like(x, float(sum(members))))
            y = torch.full((3,), float(me))
            dist.broadcast(y, members[-1], group=group)
            assert y[0] == members[-1]


def check_compiled_collectives(backend: str) -> None:
    """Run functional collectives inside ``torch.compile``, without a graph break."""
    import torch.distributed._functional_collectives as funcol

    n, me = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None

    def step(x: Tensor) -> Tensor:
        total = funcol.all_reduce(x * 2, "sum", group)
        all_ranks = funcol.all_gather_tensor(x, 0, group)
        share = funcol.reduce_scatter_tensor(all_ranks + 1, "sum", 0, group)
        exchanged = funcol.all_to_all_single(all_ranks, None, None, group)
        return total + share + exchanged.view(n, -1).sum(0)

    x = torch.arange(4.0) + me
    ranks = torch.arange(float(n)).sum()
    values = torch.arange(4.0)
    # all_ranks[k] is values + k; its part p on every rank is what all_to_all_single sends to rank
    # p.
    expected = 2 * (n * values + ranks) + n * (x + 1) + n * (values + me)
    torch._dynamo.reset()
    try:
        result = torch.compile(step, backend=backend, fullgraph=True)(x)
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(step(x), expected)


def check_many_groups(count: int) -> None:
    """Check that groups created as Megatron does share a few threads, and that no open file remains
    after they are destroyed.
    """
    n, me = dist.get_world_size(), dist.get_rank()
    lists = [
        [list(range(n))],
        [list(range(0, n, 2)), list(range(1, n, 2))],
        [list(range(n // 2)), list(range(n // 2, n))],
        [[r] for r in range(n)],
    ]
    files_before = count_open_files()
    joined = []
    for i in range(count):
        for members in lists[i % len(lists)]:
            group = dist.new_group(members)
            if me in members:
                joined.append((members, group))
    for members, group in joined:
        x = torch.full((1000,), float(me))
        dist.all_reduce(x, group=group)
        assert torch.equal(x, torch.full_like(x, float(sum(members))))
        dist.all_reduce(x, group=group, async_op=True).wait()
        assert torch.equal(x, torch.full_like(x, float(sum(members) * len(members))))
    names = sorted(list_fsccl_threads())
    assert len(names) <= 8, names
    assert names.count("fsccl-messages") <= 1, names
    assert names.count("fsccl-sends") <= 1, names
    for _, group in joined:
        dist.destroy_process_group(group)
    joined.clear()
    group = None
    assert count_open_files() <= files_before, (
        f"{files_before} open files have become {count_open_files()}"
    )


def list_fsccl_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            names.append((task / "comm").read_text().strip())
    return [name for name in names if name.startswith("fsccl")]


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def get_split_error() -> str:
    """Return the error of ``split_group``, which fsccl does not support."""
    group = dist.group.WORLD
    assert group is not None
    group.bound_device_id = torch.device("cpu:0")  # without a device torch itself does not try
    try:
        dist.split_group(split_ranks=[[0, 1], [2, 3]])
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        group.bound_device_id = None
    return "no error"


def run_monitored_barrier(seconds: float, absent: list[int]) -> str:
    """Run a monitored barrier that some ranks do not enter."""
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() in absent:
        return "absent"
    # dist.monitored_barrier allows only gloo.
    group.monitored_barrier(datetime.timedelta(seconds=seconds), wait_all_ranks=True)
    return "passed"


def _dump_flight_record(*, only_active: bool = False) -> dict[str, Any]:
    record = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(onlyActive=only_active))
    own = [e for e in record["entries"] if e["profiling_name"].startswith("fsccl:")]
    return {**record, "entries": own}


def record_operations() -> dict[str, Any]:
    """Run four operations, and return the flight recorder's entries of them."""
    rank = dist.get_rank()
    last_id = max((e["record_id"] for e in _dump_flight_record()["entries"]), default=-1)
    dist.all_reduce(torch.ones(2, 3))
    dist.all_gather([torch.empty(4, dtype=torch.int64) for _ in range(2)], torch.ones(4).long())
    sent = dist.isend(torch.ones(1), 1 - rank)
    dist.recv(torch.ones(1), 1 - rank)
    sent.wait()
    record = _dump_flight_record()
    return {**record, "entries": [e for e in record["entries"] if e["record_id"] > last_id]}


def list_active_operations() -> list[dict[str, Any]]:
    return list(_dump_flight_record(only_active=True)["entries"])


def write_flight_record(directory: str) -> None:
    flagscale.comm.fsccl.write_flight_record(f"{directory}/rank_{dist.get_rank()}")
