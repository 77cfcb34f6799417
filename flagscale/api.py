"""Runs from Python: planned, started, watched and ended as the command line does it.

::

    import flagscale

    run = flagscale.launch("examples/llama3/conf/train.yaml", ["train.model.seed=7"])
    status = run.wait()
    print(status.phase, status.loss, run.logs(rank=0, lines=20))

What goes wrong is an exception of :mod:`flagscale.errors`. Nothing here takes over signals, and
nothing of Hydra's stays behind, so that it does in a notebook, in threads, and in a program that
uses Hydra itself.
"""

from __future__ import annotations

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

# Importing this costs next to nothing: what plans and starts is loaded when it is asked for.
if TYPE_CHECKING:
    from flagscale.config.schema import Experiment
    from flagscale.launcher.planning.model import LaunchPlan
    from flagscale.launcher.runners.base import Runner
    from flagscale.launcher.snapshot import Snapshot
    from flagscale.launcher.state import RunState

Config = str | os.PathLike[str] | Mapping[str, Any]
"""The path of a YAML, of which Hydra composes the configuration, or the whole configuration."""
_NAME = "config"


def launch(config: Config, overrides: Sequence[str] = ()) -> Run:
    """Start a run in the background, whatever its ``runner.foreground`` says.

    Returns once the run is as far as its ``runner.wait_for`` says: ``none`` waits for nothing.

    Args:
        config: the path of a YAML, or a configuration as nested mappings.
        overrides: as Hydra writes them: ``train.model.lr=1e-4``.

    Raises:
        ConfigError: every mistake in the configuration, and what a preflight has found.
        JobError: the run failed, or its ranks did not join, before it was as far.
        RunStateError: another run lives in its directory.
        UnreachableError: a host or a scheduler does not answer.
    """
    from flagscale.launcher.actions import launch as start

    with _files():
        return Run(start(load(config, overrides, "launch")))


def plan(config: Config, overrides: Sequence[str] = ()) -> LaunchPlan:
    """What :func:`launch` would start, host by host; nothing is started and nobody asked.

    Raises :class:`ConfigError` for every mistake in the configuration.
    """
    from flagscale.launcher.runners.base import runner_for

    with _files():
        experiment = load(config, overrides, "plan")
        return runner_for(experiment).plan(experiment)


def find(run: str | os.PathLike[str]) -> Run:
    """A run that was started before, by anybody's launcher: by its id, the beginning of it, or the
    directory of its experiment. Raises :class:`RunStateError` for none, :class:`ConfigError` for
    the beginning of several."""
    from flagscale.launcher.runs import named

    with _files():
        return Run(named(os.fspath(run)))


@dataclass(frozen=True)
class Run:
    """A run that was started. All that is asked of it is asked anew, from wherever it can be
    reached, so that it may be kept for as long as one likes."""

    _state: RunState = field(repr=False)

    @property
    def id(self) -> str:
        return self._state.run_id

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self._state.name

    @property
    def directory(self) -> Path:
        """The experiment's directory."""
        return self._state.exp_dir

    def __repr__(self) -> str:
        return f"Run({self.id!r}, {str(self.directory)!r})"

    def status(self) -> Snapshot:
        """What it is doing now: ``phase``, ``step``, ``loss``, ``failure``, ``hosts``, …"""
        return self.wait(timeout=0)

    def wait(self, timeout: float | None = None, every: float = 1.0) -> Snapshot:
        """Wait until it has ended, for ``timeout`` seconds at most; what it was doing last, looked
        at ``every`` so many seconds. ``phase.ended`` tells whether it has ended."""
        from flagscale.launcher.runs import remember

        if not every > 0 or (timeout is not None and not timeout >= 0):
            raise ConfigError("wait: expected a timeout of no less than 0, every of more than 0")
        until = None if timeout is None else time.monotonic() + timeout
        with self._asked() as (runner, _):
            while True:
                seen = runner.query(self._now())
                left = every if until is None else min(every, until - time.monotonic())
                if seen.phase.ended or left <= 0:
                    break
                time.sleep(left)
            return remember(self._now(), seen)

    def logs(self, rank: int | None = None, lines: int | None = None) -> list[str]:
        """What it has printed so far, every line with its host and rank; of one rank alone, or the
        last so many lines of each host."""
        from flagscale.launcher.logs import lines_of

        if lines is not None and lines < 0:
            raise ConfigError(f"lines: expected 0 or more, found {lines}")
        with self._asked() as (runner, state):
            runner.bring_output(state)
            return list(lines_of(self._now(), rank, lines))

    def follow(self, rank: int | None = None) -> Iterator[str]:
        """What it has printed, and what it prints until it ends."""
        from flagscale.launcher import logs

        with self._asked() as (runner, state):
            runner.bring_output(state)
            yield from logs.follow(logs.of_hosts(self._now(), rank), lambda: runner.ended(state))

    def report(self, output: str | os.PathLike[str] | None = None, *others: Run) -> Path:
        """Write its page, ``report_<id>.html`` in the working directory unless ``output`` says
        where, beside those of ``others``; the path of the file. Raises :class:`RunStateError`
        where it cannot be written."""
        from flagscale.report.pages import write

        path = Path(f"report_{self.id}.html" if output is None else output).absolute()
        with _files():
            return write([run._now() for run in (self, *others)], path)

    def stop(self) -> None:
        """End it and nothing else, with ``runner.stop_grace`` seconds to save; one that has ended
        stays as it is. Raises :class:`UnreachableError` where it may live on."""
        from flagscale.launcher.run_commands import finish

        with _files():
            finish(self._now())

    def _now(self) -> RunState:
        """Its state as its directory has it: that of a stop, or the names of hosts that a scheduler
        has given."""
        from flagscale.launcher.state import latest

        return latest(self._state)

    @contextmanager
    def _asked(self) -> Iterator[tuple[Runner, RunState]]:
        from flagscale.launcher.runners.base import runner_of

        state = self._now()
        with _files(), closing(runner_of(state)) as runner:
            yield runner, state


