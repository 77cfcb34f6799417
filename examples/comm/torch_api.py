"""Check every operation of torch.distributed on a communication backend.

Run it with the launcher (examples/comm/conf/torch_api.yaml) or by hand:

    torchrun --nproc-per-node 2 examples/comm/torch_api.py --distributed-backend gloo

Two groups of all ranks are created, because a training run creates many, and operations use both.
Rank 0 prints a line for each operation that is correct on every rank. The first wrong result ends
the program with exit code 1 and a message with the result and the expected value.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flagscale.accelerators.device import select_device
from flagscale.comm import registry
from flagscale.errors import FlagscaleError, JobError

# torch 2.13 renamed both functions and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class TestContext:
    """This rank, its device and the groups under test."""

    rank: int
    size: int
    device: torch.device
    group1: dist.ProcessGroup
    group2: dist.ProcessGroup

    def ramp(self, rank: int, length: int = 4) -> torch.Tensor:
        """Return the data of a rank: 10 * rank + 1, 2, 3, ... Their sums are exact."""
        return 10.0 * rank + torch.arange(1.0, length + 1, device=self.device)

    def all_ramps(self, length: int = 4) -> torch.Tensor:
        """Return the data of all ranks, one row per rank."""
        return torch.stack([self.ramp(rank, length) for rank in range(self.size)])


def assert_equal(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless two tensors are equal.

    Raises:
        JobError: The tensors differ.
    """
    if not torch.equal(result, expected):
        raise JobError(f"{name}: found {result.tolist()}, expected {expected.tolist()}")


def all_reduce(s: TestContext) -> None:
    x = s.ramp(s.rank)
    y = s.ramp(s.rank)
    dist.all_reduce(x, dist.ReduceOp.MIN, group=s.group1)
    assert_equal("all_reduce min", x, s.all_ramps().amin(0))
    dist.all_reduce(y, dist.ReduceOp.MAX, group=s.group2)
    assert_equal("all_reduce max", y, s.all_ramps().amax(0))
    dist.all_reduce(x, dist.ReduceOp.SUM, group=s.group1)
    assert_equal("all_reduce sum", x, s.all_ramps().amin(0) * s.size)
    work = dist.all_reduce(y, dist.ReduceOp.SUM, group=s.group2, async_op=True)
    work.wait()
    assert_equal("all_reduce sum, asynchronous", y, s.all_ramps().amax(0) * s.size)


def broadcast(s: TestContext) -> None:
    for root in range(s.size):
        x = s.ramp(s.rank)
        dist.broadcast(x, root, group=s.group1)
        assert_equal(f"broadcast from {root}", x, s.ramp(root))


def reduce(s: TestContext) -> None:
    for root in range(s.size):
        x = s.ramp(s.rank)
        dist.reduce(x, root, dist.ReduceOp.SUM, group=s.group2)
        if s.rank == root:
            assert_equal(f"reduce to {root}", x, s.all_ramps().sum(0))


def all_gather(s: TestContext) -> None:
    pieces = [torch.empty(4, device=s.device) for _ in range(s.size)]
    dist.all_gather(pieces, s.ramp(s.rank), group=s.group1)
    assert_equal("all_gather", torch.stack(pieces), s.all_ramps())
    whole = torch.empty(4 * s.size, device=s.device)
    all_gather_single(whole, s.ramp(s.rank), group=s.group2)
    assert_equal("all_gather into one tensor", whole, s.all_ramps().flatten())


def reduce_scatter(s: TestContext) -> None:
    source = s.ramp(s.rank, 4 * s.size)
    mine = s.all_ramps(4 * s.size).sum(0).chunk(s.size)[s.rank]
    output = torch.empty(4, device=s.device)
    dist.reduce_scatter(output, list(source.chunk(s.size)), dist.ReduceOp.SUM, group=s.group1)
    assert_equal("reduce_scatter", output, mine)
    reduce_scatter_single(output.zero_(), source, dist.ReduceOp.SUM, group=s.group2)
    assert_equal("reduce_scatter of one tensor", output, mine)


def all_to_all(s: TestContext) -> None:
    source = s.ramp(s.rank, 2 * s.size)
    columns = s.all_ramps(2 * s.size).chunk(s.size, dim=1)
    output = torch.empty_like(source)
    dist.all_to_all_single(output, source, group=s.group1)
    assert_equal("all_to_all", output, columns[s.rank].flatten())


