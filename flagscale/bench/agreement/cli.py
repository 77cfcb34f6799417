"""Command line of ``flagscale bench agreement``: compares the times that ``flagscale bench
collectives`` measures with those of a baseline.

The baseline (:mod:`.baseline`) measures as nccl-tests does. Both sides measure by turns: a round
consists of one turn of each.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from flagscale.bench.agreement import definitions, verdict
from flagscale.bench.collectives.cli import read_specs
from flagscale.bench.collectives.operations import find_operation
from flagscale.bench.collectives.spec import BenchSpec
from flagscale.bench.command import BenchCommand
from flagscale.bench.files import read_object, require_writable
from flagscale.bench.options import BenchParser, add_device_flag
from flagscale.bench.placement import Placement
from flagscale.errors import ConfigError
from flagscale.report.figure import require_image

_DESCRIPTION = """\
Measure collectives by flagscale bench collectives and by a baseline that measures as nccl-tests
does, by turns in the same processes, and report where they differ by more than the limit.

The baseline calls NCCL itself (ctypes, the library torch has loaded) on a communicator of its
own: warm up, barrier, issue all iterations, synchronize, divide; the mean over ranks; algbw and
busbw by nccl-tests' formulas. Both sides run as CUDA graphs (nccl-tests' -G) unless --eager. Issued
one by one, calls through torch take tens of microseconds of the host's time, which nccl-tests,
written in C++, does not need. On a CPU the baseline calls gloo's own object.
"""
_EPILOG = """\
examples
  {prog} -r 8 -b 1K -e 1G -f 4
      every operation of nccl-tests
  {prog} -r 8 --operations all_reduce -d bf16 --json result.json --plot result.svg
  {prog} --import result.json --plot result.svg
      draw a stored result

exit codes: 0 no difference, 2 usage, 4 some measurements differ"""


@dataclass(frozen=True)
class AgreementPlan:
    """Parsed command line."""

    spec: BenchSpec
    rounds: int
    """Turns of each side, for each operation and size."""
    limit: float
    """Largest accepted difference, as a fraction."""
    json: Path | None
    plot: Path | None

    @property
    def placement(self) -> Placement:
        """All ranks on this machine."""
        return self.spec.placement

    def check(self, ranks: int) -> None:
        if ranks < 2:
            raise ConfigError("a single rank sends nothing; expected at least -r 2")


class AgreementCommand(BenchCommand[AgreementPlan]):
    """Command that compares measurements of ``flagscale bench collectives`` with a baseline's."""

    prog = "flagscale bench agreement"
    rank_entry_point = "flagscale.bench.agreement.worker:run_rank"

    def run_arguments(self, words: list[str], prog: str) -> int:
        options = _parser(prog).parse(words)
        result_path, figure = options.stored_result, options.plot
        if result_path is None:
            return super().run_arguments(words, prog)
        if figure is None:
            raise ConfigError("--import draws a stored result: --plot FILE is missing")
        require_image(figure, "--plot")
        result = read_object(
            result_path,
            f"--import {result_path}",
            "a result of --json of this command",
        )
        verdict.write_figure(result, figure)
        return 0

    def parse_plan(self, words: list[str], prog: str, *, writes_results: bool) -> AgreementPlan:
        options = _parser(prog).parse(words)
        if writes_results and options.plot is not None:
            require_image(options.plot, "--plot")
        if writes_results and options.json is not None:
            require_writable(options.json, "--json")
        if options.rounds < 2 or not 0 < options.limit < math.inf:
            raise ConfigError("--rounds must be at least 2, --limit above 0 per cent")
        spec = _make_spec(options)
        return AgreementPlan(spec, options.rounds, options.limit / 100, options.json, options.plot)


def _parser(prog: str) -> BenchParser:
    parser = BenchParser(prog, _DESCRIPTION, _EPILOG.format(prog=prog))
    add = parser.add_argument
    add("-r", "--nworkers", type=int, metavar="N", help="number of ranks, all on this machine")
    add("--operations", metavar="A,B", help="operations (all of nccl-tests)")
    add("-b", "--minbytes", default="1K", help="first size (1K)")
    add("-e", "--maxbytes", default="1G", help="last size (1G)")
    add("-f", "--stepfactor", default="4", help="factor between sizes (4)")
    add("-d", "--datatype", default="fp32", help="element type (fp32)")
    add("-n", "--iters", default="20", help="iterations per turn (20)")
    add("-w", "--warmup_iters", default="5", help="warm-up iterations (5)")
    add("-I", "--replays", default="10", help="launches of the graph per turn (10)")
    add("--eager", action="store_true", help="do not use CUDA graphs")
    add("--rounds", type=int, default=10, metavar="N", help="rounds: turns of each side (10)")
    add(
        "--limit",
        type=float,
        default=3.0,
        metavar="%",
        help="largest accepted difference in per cent (3)",
    )
    add_device_flag(add)
    add("-J", "--json", type=Path, metavar="FILE", help="write the result as JSON")
    add("--plot", type=Path, metavar="FILE", help="write a figure, .svg or .png")
    add(
        "--import",
        dest="stored_result",
        type=Path,
        metavar="FILE",
        help="draw a stored result; measure nothing",
    )
    return parser


def _make_spec(options: argparse.Namespace) -> BenchSpec:
    """Return the specification of an equivalent ``flagscale bench collectives`` command line."""
    supported = definitions.OPERATIONS
    names = options.operations.split(",") if options.operations else supported
    operations = [find_operation(name).name for name in names]
    for name in operations:
        if name not in supported:
            raise ConfigError(f"--operations {name}: nccl-tests has {', '.join(supported)}")
    argv = [",".join(operations), "-d", options.datatype, "-n", options.iters]
    argv += ["-b", options.minbytes, "-e", options.maxbytes, "-f", options.stepfactor]
    argv += ["-w", options.warmup_iters, "--device", options.device]
    argv += [] if options.eager else ["-I", options.replays]
    argv += ["-r", str(options.nworkers)] if options.nworkers is not None else []
    (spec,) = read_specs(argv)
    if len(spec.types) > 1:
        raise ConfigError(f"-d {options.datatype}: one type at a time")
    return spec


main = AgreementCommand().main
