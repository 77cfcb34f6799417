"""The command: check the line, find the ranks or start them, measure."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from flagscale.bench.collectives import patterns
from flagscale.bench.collectives.command import build_parser
from flagscale.bench.collectives.settings import from_options, parse_spec
from flagscale.bench.collectives.spec import BenchSpec, Placement
from flagscale.bench.collectives.starters import without
from flagscale.bench.files import UnreadableFileError
from flagscale.bench.options import FLAG
from flagscale.bench.spawn import spawn
from flagscale.bench.starting import is_elsewhere, start_elsewhere
from flagscale.bench.world import World, detect
from flagscale.errors import ConfigError
from flagscale.guard import guard

MODULE = "flagscale.bench.collectives"


def main(arguments: Sequence[str] | None = None, *, prog: str = "bench.py") -> int:
    """Run the benchmark that a command line describes; the exit code.

    Under a launcher, every rank comes here with the same line.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    return guard(lambda: _main(words, prog))


def _main(words: list[str], prog: str) -> int:
    if not words:
        build_parser(prog).print_help()
        return 2
    world = detect(os.environ)
    try:
        specs = read_specs(words, prog, keeps=world is None or world.rank == 0)
        if world is not None:
            _check_world(specs, world)
    except ConfigError as error:
        if world is None or world.rank == 0:
            raise
        # Each rank finds the same mistake and one message is enough, but for what one host lacks.
        if isinstance(error, UnreadableFileError) and world.local_rank == 0:
            print(f"error: rank {world.rank} on {socket.gethostname()}: {error}", file=sys.stderr)
        return ConfigError.exit_code
    if world is None:
        return _start(specs, words)
    return _as_rank(specs, world)


def read_specs(
    words: Sequence[str], prog: str = "bench.py", *, keeps: bool = True
) -> list[BenchSpec]:
    """One specification, or one a line of ``--batch``; all of them for the same ranks. ``keeps``:
    this process is the one that writes files and compares with them, so they are looked at.

    Raises:
        ConfigError: a line is wrong; the message names it.
    """
    options = build_parser(prog).parse(words)
    if options.batch is None:
        return [from_options(options, words, keeps=keeps)]
    if options.operation:
        raise ConfigError(f"--batch: the operation {options.operation!r} belongs into the file")
    specs: list[BenchSpec] = []
    shared = without(words, {"--batch": "one"})
    for number, line in enumerate(_lines(options.batch), start=1):
        own = shlex.split(line, comments=True)
        if not own:
            continue
        try:
            spec = parse_spec([*shared, *own], prog=prog, keeps=keeps)
        except ConfigError as error:
            raise type(error)(
                f"--batch {options.batch}:{number}: {error.message}", hint=error.hint
            ) from error
        _require_same_ranks(spec, specs, f"--batch {options.batch}:{number}")
        specs.append(spec)
    if not specs:
        raise ConfigError(f"--batch {options.batch}: it has no line to run")
    return specs


def _require_same_ranks(spec: BenchSpec, before: Sequence[BenchSpec], where: str) -> None:
    """Refuse a line of a batch that would need processes of its own."""
    for other in before:
        place = replace(other.placement, backend=spec.placement.backend)
        differing = [f.name for f in fields(place) if _differs(place, spec.placement, f.name)]
        if differing:
            raise ConfigError(
                f"{where}: all lines run in the same ranks, and this one asks for others "
                f"({', '.join(differing)})",
                hint="give such flags once, beside --batch",
            )
        for name in {*other.backends} & {*spec.backends}:
            if other.options_of(name) != spec.options_of(name):
                raise ConfigError(
                    f"{where}: {FLAG} of {name} holds for the whole process, and an earlier line "
                    "gives others",
                    hint="measure them one after the other, by two commands",
                )


def _differs(one: Placement, other: Placement, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UnreadableFileError(f"--batch {path}: {reason}") from error


def _check_world(specs: Sequence[BenchSpec], world: World) -> None:
    wanted = specs[0].placement.workers
    if wanted is not None and wanted != world.size:
        raise ConfigError(
            f"-r asks for {wanted} ranks, and {world.launcher} has started {world.size}",
            hint="leave -r out under a launcher, or make both equal",
        )
    for spec in specs:
        groups = patterns.groups_for(world.size, spec.groups.custom, spec.groups.dimension)
        list(spec.cases(len(groups[0])))
        if any(op.name == "permute" for op in spec.operations):
            patterns.pairs_for(len(groups[0]), spec.groups.pairs)


def _start(specs: Sequence[BenchSpec], words: Sequence[str]) -> int:
    place = specs[0].placement
    if place.workers is None:
        raise ConfigError(
            "the number of ranks is missing: -r 2, or start this under torchrun, mpirun or srun"
        )
    if is_elsewhere(place):
        header = specs[0].output.header
        return start_elsewhere(place, MODULE, words, header=header, dumps=True)
    if place.nodes > 1:
        raise ConfigError(
            f"-N {place.nodes} hosts: which? give --hosts, --hosts-file or --slurm-mode"
        )
    for spec in specs:
        _check_world([spec], World("local", 0, place.workers, 0, place.workers))
    command = [sys.executable, "-m", MODULE, *words]
    return spawn(command, place.workers, log_dir=place.log_dir)


def _as_rank(specs: Sequence[BenchSpec], world: World) -> int:
    # Read by the libraries when they are loaded, so before the import of torch. Its warnings of a
    # connection that broke are pages of addresses in libraries, around the one line that says why.
    debug = specs[0].output.debug
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "INFO" if debug else "ERROR")
    if debug:
        os.environ.setdefault("NCCL_DEBUG", "INFO")
    from flagscale.bench.collectives.ranks import leave, run_rank

    code = run_rank(specs, world)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0:
        leave()
        return 0
    # Groups whose ranks died cannot be destroyed in order: it could wait for them for ever.
    os._exit(code)