def all_to_all_v(s: TestContext) -> None:
    """Send j + 1 elements from every rank to rank j."""
    counts = [rank + 1 for rank in range(s.size)]
    source = s.ramp(s.rank, sum(counts))
    received = [s.rank + 1] * s.size
    output = torch.empty(sum(received), device=s.device)
    dist.all_to_all_single(output, source, received, counts, group=s.group2)
    start, end = sum(counts[: s.rank]), sum(counts[: s.rank + 1])
    pieces = [s.ramp(rank, sum(counts))[start:end] for rank in range(s.size)]
    assert_equal("all_to_all with counts", output, torch.cat(pieces))


def gather(s: TestContext) -> None:
    for root in range(s.size):
        pieces = None
        if s.rank == root:
            pieces = [torch.empty(4, device=s.device) for _ in range(s.size)]
        dist.gather(s.ramp(s.rank), pieces, root, group=s.group1)
        if pieces is not None:
            assert_equal(f"gather to {root}", torch.stack(pieces), s.all_ramps())


def scatter(s: TestContext) -> None:
    for root in range(s.size):
        output = torch.empty(4, device=s.device)
        pieces = list(s.all_ramps() + 1000 * root) if s.rank == root else None
        dist.scatter(output, pieces, root, group=s.group2)
        assert_equal(f"scatter from {root}", output, s.ramp(s.rank) + 1000 * root)


def sendrecv(s: TestContext) -> None:
    """Send around the ring. Even ranks send first, so that no two ranks wait for each other."""
    previous, following = (s.rank - 1) % s.size, (s.rank + 1) % s.size
    if s.size == 1:
        return
    output = torch.empty(4, device=s.device)
    if s.rank % 2 == 0:
        dist.send(s.ramp(s.rank), following, group=s.group1)
        dist.recv(output, previous, group=s.group1)
    else:
        dist.recv(output, previous, group=s.group1)
        dist.send(s.ramp(s.rank), following, group=s.group1)
    assert_equal("send and recv", output, s.ramp(previous))


def permute(s: TestContext) -> None:
    """Send around the ring in the other direction, with sends and receives in one batch."""
    if s.size == 1:
        return
    previous, following = (s.rank - 1) % s.size, (s.rank + 1) % s.size
    output = torch.empty(4, device=s.device)
    operations = [
        dist.P2POp(dist.isend, s.ramp(s.rank), previous, s.group2),
        dist.P2POp(dist.irecv, output, following, s.group2),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert_equal("batched send and recv", output, s.ramp(following))


def barrier(s: TestContext) -> None:
    dist.barrier(group=s.group1)
    dist.barrier(group=s.group2)


def objects(s: TestContext) -> None:
    gathered: list[object] = [None] * s.size
    dist.all_gather_object(gathered, {"rank": s.rank})
    if gathered != [{"rank": rank} for rank in range(s.size)]:
        raise JobError(f"all_gather_object: found {gathered}")


OPERATIONS: Mapping[str, Callable[[TestContext], None]] = {
    function.__name__: function
    for function in (
        all_reduce,
        broadcast,
        reduce,
        all_gather,
        reduce_scatter,
        all_to_all,
        all_to_all_v,
        gather,
        scatter,
        sendrecv,
        permute,
        barrier,
        objects,
    )
}
"""Checks by the operation's name in the backend adapters.

``objects`` uses the default group, whatever backend that uses for objects.
"""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse this program's flags. The launcher passes all of ``train``; other flags are ignored."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--distributed-backend", default="auto", metavar="NAME", help="backend (default: auto)"
    )
    parser.add_argument(
        "--comm", nargs="*", default=[], metavar="NAME=VALUE", help="options of the backend"
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="KIND",
        help="device type, such as cpu or cuda (default: auto)",
    )
    return parser.parse_known_args(words)[0]


def main(words: Sequence[str]) -> None:
    """Join the other ranks, check every operation that the backend supports, and leave."""
    options = parse_arguments(words)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    selected = select_device(options.device, local_rank)
    kind, device = selected.kind, selected.torch_device
    values = registry.parse_backend_options(options.distributed_backend, options.comm)
    backend = registry.get_usable_backend(options.distributed_backend, kind)
    backend.export_options(values)
    with backend.creation_context():
        dist.init_process_group(backend.torch_backend(kind), **backend.init_options(device, values))
        rank, size = dist.get_rank(), dist.get_world_size()
        ranks = list(range(size))
        setting = TestContext(rank, size, device, dist.new_group(ranks), dist.new_group(ranks))
    for name, operation in OPERATIONS.items():
        if name not in (*backend.operations_for(kind), "objects"):
            if rank == 0:
                print(f"skipped: {name} is not supported by {backend.name} on {kind}", flush=True)
            continue
        operation(setting)
        # The operation is correct on all ranks only if all of them reach this barrier.
        dist.barrier()
        if rank == 0:
            print(f"ok: {name} on {backend.name}, {size} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
