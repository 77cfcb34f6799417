"""Random operations with known results, for ``soak.py``."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)


@dataclass
class Step:
    """An operation of a group, the same on all its ranks; ``chance`` draws its remaining
    parameters.
    """

    group: Any
    members: list[int]
    me: int
    number: int
    chance: random.Random

    @property
    def size(self) -> int:
        return len(self.members)

    def data(self, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a member's input: small integers, whose sums every type represents."""
        return ((torch.arange(count) * 3 + rank * 7 + self.number) % 16).to(dtype)

    def all_data(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack([self.data(rank, count, dtype) for rank in range(self.size)])


Check = Callable[[], None]
"""Function that waits for an operation, and checks its result."""


def require_equal(found: torch.Tensor, meant: torch.Tensor) -> None:
    if not torch.equal(found, meant):
        raise AssertionError(f"wrong in {int((found != meant).sum())} of {meant.numel()} elements")


def total(of_all: torch.Tensor) -> torch.Tensor:
    return of_all.sum(0).to(of_all.dtype)


def largest(of_all: torch.Tensor) -> torch.Tensor:
    return of_all.amax(0)


def least(of_all: torch.Tensor) -> torch.Tensor:
    return of_all.amin(0)


OPS = ((dist.ReduceOp.SUM, total), (dist.ReduceOp.MAX, largest), (dist.ReduceOp.MIN, least))


def reductions(step: Step, count: int, dtype: torch.dtype) -> Check:
    """Run all_reduce, reduce or reduce_scatter, of a sum or an extreme."""
    kind = step.chance.choice(("all_reduce", "reduce", "reduce_scatter"))
    op, combine = step.chance.choice(OPS)
    root = step.chance.randrange(step.size)
    if kind == "reduce_scatter":
        given, out = step.data(step.me, count * step.size, dtype), torch.empty(count, dtype=dtype)
        work = dist.reduce_scatter_tensor(out, given, op=op, group=step.group, async_op=True)
        own = slice(step.me * count, (step.me + 1) * count)
        return check_after(work, out, lambda: combine(step.all_data(count * step.size, dtype))[own])
    out = step.data(step.me, count, dtype)
    if kind == "all_reduce":
        work = dist.all_reduce(out, op=op, group=step.group, async_op=True)
        return check_after(work, out, lambda: combine(step.all_data(count, dtype)))
    work = dist.reduce(out, step.members[root], op=op, group=step.group, async_op=True)
    known = step.me == root
    return check_after(work, out if known else None, lambda: combine(step.all_data(count, dtype)))


def copies(step: Step, count: int, dtype: torch.dtype) -> Check:
    """Run broadcast, all_gather, gather or scatter."""
    kind = step.chance.choice(("broadcast", "all_gather", "gather", "scatter"))
    root = step.chance.randrange(step.size)
    mine, at_root = step.data(step.me, count, dtype), step.me == root
    if kind == "broadcast":
        work = dist.broadcast(mine, step.members[root], group=step.group, async_op=True)
        return check_after(work, mine, lambda: step.data(root, count, dtype))
    if kind == "all_gather":
        out = torch.empty(step.size * count, dtype=dtype)
        work = dist.all_gather_into_tensor(out, mine, group=step.group, async_op=True)
        return check_after(work, out, lambda: step.all_data(count, dtype).view(-1))
    if kind == "gather":
        parts = [torch.empty(count, dtype=dtype) for _ in step.members] if at_root else None
        work = dist.gather(mine, parts, step.members[root], group=step.group, async_op=True)

        def gathered() -> None:
            work.wait()
            if parts is not None:
                require_equal(torch.stack(parts), step.all_data(count, dtype))

        return gathered
    shares = list(step.data(root, count * step.size, dtype).view(step.size, count).unbind())
    out = torch.empty(count, dtype=dtype)
    given = shares if at_root else None
    work = dist.scatter(out, given, step.members[root], group=step.group, async_op=True)
    return check_after(work, out, lambda: shares[step.me])


def exchanges(step: Step, count: int, dtype: torch.dtype) -> Check:
    """Run all_to_all with unequal parts, or messages around a ring."""
    if step.chance.random() < 0.5:
        # To member j of i: a part of a length that both know.
        lengths = [[(i * 5 + j * 3 + step.number) % 4 * count for j in range(step.size)]
                   for i in range(step.size)]  # fmt: skip
        sent, got = lengths[step.me], [row[step.me] for row in lengths]
        given, out = step.data(step.me, sum(sent), dtype), torch.empty(sum(got), dtype=dtype)
        work = dist.all_to_all_single(out, given, got, sent, group=step.group, async_op=True)

        def meant() -> torch.Tensor:
            parts = []
            for i, row in enumerate(lengths):
                begin = sum(row[: step.me])
                parts.append(step.data(i, sum(row), dtype)[begin : begin + row[step.me]])
            return torch.cat(parts)

        return check_after(work, out, meant)
    back, ahead = (step.me - 1) % step.size, (step.me + 1) % step.size
    given, out = step.data(step.me, count, dtype), torch.empty(count, dtype=dtype)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, given, step.members[ahead], group=step.group),
            dist.P2POp(dist.irecv, out, step.members[back], group=step.group),
        ]
    )

    def came() -> None:
        for work in works:
            work.wait()
        require_equal(out, step.data(back, count, dtype))

    return came


def check_after(work: Any, out: torch.Tensor | None, meant: Callable[[], torch.Tensor]) -> Check:
    """Return a check of ``out`` once the work is done; None: the result is undefined on this
    rank.
    """

    def check() -> None:
        work.wait()
        if out is not None:
            require_equal(out, meant())

    return check


KINDS = (reductions, copies, exchanges)
