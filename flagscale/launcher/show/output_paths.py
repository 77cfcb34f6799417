"""Paths of a run's output, printed when a run starts or ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from flagscale.checkpoints import CheckpointDirectory
from flagscale.errors import CheckpointError
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.state import RunState
from flagscale.object_storage import Location, StorageAddress, is_address


def find_output_paths(plan: LaunchPlan, state: RunState) -> list[tuple[str, Location]]:
    """Return the script, logs, TensorBoard files and newest checkpoint of a run, if they exist."""
    host = state.hosts[0]
    program = plan.hosts[0].program
    candidates: list[tuple[str, Location]] = [
        ("script", host.script),
        ("output", host.output),
        ("logs of ranks", host.run_dir / "ranks"),
        *(("TensorBoard", Path(path)) for path in _option_values(program, "--tensorboard-dir")),
        *(_newest_checkpoint(path) for path in _option_values(program, "--save")),
    ]
    return [
        (label, path)
        for label, path in candidates
        if isinstance(path, StorageAddress) or path.exists()
    ]


def _option_values(program: Sequence[str], flag: str) -> Iterator[str]:
    """Yield the values of a flag of the training program."""
    for word, value in pairwise(program):
        if word == flag:
            yield value


def _newest_checkpoint(save: str) -> tuple[str, Location]:
    """Return the checkpoint that would be loaded, as far as that is known without torch and without
    requests to object storage, otherwise the directory.
    """
    if is_address(save):
        return "checkpoints", StorageAddress(save)
    directory = Path(save)
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


def _relative_if_below(path: Location) -> Location:
    if isinstance(path, StorageAddress):
        return path
    current_directory = Path.cwd()
    return path.relative_to(current_directory) if path.is_relative_to(current_directory) else path
