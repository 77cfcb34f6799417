"""Checks of the NVLink engine on GPUs, for nvlink_check.py.

Results are compared bit by bit with reductions by torch in the order of ranks.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from flagscale.comm.fsccl.nvlink import KernelShape
from flagscale.comm.fsccl.nvlink_world import NvlinkGroup, NvlinkWorld, capture_graph

_GUARD_ELEMENTS = 64  # before and behind an output; a kernel must not write them
_GUARD_VALUE = 77
_REGISTERED_POOL_BYTES = 64 << 20

# Algorithms by collective; csrc/nvlink/kernel_plan.h describes them.
_ALGORITHMS = {
    "all_reduce": ("flagged", "lines", "two_shot", "staged"),
    "reduce_scatter": ("flagged", "lines", "staged"),
    "all_gather": ("flagged", "lines", "staged"),
    "all_to_all": ("flagged", "lines", "staged"),
    "broadcast": ("staged",),
}
_REDUCING_COLLECTIVES = ("all_reduce", "reduce_scatter")
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
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ELEMENT_COUNTS = (1, 3, 8, 129, 4096, 5001, 65536, 300007)


@dataclass(frozen=True)
class NvlinkCase:
    """One operation to check.

    ``count`` is the number of elements per part. Buffers begin ``shift`` elements behind an aligned
    address.
    """

    collective: str
    algorithm: str
    dtype: torch.dtype
    op: str
    count: int
    shift: int
    in_place: bool
    seed: int

    def input_parts(self, size: int) -> int:
        """Return the number of parts of a rank's input in a group of ``size`` ranks."""
        return size if self.collective in ("reduce_scatter", "all_to_all") else 1

    def output_parts(self, size: int) -> int:
        """Return the number of parts of a rank's output in a group of ``size`` ranks."""
        return size if self.collective in ("all_gather", "all_to_all") else 1


def generate_cases(quick: bool) -> Iterator[NvlinkCase]:
    """Yield cases of every collective and algorithm with every element type, then of every
    reduction.
    """
    rng = random.Random(7)

    def draw_seed() -> int:
        return rng.getrandbits(30)

    counts = _ELEMENT_COUNTS[::3] if quick else _ELEMENT_COUNTS
    for collective, algorithms in _ALGORITHMS.items():
        for algorithm, dtype, count in itertools.product(algorithms, _DTYPES, counts):
            shift = rng.choice((0, 0, 1, 2))
            in_place = collective == "broadcast" or (
                collective == "all_reduce" and rng.random() < 0.5
            )
            yield NvlinkCase(
                collective,
                algorithm=algorithm,
                dtype=dtype,
                op="sum",
                count=count,
                shift=shift,
                in_place=in_place,
                seed=draw_seed(),
            )
    for collective, op in itertools.product(
        _REDUCING_COLLECTIVES, ("avg", "min", "max", "product")
    ):
        for algorithm, dtype in itertools.product(_ALGORITHMS[collective], _FLOAT_DTYPES):
            yield NvlinkCase(
                collective,
                algorithm=algorithm,
                dtype=dtype,
                op=op,
                count=5001,
                shift=1,
                in_place=False,
                seed=draw_seed(),
            )


def make_input(case: NvlinkCase, rank: int, elements: int, device: torch.device) -> torch.Tensor:
    """Return the input of a rank: small integers, or for float types fractions whose sums are
    rounded.
    """
    generator = torch.Generator(device).manual_seed(case.seed * 64 + rank)
    integers = torch.randint(-6, 7, (elements,), generator=generator, device=device)
    if case.dtype not in _FLOAT_DTYPES:
        return (integers.abs() if case.dtype == torch.uint8 else integers).to(case.dtype)
    return (integers * 0.37 + 0.011 * rank).to(case.dtype)


