"""The command line: nccom-test's flags and nccl-tests' short ones, read into a BenchSpec."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flagscale.bench.collectives.operations import OPERATIONS, is_operation
from flagscale.bench.collectives.statistics import is_statistic
from flagscale.bench.command_line import COMM, Parser, own_words
from flagscale.bench.placement import add_place

CHECK_MODES = ("random", "all_ones")

_DESCRIPTION = """\
Measure the collectives of any communication backend that a YAML can name.

Without a launcher it starts its ranks itself (-r 4); under torchrun, mpirun (OpenMPI, MPICH) and
srun it takes its ranks from them."""

_EPILOG = """\
operations
{operations}

examples
  bench.py all_reduce -r 2                              32 MiB between two local ranks
  bench.py allr -r 4 -b 1kb -e 1gb -f 4 -d fp32 -c      a sweep, checked against a golden result
  torchrun --nproc-per-node 8 bench.py redsct -d bf16 -b 1M -e 1G -f 2 --backend nccl
  srun -n 16 bench.py alltoall -b 1M -e 64M -f 2        so with mpirun
  bench.py allr -r 16 --hosts node[01-02] -b 1K -e 1G -f 4    over SSH, 8 ranks a host
  bench.py allr -r 8 --compare nccl,fsccl -b 1K -e 1G -f 4   by turns, ratios with their interval
  bench.py allr -r 2 --report-to-json-file now.json --baseline then.json --tolerance 10%

sizes are those of the whole logical buffer (what an all-gather collects) and counts are totals;
1K is 1024 bytes. time is the wall clock of all iterations over their number, averaged over the
ranks (-a); percentiles are of each iteration's longest time over the ranks.

