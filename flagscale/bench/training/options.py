"""Flags of ``flagscale bench training``. Their values are converted in :mod:`.cli`.

An arm is one of the compared ways to reduce gradients (:mod:`.arms`).
"""

from __future__ import annotations

from pathlib import Path

from flagscale.bench.options import BenchParser
from flagscale.bench.placement import add_placement_flags
from flagscale.bench.training.experiment import DEFAULT_SETTLE_STEPS
from flagscale.bench.training.models.names import FAMILIES, SIZES

_DESCRIPTION = """\
Train models with DistributedDataParallel, compare several algorithms for reducing their gradients,
with and without background traffic.

Every arm has its own processes and its own environment, so that arms cannot affect each other. All
start from the same weights and train on the same data. They take turns of --block steps, in an
order that --seed draws in every round; each step of one arm corresponds to a step of every other.
Warm-up and the first steps of each turn are trained but not counted. Losses of exact arms must
agree, and all ranks of an arm must end with the same bits. The bytes between every two ranks are
counted: they show whether two arms communicate differently.

arms
  ring, tree    NCCL's algorithms on GPUs (NCCL_ALGO), fsccl's on CPUs (FSCCL_ALGO)
  transpose     fsccl's direct reduce-scatter and all-gather between all ranks; on CPUs
  optireduce    fsccl's bounded all_reduce (FSCCL_TAIL=bounded), which leaves out late data
  gloo, nccl... any backend by its name in a YAML (flagscale comm list)
  --arm wide=fsccl,FSCCL_TCP_CONNECTIONS=4    your own: a backend and its variables

experiments
  --config-name trains the YAML that action=run would start, on its own hosts, instead of models.
  A turn is then a start of the run, which resumes from the arm's last checkpoint.

settings
  Without --environment there is no traffic. Each --environment FILE, as written by flagscale bench
  traffic, is played while all arms train; slowdowns are relative to training without traffic.
  --apart plays the last FILE over another network. A slowdown there is not caused by the network
  between the ranks but by the hosts that carry the traffic.
"""
_EPILOG = """\
examples
  {prog} -r 2 --models vgg19 --arms gloo,ring
      two ranks on this machine, about a minute
  {prog} -r 4 --models gpt2,bert --size base --arms ring,tree,transpose --steps 200
  {prog} --hosts-file hosts --models all --arms ring,tree,optireduce \\
      --environment low.json high.json --report trials.html --json trials.json
  {prog} --config-path examples/llama3/conf --config-name train --arms gloo,ring \\
      --steps 60 --block 20 --override experiment.runner.nproc_per_node=2
  {prog} -r 8 --device cuda --models gpt2:large --arms ring,tree,nccl
"""


def build_parser(prog: str) -> BenchParser:
    """Return the parser of the whole command line."""
    parser = BenchParser(prog, _DESCRIPTION, _EPILOG.format(prog=prog))
    _add_training_flags(parser)
    _add_experiment_flags(parser)
    _add_network_flags(parser)
    add_placement_flags(parser)
    parser.set_defaults(pin=False)
    _add_output_flags(parser)
    return parser


def _add_training_flags(parser: BenchParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add(
        "--models",
        metavar="LIST",
        help=f"{', '.join((*FAMILIES, 'all'))}; gpt2:large selects a size (gpt2)",
    )
    add("--size", choices=SIZES, default="tiny", help="size of models without one (tiny)")
    add("--arms", metavar="LIST", help="arms (ring,tree,transpose; on GPUs ring,tree)")
    add(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=BACKEND[,VAR=VALUE]",
        help="an arm of your own, such as wide=fsccl,FSCCL_TCP_CONNECTIONS=4",
    )
    add("-n", "--steps", type=int, default=100, metavar="N", help="counted steps per arm (100)")
    add("--block", type=int, default=10, metavar="N", help="steps of a turn (10)")
    add("-w", "--warmup", type=int, default=5, metavar="N", help="warm-up steps per arm (5)")
    add(
        "--settle",
        type=int,
        metavar="N",
        help=(
            "uncounted steps at the start of each turn "
            f"(1; for an experiment {DEFAULT_SETTLE_STEPS})"
        ),
    )
    add("-b", "--batch", type=int, default=4, metavar="N", help="samples per rank and step (4)")
    add(
        "--sequence",
        type=int,
        metavar="N",
        help="tokens of a sample (tiny 64, base 128, large 384)",
    )
    add(
        "--bucket-mb",
        type=float,
        default=25.0,
        metavar="M",
        help="size of gradient buckets in MiB (25)",
    )
    add("--seed", type=int, default=0, help="seed of weights, data and turns (0)")


def _add_experiment_flags(parser: BenchParser) -> None:
    add = parser.add_argument_group("an experiment instead of models").add_argument
    add("--config-path", type=Path, default=Path(), metavar="DIR", help="directory of its YAML (.)")
    add("--config-name", metavar="NAME", help="name of the YAML")
    add(
        "--override",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="override of a value, in Hydra's syntax; may be repeated",
    )


def _add_network_flags(parser: BenchParser) -> None:
    add = parser.add_argument_group("settings of the network").add_argument
    add(
        "--environment",
        nargs="+",
        action="extend",
        default=[],
        type=Path,
        metavar="FILE",
        help="traffic to train under, written by flagscale bench traffic; may be repeated",
    )
    add(
        "--apart",
        nargs="+",
        action="extend",
        default=[],
        metavar="HOST=ADDRESS",
        help="control: play the last FILE's flows over these addresses of its hosts",
    )


def _add_output_flags(parser: BenchParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "-T",
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds without progress before the run fails (300)",
    )
    add("-J", "--json", type=Path, metavar="FILE", help="write all results as JSON")
    add("--csv", type=Path, metavar="FILE", help="write one line per counted step")
    add("--report", type=Path, metavar="FILE", help="write an HTML page")
    add(
        "--plot",
        dest="plots",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="write a figure of time and loss, .svg or .png; may be repeated",
    )
    add("-q", "--quiet", action="store_true", help="print only the results")
