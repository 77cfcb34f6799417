"""Command line of ``flagscale bench training``: parses it, and runs the sessions it describes.

A *session* trains one model with all arms (:mod:`.arms`) under one network setting: without
traffic, or with background traffic (:mod:`.settings`). Its ranks run :mod:`.session`. With
``--config-name`` an experiment's YAML is trained instead of a model (:mod:`.experiment`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flagscale.accelerators.registry import choose_accelerator
from flagscale.bench.command import BenchCommand, RankStarter
from flagscale.bench.files import require_writable
from flagscale.bench.machine import describe_machine
from flagscale.bench.options import (
    from_options,
    parse_backend_options,
    require_at_least,
)
from flagscale.bench.placement import Placement, parse_placement
from flagscale.bench.training.arms import (
    ALGORITHM_VARIABLES,
    Arm,
    parse_custom_arms,
    require_supported,
    require_unset,
    resolve_arm,
)
from flagscale.bench.training.experiment import (
    DEFAULT_SETTLE_STEPS,
    ExperimentSource,
    ExperimentTrainer,
    compare_arms_by_setting,
)
from flagscale.bench.training.models.names import SIZES, ModelChoice, parse_models
from flagscale.bench.training.options import build_parser
from flagscale.bench.training.output import OutputFiles, present_results
from flagscale.bench.training.plan import SessionPlan, TrainingOptions
from flagscale.bench.training.results import SessionResult
from flagscale.bench.training.schedule import draw_order
from flagscale.bench.training.settings import NetworkSetting, read_settings
from flagscale.bench.training.summary import is_valid
from flagscale.bench.world import BenchWorld, detect_world
from flagscale.comm import registry
from flagscale.errors import ConfigError, JobError
from flagscale.records import decode
from flagscale.report.figure import require_image


@dataclass(frozen=True)
class TrainingPlan:
    """All sessions of a command line."""

    models: tuple[ModelChoice, ...]
    arms: tuple[Arm, ...]
    settings: tuple[NetworkSetting, ...]
    training: TrainingOptions
    placement: Placement
    outputs: OutputFiles = field(default_factory=OutputFiles)
    comm: tuple[str, ...] = ()
    quiet: bool = False

    def check(self, ranks: int) -> None:
        """Raise ConfigError unless there are at least two ranks."""
        self.session(self.models[0], self.settings[0], Path()).check(ranks)

    def session(self, model: ModelChoice, setting: NetworkSetting, result: Path) -> SessionPlan:
        """Return the ranks' plan for one model under one setting."""
        return SessionPlan(
            model=model,
            setting=setting.label,
            arms=self.arms,
            training=self.training,
            placement=self.placement,
            comm=self.comm,
            quiet=self.quiet,
            result=result,
        )


class TrainingCommand(BenchCommand[TrainingPlan]):
    """Command that compares arms by training."""

    prog = "flagscale bench training"
    rank_entry_point = "flagscale.bench.training.session:run_rank"

    def parse_plan(self, words: list[str], prog: str, *, writes_results: bool) -> TrainingPlan:
        return _make_plan(build_parser(prog).parse(words))

    def run_arguments(self, words: list[str], prog: str) -> int:
        """Run a command line, and return the exit code.

        Raises:
            FlagscaleError: the line is wrong, a session failed, or a launcher has started this
                process.
        """
        refuse_launcher(detect_world(os.environ))
        options = build_parser(prog).parse(words)
        if options.config_name is not None:
            return _compare_by_experiment(options)
        return super().run_arguments(words, prog)

    def start(self, plan: TrainingPlan, ranks: int) -> int:
        """Run every session, one after the other, and print and write the results. Returns the exit
        code: 1 if exact arms have different losses, or ranks ended with different parameters.
        """
        results: list[SessionResult] = []
        machine = describe_machine("flagscale", "torch", "transformers")
        with tempfile.TemporaryDirectory(prefix="flagscale-trials-") as directory:
            for model in plan.models:
                order = draw_order(len(plan.settings), plan.training.seed)
                results_by_setting: dict[int, SessionResult] = {}
                for number in order:
                    result = Path(directory) / f"{len(results)}_{number}.json"
                    results_by_setting[number] = self._run_session(
                        plan, model, number, ranks, result
                    )
                results += [results_by_setting[number] for number in range(len(order))]
        present_results(results, plan.training, {**machine, "ranks": ranks}, plan.outputs)
        return 0 if all(map(is_valid, results)) else JobError.exit_code

    def _run_session(
        self, plan: TrainingPlan, model: ModelChoice, number: int, ranks: int, path: Path
    ) -> SessionResult:
        setting = plan.settings[number]
        session = plan.session(model, setting, path)
        if not plan.quiet:
            names = ", ".join(arm.name for arm in plan.arms)
            print(f"# {model.title} on {ranks} ranks, {setting.description}: {names}", flush=True)
        with setting.play_traffic(plan.placement.ssh_config) as probe:
            tail_before = probe()
            code = _SESSION_STARTER.start(session, ranks)
            tail_after = probe()
        if code or not path.is_file():
            raise JobError(
                f"training {model.title}, {setting.description}, failed", exit_code=code or 1
            )
        result = decode(SessionResult, path.read_text(encoding="utf-8"))
        return setting.add_tail_ratios(result, tail_before, tail_after)


