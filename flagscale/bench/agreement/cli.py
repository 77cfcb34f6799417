"""The command that holds the benchmark's figures against nccl-tests' definitions."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from flagscale.bench.agreement import definitions, verdict
from flagscale.bench.collectives.cli import read_specs
from flagscale.bench.collectives.operations import operation
from flagscale.bench.collectives.spec import BenchSpec
from flagscale.bench.command_line import Parser, add_device
from flagscale.bench.files import read_object, require_writable
from flagscale.bench.placement import Placement
from flagscale.bench.tool import Tool
from flagscale.errors import ConfigError
from flagscale.report.figure import require_image

_DESCRIPTION = """\
Measure collectives by the benchmark and by a baseline that does what nccl-tests does, by turns in
the same processes, and say where they differ by more than the limit.

The baseline calls NCCL itself (ctypes, the library torch has loaded) on a communicator of its
own: warm up, meet, issue all iterations, wait, divide; the mean over ranks; algbw and busbw by
nccl-tests' formulas. Both sides run as CUDA graphs (nccl-tests' -G) unless --eager: issued one by
one, calls through torch cost tens of microseconds of the host's time, which nccl-tests, written
in C++, does not pay. On a CPU the baseline calls gloo's own object.

  agreement.py -r 8 -b 1K -e 1G -f 4                        every operation of nccl-tests
  agreement.py -r 8 --operations all_reduce -d bf16 --json found.json --plot found.svg
  agreement.py --import found.json --plot found.svg         draw what was kept

exit codes: 0 none differs, 2 usage, 4 some differ"""


@dataclass(frozen=True)
class AgreementPlan:
    """What is held against each other."""

    spec: BenchSpec
    rounds: int
    limit: float
    """A fraction."""
    json: Path | None
    plot: Path | None

    @property
    def placement(self) -> Placement:
        """All ranks on this machine."""
        return self.spec.placement

    def check(self, ranks: int) -> None:
        if ranks < 2:
            raise ConfigError("one rank moves nothing that could agree; expected at least -r 2")


class Agreement(Tool[AgreementPlan]):
    """Holds the benchmark's figures against a baseline's."""

    prog = "agreement.py"
    run = "flagscale.bench.agreement.worker:run_rank"

    def run_line(self, words: list[str], prog: str) -> int:
        options = _parser(prog).parse(words)
        kept, figure = options.kept, options.plot
        if kept is None:
            return super().run_line(words, prog)
        if figure is None:
            raise ConfigError("--import is for drawing: --plot FILE is missing")
        require_image(figure, "--plot")
        result = read_object(kept, f"--import {kept}", "what --json of this command keeps")
        verdict.write_figure(result, figure)
        return 0

    def read(self, words: list[str], prog: str, *, keeps: bool) -> AgreementPlan:
        options = _parser(prog).parse(words)
        if keeps and options.plot is not None:
            require_image(options.plot, "--plot")
        if keeps and options.json is not None:
            require_writable(options.json, "--json")
        if options.rounds < 2 or not 0 < options.limit < math.inf:
            raise ConfigError("--rounds must be at least 2, --limit above 0 per cent")
        spec = _spec(options)
        return AgreementPlan(spec, options.rounds, options.limit / 100, options.json, options.plot)


def _parser(prog: str) -> Parser:
    parser = Parser(prog, _DESCRIPTION)
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
    add_device(add)
    add("-J", "--json", type=Path, metavar="FILE", help="keep the result")
    add("--plot", type=Path, metavar="FILE", help="draw it, .svg or .png")
    add("--import", dest="kept", type=Path, metavar="FILE", help="a kept one; measure nothing")
    return parser


def _spec(options: argparse.Namespace) -> BenchSpec:
    """What the benchmark's own command line would be."""
    known = definitions.OPERATIONS
    names = options.operations.split(",") if options.operations else known
    chosen = [operation(name).name for name in names]
    for name in chosen:
        if name not in known:
            raise ConfigError(f"--operations {name}: nccl-tests has {', '.join(known)}")
    line = [",".join(chosen), "-d", options.datatype, "-n", options.iters]
    line += ["-b", options.minbytes, "-e", options.maxbytes, "-f", options.stepfactor]
    line += ["-w", options.warmup_iters, "--device", options.device]
    line += [] if options.eager else ["-I", options.replays]
    line += ["-r", str(options.nworkers)] if options.nworkers is not None else []
    (spec,) = read_specs(line)
    if len(spec.types) > 1:
        raise ConfigError(f"-d {options.datatype}: one type at a time")
    return spec


main = Agreement().main
