"""Checks of the NVLink engine on GPUs, bit by bit against sums in the order of ranks."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from flagscale.comm.fsccl.nvlink import Shape
from flagscale.comm.fsccl.nvlink_world import Group, World, graph_of

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
class Case:
    """One operation; ``count`` elements a part, beginning ``shift`` elements into an allocation."""

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


def cases(quick: bool) -> Iterator[Case]:
    """Every collective and algorithm with every type, then every reduction."""
    draw = random.Random(7)

    def seed() -> int:
        return draw.getrandbits(30)

    counts = _COUNTS[::3] if quick else _COUNTS
    for collective, algorithms in _ALGORITHMS.items():
        for algorithm, dtype, count in itertools.product(algorithms, _DTYPES, counts):
            shift = draw.choice((0, 0, 1, 2))
            in_place = collective == "broadcast" or (
                collective == "all_reduce" and draw.random() < 0.5
            )
            yield Case(collective, algorithm, dtype, "sum", count, shift, in_place, seed())
    for collective, op in itertools.product(_REDUCING, ("avg", "min", "max", "product")):
        for algorithm, dtype in itertools.product(_ALGORITHMS[collective], _FLOATS):
            yield Case(collective, algorithm, dtype, op, 5001, 1, False, seed())


def values(case: Case, rank: int, elements: int, device: torch.device) -> torch.Tensor:
    """A rank's input: small numbers, with fractions that round."""
    generator = torch.Generator(device).manual_seed(case.seed * 64 + rank)
    whole = torch.randint(-6, 7, (elements,), generator=generator, device=device)
    if case.dtype not in _FLOATS:
        return (whole.abs() if case.dtype == torch.uint8 else whole).to(case.dtype)
    return (whole * 0.37 + 0.011 * rank).to(case.dtype)