def _compare_by_experiment(options: argparse.Namespace) -> int:
    """Compare the arms by training an experiment's YAML, and return the exit code."""
    conflicting = [flag for flag, name in _FLAGS_REPLACED_BY_YAML.items() if getattr(options, name)]
    if conflicting:
        raise ConfigError(
            f"{', '.join(conflicting)}: the YAML says what is trained, and where",
            hint="--override train.model.num_layers=2 changes a value of it",
        )
    options.settle = DEFAULT_SETTLE_STEPS if options.settle is None else options.settle
    training, outputs = _training_options(options), _output_files(options)
    config = ExperimentSource(options.config_path / options.config_name, tuple(options.override))
    trainer = ExperimentTrainer(config, training)
    device = choose_accelerator(options.device)
    arms = _named_arms(options, accelerated=not device.is_host, one_host=len(trainer.hosts) < 2)
    trainer.check_arms(arms)
    settings = read_settings(options.environment, options.apart)
    order = draw_order(len(settings), training.seed)
    results = compare_arms_by_setting(
        trainer, arms, settings, order, options.ssh_config, quiet=options.quiet
    )
    machine = {**describe_machine("flagscale", "torch", "megatron-core"), "ranks": trainer.ranks}
    present_results(results, training, machine, outputs)
    return 0 if all(map(is_valid, results)) else JobError.exit_code


_FLAGS_REPLACED_BY_YAML = {
    "--models": "models",
    "--sequence": "sequence",
    "-r": "nworkers",
    "--hosts": "hosts",
    "--hosts-file": "hosts_file",
    "--slurm-mode": "slurm",
    "--env": "env",
    "--comm": "comm",
}
"""Flags that an experiment's YAML replaces."""


class _SessionStarter(RankStarter[SessionPlan]):
    """Starter of the ranks of one session."""

    rank_entry_point = TrainingCommand.rank_entry_point


_SESSION_STARTER = _SessionStarter()


def refuse_launcher(world: BenchWorld | None) -> None:
    """Refuse to run under a launcher, because every session starts its own ranks.

    Raises:
        ConfigError: a launcher has started this process.
    """
    if world is not None:
        raise ConfigError(
            f"started under {world.launcher}: this command starts its own ranks, anew for every "
            "model and setting",
            hint="start it once, with -r 4, or with --hosts-file",
        )


