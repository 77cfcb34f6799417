"""Training of an experiment's own YAML under the arms: every turn is a start of the whole run.

Each arm has a directory of its own, in which its next turn goes on from the checkpoint of the last
one, so that its losses are one curve. What a turn changes of the YAML is in :meth:`Turns.words`;
everything else, hosts and layout too, is as ``action=run`` has it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flagscale.bench.training.arms import CHOOSING, Arm, require_unset
from flagscale.bench.training.plan import Training
from flagscale.bench.training.results import ArmResult, SessionResult, Steps, Trained
from flagscale.bench.training.schedule import Block, blocks
from flagscale.bench.training.settings import Setting
from flagscale.comm import registry
from flagscale.config.arguments import bounded
from flagscale.config.checks import Arguments
from flagscale.errors import ConfigError, JobError
from flagscale.status import Event

if TYPE_CHECKING:
    from flagscale.config.schema import Experiment

SETTLE = 5
"""Steps at the start of every turn that do not count: a run has to warm up each time."""


@dataclass(frozen=True)
class Chosen:
    """The YAML that is trained: the file, and what is overridden, as Hydra writes it."""

    config: Path
    overrides: tuple[str, ...] = ()


class Turns:
    """Starts an experiment under one arm after the other.

    Args:
        chosen: the YAML.
        training: how many steps count, a turn has, and settle.

    Raises:
        ConfigError: every mistake in the configuration, and what cannot be compared.
    """

    def __init__(self, chosen: Chosen, training: Training) -> None:
        from flagscale import api

        self._chosen, self._training, self._device = chosen, training, ""
        self.experiment = api.load(chosen.config, chosen.overrides, "plan")
        plan = api.plan(chosen.config, chosen.overrides)
        if self.experiment.task.is_command or plan.external:
            raise ConfigError(
                f"{chosen.config}: {self.experiment.task.program} is run, whose steps are not told",
                hint="flagscale bench training takes experiments of this project's own program",
            )
        own = _leaves(self.experiment).get("train_iters", "")
        planned = _value(self.experiment, own)
        if isinstance(planned, int) and planned < training.steps:
            raise ConfigError(f"--steps {training.steps}: {own} of {chosen.config} is {planned}")
        turns, rest = divmod(training.steps, training.block)
        if rest:
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
    def subject(self) -> Trained:
        return Trained(str(self._chosen.config), self.experiment.name)

    def admit(self, arms: Sequence[Arm]) -> None:
        """Refuse arms that the YAML would make another, or one.

        Raises:
            ConfigError: it chooses an algorithm for all, or sums exactly what one would bound.
        """
        envs = self.experiment.envs
        for variables in (envs.common, *envs.by_type.values(), *envs.by_host.values()):
            require_unset(variables, "experiment.envs")
        args = Arguments.of(self.experiment)
        given = {word.partition("=")[0] for word in args["comm"] or ()}
        for arm in arms:
            for option in registry.backend(arm.backend).options:
                if option.name in given and option.variable in (*CHOOSING, *dict(arm.environment)):
                    raise ConfigError(
                        f"comm.{option.name} of the YAML would win over arm {arm.name}: {arm.told}",
                        hint="--override '~train.system.comm'",
                    )
            if bounded.VARIABLE in arm.environment:
                for name, message in bounded.exact_anyway(args.values(), f"arm {arm.name}"):
                    place = args.keys.get(name, f"train.system.{name}")
                    wanted = "false" if name == "use_distributed_optimizer" else "cpu"
                    raise ConfigError(f"{place}: {message}", hint=f"--override {place}={wanted}")

    def session(self, setting: Setting, arms: Sequence[Arm], *, quiet: bool) -> SessionResult:
        """All turns of all arms under one setting of the network, which is played by now.

        Raises:
            ConfigError: an arm's backend cannot be had, or the YAML has a mistake.
            JobError: a run failed.
        """
        done: list[list[tuple[int, Event]]] = [[] for _ in arms]
        t = self._training
        for turn in blocks(len(arms), steps=t.steps, block=t.block, warmup=0, seed=t.seed):
            arm = arms[turn.arm]
            told = self._run(self.words(arm, setting.label, turn))
            done[turn.arm] += [(turn.round, event) for event in told]
            if not quiet:
                seconds = [event.get("step_seconds") for event in told[t.settle :]]
                mean = sum(seconds) / max(len(seconds), 1)
                print(f"# round {turn.round}: {arm.name}: {mean:.4g} s a step", flush=True)
        return SessionResult(
            model=self.subject,
            setting=setting.label,
            ranks=self.ranks,
            device=self._device,
            hosts=self._hosts_of_ranks,
            arms=tuple(self._result(arm, told) for arm, told in zip(arms, done, strict=True)),
        )

    def words(self, arm: Arm, setting: str, turn: Block) -> list[str]:
        """What a turn overrides: the arm's backend and environment, where it is kept, how far it
        goes, and that nothing is done between steps."""
        t, own = self._training, self.directory / setting.replace(" ", "-") / arm.name
        changed: dict[str, Any] = {
            "distributed_backend": arm.backend,
            "exit_interval": t.block,
            "save_interval": t.steps,
            "save": own / "checkpoints",
            "keep_last": 1,
            "log_interval": 1,
            "eval_iters": 0,
        }
        if turn.first > 0:
            changed |= {"load": own / "checkpoints", "finetune": False}
        given = _leaves(self.experiment)
        words = [f"experiment.exp_dir={_quoted(own)}"]
        for name, value in changed.items():
            words.append(f"++{given.get(name, f'train.system.{name}')}={_quoted(value)}")
        words += [f"++experiment.envs.{name}={_quoted(value)}" for name, value in arm.environment]
        return [*self._chosen.overrides, *words]

    def _run(self, words: Sequence[str]) -> list[Event]:
        """Start a run, wait for its end, and return the steps that one of its ranks told."""
        from flagscale import api
        from flagscale.launcher.snapshot import Phase

        run = api.launch(self._chosen.config, words)
        try:
            seen = run.wait(every=0.5)
        except BaseException:
            run.stop()
            raise
        if seen.phase is not Phase.COMPLETED:
            why = seen.failure.headline() if seen.failure is not None else seen.phase.value
            raise JobError(f"{run.id} in {run.directory}: {why}", exit_code=seen.exit_code or 1)
        every = [event for events in seen.events.values() for event in events]
        told = [event for event in every if event.event == "progress"]
        self._device = next((str(e.get("device")) for e in every if e.event == "started"), "")
        if not told:
            raise JobError(f"{run.id} in {run.directory}: it has told of no step")
        return sorted(told, key=lambda event: int(event.get("step")))

    def _result(self, arm: Arm, told: Sequence[tuple[int, Event]]) -> ArmResult:
        settle, seen, rows = self._training.settle, 0, []
        for place, (number, event) in enumerate(told):
            seen = seen + 1 if place and told[place - 1][0] == number else 1
            rows.append((seen > settle, number, event))
        return ArmResult(
            arm=arm,
            version=arm.backend,
            steps=_steps((number, event) for counts, number, event in rows if counts),
            settling=_steps((number, event) for counts, number, event in rows if not counts),
            parameters=0,
            buckets=(),
            replicas_equal=None,
            tail=_tail([event for counts, _, event in rows if counts]),
        )


def compare(
    turns: Turns, arms: Sequence[Arm], settings: Sequence[Setting], order: Sequence[int],
    ssh_config: Path | None, *, quiet: bool,
) -> list[SessionResult]:  # fmt: skip
    """The sessions of all settings, carried out in ``order`` and returned in theirs. A signal to
    end ends the run that is under way."""
    from flagscale.launcher.actions import be_interrupted

    be_interrupted()
    found: dict[int, SessionResult] = {}
    for number in order:
        setting = settings[number]
        if not quiet:
            names = ", ".join(arm.name for arm in arms)
            print(f"# {turns.subject.title} on {turns.ranks} ranks, {setting.told}: {names}")
        with setting.played(ssh_config) as probe:
            before = probe()
            session = turns.session(setting, arms, quiet=quiet)
            found[number] = setting.judged(session, before, probe())
    if not quiet:
        print(f"# the runs are kept in {turns.directory}")
    return [found[number] for number in range(len(settings))]


def _steps(told: Iterator[tuple[int, Event]]) -> Steps:
    rows = list(told)
    return Steps(
        step=tuple(int(event.get("step")) for _, event in rows),
        round=tuple(number for number, _ in rows),
        seconds=tuple(float(event.get("step_seconds")) for _, event in rows),
        loss=tuple(event.get("loss") for _, event in rows),
    )


def _tail(told: Sequence[Event]) -> dict[str, float]:
    """What steps have said of bounded sums: shares on average, and how many did not go so."""
    found: dict[str, float] = {}
    for name in ("tail_excluded", "tail_lost", "tail_repeated", "tail_skipped"):
        known = [value for event in told if (value := event.get(name)) is not None]
        if known:
            share = name in ("tail_excluded", "tail_lost")
            found[name.removeprefix("tail_")] = sum(known) / (len(known) if share else 1)
    return found


def _leaves(experiment: Experiment) -> dict[str, str]:
    """The arguments that the YAML gives, by their names: where each of them is."""
    found: dict[str, str] = {}

    def walk(values: Mapping[str, Any], place: str) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                walk(value, f"{place}.{key}")
            else:
                found[str(key).replace("-", "_")] = f"{place}.{key}"

    walk(experiment.train.sections(), "train")
    return found


def _value(experiment: Experiment, place: str) -> Any:
    """What a YAML gives at a place of :func:`_leaves`; None where it has none."""
    found: Any = {"train": experiment.train.sections()}
    for key in place.split(".") if place else ["train", ""]:
        found = found.get(key)
    return found


def _quoted(value: Any) -> str:
    """A value as Hydra's command line has it."""
    if isinstance(value, bool | int):
        return str(value).lower()
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