def reduced(case: Case, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The sum as the kernels define it: in the order of ranks, 16-bit floats in float32."""
    wide = torch.float32 if case.dtype in (torch.float16, torch.bfloat16) else case.dtype
    total = inputs[0].to(wide)
    for one in inputs[1:]:
        other = one.to(wide)
        if case.op in ("sum", "avg"):
            total = total + other
        elif case.op == "product":
            total = total * other
        else:
            total = torch.minimum(total, other) if case.op == "min" else torch.maximum(total, other)
    if case.op == "avg":
        # By a tensor: torch multiplies by the reciprocal of a number.
        total = total / torch.full_like(total, len(inputs))
    return total.to(case.dtype)


def expected(case: Case, index: int, size: int, device: torch.device, root: int) -> torch.Tensor:
    """What the rank with this index in the group must get."""
    parts = case.inputs(size)
    inputs = [values(case, p, parts * case.count, device) for p in range(size)]
    if case.collective == "broadcast":
        return inputs[root]
    if parts > 1:
        inputs = [one.view(size, case.count)[index] for one in inputs]
    return reduced(case, inputs) if case.collective in _REDUCING else torch.cat(inputs)


def registered_cases() -> Iterator[Case]:
    """In registered memory: parts begin at multiples of 16 bytes."""
    collectives = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    for i, (collective, dtype, count) in enumerate(
        itertools.product(collectives, (torch.float32, torch.bfloat16), (16, 4096, 300032))
    ):
        in_place = collective == "all_reduce"
        yield Case(collective, "direct", dtype, "sum", count, 0, in_place, 1000 + i)


class Prepared:
    """The memory of a case for the ranks played here.

    Args:
        case: what is to be run.
        group: by whom.
        pools: bytes by rank to take the memory from, 64 MiB each; None allocates.
    """

    def __init__(
        self, case: Case, group: Group, pools: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        self.case, self.group = case, group
        self.root = case.seed % group.size
        self.whole: dict[int, torch.Tensor] = {}
        self.out: dict[int, torch.Tensor] = {}
        self.given: dict[int, torch.Tensor] = {}
        device, size = group.world.device, group.size
        for rank in group.members:
            elements = case.outputs(size) * case.count
            inputs = case.inputs(size) * case.count + case.shift
            beyond = elements + case.shift + 2 * _GUARD
            if pools is None:
                whole = torch.empty(beyond, dtype=case.dtype, device=device)
                room = torch.empty(inputs, dtype=case.dtype, device=device)
            else:
                first, second = pools[rank].view(case.dtype).chunk(2)
                whole, room = first[:beyond], second[:inputs]
            self.whole[rank] = whole.fill_(_POISON)
            self.out[rank] = whole[_GUARD + case.shift :][:elements]
            self.given[rank] = self.out[rank] if case.in_place else room[case.shift :]
        self.fill()

    def fill(self) -> None:
        for rank, given in self.given.items():
            index = self.group.ranks.index(rank)
            given.copy_(values(self.case, index, given.numel(), self.group.world.device))
        self.group.world.synchronize()

    def run(self) -> bool:
        return self.group.run(
            self.case.collective,
            self.given,
            self.out,
            op=self.case.op,
            root=self.root,
            shape=Shape(self.case.algorithm, self.group.world.most_blocks),
        )

    def wrong(self) -> list[str]:
        found = []
        for rank, out in self.out.items():
            index, device = self.group.ranks.index(rank), self.group.world.device
            want = expected(self.case, index, self.group.size, device, self.root)
            differ = int((out.view(torch.uint8) != want.view(torch.uint8)).sum())
            if differ:
                found.append(f"rank {rank}: {differ} bytes differ: {self.case}")
            guard = self.whole[rank].clone()
            guard[_GUARD + self.case.shift :][: out.numel()] = _POISON
            if not bool((guard == _POISON).all()):
                found.append(f"rank {rank}: wrote beyond the result: {self.case}")
        return found


def check_operations(world: World, group: Group, quick: bool) -> tuple[int, list[str]]:
    """Each case by itself; how many ran, and what was wrong."""
    ran, wrong = 0, []
    for case in cases(quick):
        prepared = Prepared(case, group)
        if prepared.run():
            ran += 1
            world.synchronize()
            wrong += prepared.wrong() + group.failures()
        if wrong:
            break
    return ran, wrong


def check_registered(world: World, group: Group) -> tuple[int, list[str]]:
    """Each registered case, with all memory of all ranks registered."""
    pools = {
        rank: torch.empty(_POOL_BYTES, dtype=torch.uint8, device=world.device)
        for rank in group.members
    }
    group.register(pools)
    ran, wrong = 0, []
    for case in registered_cases():
        prepared = Prepared(case, group, pools)
        ran += prepared.run()
        world.synchronize()
        wrong += prepared.wrong() + group.failures()
    return ran, wrong


def check_groups(world: World, groups: list[Group], turns: int) -> tuple[int, list[str]]:
    """Operations of several groups one after the other, with nothing between them that waits."""
    draw = random.Random(11)
    everything = [case for case in cases(quick=False) if case.count <= 65536]
    prepared = []
    for _ in range(turns):
        group, case = draw.choice(groups), draw.choice(everything)
        prepared.append(Prepared(case, group))
    ran = [one.run() for one in prepared]
    world.synchronize()
    wrong = [text for one, did in zip(prepared, ran, strict=True) if did for text in one.wrong()]
    return sum(ran), wrong


def check_graph(world: World, group: Group, replays: int) -> tuple[int, list[str]]:
    """A graph of several operations, replayed with other inputs each time."""
    draw = random.Random(13)
    chosen = [c for c in cases(quick=False) if not c.in_place and c.count <= 65536]
    prepared = [Prepared(case, group) for case in draw.sample(chosen, 12)]
    prepared = [one for one in prepared if one.run()]

    def body() -> None:
        for one in prepared:
            one.run()

    graph = graph_of(world, body)
    wrong: list[str] = []
    for turn in range(replays):
        for one in prepared:
            one.case = replace(one.case, seed=one.case.seed + 1)
            one.fill()
        graph.replay()
        if turn % 3 == 2:
            graph.replay()  # and again at once
        world.synchronize()
        wrong += [text for one in prepared for text in one.wrong()] + group.failures()
        if wrong:
            break
    return replays * len(prepared), wrong


def check_lines(world: World, group: Group, turns: int) -> tuple[int, list[str]]:
    """Lines arrive whole: operations on end, each with values of its own everywhere."""
    # On a GPU of its own a rank has more channels.
    count, size = 15_000 if world.alone else 60_000, group.size
    device, dtype = world.device, torch.int32
    given = {rank: torch.empty(count, dtype=dtype, device=device) for rank in group.members}
    out = {rank: torch.empty(size * count, dtype=dtype, device=device) for rank in given}
    wrong = {rank: torch.zeros((), dtype=torch.int64, device=device) for rank in given}
    everyone = torch.arange(size, dtype=dtype, device=device)[:, None]
    world.synchronize()

    def run(collective: str, algorithm: str, turn: int, expect: torch.Tensor | int) -> bool:
        for rank, values in given.items():
            with world.on(rank):
                values.fill_(turn * size + group.ranks.index(rank))
        results = out if collective == "all_gather" else {r: t[:count] for r, t in out.items()}
        did = group.run(collective, given, results, shape=Shape(algorithm, world.most_blocks))
        for rank, result in results.items():
            with world.on(rank):
                if did:
                    wrong[rank] += (result.view(-1, count) != expect + turn * size).sum()
        return did

    ran = 0
    for turn in range(turns):
        ran += run("all_gather", "lines", turn, everyone)
        # turn * size comes from every rank, and once from run().
        sums = size * (size - 1) // 2 + turn * size * (size - 1)
        ran += run("all_reduce", "two_shot", turn, sums)
    world.synchronize()
    found = {rank: int(differ) for rank, differ in wrong.items()}
    texts = [f"rank {rank}: {n} values differ of lines" for rank, n in found.items() if n]
    if ran < 2 * turns:
        texts.append(f"{2 * turns - ran} operations found no room for {count} values a rank")
    return ran, texts + group.failures()


def check_absent(world: World) -> list[str]:
    """A rank that does not come: the others' kernels end, and say who it was."""
    group = Group(world, range(world.size), timeout=2.0)
    absent = world.size - 1
    memory = {r: torch.ones(1024, device=world.device) for r in group.members}
    for rank, member in group.members.items():
        if rank != absent:
            with world.on(rank):
                member.run("all_reduce", memory[rank], memory[rank], shape=Shape("staged"))
    began = time.monotonic()
    world.synchronize()
    wrong = [] if time.monotonic() - began < 20 else ["an absent rank was waited for too long"]
    for rank, member in group.members.items():
        why = member.failure()
        if rank != absent and (why is None or f"rank {absent} of" not in why):
            wrong.append(f"rank {rank}: expected a failure that names rank {absent}, found {why!r}")
    world.gather(dict.fromkeys(world.local, b""))  # nobody goes on before all have seen it
    return wrong