def reduce_inputs(case: NvlinkCase, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Reduce as the kernels do: in the order of ranks, 16-bit floats in float32."""
    accumulation_dtype = (
        torch.float32 if case.dtype in (torch.float16, torch.bfloat16) else case.dtype
    )
    total = inputs[0].to(accumulation_dtype)
    for tensor in inputs[1:]:
        operand = tensor.to(accumulation_dtype)
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
    parts = case.input_parts(size)
    inputs = [make_input(case, p, parts * case.count, device) for p in range(size)]
    if case.collective == "broadcast":
        return inputs[root]
    if parts > 1:
        inputs = [tensor.view(size, case.count)[index] for tensor in inputs]
    return (
        reduce_inputs(case, inputs)
        if case.collective in _REDUCING_COLLECTIVES
        else torch.cat(inputs)
    )


def generate_registered_cases() -> Iterator[NvlinkCase]:
    """Yield cases for registered memory, whose parts begin at multiples of 16 bytes."""
    collectives = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    for i, (collective, dtype, count) in enumerate(
        itertools.product(collectives, (torch.float32, torch.bfloat16), (16, 4096, 300032))
    ):
        in_place = collective == "all_reduce"
        yield NvlinkCase(
            collective,
            algorithm="direct",
            dtype=dtype,
            op="sum",
            count=count,
            shift=0,
            in_place=in_place,
            seed=1000 + i,
        )


class CaseBuffers:
    """Inputs and outputs of a case for the ranks of this process.

    Args:
        case: the operation.
        group: the ranks that run it.
        pools: registered memory by rank, uint8 of 64 MiB, that contains the buffers; None
            allocates them.
    """

    def __init__(
        self, case: NvlinkCase, group: NvlinkGroup, pools: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        self.case, self.group = case, group
        self.root = case.seed % group.size
        self.padded_outputs: dict[int, torch.Tensor] = {}
        self.out: dict[int, torch.Tensor] = {}
        self.sources: dict[int, torch.Tensor] = {}
        device, size = group.world.device, group.size
        for rank in group.communicators:
            output_elements = case.output_parts(size) * case.count
            input_elements = case.input_parts(size) * case.count + case.shift
            padded_elements = output_elements + case.shift + 2 * _GUARD_ELEMENTS
            if pools is None:
                padded_output = torch.empty(padded_elements, dtype=case.dtype, device=device)
                source_memory = torch.empty(input_elements, dtype=case.dtype, device=device)
            else:
                output_pool, input_pool = pools[rank].view(case.dtype).chunk(2)
                padded_output = output_pool[:padded_elements]
                source_memory = input_pool[:input_elements]
            self.padded_outputs[rank] = padded_output.fill_(_GUARD_VALUE)
            self.out[rank] = padded_output[_GUARD_ELEMENTS + case.shift :][:output_elements]
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
            expected = expected_output(self.case, index, self.group.size, device, self.root)
            wrong_bytes = int((out.view(torch.uint8) != expected.view(torch.uint8)).sum())
            if wrong_bytes:
                errors.append(f"rank {rank}: {wrong_bytes} bytes differ: {self.case}")
            guard = self.padded_outputs[rank].clone()
            guard[_GUARD_ELEMENTS + self.case.shift :][: out.numel()] = _GUARD_VALUE
            if not bool((guard == _GUARD_VALUE).all()):
                errors.append(f"rank {rank}: wrote beyond the result: {self.case}")
        return errors


def check_operations(world: NvlinkWorld, group: NvlinkGroup, quick: bool) -> tuple[int, list[str]]:
    """Run the cases one by one; return the number of supported cases, and the errors.

    The following functions with the same return type return the same.
    """
    runs, errors = 0, []
    for case in generate_cases(quick):
        buffers = CaseBuffers(case, group)
        if buffers.run():
            runs += 1
            world.synchronize()
            errors += buffers.find_errors() + group.collect_failures()
        if errors:
            break
    return runs, errors


def check_registered(world: NvlinkWorld, group: NvlinkGroup) -> tuple[int, list[str]]:
    """Run the cases for registered memory."""
    pools = {
        rank: torch.empty(_REGISTERED_POOL_BYTES, dtype=torch.uint8, device=world.device)
        for rank in group.communicators
    }
    group.register_memory(pools)
    runs, errors = 0, []
    for case in generate_registered_cases():
        buffers = CaseBuffers(case, group, pools)
        runs += buffers.run()
        world.synchronize()
        errors += buffers.find_errors() + group.collect_failures()
    return runs, errors


def check_groups(
    world: NvlinkWorld, groups: list[NvlinkGroup], operations: int
) -> tuple[int, list[str]]:
    """Run random operations of several groups without waiting for the GPU in between."""
    rng = random.Random(11)
    small_cases = [case for case in generate_cases(quick=False) if case.count <= 65536]
    all_buffers = []
    for _ in range(operations):
        group, case = rng.choice(groups), rng.choice(small_cases)
        all_buffers.append(CaseBuffers(case, group))
    was_run = [buffers.run() for buffers in all_buffers]
    world.synchronize()
    errors = [
        error
        for buffers, run in zip(all_buffers, was_run, strict=True)
        if run
        for error in buffers.find_errors()
    ]
    return sum(was_run), errors


def check_graph(world: NvlinkWorld, group: NvlinkGroup, replays: int) -> tuple[int, list[str]]:
    """Replay a CUDA graph of several operations with other inputs each time."""
    rng = random.Random(13)
    candidates = [c for c in generate_cases(quick=False) if not c.in_place and c.count <= 65536]
    all_buffers = [CaseBuffers(case, group) for case in rng.sample(candidates, 12)]
    all_buffers = [buffers for buffers in all_buffers if buffers.run()]

    def body() -> None:
        for buffers in all_buffers:
            buffers.run()

    graph = capture_graph(world, body)
    errors: list[str] = []
    for replay in range(replays):
        for buffers in all_buffers:
            buffers.case = replace(buffers.case, seed=buffers.case.seed + 1)
            buffers.fill_inputs()
        graph.replay()
        if replay % 3 == 2:
            graph.replay()  # again, without waiting
        world.synchronize()
        errors += [
            text for buffers in all_buffers for text in buffers.find_errors()
        ] + group.collect_failures()
        if errors:
            break
    return replays * len(all_buffers), errors


def check_lines(world: NvlinkWorld, group: NvlinkGroup, repetitions: int) -> tuple[int, list[str]]:
    """Check that lines (128 bytes with a flag at the end, csrc/nvlink/cells.h) arrive as a whole.

    Runs many operations whose values all differ from those of the previous one.
    """
    # A rank with a GPU of its own has more channels.
    count, size = 15_000 if world.is_single_process else 60_000, group.size
    device, dtype = world.device, torch.int32
    sources = {rank: torch.empty(count, dtype=dtype, device=device) for rank in group.communicators}
    outputs = {rank: torch.empty(size * count, dtype=dtype, device=device) for rank in sources}
    mismatches = {rank: torch.zeros((), dtype=torch.int64, device=device) for rank in sources}
    all_ranks = torch.arange(size, dtype=dtype, device=device)[:, None]
    world.synchronize()

    def run_and_compare(
        collective: str, algorithm: str, turn: int, expect: torch.Tensor | int
    ) -> bool:
        for rank, values in sources.items():
            with world.use_stream(rank):
                values.fill_(turn * size + group.ranks.index(rank))
        results = (
            outputs if collective == "all_gather" else {r: t[:count] for r, t in outputs.items()}
        )
        was_run = group.run(
            collective, sources, results, shape=KernelShape(algorithm, world.max_blocks)
        )
        for rank, result in results.items():
            with world.use_stream(rank):
                if was_run:
                    mismatches[rank] += (result.view(-1, count) != expect + turn * size).sum()
        return was_run

    runs = 0
    for turn in range(repetitions):
        runs += run_and_compare("all_gather", "lines", turn, all_ranks)
        # Every rank adds turn * size, once of which run_and_compare() adds itself.
        sums = size * (size - 1) // 2 + turn * size * (size - 1)
        runs += run_and_compare("all_reduce", "two_shot", turn, sums)
    world.synchronize()
    counts = {rank: int(differ) for rank, differ in mismatches.items()}
    errors = [f"rank {rank}: {n} values of lines differ" for rank, n in counts.items() if n]
    if runs < 2 * repetitions:
        errors.append(
            f"{2 * repetitions - runs} operations have no room for {count} values per rank"
        )
    return runs, errors + group.collect_failures()


def check_absent(world: NvlinkWorld) -> list[str]:
    """Check that kernels end when a rank is absent, and that the error names it."""
    group = NvlinkGroup(world, range(world.size), timeout=2.0)
    absent_rank = world.size - 1
    tensors = {r: torch.ones(1024, device=world.device) for r in group.communicators}
    for rank, communicator in group.communicators.items():
        if rank != absent_rank:
            with world.use_stream(rank):
                communicator.run(
                    "all_reduce", tensors[rank], tensors[rank], shape=KernelShape("staged")
                )
    start = time.monotonic()
    world.synchronize()
    errors = (
        [] if time.monotonic() - start < 20 else ["kernels waited too long for the absent rank"]
    )
    for rank, communicator in group.communicators.items():
        failure = communicator.failure()
        if rank != absent_rank and (failure is None or f"rank {absent_rank} of" not in failure):
            errors.append(
                f"rank {rank}: expected a failure that names rank {absent_rank}, found {failure!r}"
            )
    # A barrier: no rank continues before all have checked.
    world.all_gather_bytes(dict.fromkeys(world.local_ranks, b""))
    return errors
