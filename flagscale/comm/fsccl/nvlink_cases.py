"""Checks of the NVLink engine on GPUs, bit by bit against reductions in the order of ranks."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from flagscale.comm.fsccl.nvlink import KernelShape
from flagscale.comm.fsccl.nvlink_world import NvlinkGroup, NvlinkWorld, capture_graph

_GUARD = 64  # elements around a result that must stay as they were
_POISON = 77
_POOL_BYTES = 64 << 20

_ALGORITHMS = {
    "all_reduce": ("flagged", "lines", "two_shot", "staged"),
    "reduce_scatter": ("flagged", "lines", "staged"),
    "all_gather": ("flagged", "lines", "staged"),
    "all_to_all": ("flagged", "lines", "staged"),
    "broadcast": ("staged",),
}
_REDUCING = ("all_reduce", "reduce_scatter")
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COUNTS = (1, 3, 8, 129, 4096, 5001, 65536, 300007)


@dataclass(frozen=True)
class NvlinkCase:
    """One operation with ``count`` elements per part, at ``shift`` elements into an allocation."""

    collective: str
    algorithm: str
    dtype: torch.dtype
    op: str
    count: int
    shift: int
    in_place: bool
    seed: int

    def inputs(self, size: int) -> int:
        return size if self.collective in ("reduce_scatter", "all_to_all") else 1

    def outputs(self, size: int) -> int:
        return size if self.collective in ("all_gather", "all_to_all") else 1


def generate_cases(quick: bool) -> Iterator[NvlinkCase]:
    """Yield every collective and algorithm with every type, then every reduction."""
    rng = random.Random(7)

    def draw_seed() -> int:
        return rng.getrandbits(30)

    counts = _COUNTS[::3] if quick else _COUNTS
    for collective, algorithms in _ALGORITHMS.items():
        for algorithm, dtype, count in itertools.product(algorithms, _DTYPES, counts):
            shift = rng.choice((0, 0, 1, 2))
            in_place = collective == "broadcast" or (
                collective == "all_reduce" and rng.random() < 0.5
            )
            yield NvlinkCase(
                collective, algorithm, dtype, "sum", count, shift, in_place, draw_seed()
            )
    for collective, op in itertools.product(_REDUCING, ("avg", "min", "max", "product")):
        for algorithm, dtype in itertools.product(_ALGORITHMS[collective], _FLOATS):
            yield NvlinkCase(collective, algorithm, dtype, op, 5001, 1, False, draw_seed())


def make_input(case: NvlinkCase, rank: int, elements: int, device: torch.device) -> torch.Tensor:
    """Return the input of a rank: small numbers, with fractions that round."""
    generator = torch.Generator(device).manual_seed(case.seed * 64 + rank)
    whole = torch.randint(-6, 7, (elements,), generator=generator, device=device)
    if case.dtype not in _FLOATS:
        return (whole.abs() if case.dtype == torch.uint8 else whole).to(case.dtype)
    return (whole * 0.37 + 0.011 * rank).to(case.dtype)


def reduce_inputs(case: NvlinkCase, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Reduce as the kernels do: in the order of ranks, 16-bit floats in float32."""
    wide = torch.float32 if case.dtype in (torch.float16, torch.bfloat16) else case.dtype
    total = inputs[0].to(wide)
    for tensor in inputs[1:]:
        operand = tensor.to(wide)
        if case.op in ("sum", "avg"):
            total = total + operand
        elif case.op == "product":
            total = total * operand
        else:
            total = (
                torch.minimum(total, operand) if case.op == "min" else torch.maximum(total, operand)
            )
    if case.op == "avg":
        # The divisor is a tensor, because torch multiplies by the reciprocal of a number.
        total = total / torch.full_like(total, len(inputs))
    return total.to(case.dtype)


def expected_output(
    case: NvlinkCase, index: int, size: int, device: torch.device, root: int
) -> torch.Tensor:
    """Return the correct output of the rank with this index in the group."""
    parts = case.inputs(size)
    inputs = [make_input(case, p, parts * case.count, device) for p in range(size)]
    if case.collective == "broadcast":
        return inputs[root]
    if parts > 1:
        inputs = [tensor.view(size, case.count)[index] for tensor in inputs]
    return reduce_inputs(case, inputs) if case.collective in _REDUCING else torch.cat(inputs)


