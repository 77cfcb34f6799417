"""Comparison of arms (:mod:`.arms`) by training an experiment's YAML
(``flagscale bench training --config-name``).

Every *turn*, some consecutive steps of one arm, is a run of its own. Each arm has its own
directory. Its next turn resumes from the checkpoint of the previous one, so that its losses form
one curve. A turn changes only the values in :meth:`ExperimentTrainer.turn_overrides`; everything
else, including hosts and parallel layout, is as for ``action=run``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.bench.training.arms import ALGORITHM_VARIABLES, Arm, require_unset
from flagscale.bench.training.plan import TrainingOptions
from flagscale.bench.training.results import ArmResult, SessionResult, Steps, TrainingSubject
from flagscale.bench.training.schedule import Block, schedule_blocks
from flagscale.bench.training.settings import NetworkSetting
from flagscale.comm import registry
from flagscale.config.arguments.rules.optimizer import BOUNDED_VARIABLE, exact_reductions
from flagscale.errors import ConfigError, JobError
from flagscale.status import Event

DEFAULT_SETTLE_STEPS = 5
"""Default number of steps at the start of every turn that do not count: each run warms up."""


@dataclass(frozen=True)
class ExperimentSource:
    """The YAML to train: its file, and overrides in Hydra's syntax."""

    config: Path
    overrides: tuple[str, ...] = ()


class ExperimentTrainer:
    """Trains an experiment by turns under each arm.

    Args:
        source: YAML with overrides.
        training: numbers of steps: counted, per turn, and uncounted at the start of a turn.

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
                f"{source.config}: it runs {self.experiment.task.program}, which reports no steps",
                hint="flagscale bench training takes experiments of this project's own program",
            )
        train_iters = self.experiment.train.given.get("train_iters")
        if train_iters is not None and train_iters < training.steps:
            key = self.experiment.train.key_of("train_iters")
            raise ConfigError(
                f"--steps {training.steps}: {key} of {source.config} is {train_iters}"
            )
        turns, remainder = divmod(training.steps, training.block)
        if remainder:
            raise ConfigError(
                f"--steps {training.steps}: turns of an experiment are whole, of --block "
                f"{training.block} steps",
                hint=f"--steps {max(turns, 1) * training.block}",
            )
        self.ranks, self.hosts = plan.world_size, tuple(host.name for host in plan.hosts)
        self._hosts_of_ranks = tuple(host.name for host in plan.hosts for _ in range(host.nproc))
        timestamp = time.strftime("%Y%m%d-%H%M%S")
        self.directory = self.experiment.exp_dir / "trials" / timestamp

    @property
    def subject(self) -> TrainingSubject:
        return TrainingSubject(str(self._source.config), self.experiment.name)

    def check_arms(self, arms: Sequence[Arm]) -> None:
        """Refuse arms whose variables the YAML would override.

        Raises:
            ConfigError: the YAML chooses an algorithm for all arms, or has a setting that requires
                exact reductions with an arm for bounded ones.
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
        """Train all turns of all arms under one setting of the network, whose traffic has been
        started.

        Raises:
            ConfigError: an arm's backend is not available, or the YAML has a mistake.
            JobError: a run failed.
        """
        events: list[list[tuple[int, Event]]] = [[] for _ in arms]
        training = self._training
        for turn in schedule_blocks(
            len(arms), steps=training.steps, block=training.block, warmup=0, seed=training.seed
        ):
            arm = arms[turn.arm]
            turn_events = self._run_turn(self.turn_overrides(arm, setting.label, turn))
            events[turn.arm] += [(turn.round, event) for event in turn_events]
            if not quiet:
                seconds = [event.get("step_seconds") for event in turn_events[training.settle :]]
                mean = sum(seconds) / max(len(seconds), 1)
                print(f"# round {turn.round}: {arm.name}: {mean:.4g} s a step", flush=True)
        return SessionResult(
            model=self.subject,
            setting=setting.label,
            ranks=self.ranks,
            device=self._device,
            hosts=self._hosts_of_ranks,
            arms=tuple(
                self._arm_result(arm, turn_events)
                for arm, turn_events in zip(arms, events, strict=True)
            ),
        )

    def turn_overrides(self, arm: Arm, setting: str, turn: Block) -> list[str]:
        """Return the overrides of a turn: the arm's backend and environment, its directory, its
        last step, and settings that avoid other work between steps.
        """
        training, directory = self._training, self.directory / setting.replace(" ", "-") / arm.name
        arguments: dict[str, Any] = {
            "distributed_backend": arm.backend,
            "exit_interval": training.block,
            "save_interval": training.steps,
            "save": directory / "checkpoints",
            "keep_last": 1,
            "log_interval": 1,
            "eval_iters": 0,
        }
        if turn.first > 0:
            arguments |= {"load": directory / "checkpoints", "finetune": False}
        train = self.experiment.train
        overrides = [f"experiment.exp_dir={_quote(directory)}"]
        for name, value in arguments.items():
            overrides.append(f"++{train.key_of(name)}={_quote(value)}")
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
        events = [event for rank_events in snapshot.events.values() for event in rank_events]
        steps = [event for event in events if event.event == "progress"]
        self._device = next((str(e.get("device")) for e in events if e.event == "started"), "")
        if not steps:
            raise JobError(f"{run.id} in {run.directory}: no step was reported")
        return sorted(steps, key=lambda event: int(event.get("step")))

    def _arm_result(self, arm: Arm, events: Sequence[tuple[int, Event]]) -> ArmResult:
        """Combine the steps of an arm's turns. ``events``: round and progress event of each."""
        settle, step_of_turn, rows = self._training.settle, 0, []
        for index, (number, event) in enumerate(events):
            step_of_turn = step_of_turn + 1 if index and events[index - 1][0] == number else 1
            rows.append((step_of_turn > settle, number, event))
        return ArmResult(
            arm=arm,
            version=arm.backend,
            steps=_to_steps((number, event) for counts, number, event in rows if counts),
            settling=_to_steps((number, event) for counts, number, event in rows if not counts),
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
    """Train a session under each setting, in ``order``, and return them in the order of
    ``settings``. A signal that ends this process also stops the current run.
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
            tail_before = probe()
            session = trainer.train_session(setting, arms, quiet=quiet)
            results[number] = setting.add_tail_ratios(session, tail_before, probe())
    if not quiet:
        print(f"# the runs are kept in {trainer.directory}")
    return [results[number] for number in range(len(settings))]


def _to_steps(rounds_and_events: Iterator[tuple[int, Event]]) -> Steps:
    rows = list(rounds_and_events)
    return Steps(
        step=tuple(int(event.get("step")) for _, event in rows),
        round=tuple(number for number, _ in rows),
        seconds=tuple(float(event.get("step_seconds")) for _, event in rows),
        loss=tuple(event.get("loss") for _, event in rows),
    )


def _bounded_statistics(events: Sequence[Event]) -> dict[str, float]:
    """Return statistics of bounded all_reduces: means of fractions, and sums of counts."""
    statistics: dict[str, float] = {}
    for name in ("tail_excluded", "tail_lost", "tail_repeated", "tail_skipped"):
        values = [value for event in events if (value := event.get(name)) is not None]
        if values:
            is_fraction = name in ("tail_excluded", "tail_lost")
            statistics[name.removeprefix("tail_")] = sum(values) / (
                len(values) if is_fraction else 1
            )
    return statistics


def _quote(value: Any) -> str:
    """Quote a value for Hydra's command line."""
    if isinstance(value, bool | int):
        return str(value).lower()
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
