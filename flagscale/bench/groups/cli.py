"""Command line of ``flagscale bench groups``: time to create process groups, and their memory.

A *variant* is a way to create groups, such as by splitting an existing communicator; see
``--help``. Each measurement, or *trial*, runs in fresh processes, because a process creates its
first communicator only once.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from flagscale.bench.collectives.sizes import parse_size
from flagscale.bench.command import BenchCommand
from flagscale.bench.files import require_writable
from flagscale.bench.options import BenchParser, parse_backend_options
from flagscale.bench.placement import Placement, add_placement_flags, parse_placement
from flagscale.errors import ConfigError
from flagscale.hosts.names import expand_list, format_ranges
from flagscale.hosts.workers.task import load_function
from flagscale.records import WRITTEN_BY_RANK

Variant = Literal["bound", "cold", "warm", "split"]
VARIANTS: tuple[Variant, ...] = ("bound", "cold", "warm", "split")
ACCELERATOR_VARIANTS: tuple[Variant, ...] = ("bound", "split")
"""Variants for accelerators only: on a CPU a group cannot be bound to a device."""


@dataclass(frozen=True)
class GroupsPlan:
    """Parsed command line."""

    variants: tuple[Variant, ...]
    counts: tuple[int, ...]
    """Numbers of groups to create."""
    repeats: int
    """Trials of each variant and number of groups."""
    members: int | None
    """Number of ranks in a group; None: all but one."""
    placement: Placement
    ranks: tuple[int, ...] = ()
    """Ranks of every group; empty: all but one, in rotation."""
    bytes: int = 4096
    """Size of an operation."""
    comm: tuple[str, ...] = ()
    """Options of the backend, as on the command line."""
    json: Path | None = field(default=None, metadata=WRITTEN_BY_RANK)

    def check(self, ranks: int) -> None:
        if not set(self.ranks) <= set(range(ranks)):
            raise ConfigError(
                f"--ranks {format_ranges(self.ranks)}; expected ranks from 0 to {ranks - 1}"
            )
        if self.members is not None and not 1 <= self.members <= ranks:
            raise ConfigError(f"--members {self.members}; expected 1 to {ranks}")


@dataclass(frozen=True)
class TrialPlan:
    """One trial: a measurement in fresh processes."""

    variant: Variant
    count: int
    """Number of groups."""
    plan_of_all: GroupsPlan
    result: Path
    """File for rank 0's sample."""


@dataclass(frozen=True)
class Sample:
    """Result of one trial: seconds, each the maximum over the ranks."""

    world: float
    """Creation of the default group."""
    create: float
    """Creation of all other groups."""
    first: float
    """First all_reduce on each of them."""
    second: float
    """Second all_reduce on each of them."""
    memory: float
    """Device memory in MiB on the rank with the most; 0 on a CPU."""
    splits: int
    """Communicators that the backend split off, by its own count; -1 if it does not count."""

    @property
    def total(self) -> float:
        """Seconds from no group at all until all groups are usable."""
        return self.world + self.usable

    @property
    def usable(self) -> float:
        """Seconds until the other groups are usable: created, and used once."""
        return self.create + self.first


TRIAL_TIMEOUT_SECONDS = 600.0
"""Time within which all ranks of a trial must join."""

_DESCRIPTION = """\
Measure how long process groups take to create and to become usable, and the device memory they
hold. Every measurement starts fresh processes. Variants take turns, so that a drift of the machine
affects all of them alike.

variants
  bound  the default group is bound to its device: new_group may split its communicator
  cold   nothing bound: communicators are made by the first operation of each group
  warm   as cold, after an operation on the default group: the control
  split  as bound, by split_group
"""
_EPILOG = """\
examples
  {prog} -r 8 --groups 1,8,33              every variant, 10 times each
  {prog} -r 8 --simple                     bound once; --without-split: cold
  {prog} -r 16 --hosts node[01-02]         over SSH, 8 ranks per host; also --hosts-file
  {prog} -r 16 -N 2 --slurm-mode           in a Slurm allocation
  {prog} -r 2 --backend gloo --repeats 2   on a CPU, which supports only cold and warm
  torchrun --nproc-per-node 8 --no-python {prog}
      ranks from a launcher; mpirun and srun work in the same way
"""


