"""Paths of a run's output, printed when a run starts or ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from flagscale.checkpoints import CheckpointDirectory
from flagscale.errors import CheckpointError
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.state import RunState


def find_output_paths(plan: LaunchPlan, state: RunState) -> list[tuple[str, Path]]:
    """Return the script, logs, TensorBoard files and newest checkpoint of a run, if they exist."""
    host = state.hosts[0]
    program = plan.hosts[0].program
    candidates = [
        ("script", host.script),
        ("output", host.output),
        ("logs of ranks", host.run_dir / "ranks"),
        *(("TensorBoard", path) for path in _option_values(program, "--tensorboard-dir")),
        *(_newest_checkpoint(path) for path in _option_values(program, "--save")),
    ]
    return [(label, path) for label, path in candidates if path.exists()]


def _option_values(program: Sequence[str], flag: str) -> Iterator[Path]:
    """Yield the values of a flag of the training program."""
    for word, value in pairwise(program):
        if word == flag:
            yield Path(value)


def _newest_checkpoint(directory: Path) -> tuple[str, Path]:
    """Return the checkpoint that would be loaded, as far as that is known without torch, otherwise
    the directory.
    """
    try:
        # Checkpoints of other programs have no manifest that can be checked quickly.
        newest = CheckpointDirectory(directory).find_latest(verify_without_manifest=False)
    except (OSError, CheckpointError):
        newest = None
    return ("checkpoints", directory) if newest is None else ("checkpoint", newest.path)


def format_output_paths(plan: LaunchPlan, state: RunState) -> Iterator[str]:
    """Yield these paths as lines to print, relative to the working directory if that is shorter."""
    output_paths = find_output_paths(plan, state)
    width = max((len(label) for label, _ in output_paths), default=0)
    for label, path in output_paths:
        yield f"  {label + ':':{width + 1}} {_relative_if_below(path)}"


def _relative_if_below(path: Path) -> Path:
    current_directory = Path.cwd()
    return path.relative_to(current_directory) if path.is_relative_to(current_directory) else path
