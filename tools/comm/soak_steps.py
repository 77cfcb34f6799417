"""Random operations with known results, for ``soak.py``.

Each function starts an operation with parameters drawn by a :class:`Step`, and returns a function
that waits for it and checks the result.
"""

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
    """Parameters of an operation, the same on all ranks of its group. ``generator`` draws further
    parameters.
    """

    group: Any
    members: list[int]
    """Global ranks of the group."""
    index: int
    """Index of this rank in ``members``."""
    number: int
    """Number of the operation in the round, on which the data depend."""
    generator: random.Random

    @property
    def size(self) -> int:
        return len(self.members)

    def data(self, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a member's input: small integers, whose sums every type represents exactly."""
        return ((torch.arange(count) * 3 + rank * 7 + self.number) % 16).to(dtype)

    def all_data(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack([self.data(rank, count, dtype) for rank in range(self.size)])


Check = Callable[[], None]
"""Function that waits for an operation, and checks its result."""


def require_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(actual, expected):
        raise AssertionError(
            f"wrong in {int((actual != expected).sum())} of {expected.numel()} elements"
        )


def reduce_sum(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.sum(0).to(inputs.dtype)


def reduce_max(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.amax(0)


def reduce_min(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.amin(0)


OPS = (
    (dist.ReduceOp.SUM, reduce_sum),
    (dist.ReduceOp.MAX, reduce_max),
    (dist.ReduceOp.MIN, reduce_min),
)


def start_reduction(step: Step, count: int, dtype: torch.dtype) -> Check:
    """Start all_reduce, reduce or reduce_scatter, of sums, maxima or minima."""
    kind = step.generator.choice(("all_reduce", "reduce", "reduce_scatter"))
    op, combine = step.generator.choice(OPS)
    root = step.generator.randrange(step.size)
    if kind == "reduce_scatter":
        source, out = (
            step.data(step.index, count * step.size, dtype),
            torch.empty(count, dtype=dtype),
        )
        work = dist.reduce_scatter_tensor(out, source, op=op, group=step.group, async_op=True)
        own_slice = slice(step.index * count, (step.index + 1) * count)
        return check_after(
            work, out, lambda: combine(step.all_data(count * step.size, dtype))[own_slice]
        )
    out = step.data(step.index, count, dtype)
    if kind == "all_reduce":
        work = dist.all_reduce(out, op=op, group=step.group, async_op=True)
        return check_after(work, out, lambda: combine(step.all_data(count, dtype)))
    work = dist.reduce(out, step.members[root], op=op, group=step.group, async_op=True)
    is_defined = step.index == root
    return check_after(
        work, out if is_defined else None, lambda: combine(step.all_data(count, dtype))
    )


def start_copy(step: Step, count: int, dtype: torch.dtype) -> Check:
    """Start broadcast, all_gather, gather or scatter."""
    kind = step.generator.choice(("broadcast", "all_gather", "gather", "scatter"))
    root = step.generator.randrange(step.size)
    own_data, is_root = step.data(step.index, count, dtype), step.index == root
    if kind == "broadcast":
        work = dist.broadcast(own_data, step.members[root], group=step.group, async_op=True)
        return check_after(work, own_data, lambda: step.data(root, count, dtype))
    if kind == "all_gather":
        out = torch.empty(step.size * count, dtype=dtype)
        work = dist.all_gather_into_tensor(out, own_data, group=step.group, async_op=True)
        return check_after(work, out, lambda: step.all_data(count, dtype).view(-1))
    if kind == "gather":
        parts = [torch.empty(count, dtype=dtype) for _ in step.members] if is_root else None
        work = dist.gather(own_data, parts, step.members[root], group=step.group, async_op=True)

        def check_gathered() -> None:
            work.wait()
            if parts is not None:
                require_equal(torch.stack(parts), step.all_data(count, dtype))

        return check_gathered
    shards = list(step.data(root, count * step.size, dtype).view(step.size, count).unbind())
    out = torch.empty(count, dtype=dtype)
    source = shards if is_root else None
    work = dist.scatter(out, source, step.members[root], group=step.group, async_op=True)
    return check_after(work, out, lambda: shards[step.index])


def start_exchange(step: Step, count: int, dtype: torch.dtype) -> Check:
    """Start all_to_all with unequal counts, or send messages around a ring."""
    if step.generator.random() < 0.5:
        # lengths[i][j]: number of elements from member i to member j.
        lengths = [[(i * 5 + j * 3 + step.number) % 4 * count for j in range(step.size)]
                   for i in range(step.size)]  # fmt: skip
        sent_counts, received_counts = lengths[step.index], [row[step.index] for row in lengths]
        source, out = (
            step.data(step.index, sum(sent_counts), dtype),
            torch.empty(sum(received_counts), dtype=dtype),
        )
        work = dist.all_to_all_single(
            out, source, received_counts, sent_counts, group=step.group, async_op=True
        )

        def compute_expected() -> torch.Tensor:
            parts = []
            for i, row in enumerate(lengths):
                begin = sum(row[: step.index])
                parts.append(step.data(i, sum(row), dtype)[begin : begin + row[step.index]])
            return torch.cat(parts)

        return check_after(work, out, compute_expected)
    previous_index, next_index = (step.index - 1) % step.size, (step.index + 1) % step.size
    source, out = step.data(step.index, count, dtype), torch.empty(count, dtype=dtype)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, source, step.members[next_index], group=step.group),
            dist.P2POp(dist.irecv, out, step.members[previous_index], group=step.group),
        ]
    )

    def check_received() -> None:
        for work in works:
            work.wait()
        require_equal(out, step.data(previous_index, count, dtype))

    return check_received


def check_after(
    work: Any, out: torch.Tensor | None, compute_expected: Callable[[], torch.Tensor]
) -> Check:
    """Return a function that waits for ``work`` and compares ``out`` with the expected result. With
    ``out`` None the result is undefined on this rank, and only the wait remains.
    """

    def check() -> None:
        work.wait()
        if out is not None:
            require_equal(out, compute_expected())

    return check


START_FUNCTIONS = (start_reduction, start_copy, start_exchange)
