"""Every operation of torch.distributed on a communication backend, each with its result asserted.

Run by the launcher (examples/comm/conf/torch_api.yaml), or by hand:

    torchrun --nproc-per-node 2 examples/comm/torch_api.py --distributed-backend gloo

Two groups of all ranks are made, as a training run makes many, and operations go through both.
Rank 0 prints a line for each operation that was right on every rank; the first wrong result ends
the program with exit code 1 and says what was found and what was expected.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flagscale.accelerators.device import select
from flagscale.comm import registry
from flagscale.errors import FlagscaleError, JobError

# torch 2.13 renamed these two and warns of the old names.
gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Setting:
    """This rank and what it talks through."""

    rank: int
    size: int
    device: torch.device
    group1: dist.ProcessGroup
    group2: dist.ProcessGroup

    def ramp(self, rank: int, length: int = 4) -> torch.Tensor:
        """The data of a rank: 10 * rank + 1, 2, 3, ... All sums of it are exact."""
        return 10.0 * rank + torch.arange(1.0, length + 1, device=self.device)

    def all_ramps(self, length: int = 4) -> torch.Tensor:
        """Every rank's data, a row each."""
        return torch.stack([self.ramp(rank, length) for rank in range(self.size)])


def expect(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless two tensors are equal."""
    if not torch.equal(found, expected):
        raise JobError(f"{name}: found {found.tolist()}, expected {expected.tolist()}")


def all_reduce(s: Setting) -> None:
    x = s.ramp(s.rank)
    y = s.ramp(s.rank)
    dist.all_reduce(x, dist.ReduceOp.MIN, group=s.group1)
    expect("all_reduce min", x, s.all_ramps().amin(0))
    dist.all_reduce(y, dist.ReduceOp.MAX, group=s.group2)
    expect("all_reduce max", y, s.all_ramps().amax(0))
    dist.all_reduce(x, dist.ReduceOp.SUM, group=s.group1)
    expect("all_reduce sum", x, s.all_ramps().amin(0) * s.size)
    work = dist.all_reduce(y, dist.ReduceOp.SUM, group=s.group2, async_op=True)
    work.wait()
    expect("all_reduce sum, asynchronous", y, s.all_ramps().amax(0) * s.size)


def broadcast(s: Setting) -> None:
    for root in range(s.size):
        x = s.ramp(s.rank)
        dist.broadcast(x, root, group=s.group1)
        expect(f"broadcast from {root}", x, s.ramp(root))


def reduce(s: Setting) -> None:
    for root in range(s.size):
        x = s.ramp(s.rank)
        dist.reduce(x, root, dist.ReduceOp.SUM, group=s.group2)
        if s.rank == root:
            expect(f"reduce to {root}", x, s.all_ramps().sum(0))


def all_gather(s: Setting) -> None:
    pieces = [torch.empty(4, device=s.device) for _ in range(s.size)]
    dist.all_gather(pieces, s.ramp(s.rank), group=s.group1)
    expect("all_gather", torch.stack(pieces), s.all_ramps())
    whole = torch.empty(4 * s.size, device=s.device)
    gather_whole(whole, s.ramp(s.rank), group=s.group2)
    expect("all_gather into one tensor", whole, s.all_ramps().flatten())


def reduce_scatter(s: Setting) -> None:
    source = s.ramp(s.rank, 4 * s.size)
    mine = s.all_ramps(4 * s.size).sum(0).chunk(s.size)[s.rank]
    output = torch.empty(4, device=s.device)
    dist.reduce_scatter(output, list(source.chunk(s.size)), dist.ReduceOp.SUM, group=s.group1)
    expect("reduce_scatter", output, mine)
    scatter_sum(output.zero_(), source, dist.ReduceOp.SUM, group=s.group2)
    expect("reduce_scatter of one tensor", output, mine)


def all_to_all(s: Setting) -> None:
    source = s.ramp(s.rank, 2 * s.size)
    columns = s.all_ramps(2 * s.size).chunk(s.size, dim=1)
    output = torch.empty_like(source)
    dist.all_to_all_single(output, source, group=s.group1)
    expect("all_to_all", output, columns[s.rank].flatten())


def all_to_all_v(s: Setting) -> None:
    """Rank i sends j + 1 elements to rank j."""
    counts = [rank + 1 for rank in range(s.size)]
    source = s.ramp(s.rank, sum(counts))
    received = [s.rank + 1] * s.size
    output = torch.empty(sum(received), device=s.device)
    dist.all_to_all_single(output, source, received, counts, group=s.group2)
    start, end = sum(counts[: s.rank]), sum(counts[: s.rank + 1])
    pieces = [s.ramp(rank, sum(counts))[start:end] for rank in range(s.size)]
    expect("all_to_all with counts", output, torch.cat(pieces))


def gather(s: Setting) -> None:
    for root in range(s.size):
        pieces = None
        if s.rank == root:
            pieces = [torch.empty(4, device=s.device) for _ in range(s.size)]
        dist.gather(s.ramp(s.rank), pieces, root, group=s.group1)
        if pieces is not None:
            expect(f"gather to {root}", torch.stack(pieces), s.all_ramps())


def scatter(s: Setting) -> None:
    for root in range(s.size):
        output = torch.empty(4, device=s.device)
        pieces = list(s.all_ramps() + 1000 * root) if s.rank == root else None
        dist.scatter(output, pieces, root, group=s.group2)
        expect(f"scatter from {root}", output, s.ramp(s.rank) + 1000 * root)


def sendrecv(s: Setting) -> None:
    """Around the ring: even ranks send first, so that no two wait for each other."""
    before, after = (s.rank - 1) % s.size, (s.rank + 1) % s.size
    if s.size == 1:
        return
    output = torch.empty(4, device=s.device)
    if s.rank % 2 == 0:
        dist.send(s.ramp(s.rank), after, group=s.group1)
        dist.recv(output, before, group=s.group1)
    else:
        dist.recv(output, before, group=s.group1)
        dist.send(s.ramp(s.rank), after, group=s.group1)
    expect("send and recv", output, s.ramp(before))


def permute(s: Setting) -> None:
    """Around the ring the other way, sends and receives in one batch."""
    if s.size == 1:
        return
    before, after = (s.rank - 1) % s.size, (s.rank + 1) % s.size
    output = torch.empty(4, device=s.device)
    operations = [
        dist.P2POp(dist.isend, s.ramp(s.rank), before, s.group2),
        dist.P2POp(dist.irecv, output, after, s.group2),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    expect("batched send and recv", output, s.ramp(after))


def barrier(s: Setting) -> None:
    dist.barrier(group=s.group1)
    dist.barrier(group=s.group2)


def objects(s: Setting) -> None:
    found: list[object] = [None] * s.size
    dist.all_gather_object(found, {"rank": s.rank})
    if found != [{"rank": rank} for rank in range(s.size)]:
        raise JobError(f"all_gather_object: found {found}")


OPERATIONS: Mapping[str, Callable[[Setting], None]] = {
    function.__name__: function
    for function in (
        *(all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all, all_to_all_v),
        *(gather, scatter, sendrecv, permute, barrier, objects),
    )
}
"""By the names that a backend's adapter has for them; ``objects`` goes through the default group,
whatever it moves objects with."""


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The launcher hands over all of ``train`` as flags; this program needs three of them."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--distributed-backend", default="auto", metavar="NAME")
    parser.add_argument("--comm", nargs="*", default=[], metavar="NAME=VALUE", help="its options")
    parser.add_argument("--device", default="auto", metavar="KIND", help="such as cpu or cuda")
    return parser.parse_known_args(words)[0]


def main(words: Sequence[str]) -> None:
    """Join the other ranks, check every operation that the backend can do, leave."""
    options = arguments(words)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = select(options.device, local_rank)
    kind, device = chosen.kind, chosen.torch_device
    values = registry.options_of(options.distributed_backend, options.comm)
    backend = registry.usable(options.distributed_backend, kind)
    backend.export(values)
    with backend.creating():
        dist.init_process_group(backend.torch_backend(kind), **backend.init_options(device, values))
        rank, size = dist.get_rank(), dist.get_world_size()
        ranks = list(range(size))
        setting = Setting(rank, size, device, dist.new_group(ranks), dist.new_group(ranks))
    for name, operation in OPERATIONS.items():
        if name not in (*backend.operations_on(kind), "objects"):
            if rank == 0:
                print(f"left out: {name}, which {backend.name} cannot do on {kind}", flush=True)
            continue
        operation(setting)
        # Only when all ranks are here was the operation right on all of them.
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