def load(config: Config, overrides: Sequence[str], purpose: Purpose) -> Experiment:
    """The experiment of a configuration, checked. Raises :class:`ConfigError`."""
    from flagscale.config.load import load as read

    _require_texts(overrides)
    config = _as_data(config)
    if not isinstance(config, Mapping):
        path = Path(config).absolute()
        return read(path.parent, path.name, overrides, purpose).experiment
    if "defaults" in config:
        raise ConfigError(
            Problem("defaults", "a mapping has no config groups beside it"),
            hint="give the path of a YAML",
        )
    return _load_mapping(config, overrides, purpose)


def _require_texts(overrides: object) -> None:
    listed = isinstance(overrides, Sequence) and not isinstance(overrides, (str, bytes))
    if not listed or not all(isinstance(one, str) for one in cast(Sequence[object], overrides)):
        raise ConfigError(f"overrides: expected a list of texts, found {overrides!r}")
    for override in cast(Sequence[str], overrides):
        if override.lstrip("+").startswith("action="):
            raise ConfigError(f"{override}: what is called says what is done; leave it out")


def _as_data(config: Config) -> Config:
    """A configuration as a path or as nested mappings; those of OmegaConf as they are written."""
    if _is_omegaconf(config):
        from omegaconf import OmegaConf

        # What refers to other keys, or is still to be given, is for loading.
        config = cast(Config, OmegaConf.to_container(cast(Any, config)))
    if not isinstance(config, (str, os.PathLike, Mapping)):
        kind = type(config).__name__
        raise ConfigError(f"config: expected a path or nested mappings, found {kind}")
    return config


def _is_omegaconf(config: object) -> bool:
    """Whether this is a DictConfig, as programs have that use Hydra themselves."""
    return type(config).__module__.partition(".")[0] == "omegaconf"


def _load_mapping(
    config: Mapping[str, Any], overrides: Sequence[str], purpose: Purpose
) -> Experiment:
    """The experiment of a mapping. It is read from a file, as any YAML, which nobody else may read
    and which is gone afterwards: it may hold secrets, and its lines mean nothing to anybody."""
    import yaml

    from flagscale.config.load import load as read
    from flagscale.launcher.layout import Layout

    text = yaml.safe_dump(_plain(config, ""), sort_keys=False, allow_unicode=True)
    with TemporaryDirectory(prefix="flagscale-") as name:
        file = Path(name, f"{_NAME}.yaml")
        file.write_text(text, encoding="utf-8")
        try:
            made = read(file.parent, _NAME, overrides, purpose).experiment
        except ConfigError as error:
            problems = [replace(one, where=_place(one.where)) for one in error.problems]
            raise ConfigError(problems, hint=error.hint) from None
    sources = {key: place for key, where in made.sources.items() if (place := _place(where))}
    return replace(made, config_file=Layout(made.exp_dir).config, sources=sources)


def _place(where: str | None) -> str | None:
    from flagscale.config.sources import OVERRIDE

    return where if where == OVERRIDE else None


def _plain(value: Any, key: str) -> Any:
    """What YAML knows, of what programs have. Raises :class:`ConfigError` for anything else."""
    if isinstance(value, Mapping):
        return {str(k): _plain(inner, f"{key}.{k}".lstrip(".")) for k, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, key) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    found = type(value).__name__
    raise ConfigError(Problem(key, f"expected plain data, found {value!r} of type {found}"))


@contextmanager
def _files() -> Iterator[None]:
    """A file that cannot be read or written is an error like others."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise RunStateError(f"{error.filename}: {error.strerror}") from error
