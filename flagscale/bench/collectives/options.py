"""Flags of ``flagscale bench collectives``.

The flags are those of nccom-test, a benchmark of AWS Neuron, and the short ones of nccl-tests.
Their values become a :class:`.spec.BenchSpec` in :mod:`.cli`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flagscale.bench.collectives.operations import OPERATIONS, is_operation
from flagscale.bench.options import COMM, BenchParser, count_comm_values
from flagscale.bench.placement import add_placement_flags
from flagscale.bench.statistics import is_statistic

CHECK_MODES = ("random", "all_ones")

_DESCRIPTION = """\
Measure the collectives of any communication backend that a YAML can name.

Without a launcher it starts its ranks itself (-r 4); under torchrun, mpirun (OpenMPI, MPICH) and
srun it takes its ranks from them."""

_EPILOG = """\
operations
{operations}

examples
  {prog} all_reduce -r 2
      32 MiB between two local ranks
  {prog} allr -r 4 -b 1kb -e 1gb -f 4 -d fp32 -c
      a sweep of sizes, each checked against a golden result
  {prog} allr -r 16 --hosts node[01-02] -b 1K -e 1G -f 4
      over SSH, 8 ranks per host
  {prog} allr -r 8 --compare nccl,fsccl -b 1K -e 1G -f 4
      two backends by turns, with the interval of their ratio
  {prog} allr -r 2 --report-to-json-file now.json --baseline then.json --tolerance 10%
      exit 4 if slower than an earlier result
  torchrun --nproc-per-node 8 --no-python {prog} redsct -d bf16 -b 1M -e 1G -f 2
  srun -n 16 {prog} alltoall -b 1M -e 64M -f 2
      ranks from a launcher; mpirun works in the same way

sizes are those of the whole logical buffer (what an all-gather collects) and counts are totals;
1K is 1024 bytes. time is the wall clock of all iterations over their number, averaged over the
ranks (-a); percentiles are of each iteration's longest time over the ranks.

exit codes: 0 ok, 1 a check or the run failed, 2 usage, 3 the environment (a launcher is absent or
a host cannot be reached), 4 worse than the baseline"""


def normalize_arguments(arguments: Sequence[str]) -> list[str]:
    """Resolve ambiguities of nccom-test's command lines, so that the operation may stand
    anywhere.

    ``--check allg`` means ``--check=random allg``. ``--stats avg p50 allg`` ends at the first
    word that is no statistic, and ``--hosts a b allg`` at a last word that is an operation.
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
            # ``=`` binds each value to its flag, so that the operation after it is not a value.
            result += [f"{word}={words.pop(0)}" for _ in range(count_comm_values(words))] or [word]
        elif word in ("-s", "--hosts", "-hosts"):
            count = next((i for i, w in enumerate(words) if w.startswith("-")), len(words))
            hosts, words = words[:count], words[count:]
            operations = [hosts.pop()] if len(hosts) > 1 and is_operation(hosts[-1]) else []
            result += [*(f"--hosts={host}" for host in hosts), *operations] or [word]
        else:
            result.append(word)
    return result


def build_parser(prog: str) -> BenchParser:
    """Return the parser of the whole command line."""
    operations = "\n".join(
        f"  {', '.join((op.name, *op.aliases)):42} {op.summary}" for op in OPERATIONS.values()
    )
    parser = BenchParser(prog, _DESCRIPTION, _EPILOG.format(operations=operations, prog=prog))
    parser.add_argument(
        "operation",
        nargs="?",
        metavar="OPERATION",
        help="operation, several separated by commas, or all; see below",
    )
    parser.add_argument(
        "--batch",
        type=Path,
        metavar="FILE",
        help="run each line of FILE as a command line, all on the same ranks",
    )
    for add in (
        _add_benchmark_flags,
        _add_iteration_flags,
        _add_data_flags,
        _add_rank_flags,
        _add_group_flags,
        _add_output_flags,
        _add_comparison_flags,
        _add_ignored_flags,
    ):
        add(parser)
    return parser


