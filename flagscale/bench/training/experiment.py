"""Comparison of arms by an experiment's own YAML: every turn is a start of the whole run.

Each arm has a directory of its own. Its next turn resumes from the checkpoint of the previous
one, so that its losses form one curve. A turn changes only the values in
:meth:`ExperimentTrainer.overrides_of`; everything else, including hosts and layout, is as
``action=run`` has it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flagscale.bench.training.arms import ALGORITHM_VARIABLES, Arm, require_unset
from flagscale.bench.training.plan import TrainingOptions
from flagscale.bench.training.results import ArmResult, SessionResult, Steps, TrainingSubject
from flagscale.bench.training.schedule import Block, schedule_blocks
from flagscale.bench.training.settings import NetworkSetting
from flagscale.comm import registry
from flagscale.config.arguments.rules.optimizer import BOUNDED_VARIABLE, exact_reductions
from flagscale.errors import ConfigError, JobError
from flagscale.status import Event

if TYPE_CHECKING:
    pass

SETTLE = 5
"""Steps at the start of every turn that do not count: a run has to warm up each time."""


@dataclass(frozen=True)
class ExperimentSource:
    """The YAML to train: its file, and overrides in Hydra's syntax."""

    config: Path
    overrides: tuple[str, ...] = ()


class ExperimentTrainer:
    """Starts an experiment under one arm after the other.

    Args:
        chosen: the YAML.
        training: numbers of steps: that count, of a turn, and that settle.

    Raises:
        ConfigError: every mistake in the configuration, or the experiment cannot be compared.
    """

    def __init__(self, source: ExperimentSource, training: TrainingOptions) -> None:
        from flagscale import api

        self._source, self._training, self._device = source, training, ""
        self.experiment = api.load(source.config, source.overrides, "plan")
        plan = api.plan(source.config, source.overrides)
        if self.experiment.task.is_command or plan.external:
            raise ConfigError(
                f"{source.config}: {self.experiment.task.program} is run, whose steps are not told",
                hint="flagscale bench training takes experiments of this project's own program",
            )
        planned = self.experiment.train.given.get("train_iters")
        if planned is not None and planned < training.steps:
            key = self.experiment.train.key_of("train_iters")
            raise ConfigError(f"--steps {training.steps}: {key} of {source.config} is {planned}")
        turns, remainder = divmod(training.steps, training.block)
        if remainder:
            raise ConfigError(
                f"--steps {training.steps}: turns of an experiment are whole, of --block "
                f"{training.block} steps",
                hint=f"--steps {max(turns, 1) * training.block}",
            )
        self.ranks, self.hosts = plan.world_size, tuple(host.name for host in plan.hosts)
        self._hosts_of_ranks = tuple(host.name for host in plan.hosts for _ in range(host.nproc))
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self.directory = self.experiment.exp_dir / "trials" / stamp

    @property
    def subject(self) -> TrainingSubject:
        return TrainingSubject(str(self._source.config), self.experiment.name)

    def check_arms(self, arms: Sequence[Arm]) -> None:
        """Refuse arms that the YAML would change into another.

        Raises:
            ConfigError: the YAML chooses an algorithm for all arms, or reduces exactly where an
                arm would be bounded.
        """
        envs = self.experiment.envs
        for variables in (envs.common, *envs.by_type.values(), *envs.by_host.values()):
            require_unset(variables, "experiment.envs")
        args = self.experiment.train
        options = {word.partition("=")[0] for word in args["comm"] or ()}
        for arm in arms:
            for option in registry.get_backend(arm.backend).options:
                if option.name in options and option.variable in (
                    *ALGORITHM_VARIABLES,
                    *dict(arm.environment),
                ):
                    raise ConfigError(
                        f"comm.{option.name} of the YAML would win over arm {arm.name}: "
                        f"{arm.description}",
                        hint="--override '~train.system.comm'",
                    )
            if BOUNDED_VARIABLE in arm.environment:
                for name, message in exact_reductions(args.values, f"arm {arm.name}"):
                    key = args.key_of(name)
                    required = "false" if name == "use_distributed_optimizer" else "cpu"
                    raise ConfigError(f"{key}: {message}", hint=f"--override {key}={required}")

    def train_session(
        self, setting: NetworkSetting, arms: Sequence[Arm], *, quiet: bool
    ) -> SessionResult:
        """Train all turns of all arms under one setting of the network, whose traffic is
        playing.

        Raises:
            ConfigError: an arm's backend is not available, or the YAML has a mistake.
            JobError: a run failed.
        """
        events: list[list[tuple[int, Event]]] = [[] for _ in arms]
        t = self._training
        for turn in schedule_blocks(len(arms), steps=t.steps, block=t.block, warmup=0, seed=t.seed):
            arm = arms[turn.arm]
            steps = self._run_turn(self.overrides_of(arm, setting.label, turn))
            events[turn.arm] += [(turn.round, event) for event in steps]
            if not quiet:
                seconds = [event.get("step_seconds") for event in steps[t.settle :]]
                mean = sum(seconds) / max(len(seconds), 1)
                print(f"# round {turn.round}: {arm.name}: {mean:.4g} s a step", flush=True)
        return SessionResult(
            model=self.subject,
            setting=setting.label,
            ranks=self.ranks,
            device=self._device,
            hosts=self._hosts_of_ranks,
            arms=tuple(
                self._arm_result(arm, steps) for arm, steps in zip(arms, events, strict=True)
            ),
        )

    def overrides_of(self, arm: Arm, setting: str, turn: Block) -> list[str]:
        """Return the overrides of a turn: the arm's backend and environment, its directory, its
        last step, and settings that avoid other work between steps.
        """
        t, directory = self._training, self.directory / setting.replace(" ", "-") / arm.name
        changed: dict[str, Any] = {
            "distributed_backend": arm.backend,
            "exit_interval": t.block,
            "save_interval": t.steps,
            "save": directory / "checkpoints",
            "keep_last": 1,
            "log_interval": 1,
            "eval_iters": 0,
        }
        if turn.first > 0:
            changed |= {"load": directory / "checkpoints", "finetune": False}
        keys = self.experiment.train
        overrides = [f"experiment.exp_dir={_quote(directory)}"]
        for name, value in changed.items():
            overrides.append(f"++{keys.key_of(name)}={_quote(value)}")
        overrides += [
            f"++experiment.envs.{name}={_quote(value)}" for name, value in arm.environment
        ]
        return [*self._source.overrides, *overrides]

    def _run_turn(self, overrides: Sequence[str]) -> list[Event]:
        """Start a run, wait for its end, and return the steps that one of its ranks reported."""
        from flagscale import api
        from flagscale.launcher.snapshot import Phase

        run = api.launch(self._source.config, overrides)
        try:
            snapshot = run.wait(every=0.5)
        except BaseException:
            run.stop()
            raise
        if snapshot.phase is not Phase.COMPLETED:
            reason = (
                snapshot.failure.headline()
                if snapshot.failure is not None
                else snapshot.phase.value
            )
            raise JobError(
                f"{run.id} in {run.directory}: {reason}", exit_code=snapshot.exit_code or 1
            )
        every = [event for events in snapshot.events.values() for event in events]
        steps = [event for event in every if event.event == "progress"]
        self._device = next((str(e.get("device")) for e in every if e.event == "started"), "")
        if not steps:
            raise JobError(f"{run.id} in {run.directory}: it has told of no step")
        return sorted(steps, key=lambda event: int(event.get("step")))

    def _arm_result(self, arm: Arm, events: Sequence[tuple[int, Event]]) -> ArmResult:
        settle, steps_of_turn, rows = self._training.settle, 0, []
        for place, (number, event) in enumerate(events):
            steps_of_turn = steps_of_turn + 1 if place and events[place - 1][0] == number else 1
            rows.append((steps_of_turn > settle, number, event))
        return ArmResult(
            arm=arm,
            version=arm.backend,
            steps=_steps((number, event) for counts, number, event in rows if counts),
            settling=_steps((number, event) for counts, number, event in rows if not counts),
            parameters=0,
            buckets=(),
            replicas_equal=None,
            tail=_bounded_statistics([event for counts, _, event in rows if counts]),
        )


