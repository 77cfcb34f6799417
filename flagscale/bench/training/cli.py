"""``flagscale bench training``: its command line, and the sessions that it amounts to."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flagscale.accelerators.registry import chosen
from flagscale.bench.command_line import Parser, at_least, filled, judge
from flagscale.bench.files import require_writable
from flagscale.bench.machine import facts
from flagscale.bench.placement import Placement, add_place, placement
from flagscale.bench.tool import Starter, Tool
from flagscale.bench.training.arms import (
    CHOOSING,
    Arm,
    parse_custom,
    require,
    require_unset,
    resolve,
)
from flagscale.bench.training.experiment import SETTLE, Chosen, Turns, compare
from flagscale.bench.training.models.names import FAMILIES, SIZES, Choice, parse
from flagscale.bench.training.output import Outputs, present
from flagscale.bench.training.plan import SessionPlan, Training
from flagscale.bench.training.results import SessionResult
from flagscale.bench.training.schedule import shuffled
from flagscale.bench.training.settings import Setting, read_settings
from flagscale.bench.training.summary import sound
from flagscale.bench.world import BenchWorld, detect
from flagscale.comm import registry
from flagscale.errors import ConfigError, JobError
from flagscale.records import decode
from flagscale.report.figure import require_image

_DESCRIPTION = """\
Train models by DistributedDataParallel under several ways to sum their gradients, with and
without background traffic, and compare them fairly.

Every arm has its own processes and its own environment, so that nothing of one reaches another.
All start from the same weights and learn from the same data. They take turns of --block steps, in
an order that --seed draws in every round; a step of one arm has its pair in every other. Warm-up
and the first steps of each turn are trained and not counted. Losses of exact arms have to agree,
all ranks of an arm have to end with the same bits, and who sent how many bytes to whom is counted
between every two ranks: that is how one sees that two arms are two.

arms
  ring, tree    NCCL's algorithms on GPUs (NCCL_ALGO), fsccl's on CPUs (FSCCL_ALGO)
  transpose     fsccl's: shards to their owners, sums to all; on CPUs
  optireduce    fsccl's sums of bounded time (FSCCL_TAIL=bounded): they leave out what comes late
  gloo, nccl... any backend by the name that a YAML gives it (flagscale comm list)
  --arm wide=fsccl,FSCCL_TCP_CONNECTIONS=4    one of your own: a backend and its variables

experiments
  --config-name trains the YAML that action=run would start, on its own hosts, in place of models.
  A turn is then a start of the run, which goes on from the arm's last checkpoint.

settings
  Without --environment: no traffic. Each --environment FILE, as flagscale bench traffic keeps it,
  is played while all arms train; without traffic they train as well, which is what slowdowns are
  against. --apart plays the last FILE over another network: what slows training then is not the
  network between ranks but the hosts that carry the traffic.
"""
_EPILOG = """\
examples
  training -r 2 --models vgg19 --arms gloo,ring            two ranks here, a minute
  training -r 4 --models gpt2,bert --size base --arms ring,tree,transpose --steps 200
  training --hosts-file hosts --models all --arms ring,tree,optireduce \\
      --environment low.json high.json --report trials.html --json trials.json
  training --config-path examples/llama3/conf --config-name train --arms gloo,ring \\
      --steps 60 --block 20 --override experiment.runner.nproc_per_node=2
  training -r 8 --device cuda --models gpt2:large --arms ring,tree,nccl