exit codes: 0 ok, 1 a check or the run failed, 2 usage, 3 the environment (a launcher is absent or
a host cannot be reached), 4 worse than the baseline"""


def normalise(arguments: Sequence[str]) -> list[str]:
    """Make what nccom-test leaves open definite, so that an operation may come anywhere.

    ``--check allg`` means ``--check=random allg``; ``--stats avg p50 allg`` ends its list at the
    first word that is no statistic, and ``--hosts a b allg`` at a last one that is an operation.
    """
    words = list(arguments)
    result: list[str] = []
    while words:
        word = words.pop(0)
        if word in ("-c", "--check"):
            mode = words.pop(0) if words and words[0] in (*CHECK_MODES, "0", "1") else "random"
            result.append(f"--check={mode}")
        elif word in ("-t", "--stats"):
            names = []
            while words and all(is_statistic(name) for name in words[0].split(",")):
                names.append(words.pop(0))
            # A mistyped name must reach the parser as this flag's value, not as an operation.
            if not names and words and not words[0].startswith("-"):
                names.append(words.pop(0))
            result.append(f"--stats={','.join(names)}")
        elif word == COMM:
            # ``=`` binds a value to its flag: the operation behind it is none.
            result += [f"{word}={words.pop(0)}" for _ in range(own_words(words))] or [word]
        elif word in ("-s", "--hosts", "-hosts"):
            count = next((i for i, w in enumerate(words) if w.startswith("-")), len(words))
            hosts, words = words[:count], words[count:]
            operations = [hosts.pop()] if len(hosts) > 1 and is_operation(hosts[-1]) else []
            result += [*(f"--hosts={host}" for host in hosts), *operations] or [word]
        else:
            result.append(word)
    return result


def build_parser(prog: str = "bench.py") -> Parser:
    """The parser of the whole command line."""
    operations = "\n".join(
        f"  {', '.join((op.name, *op.aliases)):42} {op.summary}" for op in OPERATIONS.values()
    )
    parser = Parser(prog, _DESCRIPTION, _EPILOG.format(operations=operations))
    which = "see below; several with commas, or all"
    parser.add_argument("operation", nargs="?", metavar="OPERATION", help=which)
    batch = "run every line of FILE, each a command line, in one group of ranks"
    parser.add_argument("--batch", type=Path, metavar="FILE", help=batch)
    for add in (_benchmark, _iterations, _data, _place, _groups, _output, _comparing, _foreign):
        add(parser)
    return parser


def _benchmark(parser: Parser) -> None:
    group = parser.add_argument_group("what is measured")
    add = group.add_argument
    add("-b", "--minbytes", default="32M", metavar="SIZE", help="the first size (32M)")
    add("-e", "--maxbytes", metavar="SIZE", help="the last size (that of -b, at least 32M)")
    add("-i", "--stepbytes", metavar="SIZE", help="from size to size: add this (a tenth)")
    add("-f", "--stepfactor", metavar="FACTOR", help="from size to size: multiply by this")
    add("-d", "--datatype", default="uint8", metavar="TYPE", help="element types (uint8), or all")
    add("-o", "--redop", default="sum", metavar="OP", help="sum, prod, min, max, avg, or all (sum)")
    add("--root", default="0", metavar="RANK", help="of rooted operations; -1: each in turn (0)")
    place = group.add_mutually_exclusive_group()
    place.add_argument("--in-place", action="store_true", help="one buffer for input and output")
    place.add_argument("--out-of-place", action="store_true", help="two buffers")
    place.add_argument("--both-places", action="store_true", help="one and the other")


def _iterations(parser: Parser) -> None:
    add = parser.add_argument_group("how often").add_argument
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    add("-n", "--iters", dest="measured", default=20, **count, help="measured iterations (20)")
    warmup = ("-w", "--warmup_iters", "--warmup-iters")
    add(*warmup, dest="warmup", default=5, **count, help="before (5)")
    replays = ("-I", "--neff_iters", "--replays", "-G", "--cudagraph")
    graph = "capture the iterations in a CUDA graph and replay it so often; on a CPU: repeat them"
    add(*replays, dest="replays", **count, help=graph)
    before = ("-W", "--neff_warmup_iters", "--warmup-replays")
    first = "replays before the measured ones (0)"
    add(*before, dest="replay_warmup", default=0, **count, help=first)
    together = "operations issued together"
    add("-m", "--agg-iters", dest="aggregated", default=1, **count, help=together)
    add("--run-cycles", dest="cycles", default=1, **count, help="runs of the whole sweep (1)")
    add("-z", "--blocking", nargs="?", const="1", default="0", help="1: wait for each operation")
    add("-a", "--average", default="1", help="time of: 0 rank 0, 1 mean, 2 min, 3 max of ranks (1)")
    add("-C", "--report-cputime", nargs="?", const="1", default="0", help="1: time to issue only")
    add("--timing", choices=("wall", "events"), default="wall", help="clock on a GPU (wall)")


def _data(parser: Parser) -> None:
    add = parser.add_argument_group("data").add_argument
    verify = "verify, outside the timing: random (against a golden result) or all_ones"
    add("-c", "--check", metavar="MODE", help=verify)
    add("--seed", type=int, help="of random data (the time; it is printed)")
    add("--dump-dir", type=Path, default=Path("bench-failures"), help="for data of a failed check")
    add("--unique-buff", action="store_true", help="buffers of its own for every iteration")
    add("--shared-output-buff", action="store_true", help="with --unique-buff: one output")
    register = "1: buffers registered with the backend, 2: symmetrically"
    add("-R", "--local_register", "--register", choices=("0", "1", "2"), default="0", help=register)
    add("--coalesced-cc-size-ratio", metavar="[1,2,1]", help="split in parts issued together")
    add("--alltoallv-metadata", type=Path, metavar="JSON", help="counts and displacements")


def _place(parser: Parser) -> None:
    add = add_place(parser)
    add("-T", "--timeout", type=float, default=300, metavar="S", help="stuck after so long (300)")
    add("--vcpu-pin-mode", dest="pin", action="store_true", help="keep each rank on one CPU")


def _groups(parser: Parser) -> None:
    add = parser.add_argument_group("replica groups").add_argument
    add("--data-parallel-dimension", type=int, metavar="K", help="groups of K ranks at once")
    add("--custom-replica-group", type=Path, metavar="JSON", help="groups by hand")
    add("--custom-src-target-pairs", type=Path, metavar="JSON", help="pairs of permute")


def _output(parser: Parser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--format", choices=("nccom", "nccl-tests", "flagcx"), default="nccom", help="of the table")
    stats = "avg min max p50 p99 p99/p50 ... (avg)"
    add("-t", "--stats", default="avg", metavar="STAT", help=stats)
    unit = "1e9 or 2**30 bytes (GB)"
    add("--bw-unit", dest="unit", choices=("GB", "GiB"), default="GB", help=unit)
    add("--show-algorithm", action="store_true", help="which the backend chose, where it tells")
    sizes = "bytes of a rank's buffers"
    add("--show-input-output-size", dest="show_sizes", action="store_true", help=sizes)
    header = "no lines about versions and devices"
    add("--no-header", dest="header", action="store_false", help=header)
    add("--non-interactive", action="store_true", help="no progress")
    add("--debug", action="store_true", help="the backend's own messages; implies the former")
    add("-p", "--print-buffer", nargs="?", const="1", default="0", help="1: some of rank 0's data")
    keep = ("-J", "--report-to-json-file", "--json")
    add(*keep, dest="json", type=Path, metavar="FILE", help="keep results")
    files: dict[str, Any] = {"type": Path, "action": "append", "default": [], "metavar": "FILE"}
    add("--plot", dest="plots", **files, help=".svg or .png")
    add("--report", type=Path, metavar="FILE.html", help="one file with tables and curves")
    add("--csv", type=Path, metavar="FILE", help="a line a result")
    others = "output of nccl-tests or nccom-test, or our JSON, to plot beside"
    add("--import", "--import-results", dest="imports", **files, help=others)


def _comparing(parser: Parser) -> None:
    add = parser.add_argument_group("comparing").add_argument
    add("--compare", metavar="A,B", help="measure these backends by turns")
    rounds = "turns each (10)"
    add("--compare-rounds", dest="rounds", type=int, default=10, metavar="N", help=rounds)
    add("--baseline", type=Path, metavar="JSON", help="exit 4 where slower than this result")
    worse = "slower by more than this is worse (5%%)"
    add("--tolerance", default="5%", metavar="SHARE", help=worse)
    add("--peak", type=float, metavar="GB/s", help="nominal limit of busbw (by device)")
    add("--probe", action="store_true", help="measure the limit by plain copies to a neighbour")


def _foreign(parser: Parser) -> None:
    """Flags of other tools that mean nothing here, or only one value: said, not refused."""
    add = parser.add_argument_group("accepted for other tools' command lines").add_argument
    add("-k", "--kernel_num", type=int, help="of mscclpp's kernels: each backend has its own")
    add("-g", "--ngpus", type=int, default=1, help="GPUs a process: always 1")
    add("--sb2sb", action="store_true", help="as --register 1")
    for flag in ("--input-shape", "--output-shape", "--cc-dim"):
        add(flag, help=argparse.SUPPRESS)
    add("--slurm-use-head-node-neuron-bench", action="store_true", help=argparse.SUPPRESS)
