"""Where a person finds what a run wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from flagscale.checkpoints import Checkpoints
from flagscale.errors import CheckpointError
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.state import RunState


def written(plan: LaunchPlan, state: RunState) -> list[tuple[str, Path]]:
    """The script, logs, TensorBoard files and newest checkpoint of a run, those that exist."""
    host = state.hosts[0]
    program = plan.hosts[0].program
    found = [
        ("script", host.script),
        ("output", host.output),
        ("logs of ranks", host.run_dir / "ranks"),
        *(("TensorBoard", path) for path in _option(program, "--tensorboard-dir")),
        *(_newest(path) for path in _option(program, "--save")),
    ]
    return [(label, path) for label, path in found if path.exists()]


def _option(program: Sequence[str], flag: str) -> Iterator[Path]:
    """The value of a flag of the training program, if it was given."""
    for word, following in pairwise(program):
        if word == flag:
            yield Path(following)


def _newest(directory: Path) -> tuple[str, Path]:
    """The checkpoint that would be loaded, as far as that shows without torch; the directory where
    none would be."""
    try:
        # Of another program's nothing is known that is quick to look at.
        newest = Checkpoints(directory).find(foreign=False)
    except (OSError, CheckpointError):
        newest = None
    return ("checkpoints", directory) if newest is None else ("checkpoint", newest.path)


def lines(plan: LaunchPlan, state: RunState) -> Iterator[str]:
    """The same, to print, relative to the directory the user is in where that is shorter."""
    places = written(plan, state)
    width = max((len(label) for label, _ in places), default=0)
    for label, path in places:
        yield f"  {label + ':':{width + 1}} {_near(path)}"


def _near(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