"""


@dataclass(frozen=True)
class TrialsPlan:
    """All sessions of a command line."""

    models: tuple[Choice, ...]
    arms: tuple[Arm, ...]
    settings: tuple[Setting, ...]
    training: Training
    placement: Placement
    outputs: Outputs = field(default_factory=Outputs)
    comm: tuple[str, ...] = ()
    quiet: bool = False

    def check(self, ranks: int) -> None:
        """Refuse one rank.

        Raises:
            ConfigError: there is only one.
        """
        self.session(self.models[0], self.settings[0], Path()).check(ranks)

    def session(self, model: Choice, setting: Setting, result: Path) -> SessionPlan:
        """What ranks do for one model under one setting."""
        return SessionPlan(
            *(model, setting.label, self.arms, self.training, self.placement),
            comm=self.comm,
            quiet=self.quiet,
            result=result,
        )


class Trials(Tool[TrialsPlan]):
    """Compares arms by training under them."""

    prog = "training"
    run = "flagscale.bench.training.session:run_rank"

    def read(self, words: list[str], prog: str, *, keeps: bool) -> TrialsPlan:
        return _plan(_parser(prog).parse(words))

    def run_line(self, words: list[str], prog: str) -> int:
        """Carry out a command line; the exit code.

        Raises:
            FlagscaleError: it is wrong, its sessions fail, or a launcher has started this.
        """
        refuse_launcher(detect(os.environ))
        options = _parser(prog).parse(words)
        if options.config_name is not None:
            return _of_experiment(options)
        return super().run_line(words, prog)

    def start(self, plan: TrialsPlan, ranks: int) -> int:
        """Carry out every session, one after the other, and present what they found; the exit code:
        1 where exact arms have not learned the same, or ranks have not ended with one model."""
        found: list[SessionResult] = []
        about = facts("flagscale", "torch", "transformers")
        with tempfile.TemporaryDirectory(prefix="flagscale-trials-") as directory:
            for model in plan.models:
                order = shuffled(len(plan.settings), plan.training.seed)
                own: dict[int, SessionResult] = {}
                for number in order:
                    result = Path(directory) / f"{len(found)}_{number}.json"
                    own[number] = self._session(plan, model, number, ranks, result)
                found += [own[number] for number in range(len(order))]
        present(found, plan.training, {**about, "ranks": ranks}, plan.outputs)
        return 0 if all(map(sound, found)) else JobError.exit_code

    def _session(
        self, plan: TrialsPlan, model: Choice, number: int, ranks: int, path: Path
    ) -> SessionResult:
        setting = plan.settings[number]
        session = plan.session(model, setting, path)
        if not plan.quiet:
            names = ", ".join(arm.name for arm in plan.arms)
            print(f"# {model.title} on {ranks} ranks, {setting.told}: {names}", flush=True)
        with setting.played(plan.placement.ssh_config) as probe:
            before = probe()
            code = _SESSION.start(session, ranks)
            after = probe()
        if code or not path.is_file():
            raise JobError(f"training {model.title}, {setting.told}, failed", exit_code=code or 1)
        result = decode(SessionResult, path.read_text(encoding="utf-8"))
        return setting.judged(result, before, after)


def _of_experiment(options: argparse.Namespace) -> int:
    """Compare the arms by an experiment's own training; the exit code."""
    given = [flag for flag, name in _NOT_OF_EXPERIMENTS.items() if getattr(options, name)]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: the YAML says what is trained, and where",
            hint="--override train.model.num_layers=2 changes a value of it",
        )
    options.settle = SETTLE if options.settle is None else options.settle
    training, outputs = _training(options), _outputs(options)
    config = Chosen(options.config_path / options.config_name, tuple(options.override))
    turns = Turns(config, training)
    device = chosen(options.device)
    arms = _named_arms(options, accelerated=not device.is_host, one_host=len(turns.hosts) < 2)
    turns.admit(arms)
    settings = read_settings(options.environment, options.apart)
    order = shuffled(len(settings), training.seed)
    found = compare(turns, arms, settings, order, options.ssh_config, quiet=options.quiet)
    about = {**facts("flagscale", "torch", "megatron-core"), "ranks": turns.ranks}
    present(found, training, about, outputs)
    return 0 if all(map(sound, found)) else JobError.exit_code


_NOT_OF_EXPERIMENTS = {
    "--models": "models", "--sequence": "sequence", "-r": "nworkers", "--hosts": "hosts",
    "--hosts-file": "hosts_file", "--slurm-mode": "slurm", "--env": "env", "--comm": "comm",
}  # fmt: skip


class _Session(Starter[SessionPlan]):
    """One session: ranks, started wherever they are."""

    run = Trials.run


