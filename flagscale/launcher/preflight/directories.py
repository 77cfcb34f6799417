"""Checks of the directories that training writes to.

The experiment's own directory is one of them. Directories below it are not checked again unless
the YAML names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flagscale.config.arguments.spec.paths import data_cache_of
from flagscale.config.schema import Experiment
from flagscale.hosts.facts import NOT_WRITABLE, PathState
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.per_host import HostSettings
from flagscale.launcher.planning.plan import default_directories
from flagscale.launcher.preflight.checks import Check
from flagscale.object_storage import is_address

_CACHE_ARGUMENT = "data_cache_path"
_MIB = 1 << 20
_MIN_FREE_BYTES = 64 * _MIB
_LOW_FREE_BYTES = 2048 * _MIB


@dataclass(frozen=True)
class HostPaths:
    """Paths and arguments of the ranks on one host.

    ``output_paths`` maps arguments to the paths that they name for writing. ``expects_checkpoint``
    is True if the YAML sets ``load`` to another directory than ``save``: if that has no checkpoint,
    the user should know. ``arguments`` are the values of all arguments by name.
    """

    load_dir: str = ""
    expects_checkpoint: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    output_paths: Mapping[str, str] = field(default_factory=dict)


def collect_host_paths(
    experiment: Experiment, layout: Layout, settings: HostSettings, *, is_first: bool
) -> HostPaths:
    """Return the paths that a host with these settings uses.

    The rank that writes TensorBoard files runs on the first host (``is_first``). The result is
    empty for a program of another project, which may give the arguments another meaning.
    """
    if experiment.task.external:
        return HostPaths()
    args = settings.train
    values = {**args.values, **default_directories(layout, args)}
    named_paths = {name: values[name] for name in ("save", "save_staging_dir")}
    cache = data_cache_of(values)
    if is_first:
        named_paths["tensorboard_dir"] = values["tensorboard_dir"]
        if cache is not None and cache[1] in args.given:
            named_paths[_CACHE_ARGUMENT] = str(cache[0])
    return HostPaths(
        load_dir=values["load"] or "",
        expects_checkpoint="load" in args.given and values["load"] != values["save"],
        arguments=values,
        output_paths={
            name: path
            for name, path in named_paths.items()
            if path and not is_address(path) and (name in args.given or name == _CACHE_ARGUMENT)
        },
    )


def check_output_paths(host_paths: HostPaths, states: Mapping[str, PathState]) -> Iterator[Check]:
    """Yield the checks of a host, from the ``states`` of its paths."""
    reported_directories = set[str]()
    for name, path in host_paths.output_paths.items():
        state = states.get(path)
        # If `save` cannot be created, neither can the cache next to it: report the cause once.
        if name != _CACHE_ARGUMENT or state is None or state.existing not in reported_directories:
            yield _check_output_path(name, path, state)
        if state is not None and state.problem:
            reported_directories.add(state.existing)


def _check_output_path(name: str, path: str, state: PathState | None) -> Check:
    read_only = state is not None and (state.existing, state.problem) == (path, NOT_WRITABLE)
    if name == _CACHE_ARGUMENT and read_only:
        finding = f"{path} is not writable: what is not cached there yet cannot be used"
        return Check(name, True, finding, warning=True)
    return check_directory(name, path, state, key=name)


def check_directory(name: str, path: str, state: PathState | None, *, key: str) -> Check:
    """Check a directory that the run will write. ``key`` is the key that selects another one."""
    if state is None:
        return Check(name, False, f"{path}: the host did not report its state")
    if state.problem == NOT_WRITABLE and state.user:
        finding = f"{state.existing} is {state.problem} for user {state.user}"
        hint = f"set {key}, give the user the directory, or set another user= in a hostfile"
        return Check(name, False, finding, hint)
    if state.problem:
        hint = f"set {key} to a directory that can be written"
        return Check(name, False, f"{state.existing} is {state.problem}", hint)
    if state.free_bytes is None:
        return Check(name, True, f"{path}: free space unknown", warning=True)
    finding = f"{path}: {state.free_bytes / _MIB:,.0f} MiB free"
    if state.free_bytes < _MIN_FREE_BYTES:
        return Check(name, False, finding, f"make room there, or set {key}")
    return Check(name, True, finding, warning=state.free_bytes < _LOW_FREE_BYTES)
