"""The command that measures the creation of process groups, each time in fresh processes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from flagscale.bench.collectives.sizes import parse_size
from flagscale.bench.command_line import Parser, judge
from flagscale.bench.files import require_writable
from flagscale.bench.placement import Placement, add_place, placement
from flagscale.bench.rank import carry_out
from flagscale.bench.tool import Tool
from flagscale.errors import ConfigError
from flagscale.hosts.names import expand_list, folded
from flagscale.records import WRITTEN

Variant = Literal["bound", "cold", "warm", "split"]
VARIANTS: tuple[Variant, ...] = ("bound", "cold", "warm", "split")
ON_ACCELERATORS: tuple[Variant, ...] = ("bound", "split")
"""Those that have a meaning on accelerators alone: only these can be bound."""


@dataclass(frozen=True)
class GroupsPlan:
    """What is measured."""

    variants: tuple[Variant, ...]
    counts: tuple[int, ...]
    repeats: int
    members: int | None
    placement: Placement
    ranks: tuple[int, ...] = ()
    """Those of every group; without them the groups go round."""
    bytes: int = 4096
    """Of an operation."""
    comm: tuple[str, ...] = ()
    """The backend's options, as they were given."""
    json: Path | None = field(default=None, metadata=WRITTEN)

    def check(self, ranks: int) -> None:
        if not set(self.ranks) <= set(range(ranks)):
            raise ConfigError(f"--ranks {folded(self.ranks)}; expected ranks from 0 to {ranks - 1}")
        if self.members is not None and not 1 <= self.members <= ranks:
            raise ConfigError(f"--members {self.members}; expected 1 to {ranks}")


@dataclass(frozen=True)
class TrialPlan:
    """One measurement, in fresh processes."""

    variant: Variant
    count: int
    """Groups."""
    of: GroupsPlan
    result: Path
    """Where rank 0 leaves its sample."""


@dataclass(frozen=True)
class Sample:
    """One measurement: seconds, of each the most over the ranks."""

    world: float
    """Creating the default group."""
    create: float
    """Creating all further groups."""
    first: float
    """The first all_reduce on each of them."""
    second: float
    """The second."""
    memory: float
    """MiB of device memory that all of it holds, on the rank that holds most; 0 on a CPU."""
    splits: int
    """How many communicators the backend says it split off; -1 where it does not tell."""

    @property
    def total(self) -> float:
        """Seconds from no group at all until all can be used."""
        return self.world + self.usable

    @property
    def usable(self) -> float:
        """Seconds until the further groups can be used: created, and run once."""
        return self.create + self.first


STUCK_SECONDS = 600.0
"""Without all ranks for so long a measurement has failed."""

_DESCRIPTION = """\
Measure how long process groups take to create and to become usable, and the device memory they
hold. Every measurement starts fresh processes; variants take turns, so that a drift hits all alike.

variants
  bound  the default group is bound to its device: new_group may split its communicator
  cold   nothing bound: communicators are made by the first operation of each group
  warm   as cold, after an operation on the default group: the control
  split  as bound, by split_group

examples
  groups.py -r 8 --groups 1,8,33              every variant, 10 times each
  groups.py -r 8 --simple                     bound once; --without-split: cold
  torchrun --nproc-per-node 8 groups.py       ranks from a launcher, mpirun and srun too
  groups.py -r 16 --hosts node[01-02]         over SSH, 8 ranks a host; also --hosts-file
  groups.py -r 16 -N 2 --slurm-mode           in an allocation of Slurm
  groups.py -r 2 --backend gloo --repeats 2   on a CPU, where only cold and warm have a meaning
"""


class Groups(Tool[GroupsPlan]):
    """Measures the creation of groups."""

    prog = "groups.py"
    run = "flagscale.bench.groups.worker:run_rank"

    def read(self, words: list[str], prog: str, *, keeps: bool) -> GroupsPlan:
        options = _parser(prog).parse(words)
        if keeps and options.json is not None:
            require_writable(options.json, "--json")
        return _plan(options)

    def start_here(self, plan: GroupsPlan, ranks: int) -> int:
        # Fresh processes are what it measures: this one only starts them.
        return carry_out(self.run, plan, None)


def _parser(prog: str) -> Parser:
    parser = Parser(prog, _DESCRIPTION)
    add_place(parser)
    # Of the placement of other commands; here ranks are processes that last a second.
    parser.set_defaults(timeout=STUCK_SECONDS)
    add = parser.add_argument_group("what is measured").add_argument
    add("--arms", "--variants", default=",".join(VARIANTS), help="which, with commas (all)")
    add("--groups", default="1,8,33", help="numbers of groups, with commas (1,8,33)")
    which = parser.add_mutually_exclusive_group().add_argument
    which("--ranks", metavar="LIST", help="of each group, such as 0-6 (all but one, going round)")
    add("--bytes", default="4K", metavar="SIZE", help="of an operation on a group (4K)")
    which("--members", type=int, metavar="M", help="ranks of a group (all but one, two at least)")
    add("--repeats", type=int, default=10, metavar="N", help="measurements of each (10)")
    add("--simple", action="store_true", help="one group, one variant, once")
    add("--without-split", action="store_true", help="with --simple: cold")
    add("-J", "--json", "--report-to-json-file", type=Path, metavar="FILE", help="keep all samples")
    return parser


def _plan(options: argparse.Namespace) -> GroupsPlan:
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
    place = placement(options)
    judge([place.backend], options.comm)
    return GroupsPlan(
        variants=cast(tuple[Variant, ...], variants),
        counts=counts,
        repeats=repeats,
        members=options.members,
        ranks=_ranks(options.ranks),
        bytes=max(4, parse_size(options.bytes)),
        placement=place,
        comm=tuple(options.comm),
        json=options.json,
    )


def _ranks(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(sorted({int(name) for name in expand_list(f"[{text}]")}))
    except ValueError as error:
        raise ConfigError(f"--ranks {text!r}; expected such as 0-6 or 0,2,4") from error


main = Groups().main