def _make_plan(options: argparse.Namespace) -> TrainingPlan:
    if options.override:
        raise ConfigError("--override needs --config-name: of which experiment?")
    options.settle = 1 if options.settle is None else options.settle
    training = _training_options(options)
    models = _selected_models(options.models or "gpt2", options.size)
    for model in models:
        if training.sequence is not None and (model.max_sequence or 0) < training.sequence:
            limit = (
                f"takes at most {model.max_sequence} tokens"
                if model.max_sequence
                else "takes images"
            )
            raise ConfigError(f"--sequence {training.sequence}: {model.title} {limit}")
    if options.backend != "auto":
        raise ConfigError(
            f"--backend {options.backend}: here backends are arms", hint=f"--arms {options.backend}"
        )
    placement = parse_placement(options)
    if placement.slurm or placement.starter == "mpirun":
        flag = "--slurm-mode" if placement.slurm else "--starter mpirun"
        raise ConfigError(
            f"{flag}: ranks of trials are started here or over SSH",
            hint="--hosts-file FILE, or omit it",
        )
    require_unset((name for _, name, _ in placement.environment), "--env")
    require_unset(os.environ, "the environment")
    arms = _arms_for_placement(options, placement)
    _check_backend_options(arms, options.comm)
    if not placement.hosts:
        require_supported(arms, choose_accelerator(placement.device).name)
    return TrainingPlan(
        models=models,
        arms=arms,
        settings=read_settings(options.environment, options.apart),
        training=training,
        placement=placement,
        outputs=_output_files(options),
        comm=tuple(options.comm),
        quiet=options.quiet,
    )


def _training_options(options: argparse.Namespace) -> TrainingOptions:
    require_at_least("-n/--steps", options.steps, 1)
    require_at_least("--block", options.block, 1)
    require_at_least("-w/--warmup", options.warmup, 0)
    require_at_least("--settle", options.settle, 0)
    require_at_least("-b/--batch", options.batch, 1)
    require_at_least("--sequence", options.sequence, 16)
    require_at_least("--seed", options.seed, 0)
    if not 0 < options.bucket_mb <= 1 << 16:
        raise ConfigError(f"--bucket-mb {options.bucket_mb:g}; expected MiB above 0")
    last_block = options.steps % options.block or options.block
    if options.settle >= min(last_block, options.block):
        raise ConfigError(
            f"--settle {options.settle}: turns of {options.block} steps, the last of {last_block}, "
            "would count none",
            hint="longer turns (--block), which divide --steps",
        )
    return from_options(TrainingOptions, options)


def _selected_models(text: str, size: str) -> tuple[ModelChoice, ...]:
    default = next(name for name in SIZES if name == size)
    choices = [c for word in text.split(",") if word.strip() for c in parse_models(word, default)]
    if not choices:
        raise ConfigError(f"--models {text!r}; expected such as gpt2,bert:large")
    return tuple(dict.fromkeys(choices))


def _arms_for_placement(options: argparse.Namespace, placement: Placement) -> tuple[Arm, ...]:
    accelerated = not choose_accelerator(placement.device).is_host
    return _named_arms(options, accelerated=accelerated, one_host=len(placement.hosts) < 2)


def _named_arms(
    options: argparse.Namespace, *, accelerated: bool, one_host: bool
) -> tuple[Arm, ...]:
    custom_arms = parse_custom_arms(options.arm)
    default = "ring,tree" if accelerated else "ring,tree,transpose"
    selection = default if options.arms is None else options.arms
    names = [word.strip() for word in selection.split(",") if word.strip()]
    names = list(dict.fromkeys((*names, *custom_arms)))
    if not names:
        raise ConfigError(f"--arms {options.arms!r}; expected such as ring,tree")
    return tuple(
        resolve_arm(name, accelerated=accelerated, one_host=one_host, custom=custom_arms)
        for name in names
    )


def _check_backend_options(arms: Sequence[Arm], words: Sequence[str]) -> None:
    """Refuse ``--comm`` options of backends that no arm uses, and options that would override the
    variables of an arm.
    """
    options = parse_backend_options([arm.backend for arm in arms], words)
    for arm in arms:
        variables = dict(arm.environment)
        for option in registry.get_backend(arm.backend).options:
            if option.name in options[arm.backend] and option.variable in (
                *variables,
                *ALGORITHM_VARIABLES,
            ):
                raise ConfigError(
                    f"--comm {option.name}: arm {arm.name} is {arm.description}",
                    hint=f"--arm NAME={arm.backend},{option.variable}=... is another arm",
                )


def _output_files(options: argparse.Namespace) -> OutputFiles:
    for path in options.plots:
        require_image(path, "--plot")
        require_writable(path, "--plot")
    for flag, path in (("--json", options.json), ("--csv", options.csv)):
        if path is not None:
            require_writable(path, flag)
    if options.report is not None:
        require_writable(options.report, "--report")
    return OutputFiles(options.json, options.csv, options.report, tuple(options.plots))


main = TrainingCommand().main
