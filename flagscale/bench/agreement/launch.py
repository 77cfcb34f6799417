"""The command that holds the benchmark's figures against nccl-tests' definitions."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flagscale.bench.agreement import plot
from flagscale.bench.collectives.command import Parser, normalise
from flagscale.bench.collectives.operations import operation
from flagscale.bench.collectives.plots import require_image
from flagscale.bench.collectives.settings import parse_spec
from flagscale.bench.collectives.spec import BenchSpec
from flagscale.bench.files import read_object
from flagscale.bench.machine import facts
from flagscale.bench.spawn import spawn
from flagscale.bench.world import World, detect
from flagscale.errors import ConfigError
from flagscale.guard import guard

MODULE = "flagscale.bench.agreement"
EXIT_DIFFERS = 4
_DESCRIPTION = """\
Measure collectives by the benchmark and by a bare loop that does what nccl-tests does, by turns in
the same processes, and say where they differ by more than the limit.

The bare loop calls NCCL itself (ctypes, the library torch has loaded) on a communicator of its
own: warm up, meet, issue all iterations, wait, divide; the mean over ranks; algbw and busbw by
nccl-tests' formulas. Both sides run as CUDA graphs (nccl-tests' -G) unless --eager: issued one by
one, calls through torch cost tens of microseconds of the host's time, which nccl-tests, written
in C++, does not pay. On a CPU the bare loop calls gloo's own object.

  agreement.py -r 8 -b 1K -e 1G -f 4                        every operation of nccl-tests
  agreement.py -r 8 --operations all_reduce -d bf16 --json found.json --plot found.svg
  agreement.py --import found.json --plot found.svg         draw what was kept

exit codes: 0 none differs, 2 usage, 4 some differ"""


def main(arguments: Sequence[str] | None = None, *, prog: str = "agreement.py") -> int:
    """Run the command; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return guard(lambda: _main(words, prog))


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-r", "--nworkers", type=int, metavar="N", help="number of ranks, all on this machine")
    add("--operations", metavar="A,B", help="which (all that nccl-tests has)")
    add("-b", "--minbytes", default="1K", help="the first size (1K)")
    add("-e", "--maxbytes", default="1G", help="the last size (1G)")
    add("-f", "--stepfactor", default="4", help="from size to size (4)")
    add("-d", "--datatype", default="fp32", help="element type (fp32)")
    add("-n", "--iters", default="20", help="iterations of a turn (20)")
    add("-w", "--warmup_iters", default="5", help="before (5)")
    add("-I", "--replays", default="10", help="launches of the graph in a turn (10)")
    add("--eager", action="store_true", help="no graphs")
    add("--rounds", type=int, default=10, metavar="N", help="turns of each side (10)")
    add("--limit", type=float, default=3.0, metavar="%", help="per cent (3)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("-J", "--json", type=Path, metavar="FILE", help="keep the result")
    add("--plot", type=Path, metavar="FILE", help="draw it, .svg or .png")
    add("--import", dest="kept", type=Path, metavar="FILE", help="a kept one; measure nothing")
    return parser


def _main(words: list[str], prog: str) -> int:
    options = _parser(prog).parse(normalise(words))
    if options.plot is not None:
        require_image(options.plot, "--plot")
    if options.kept is not None:
        return _draw(options.kept, options.plot)
    if options.rounds < 2 or not 0 < options.limit < math.inf:
        raise ConfigError("--rounds must be at least 2, --limit above 0 per cent")
    spec, world = _spec(options), detect(os.environ)
    size = spec.placement.workers if world is None else world.size
    if size is None:
        raise ConfigError("the number of ranks is missing: -r 8, or start it under torchrun")
    if size < 2:
        raise ConfigError("one rank moves nothing that could agree; expected at least -r 2")
    if world is None:
        return spawn([sys.executable, "-m", MODULE, *words], size)
    return _as_rank(spec, world, options)


def _draw(kept: Path, figure: Path | None) -> int:
    if figure is None:
        raise ConfigError("--import is for drawing: --plot FILE is missing")
    plot.write(read_object(kept, f"--import {kept}", "what --json of this command keeps"), figure)
    return 0


def _spec(options: argparse.Namespace) -> BenchSpec:
    """What the benchmark's own command line would be."""
    from flagscale.bench.agreement.definitions import OPERATIONS

    names = options.operations.split(",") if options.operations else OPERATIONS
    chosen = [operation(name).name for name in names]
    for name in chosen:
        if name not in OPERATIONS:
            raise ConfigError(f"--operations {name}: nccl-tests has {', '.join(OPERATIONS)}")
    line = [",".join(chosen), "-d", options.datatype, "-n", options.iters]
    line += ["-b", options.minbytes, "-e", options.maxbytes, "-f", options.stepfactor]
    line += ["-w", options.warmup_iters, "--device", options.device]
    line += [] if options.eager else ["-I", options.replays]
    line += ["-r", str(options.nworkers)] if options.nworkers is not None else []
    spec = parse_spec(line)
    if len(spec.types) > 1:
        raise ConfigError(f"-d {options.datatype}: one type at a time")
    return spec


def _as_rank(spec: BenchSpec, world: World, options: argparse.Namespace) -> int:
    from flagscale.bench.agreement.rank import Sides
    from flagscale.bench.agreement.verdict import conclusion, table

    limit = options.limit / 100
    sides = Sides(spec, world, options.rounds)
    way = "graphs" if spec.iterations.replays and sides.device.is_cuda else "calls one by one"
    about = facts("flagscale", "torch") | {
        **{"library": sides.version, "device": sides.device.name, "ranks": world.size},
        **{"type": spec.types[0].name, "way": way, "rounds": options.rounds, "limit": limit},
    }
    pairs = []
    if world.rank == 0:
        print(f"# {world.size} ranks, {sides.device.name}, {sides.version}, {way}")
        print(table([], limit)[0], flush=True)
    for pair in sides.run():
        pairs.append(pair)
        if world.rank == 0:
            print(table([pair], limit)[1], flush=True)
    sides.close()
    text, fine = conclusion(pairs, limit)
    if world.rank:
        return 0 if fine else EXIT_DIFFERS
    print(f"# {text}")
    result = {**about, "text": text, "rows": [pair.to_json(limit) for pair in pairs]}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot is not None:
        plot.write(result, options.plot)
    return 0 if fine else EXIT_DIFFERS