def generate_registered_cases() -> Iterator[NvlinkCase]:
    """Yield cases for registered memory: parts begin at multiples of 16 bytes."""
    collectives = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    for i, (collective, dtype, count) in enumerate(
        itertools.product(collectives, (torch.float32, torch.bfloat16), (16, 4096, 300032))
    ):
        in_place = collective == "all_reduce"
        yield NvlinkCase(collective, "direct", dtype, "sum", count, 0, in_place, 1000 + i)


class CaseBuffers:
    """Memory of a case, for the ranks of this process.

    Args:
        case: the operation.
        group: the ranks that run it.
        pools: bytes by rank to take the memory from, 64 MiB each; None allocates.
    """

    def __init__(
        self, case: NvlinkCase, group: NvlinkGroup, pools: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        self.case, self.group = case, group
        self.root = case.seed % group.size
        self.whole: dict[int, torch.Tensor] = {}
        self.out: dict[int, torch.Tensor] = {}
        self.sources: dict[int, torch.Tensor] = {}
        device, size = group.world.device, group.size
        for rank in group.communicators:
            elements = case.outputs(size) * case.count
            inputs = case.inputs(size) * case.count + case.shift
            padded = elements + case.shift + 2 * _GUARD
            if pools is None:
                whole = torch.empty(padded, dtype=case.dtype, device=device)
                source_memory = torch.empty(inputs, dtype=case.dtype, device=device)
            else:
                first, second = pools[rank].view(case.dtype).chunk(2)
                whole, source_memory = first[:padded], second[:inputs]
            self.whole[rank] = whole.fill_(_POISON)
            self.out[rank] = whole[_GUARD + case.shift :][:elements]
            self.sources[rank] = self.out[rank] if case.in_place else source_memory[case.shift :]
        self.fill_inputs()

    def fill_inputs(self) -> None:
        for rank, source in self.sources.items():
            index = self.group.ranks.index(rank)
            source.copy_(make_input(self.case, index, source.numel(), self.group.world.device))
        self.group.world.synchronize()

    def run(self) -> bool:
        return self.group.run(
            self.case.collective,
            self.sources,
            self.out,
            op=self.case.op,
            root=self.root,
            shape=KernelShape(self.case.algorithm, self.group.world.max_blocks),
        )

    def find_errors(self) -> list[str]:
        errors = []
        for rank, out in self.out.items():
            index, device = self.group.ranks.index(rank), self.group.world.device
            correct = expected_output(self.case, index, self.group.size, device, self.root)
            wrong_bytes = int((out.view(torch.uint8) != correct.view(torch.uint8)).sum())
            if wrong_bytes:
                errors.append(f"rank {rank}: {wrong_bytes} bytes differ: {self.case}")
            guard = self.whole[rank].clone()
            guard[_GUARD + self.case.shift :][: out.numel()] = _POISON
            if not bool((guard == _POISON).all()):
                errors.append(f"rank {rank}: wrote beyond the result: {self.case}")
        return errors


def check_operations(world: NvlinkWorld, group: NvlinkGroup, quick: bool) -> tuple[int, list[str]]:
    """Run each case by itself; return the number of cases run, and the errors."""
    runs, errors = 0, []
    for case in generate_cases(quick):
        prepared = CaseBuffers(case, group)
        if prepared.run():
            runs += 1
            world.synchronize()
            errors += prepared.find_errors() + group.collect_failures()
        if errors:
            break
    return runs, errors


def check_registered(world: NvlinkWorld, group: NvlinkGroup) -> tuple[int, list[str]]:
    """Run each case for registered memory, with all memory of all ranks registered."""
    pools = {
        rank: torch.empty(_POOL_BYTES, dtype=torch.uint8, device=world.device)
        for rank in group.communicators
    }
    group.register_memory(pools)
    runs, errors = 0, []
    for case in generate_registered_cases():
        prepared = CaseBuffers(case, group, pools)
        runs += prepared.run()
        world.synchronize()
        errors += prepared.find_errors() + group.collect_failures()
    return runs, errors


def check_groups(
    world: NvlinkWorld, groups: list[NvlinkGroup], turns: int
) -> tuple[int, list[str]]:
    """Run operations of several groups one after the other, without waiting in between."""
    rng = random.Random(11)
    small_cases = [case for case in generate_cases(quick=False) if case.count <= 65536]
    prepared = []
    for _ in range(turns):
        group, case = rng.choice(groups), rng.choice(small_cases)
        prepared.append(CaseBuffers(case, group))
    was_run = [buffers.run() for buffers in prepared]
    world.synchronize()
    errors = [
        error
        for buffers, run in zip(prepared, was_run, strict=True)
        if run
        for error in buffers.find_errors()
    ]
    return sum(was_run), errors


def check_graph(world: NvlinkWorld, group: NvlinkGroup, replays: int) -> tuple[int, list[str]]:
    """Replay a graph of several operations, with other inputs each time."""
    rng = random.Random(13)
    candidates = [c for c in generate_cases(quick=False) if not c.in_place and c.count <= 65536]
    prepared = [CaseBuffers(case, group) for case in rng.sample(candidates, 12)]
    prepared = [buffers for buffers in prepared if buffers.run()]

    def body() -> None:
        for buffers in prepared:
            buffers.run()

    graph = capture_graph(world, body)
    errors: list[str] = []
    for turn in range(replays):
        for buffers in prepared:
            buffers.case = replace(buffers.case, seed=buffers.case.seed + 1)
            buffers.fill_inputs()
        graph.replay()
        if turn % 3 == 2:
            graph.replay()  # again, without waiting
        world.synchronize()
        errors += [
            text for buffers in prepared for text in buffers.find_errors()
        ] + group.collect_failures()
        if errors:
            break
    return replays * len(prepared), errors


def check_lines(world: NvlinkWorld, group: NvlinkGroup, turns: int) -> tuple[int, list[str]]:
    """Check that lines arrive whole: many operations, each with different values everywhere."""
    # A rank with a GPU of its own has more channels.
    count, size = 15_000 if world.is_single_process else 60_000, group.size
    device, dtype = world.device, torch.int32
    sources = {rank: torch.empty(count, dtype=dtype, device=device) for rank in group.communicators}
    out = {rank: torch.empty(size * count, dtype=dtype, device=device) for rank in sources}
    mismatches = {rank: torch.zeros((), dtype=torch.int64, device=device) for rank in sources}
    all_ranks = torch.arange(size, dtype=dtype, device=device)[:, None]
    world.synchronize()

    def run_and_compare(
        collective: str, algorithm: str, turn: int, expect: torch.Tensor | int
    ) -> bool:
        for rank, values in sources.items():
            with world.use_stream(rank):
                values.fill_(turn * size + group.ranks.index(rank))
        results = out if collective == "all_gather" else {r: t[:count] for r, t in out.items()}
        was_run = group.run(
            collective, sources, results, shape=KernelShape(algorithm, world.max_blocks)
        )
        for rank, result in results.items():
            with world.use_stream(rank):
                if was_run:
                    mismatches[rank] += (result.view(-1, count) != expect + turn * size).sum()
        return was_run

    runs = 0
    for turn in range(turns):
        runs += run_and_compare("all_gather", "lines", turn, all_ranks)
        # turn * size is added by every rank, and once by run().
        sums = size * (size - 1) // 2 + turn * size * (size - 1)
        runs += run_and_compare("all_reduce", "two_shot", turn, sums)
    world.synchronize()
    counts = {rank: int(differ) for rank, differ in mismatches.items()}
    errors = [f"rank {rank}: {n} values differ of lines" for rank, n in counts.items() if n]
    if runs < 2 * turns:
        errors.append(f"{2 * turns - runs} operations have no room for {count} values per rank")
    return runs, errors + group.collect_failures()


def check_absent(world: NvlinkWorld) -> list[str]:
    """Check that kernels end when a rank is absent, and that the error names it."""
    group = NvlinkGroup(world, range(world.size), timeout=2.0)
    absent = world.size - 1
    memory = {r: torch.ones(1024, device=world.device) for r in group.communicators}
    for rank, member in group.communicators.items():
        if rank != absent:
            with world.use_stream(rank):
                member.run("all_reduce", memory[rank], memory[rank], shape=KernelShape("staged"))
    start = time.monotonic()
    world.synchronize()
    errors = (
        [] if time.monotonic() - start < 20 else ["kernels waited too long for the absent rank"]
    )
    for rank, member in group.communicators.items():
        failure = member.failure()
        if rank != absent and (failure is None or f"rank {absent} of" not in failure):
            errors.append(
                f"rank {rank}: expected a failure that names rank {absent}, found {failure!r}"
            )
    world.gather(dict.fromkeys(world.local, b""))  # no rank continues before all have checked
    return errors