def _add_benchmark_flags(parser: BenchParser) -> None:
    group = parser.add_argument_group("measurement")
    add = group.add_argument
    add("-b", "--minbytes", default="32M", metavar="SIZE", help="first size (32M)")
    add("-e", "--maxbytes", metavar="SIZE", help="last size (that of -b, at least 32M)")
    add("-i", "--stepbytes", metavar="SIZE", help="step between sizes (a tenth of the range)")
    add("-f", "--stepfactor", metavar="FACTOR", help="factor between sizes")
    add("-d", "--datatype", default="uint8", metavar="TYPE", help="element types, or all (uint8)")
    add(
        "-o",
        "--redop",
        default="sum",
        metavar="OP",
        help="reduction: sum, prod, min, max, avg, or all (sum)",
    )
    add(
        "--root",
        default="0",
        metavar="RANK",
        help="root of rooted operations; -1: each rank in turn (0)",
    )
    place_group = group.add_mutually_exclusive_group()
    place_group.add_argument(
        "--in-place", action="store_true", help="use one buffer for input and output"
    )
    place_group.add_argument("--out-of-place", action="store_true", help="use two buffers")
    place_group.add_argument("--both-places", action="store_true", help="measure both")


def _add_iteration_flags(parser: BenchParser) -> None:
    add = parser.add_argument_group("iterations").add_argument
    count_options: dict[str, Any] = {"type": int, "metavar": "N"}
    add(
        "-n",
        "--iters",
        dest="measured",
        default=20,
        **count_options,
        help="measured iterations (20)",
    )
    warmup_flags = ("-w", "--warmup_iters", "--warmup-iters")
    add(*warmup_flags, dest="warmup", default=5, **count_options, help="warm-up iterations (5)")
    replay_flags = ("-I", "--neff_iters", "--replays", "-G", "--cudagraph")
    add(
        *replay_flags,
        dest="replays",
        **count_options,
        help=(
            "capture the iterations in a CUDA graph and replay it N times; on a CPU: repeat them"
        ),
    )
    replay_warmup_flags = ("-W", "--neff_warmup_iters", "--warmup-replays")
    add(
        *replay_warmup_flags,
        dest="replay_warmup",
        default=0,
        **count_options,
        help="warm-up replays (0)",
    )
    add(
        "-m",
        "--agg-iters",
        dest="aggregated",
        default=1,
        **count_options,
        help="operations issued together in one iteration (1)",
    )
    add(
        "--run-cycles",
        dest="cycles",
        default=1,
        **count_options,
        help="repetitions of the whole sweep (1)",
    )
    add("-z", "--blocking", nargs="?", const="1", default="0", help="1: wait for each operation")
    add(
        "-a",
        "--average",
        default="1",
        help="reported time: 0 rank 0, 1 mean, 2 min, 3 max over ranks (1)",
    )
    add(
        "-C",
        "--report-cputime",
        nargs="?",
        const="1",
        default="0",
        help="1: report the time to issue operations",
    )
    add("--timing", choices=("wall", "events"), default="wall", help="clock on a GPU (wall)")


