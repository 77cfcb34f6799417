"""The command that measures the creation of process groups, each time in fresh processes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flagscale.bench.collectives.command import Parser, add_place
from flagscale.bench.collectives.placing import placement
from flagscale.bench.collectives.spec import Placement
from flagscale.bench.machine import facts
from flagscale.bench.options import judge
from flagscale.bench.spawn import interruptible
from flagscale.bench.starting import is_elsewhere, start_elsewhere
from flagscale.bench.world import World, detect
from flagscale.comm import registry
from flagscale.errors import ConfigError
from flagscale.guard import guard

MODULE = "flagscale.bench.groups"
STUCK_SECONDS = 600.0
"""Without all ranks for so long a measurement has failed."""
ARM_NAMES = ("bound", "cold", "warm", "split")
_ON_ACCELERATORS = ("bound", "split")

_DESCRIPTION = """\
Measure how long process groups take to create and to become usable, and the device memory they
hold. Every measurement starts fresh processes; arms take turns, so that a drift hits all alike.

arms
  bound  the default group is bound to its device: new_group may split its communicator
  cold   nothing bound: communicators are made by the first operation of each group
  warm   as cold, after an operation on the default group: the control
  split  as bound, by split_group

examples
  groups.py -r 8 --groups 1,8,33              every arm, 10 times each
  groups.py -r 8 --simple                     the bound arm once; --without-split: the cold one
  torchrun --nproc-per-node 8 groups.py       ranks from a launcher: each starts fresh ones
  mpirun -np 8 groups.py                      so do OpenMPI, MPICH and srun
  groups.py -r 16 --hosts node[01-02]         over SSH, 8 ranks a host; also --hosts-file
  groups.py -r 16 -N 2 --slurm-mode           in an allocation of Slurm
  groups.py -r 2 --backend gloo --repeats 2   on a CPU, where only cold and warm have a meaning
"""


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    arms: tuple[str, ...]
    counts: tuple[int, ...]
    repeats: int
    members: int | None
    place: Placement
    comm: tuple[str, ...] = ()
    """The backend's options, as they were given."""


def main(arguments: Sequence[str] | None = None, *, prog: str = "groups.py") -> int:
    """Run the command; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Read when torch is loaded: its warnings of a connection that broke are pages of addresses.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return guard(lambda: _main(words, prog))


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_place(parser)
    # Of the placement of other commands; here ranks are processes that last a second.
    parser.set_defaults(timeout=STUCK_SECONDS, vcpu_pin_mode=False, ngpus=1)
    add = parser.add_argument_group("what is measured").add_argument
    add("--arms", default=",".join(ARM_NAMES), help="which, with commas (all)")
    add("--groups", default="1,8,33", help="numbers of groups, with commas (1,8,33)")
    add("--members", type=int, metavar="M", help="ranks of a group (all but one, two at least)")
    add("--repeats", type=int, default=10, metavar="N", help="measurements of each (10)")
    add("--simple", action="store_true", help="one group, one arm, once")
    add("--without-split", action="store_true", help="with --simple: the cold arm")
    add("-J", "--json", "--report-to-json-file", type=Path, metavar="FILE", help="keep all samples")
    add("--measure", nargs=2, metavar=("ARM", "COUNT"), help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def _main(words: list[str], prog: str) -> int:
    options = _parser(prog).parse(words)
    plan, world = _plan(options), detect(os.environ)
    if options.measure:
        from flagscale.bench.groups.rank import run_rank

        if world is None:
            raise ConfigError("--measure is what the ranks are started with")
        return run_rank(options.measure[0], int(options.measure[1]), plan, world, options.result)
    size = _size(plan, world)
    if world is None and is_elsewhere(plan.place):
        return start_elsewhere(plan.place, MODULE, words, header=True, dumps=False)
    if world is None and plan.place.nodes > 1:
        raise ConfigError(f"-N {plan.place.nodes} hosts: which? give --hosts or --slurm-mode")
    if world is None or world.rank == 0:
        _require_directory(options.json)
    with interruptible():
        return _run(plan, size, world, options.json)


def _size(plan: Plan, world: World | None) -> int:
    wanted = plan.place.workers
    if world is not None and wanted not in (None, world.size):
        raise ConfigError(f"-r asks for {wanted} ranks, and {world.launcher} started {world.size}")
    size = world.size if world is not None else wanted
    if size is None:
        raise ConfigError(
            "the number of ranks is missing: -r 8, or start this under torchrun, mpirun or srun"
        )
    if plan.members is not None and not 1 <= plan.members <= size:
        raise ConfigError(f"--members {plan.members}; expected 1 to {size}")
    return size


def _require_directory(keep: Path | None) -> None:
    if keep is not None and not keep.absolute().parent.is_dir():
        raise ConfigError(f"--json {keep}: its directory does not exist")


def _plan(options: argparse.Namespace) -> Plan:
    arms = tuple(dict.fromkeys(options.arms.split(",")))
    for arm in arms:
        if arm not in ARM_NAMES:
            raise ConfigError(f"--arms {arm!r}; expected {', '.join(ARM_NAMES)}")
    try:
        counts = tuple(int(word) for word in options.groups.split(","))
    except ValueError as error:
        raise ConfigError(f"--groups {options.groups!r}; expected such as 1,8,33") from error
    if min(counts) < 1 or options.repeats < 1:
        raise ConfigError("--groups and --repeats need numbers of at least 1")
    if options.without_split and not options.simple:
        raise ConfigError("--without-split goes with --simple; else name the arms with --arms")
    repeats = options.repeats
    if options.simple:
        arms, counts, repeats = ("cold" if options.without_split else "bound",), (1,), 1
    place = placement(options)
    judge([options.backend], options.comm)
    return Plan(arms, counts, repeats, options.members, place, tuple(options.comm))


def _run(plan: Plan, size: int, world: World | None, keep: Path | None) -> int:
    from flagscale.bench.groups.rank import Starter, device_kind
    from flagscale.bench.groups.summary import findings, table

    kind = device_kind(plan.place.device)
    backend = registry.usable(plan.place.backend, kind, given_by="--backend")
    arms = [arm for arm in plan.arms if kind == "cuda" or arm not in _ON_ACCELERATORS]
    left_out = [arm for arm in plan.arms if arm not in arms]
    if not arms:
        raise ConfigError(f"{', '.join(left_out)}: only accelerators can be bound")
    speaks = world is None or world.rank == 0
    starter = Starter(plan, size, world)
    hosts = starter.hosts()
    if speaks:
        given = f" ({', '.join(plan.comm)})" if plan.comm else ""
        print(f"# {size} ranks, backend {backend.name} {backend.version() or ''}".rstrip() + given)
        print(f"# {hosts}; started by {world.launcher if world is not None else 'local'}")
        for arm in left_out:
            print(f"# {arm}: left out, only accelerators can be bound")
        sys.stdout.flush()
    about = facts("flagscale", "torch") if keep is not None else {}
    results = starter.run(arms)
    if not speaks:
        return 0
    for line in (*table(results), "", *findings(results)):
        print(line)
    if keep is not None:
        rows = [
            {"arm": arm, "groups": count, "samples": [asdict(s) for s in samples]}
            for (arm, count), samples in results.items()
        ]
        about |= {"ranks": size, "hosts": hosts.count(" ["), "backend": backend.name}
        about |= {"options": list(plan.comm)} if plan.comm else {}
        keep.write_text(json.dumps({**about, "results": rows}, indent=1) + "\n")
    return 0
