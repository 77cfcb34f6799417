"""The buffers of one size: allocated, registered where asked, and the steps that use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flagscale.bench.collectives.bodies import Body, Part, Shape, assemble, build
from flagscale.bench.collectives.devices import BenchDevice
from flagscale.bench.collectives.process_groups import RankGroup
from flagscale.bench.collectives.spec import BenchSpec, Case
from flagscale.bench.collectives.timing import Step


@dataclass(frozen=True)
class PreparedBuffers:
    """One size on one backend, ready to run."""

    group: RankGroup
    bodies: tuple[Body, ...]
    """One, or one an iteration with unique buffers."""
    keep: Any = None
    """What must live as long as the buffers."""

    @property
    def distinct(self) -> tuple[Part, ...]:
        """Every part with buffers of its own; those of one body share theirs when aggregated."""
        return tuple(part for body in self.bodies for part in body.parts)

    def steps(self, count: int, first: int = 0) -> list[Step]:
        """``count`` steps, of the buffers from number ``first`` on, over and over."""
        many = len(self.bodies)
        return [self.bodies[(first + i) % many].step for i in range(count)]


def prepare(
    case: Case, shapes: tuple[Shape, ...], group: RankGroup, device: BenchDevice, spec: BenchSpec
) -> PreparedBuffers:
    """Allocate all buffers of a size.

    Raises:
        RuntimeError: there is not enough memory, or the backend cannot register it.
    """
    if not group.member:
        return PreparedBuffers(group, ())
    iterations = spec.iterations
    count = iterations.measured + iterations.warmup if spec.buffers.unique else 1
    bodies: list[Body] = []
    with _pool(group, device, spec.buffers.registered) as keep:
        for _ in range(count):
            shared = bodies[0].parts if bodies and spec.buffers.shared_output else ()
            parts = []
            for index, shape in enumerate(shapes * iterations.aggregated):
                reuse = shared[index].output if shared and not case.in_place else None
                parts.append(build(case, shape, group, device, reuse))
            bodies.append(assemble(tuple(parts), device, group, case.operation.name))
    return PreparedBuffers(group, tuple(bodies), keep)


@contextmanager
def _pool(group: RankGroup, device: BenchDevice, registered: int) -> Iterator[Any]:
    """Allocations within are registered with the backend of ``group`` at the end."""
    if not registered or not device.is_cuda:
        yield None
        return
    backend: Any = group.backend_on(device)
    if not hasattr(backend, "register_mem_pool"):
        raise RuntimeError(f"{group.backend} registers no memory: measure it without -R")
    pool = _memory_pool(backend, registered)
    with torch.cuda.use_mem_pool(pool):
        yield pool
    if registered == 2:
        backend.register_mem_pool(pool, symm=True)
    else:
        backend.register_mem_pool(pool)


def _memory_pool(backend: Any, registered: int) -> Any:
    """Of memory that NCCL made itself, or of CUDA's, which it registers too, but not as windows."""
    try:
        return torch.cuda.MemPool(backend.mem_allocator)
    except RuntimeError as error:
        if registered == 2:
            raise RuntimeError(
                "symmetric windows need memory of NCCL's own allocator, which torch lends only "
                f"where the GPUs support multicast and it is not switched off: use -R 1 ({error})"
            ) from error
        return torch.cuda.MemPool()


def release(prepared: PreparedBuffers, device: BenchDevice) -> None:
    """Undo the registration of a size's buffers before they go."""
    if prepared.keep is not None:
        device.synchronize()
        backend: Any = prepared.group.backend_on(device)
        backend.deregister_mem_pool(prepared.keep)
