"""Python API: plan, start, observe and end runs.

::

    import flagscale

    run = flagscale.launch("examples/llama3/conf/train.yaml", ["train.model.seed=7"])
    status = run.wait()
    print(status.phase, status.loss, run.logs(rank=0, lines=20))

Errors are exceptions of :mod:`flagscale.errors`. The API installs no signal handlers and leaves no
global state of Hydra's behind, so it works in notebooks, in threads, and in programs that use
Hydra themselves.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from flagscale.config.actions import Purpose
from flagscale.errors import ConfigError, Problem, RunStateError

# Importing this module is cheap: planning and launching code is loaded on first use.
if TYPE_CHECKING:
    from flagscale.config.schema import Experiment
    from flagscale.launcher.planning.model import LaunchPlan
    from flagscale.launcher.runners.base import Runner
    from flagscale.launcher.snapshot import Snapshot
    from flagscale.launcher.state import RunState

Config = str | os.PathLike[str] | Mapping[str, Any]
"""Path of a YAML, from which Hydra composes the configuration, or the whole configuration."""
_CONFIG_NAME = "config"


def launch(config: Config, overrides: Sequence[str] = ()) -> Run:
    """Start a run in the background, regardless of ``runner.foreground``.

    Returns when the run has reached ``runner.wait_for``; with ``none``, at once.

    Args:
        config: path of a YAML, or a configuration as nested mappings.
        overrides: in Hydra's syntax: ``train.model.lr=1e-4``.

    Raises:
        ConfigError: the configuration or a host is wrong; has every problem.
        JobError: the run failed, or its ranks did not join, before ``wait_for`` was reached.
        RunStateError: another run is alive in its directory.
        UnreachableError: a host or a scheduler does not answer.
    """
    from flagscale.launcher.actions import launch_in_background as start

    with _convert_file_errors():
        return Run(start(load(config, overrides, "launch")))


def plan(config: Config, overrides: Sequence[str] = ()) -> LaunchPlan:
    """Return the plan that :func:`launch` would start. Nothing is started and no host is contacted.

    Raises:
        ConfigError: the configuration is wrong; has every problem.
    """
    from flagscale.launcher.code_snapshot import use_snapshot
    from flagscale.launcher.runners.base import runner_for_experiment

    with _convert_file_errors():
        experiment = use_snapshot(load(config, overrides, "plan"), create=False).experiment
        return runner_for_experiment(experiment).plan(experiment)


def find(run: str | os.PathLike[str]) -> Run:
    """Return an earlier run by its id, the beginning of its id, or the directory of its experiment.

    Raises:
        RunStateError: there is none.
        ConfigError: several ids begin with the text.
    """
    from flagscale.launcher.runs import require_run

    with _convert_file_errors():
        return Run(require_run(os.fspath(run)))


@dataclass(frozen=True)
class Run:
    """Handle of a started run. Every method queries the current state."""

    _state: RunState = field(repr=False)

    @property
    def id(self) -> str:
        return self._state.run_id

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self._state.name

    @property
    def directory(self) -> Path:
        """Directory of the experiment."""
        return self._state.exp_dir

    def __repr__(self) -> str:
        return f"Run({self.id!r}, {str(self.directory)!r})"

    def status(self) -> Snapshot:
        """Return the current status: ``phase``, ``step``, ``loss``, ``failure``, ``hosts``, …"""
        return self.wait(timeout=0)

    def wait(self, timeout: float | None = None, every: float = 1.0) -> Snapshot:
        """Wait until the run has ended, at most ``timeout`` seconds, and return its last status.

        The status is polled every ``every`` seconds. ``phase.ended`` is True if the run has ended.
        """
        from flagscale.launcher.runs import remember_outcome

        if not every > 0 or (timeout is not None and not timeout >= 0):
            raise ConfigError("wait: expected a timeout of no less than 0, every of more than 0")
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._open_runner() as (runner, _):
            while True:
                snapshot = runner.query(self._current_state())
                sleep_seconds = (
                    every if deadline is None else min(every, deadline - time.monotonic())
                )
                if snapshot.phase.ended or sleep_seconds <= 0:
                    break
                time.sleep(sleep_seconds)
            return remember_outcome(self._current_state(), snapshot)

    def logs(
        self,
        rank: int | None = None,
        lines: int | None = None,
        *,
        host: str | None = None,
        grep: str | None = None,
        since: str | None = None,
        level: str | None = None,
    ) -> list[str]:
        """Return the lines printed so far, with host and rank in front.

        Args:
            rank: Only this rank's lines.
            lines: Only this many last lines of each host.
            host: Only the lines of this host, or of several: ``node[1-4]``.
            grep: Only lines in which this regular expression is found.
            since: Only lines since an age (``10m``), a time (``14:02``), or a date and time.
            level: Only messages of this level, or a worse one: ``warning`` or ``error``.

        Raises:
            ConfigError: An argument has a wrong value for this run.
        """
        from flagscale.config.schema import Options
        from flagscale.launcher.log_query import parse_query
        from flagscale.launcher.logs import read_lines

        if lines is not None and lines < 0:
            raise ConfigError(f"lines: expected 0 or more, found {lines}")
        options = Options(
            rank=rank, lines=lines, host=host, grep=grep, since=since, level=level, action="logs"
        )
        with self._open_runner() as (runner, state):
            runner.bring_output(state)
            now = self._current_state()
            return list(read_lines(now, parse_query(now, options)))

    def follow(self, rank: int | None = None) -> Iterator[str]:
        """Yield the lines printed so far, and further ones until the run ends."""
        from flagscale.launcher import logs
        from flagscale.launcher.log_query import LogQuery, select_hosts

        with self._open_runner() as (runner, state):
            runner.bring_output(state)
            now = self._current_state()
            outputs = logs.host_outputs(now, LogQuery(select_hosts(now, rank=rank), rank))
            yield from logs.follow_lines(outputs, lambda: runner.ended(state))

    def report(self, output: str | os.PathLike[str] | None = None, *others: Run) -> Path:
        """Write the run's HTML report, next to those of ``others``, and return its path.

        The default is ``report_<id>.html`` in the working directory, with the ids of all runs.

        Raises:
            RunStateError: the file cannot be written.
        """
        from flagscale.report.command import default_path
        from flagscale.report.pages import write_page

        ids = [run.id for run in (self, *others)]
        path = Path(default_path(ids) if output is None else output).absolute()
        with _convert_file_errors():
            return write_page([run._current_state() for run in (self, *others)], path)

    def stop(self) -> None:
        """End this run, with ``runner.stop_grace`` seconds to save. Has no effect on an ended run.

        Raises:
            UnreachableError: the run may still be alive.
        """
        from flagscale.launcher.run_commands import stop_run

        with _convert_file_errors():
            stop_run(self._current_state())

    def _current_state(self) -> RunState:
        """Return the state in the run's directory, which has stops and the hosts a scheduler
        allocated.
        """
        from flagscale.launcher.state import reload_state

        return reload_state(self._state)

    @contextmanager
    def _open_runner(self) -> Iterator[tuple[Runner, RunState]]:
        from flagscale.launcher.runners.base import runner_for_run

        state = self._current_state()
        with _convert_file_errors(), closing(runner_for_run(state)) as runner:
            yield runner, state


def load(config: Config, overrides: Sequence[str], purpose: Purpose) -> Experiment:
    """Load and check the experiment of a configuration.

    Raises:
        ConfigError: it is wrong.
    """
    from flagscale.config.load import load as read

    _check_overrides(overrides)
    config = _to_config_input(config)
    if not isinstance(config, Mapping):
        path = Path(config).absolute()
        return read(path.parent, path.name, overrides, purpose).experiment
    if "defaults" in config:
        raise ConfigError(
            Problem("defaults", "a mapping has no config groups beside it"),
            hint="give the path of a YAML",
        )
    return _load_mapping(config, overrides, purpose)


def _check_overrides(overrides: object) -> None:
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, (str, bytes))
    if not is_list or not all(
        isinstance(override_text, str) for override_text in cast(Sequence[object], overrides)
    ):
        raise ConfigError(f"overrides: expected a list of texts, found {overrides!r}")
    for override in cast(Sequence[str], overrides):
        if override.lstrip("+").startswith("action="):
            raise ConfigError(f"{override}: what is called says what is done; leave it out")


def _to_config_input(config: Config) -> Config:
    """Return the configuration as a path or nested mappings; OmegaConf's interpolations stay
    unresolved.
    """
    if _is_omegaconf(config):
        from omegaconf import OmegaConf

        # Interpolations and missing values are handled when the configuration is loaded.
        config = cast(Config, OmegaConf.to_container(cast(Any, config)))
    if not isinstance(config, (str, os.PathLike, Mapping)):
        kind = type(config).__name__
        raise ConfigError(f"config: expected a path or nested mappings, found {kind}")
    return config


def _is_omegaconf(config: object) -> bool:
    """Return True for a DictConfig, as used by programs with Hydra."""
    return type(config).__module__.partition(".")[0] == "omegaconf"


def _load_mapping(
    config: Mapping[str, Any], overrides: Sequence[str], purpose: Purpose
) -> Experiment:
    """Load the experiment of a mapping.

    It is written to a temporary private file, because it may contain secrets, and read as any YAML.
    Line numbers of that file are removed from messages.
    """
    from flagscale.config.load import load as read
    from flagscale.launcher.layout import Layout

    text = _format_yaml(_to_plain_data(config, ""))
    with TemporaryDirectory(prefix="flagscale-") as name:
        file = Path(name, f"{_CONFIG_NAME}.yaml")
        file.write_text(text, encoding="utf-8")
        try:
            experiment = read(file.parent, _CONFIG_NAME, overrides, purpose).experiment
        except ConfigError as error:
            problems = [
                replace(problem, where=_drop_file_location(problem.where))
                for problem in error.problems
            ]
            raise ConfigError(problems, hint=error.hint) from None
    sources = {
        key: location
        for key, source in experiment.sources.items()
        if (location := _drop_file_location(source))
    }
    return replace(experiment, config_file=Layout(experiment.exp_dir).config, sources=sources)


def _format_yaml(data: Any) -> str:
    """Return data as YAML.

    Every text is quoted, because Hydra reads more texts as numbers, such as 1e-4, than the library
    that writes them. Numbers are written as messages and command lines show them.
    """
    import yaml

    from flagscale.config.arguments.spec.values import to_word

    class QuotingDumper(yaml.SafeDumper):
        pass

    QuotingDumper.add_representer(
        str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
    )
    QuotingDumper.add_representer(
        float,
        lambda dumper, number: (
            dumper.represent_scalar("tag:yaml.org,2002:float", to_word(number))
            if math.isfinite(number)
            else yaml.SafeDumper.represent_float(dumper, number)
        ),
    )
    return yaml.dump(data, Dumper=QuotingDumper, sort_keys=False, allow_unicode=True)


def _drop_file_location(location: str | None) -> str | None:
    from flagscale.config.sources import OVERRIDE

    return location if location == OVERRIDE else None


def _to_plain_data(value: Any, key: str) -> Any:
    """Convert a value to plain YAML data.

    Raises:
        ConfigError: it has another type.
    """
    if isinstance(value, Mapping):
        return {
            str(k): _to_plain_data(inner, f"{key}.{k}".lstrip(".")) for k, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_to_plain_data(inner, key) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for scalar_type in (bool, int, float, str):
        if isinstance(value, scalar_type):
            return scalar_type(value)
    if value is None:
        return None
    type_name = type(value).__name__
    raise ConfigError(Problem(key, f"expected plain data, found {value!r} of type {type_name}"))


@contextmanager
def _convert_file_errors() -> Iterator[None]:
    """Convert file errors to errors of this API."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise RunStateError(f"{error.filename}: {error.strerror}") from error