class GroupsCommand(BenchCommand[GroupsPlan]):
    """Command that measures the creation of process groups."""

    prog = "flagscale bench groups"
    rank_entry_point = "flagscale.bench.groups.worker:run_rank"

    def parse_plan(self, words: list[str], prog: str, *, writes_results: bool) -> GroupsPlan:
        options = _parser(prog).parse(words)
        if writes_results and options.json is not None:
            require_writable(options.json, "--json")
        return _make_plan(options)

    def start_here(self, plan: GroupsPlan, ranks: int) -> int:
        # Fresh processes are measured: this one only starts them. The module needs torch.
        return load_function("flagscale.bench.groups.worker:measure_groups")(plan, None)


def _parser(prog: str) -> BenchParser:
    parser = BenchParser(prog, _DESCRIPTION, _EPILOG.format(prog=prog))
    add_placement_flags(parser)
    # The default of other commands is too short here: it includes the start of the processes.
    parser.set_defaults(timeout=TRIAL_TIMEOUT_SECONDS)
    add = parser.add_argument_group("measurement").add_argument
    add(
        "--arms",
        "--variants",
        default=",".join(VARIANTS),
        help="variants, separated by commas (all)",
    )
    add("--groups", default="1,8,33", help="numbers of groups, separated by commas (1,8,33)")
    add_exclusive = parser.add_mutually_exclusive_group().add_argument
    add_exclusive(
        "--ranks",
        metavar="LIST",
        help="ranks of each group, such as 0-6 (all but one, in rotation)",
    )
    add("--bytes", default="4K", metavar="SIZE", help="size of an operation on a group (4K)")
    add_exclusive(
        "--members",
        type=int,
        metavar="M",
        help="number of ranks of a group (all but one, at least two)",
    )
    add("--repeats", type=int, default=10, metavar="N", help="measurements of each variant (10)")
    add("--simple", action="store_true", help="measure one group and one variant, once")
    add("--without-split", action="store_true", help="measure the variant cold, with --simple")
    add(
        "-J",
        "--json",
        "--report-to-json-file",
        type=Path,
        metavar="FILE",
        help="write all samples as JSON",
    )
    return parser


def _make_plan(options: argparse.Namespace) -> GroupsPlan:
    variants = tuple(dict.fromkeys(options.arms.split(",")))
    for variant in variants:
        if variant not in VARIANTS:
            raise ConfigError(f"--arms {variant!r}; expected {', '.join(VARIANTS)}")
    try:
        counts = tuple(int(word) for word in options.groups.split(","))
    except ValueError as error:
        raise ConfigError(f"--groups {options.groups!r}; expected such as 1,8,33") from error
    if min(counts) < 1 or options.repeats < 1:
        raise ConfigError("--groups and --repeats need numbers of at least 1")
    if options.without_split and not options.simple:
        raise ConfigError("--without-split goes with --simple; else name variants with --arms")
    repeats = options.repeats
    if options.simple:
        variants, counts, repeats = ("cold" if options.without_split else "bound",), (1,), 1
    placement = parse_placement(options)
    parse_backend_options([placement.backend], options.comm)
    return GroupsPlan(
        variants=cast(tuple[Variant, ...], variants),
        counts=counts,
        repeats=repeats,
        members=options.members,
        ranks=_parse_ranks(options.ranks),
        bytes=max(4, parse_size(options.bytes)),
        placement=placement,
        comm=tuple(options.comm),
        json=options.json,
    )


def _parse_ranks(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(sorted({int(name) for name in expand_list(f"[{text}]")}))
    except ValueError as error:
        raise ConfigError(f"--ranks {text!r}; expected such as 0-6 or 0,2,4") from error


main = GroupsCommand().main