def _add_data_flags(parser: BenchParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add(
        "-c",
        "--check",
        metavar="MODE",
        help="verify results, outside the timing: random (against a golden result) or all_ones",
    )
    add("--seed", type=int, help="seed of random data (the time; it is printed)")
    add(
        "--dump-dir",
        type=Path,
        default=Path("bench-failures"),
        help="directory for the data of a failed check (bench-failures)",
    )
    add("--unique-buff", action="store_true", help="use separate buffers for every iteration")
    add(
        "--shared-output-buff",
        action="store_true",
        help="use one output for all iterations, with --unique-buff",
    )
    add(
        "-R",
        "--local_register",
        "--register",
        choices=("0", "1", "2"),
        default="0",
        help="1: register buffers with the backend, 2: symmetrically (0)",
    )
    add(
        "--coalesced-cc-size-ratio",
        metavar="[1,2,1]",
        help="split sizes into parts that are issued together",
    )
    add(
        "--alltoallv-metadata",
        type=Path,
        metavar="JSON",
        help="counts and displacements of all_to_all_v",
    )


def _add_rank_flags(parser: BenchParser) -> None:
    add = add_placement_flags(parser)
    add(
        "-T",
        "--timeout",
        type=float,
        default=300,
        metavar="S",
        help="seconds without progress before the run fails (300)",
    )
    add("--vcpu-pin-mode", dest="pin", action="store_true", help="bind each rank to one CPU")


def _add_group_flags(parser: BenchParser) -> None:
    add = parser.add_argument_group("replica groups").add_argument
    add(
        "--data-parallel-dimension",
        type=int,
        metavar="K",
        help="run groups of K ranks at the same time",
    )
    add("--custom-replica-group", type=Path, metavar="JSON", help="replica groups")
    add(
        "--custom-src-target-pairs",
        type=Path,
        metavar="JSON",
        help="source and target pairs of permute",
    )


def _add_output_flags(parser: BenchParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--format",
        choices=("nccom", "nccl-tests", "flagcx"),
        default="nccom",
        help="format of the table (nccom)",
    )
    add(
        "-t",
        "--stats",
        default="avg",
        metavar="STAT",
        help="statistics of the time: avg min max p50 p99 p99/p50 ... (avg)",
    )
    add(
        "--bw-unit",
        dest="unit",
        choices=("GB", "GiB"),
        default="GB",
        help="unit of bandwidths: 1e9 or 2**30 bytes (GB)",
    )
    add(
        "--show-algorithm", action="store_true", help="show the algorithm if the backend reports it"
    )
    add(
        "--show-input-output-size",
        dest="show_sizes",
        action="store_true",
        help="show the sizes of a rank's buffers",
    )
    add(
        "--no-header",
        dest="header",
        action="store_false",
        help="omit the lines on versions and devices",
    )
    add("--non-interactive", action="store_true", help="omit the progress display")
    add(
        "--debug",
        action="store_true",
        help="print the backend's debug messages; implies --non-interactive",
    )
    add(
        "-p",
        "--print-buffer",
        nargs="?",
        const="1",
        default="0",
        help="1: print some of rank 0's data",
    )
    json_flags = ("-J", "--report-to-json-file", "--json")
    add(*json_flags, dest="json", type=Path, metavar="FILE", help="write the results as JSON")
    file_options: dict[str, Any] = {
        "type": Path,
        "action": "append",
        "default": [],
        "metavar": "FILE",
    }
    add(
        "--plot", dest="plots", **file_options, help="write a figure, .svg or .png; may be repeated"
    )
    add(
        "--report", type=Path, metavar="FILE.html", help="write an HTML page with tables and curves"
    )
    add("--csv", type=Path, metavar="FILE", help="write one line per result")
    add(
        "--import",
        "--import-results",
        dest="imports",
        **file_options,
        help="output of nccl-tests, nccom-test or this command to include in plots",
    )


def _add_comparison_flags(parser: BenchParser) -> None:
    add = parser.add_argument_group("comparison").add_argument
    add("--compare", metavar="A,B", help="compare these backends by turns")
    add(
        "--compare-rounds",
        dest="rounds",
        type=int,
        default=10,
        metavar="N",
        help="turns of each backend (10)",
    )
    add("--baseline", type=Path, metavar="JSON", help="exit with 4 if slower than this JSON result")
    add(
        "--tolerance",
        default="5%",
        metavar="SHARE",
        help="accepted slowdown relative to the baseline (5%%)",
    )
    add("--peak", type=float, metavar="GB/s", help="nominal limit of the bus bandwidth (by device)")
    add("--probe", action="store_true", help="measure the bandwidth of plain copies to a neighbour")


def _add_ignored_flags(parser: BenchParser) -> None:
    """Add flags of other tools that have no meaning here, or only one value. They produce notes."""
    add = parser.add_argument_group("accepted for other tools' command lines").add_argument
    add("-k", "--kernel_num", type=int, help="number of mscclpp's kernel; ignored")
    add("-g", "--ngpus", type=int, default=1, help="GPUs per process: always 1")
    add("--sb2sb", action="store_true", help="as --register 1")
    for flag in ("--input-shape", "--output-shape", "--cc-dim"):
        add(flag, help=argparse.SUPPRESS)
    add("--slurm-use-head-node-neuron-bench", action="store_true", help=argparse.SUPPRESS)