def compare_arms_by_setting(
    trainer: ExperimentTrainer,
    arms: Sequence[Arm],
    settings: Sequence[NetworkSetting],
    order: Sequence[int],
    ssh_config: Path | None,
    *,
    quiet: bool,
) -> list[SessionResult]:
    """Return the sessions of all settings. They run in ``order``. A signal that ends this
    process ends the current run.
    """
    from flagscale.launcher.actions import interrupt_on_signals

    interrupt_on_signals()
    results: dict[int, SessionResult] = {}
    for number in order:
        setting = settings[number]
        if not quiet:
            names = ", ".join(arm.name for arm in arms)
            print(
                f"# {trainer.subject.title} on {trainer.ranks} ranks, "
                f"{setting.description}: {names}"
            )
        with setting.play_traffic(ssh_config) as probe:
            before = probe()
            session = trainer.train_session(setting, arms, quiet=quiet)
            results[number] = setting.add_tail_ratios(session, before, probe())
    if not quiet:
        print(f"# the runs are kept in {trainer.directory}")
    return [results[number] for number in range(len(settings))]


def _steps(events: Iterator[tuple[int, Event]]) -> Steps:
    rows = list(events)
    return Steps(
        step=tuple(int(event.get("step")) for _, event in rows),
        round=tuple(number for number, _ in rows),
        seconds=tuple(float(event.get("step_seconds")) for _, event in rows),
        loss=tuple(event.get("loss") for _, event in rows),
    )


def _bounded_statistics(events: Sequence[Event]) -> dict[str, float]:
    """Return statistics of bounded all_reduces: mean shares, and total counts of steps."""
    statistics: dict[str, float] = {}
    for name in ("tail_excluded", "tail_lost", "tail_repeated", "tail_skipped"):
        values = [value for event in events if (value := event.get(name)) is not None]
        if values:
            share = name in ("tail_excluded", "tail_lost")
            statistics[name.removeprefix("tail_")] = sum(values) / (len(values) if share else 1)
    return statistics


def _quote(value: Any) -> str:
    """Quote a value for Hydra's command line."""
    if isinstance(value, bool | int):
        return str(value).lower()
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