_SESSION = _Session()


def refuse_launcher(world: BenchWorld | None) -> None:
    """Refuse ranks that somebody else has started: sessions start their own.

    Raises:
        ConfigError: this process is one of them.
    """
    if world is not None:
        raise ConfigError(
            f"started under {world.launcher}: this command starts its own ranks, anew for every "
            "model and setting",
            hint="start it once, with -r 4, or with --hosts-file",
        )


def _parser(prog: str) -> Parser:
    parser = Parser(prog, _DESCRIPTION, _EPILOG)
    add = parser.add_argument_group("what is trained").add_argument
    names = ", ".join((*FAMILIES, "all"))
    add("--models", metavar="LIST", help=f"{names}; gpt2:large is one of a size (gpt2)")
    add("--size", choices=SIZES, default="tiny", help="of models that name none (tiny)")
    text = "what is compared (ring,tree,transpose; on GPUs ring,tree)"
    add("--arms", metavar="LIST", help=text)
    text = "an arm of your own, such as wide=fsccl,FSCCL_TCP_CONNECTIONS=4"
    add("--arm", action="append", default=[], metavar="NAME=BACKEND[,VAR=VALUE]", help=text)
    add("-n", "--steps", type=int, default=100, metavar="N", help="that count, of each arm (100)")
    add("--block", type=int, default=10, metavar="N", help="steps of a turn (10)")
    add("-w", "--warmup", type=int, default=5, metavar="N", help="steps before the first (5)")
    text = f"uncounted at each turn's start (1; of an experiment {SETTLE})"
    add("--settle", type=int, metavar="N", help=text)
    add("-b", "--batch", type=int, default=4, metavar="N", help="samples of a rank and step (4)")
    text = "tokens of a sample (tiny 64, base 128, large 384)"
    add("--sequence", type=int, metavar="N", help=text)
    add("--bucket-mb", type=float, default=25.0, metavar="M", help="of gradient buckets, MiB (25)")
    add("--seed", type=int, default=0, help="of weights, data and turns (0)")
    add = parser.add_argument_group("an experiment in place of models").add_argument
    text = "where its YAML is (.)"
    add("--config-path", type=Path, default=Path(), metavar="DIR", help=text)
    add("--config-name", metavar="NAME", help="of the YAML that action=run would start")
    text = "a value of it, as Hydra writes it; several, or again"
    add("--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text)
    add = parser.add_argument_group("settings of the network").add_argument
    text = "traffic to train under, as flagscale bench traffic keeps it; several, or again"
    add(
        "--environment",
        nargs="+",
        action="extend",
        default=[],
        type=Path,
        metavar="FILE",
        help=text,
    )
    text = "a control: the last FILE's flows over these addresses of its hosts"
    add("--apart", nargs="+", action="extend", default=[], metavar="HOST=ADDRESS", help=text)
    add_place(parser)
    parser.set_defaults(pin=False)
    add = parser.add_argument_group("what is kept").add_argument
    add("-T", "--timeout", type=float, default=300.0, metavar="S", help="longest silence (300)")
    add("-J", "--json", type=Path, metavar="FILE", help="everything, for programs")
    add("--csv", type=Path, metavar="FILE", help="a line a step that counts")
    add("--report", type=Path, metavar="FILE", help="one HTML page with all of it")
    text = "time by setting and loss over time, .svg or .png; again for more"
    add("--plot", dest="plots", action="append", default=[], type=Path, metavar="FILE", help=text)
    add("-q", "--quiet", action="store_true", help="the results alone")
    return parser


def _plan(options: argparse.Namespace) -> TrialsPlan:
    if options.override:
        raise ConfigError("--override needs --config-name: of which experiment?")
    options.settle = 1 if options.settle is None else options.settle
    training = _training(options)
    models = _models(options.models or "gpt2", options.size)
    for model in models:
        if training.sequence is not None and (model.longest or 0) < training.sequence:
            most = f"takes at most {model.longest} tokens" if model.longest else "takes images"
            raise ConfigError(f"--sequence {training.sequence}: {model.title} {most}")
    if options.backend != "auto":
        raise ConfigError(
            f"--backend {options.backend}: here backends are arms", hint=f"--arms {options.backend}"
        )
    place = placement(options)
    if place.slurm or place.starter == "mpirun":
        what = "--slurm-mode" if place.slurm else "--starter mpirun"
        raise ConfigError(
            f"{what}: ranks of trials are started here or over SSH",
            hint="--hosts-file FILE, or leave it out",
        )
    require_unset((name for _, name, _ in place.environment), "--env")
    require_unset(os.environ, "the environment")
    arms = _arms(options, place)
    _judge(arms, options.comm)
    if not place.hosts:
        require(arms, chosen(place.device).name)
    return TrialsPlan(
        models=models,
        arms=arms,
        settings=read_settings(options.environment, options.apart),
        training=training,
        placement=place,
        outputs=_outputs(options),
        comm=tuple(options.comm),
        quiet=options.quiet,
    )


def _training(options: argparse.Namespace) -> Training:
    at_least("-n/--steps", options.steps, 1)
    at_least("--block", options.block, 1)
    at_least("-w/--warmup", options.warmup, 0)
    at_least("--settle", options.settle, 0)
    at_least("-b/--batch", options.batch, 1)
    at_least("--sequence", options.sequence, 16)
    at_least("--seed", options.seed, 0)
    if not 0 < options.bucket_mb <= 1 << 16:
        raise ConfigError(f"--bucket-mb {options.bucket_mb:g}; expected MiB above 0")
    last = options.steps % options.block or options.block
    if options.settle >= min(last, options.block):
        raise ConfigError(
            f"--settle {options.settle}: turns of {options.block} steps, the last of {last}, "
            "would count none",
            hint="longer turns (--block), which divide --steps",
        )
    return filled(Training, options)


def _models(text: str, size: str) -> tuple[Choice, ...]:
    default = next(known for known in SIZES if known == size)
    found = [c for word in text.split(",") if word.strip() for c in parse(word, default)]
    if not found:
        raise ConfigError(f"--models {text!r}; expected such as gpt2,bert:large")
    return tuple(dict.fromkeys(found))


def _arms(options: argparse.Namespace, place: Placement) -> tuple[Arm, ...]:
    accelerated = not chosen(place.device).is_host
    return _named_arms(options, accelerated=accelerated, one_host=len(place.hosts) < 2)


def _named_arms(
    options: argparse.Namespace, *, accelerated: bool, one_host: bool
) -> tuple[Arm, ...]:
    custom = parse_custom(options.arm)
    default = "ring,tree" if accelerated else "ring,tree,transpose"
    given = default if options.arms is None else options.arms
    names = [word.strip() for word in given.split(",") if word.strip()]
    names = list(dict.fromkeys((*names, *custom)))
    if not names:
        raise ConfigError(f"--arms {options.arms!r}; expected such as ring,tree")
    return tuple(
        resolve(name, accelerated=accelerated, one_host=one_host, custom=custom) for name in names
    )


def _judge(arms: Sequence[Arm], words: Sequence[str]) -> None:
    """Refuse options that are no backend's, or would make an arm another one."""
    given = judge([arm.backend for arm in arms], words)
    for arm in arms:
        own = dict(arm.environment)
        for option in registry.backend(arm.backend).options:
            if option.name in given[arm.backend] and option.variable in (*own, *CHOOSING):
                raise ConfigError(
                    f"--comm {option.name}: arm {arm.name} is {arm.told}",
                    hint=f"--arm NAME={arm.backend},{option.variable}=... is another arm",
                )


def _outputs(options: argparse.Namespace) -> Outputs:
    for path in options.plots:
        require_image(path, "--plot")
        require_writable(path, "--plot")
    for flag, path in (("--json", options.json), ("--csv", options.csv)):
        if path is not None:
            require_writable(path, flag)
    if options.report is not None:
        require_writable(options.report, "--report")
    return Outputs(options.json, options.csv, options.report, tuple(options.plots))


main = Trials().main
