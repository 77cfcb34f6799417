"""The directories that training writes to, held against what a host has there.

The experiment's own directory is one of them; those below it that the YAML does not name are not
looked at again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flagscale.config.arguments import paths
from flagscale.config.checks import Arguments
from flagscale.config.schema import Experiment
from flagscale.hosts.facts import NOT_WRITABLE, PathState
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.per_host import Settings
from flagscale.launcher.planning.plan import unnamed_directories
from flagscale.launcher.preflight.checks import Check

_CACHE = "data_cache_path"
_MIB = 1 << 20
_DISK_FAILS_BELOW = 64 * _MIB
_DISK_WARNS_BELOW = 2048 * _MIB


@dataclass(frozen=True)
class Wanted:
    """What a host's ranks use. ``written``: paths by the argument that names them. ``expected``:
    whether the YAML says that ``load`` has a checkpoint. ``values``: every argument."""

    load: str = ""
    expected: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)


def wanted(experiment: Experiment, layout: Layout, own: Settings, *, first: bool) -> Wanted:
    """What a host with these settings uses; the rank that reports is on the ``first``. Nothing is
    known of a external program, which may give the arguments another meaning."""
    if experiment.task.external:
        return Wanted()
    args = Arguments.of_sections(own.sections, experiment.sources)
    values = {**args.values(), **unnamed_directories(layout, own.sections)}
    named = {"save": values["save"]}
    cache = paths.data_cache(values)
    if first:
        named["tensorboard_dir"] = values["tensorboard_dir"]
        if cache is not None and cache[1] in args.given:
            named[_CACHE] = str(cache[0])
    return Wanted(
        load=values["load"] or "",
        expected="load" in args.given and values["load"] != values["save"],
        values=values,
        written={
            name: path
            for name, path in named.items()
            if path and "://" not in path and (name in args.given or name == _CACHE)
        },
    )


def judge(want: Wanted, states: Mapping[str, PathState]) -> Iterator[Check]:
    """The checks of a host that has these ``states`` by path."""
    unfit = set[str]()
    for name, path in want.written.items():
        state = states.get(path)
        # What keeps `save` from being made keeps the cache beside it, too: once is enough.
        if name != _CACHE or state is None or state.existing not in unfit:
            yield _written(name, path, state)
        if state is not None and state.unfit:
            unfit.add(state.existing)


def _written(name: str, path: str, state: PathState | None) -> Check:
    read_only = state is not None and (state.existing, state.unfit) == (path, NOT_WRITABLE)
    if name == _CACHE and read_only:
        found = f"{path} is not writable: what is not cached there yet cannot be used"
        return Check(name, True, found, warning=True)
    return check_directory(name, path, state, key=name)


def check_directory(name: str, path: str, state: PathState | None, *, key: str) -> Check:
    """A directory that is to be written. ``key``: what names another one."""
    if state is None:
        return Check(name, False, f"{path}: it did not say what is there")
    if state.unfit == NOT_WRITABLE and state.user:
        found = f"{state.existing} is {state.unfit} for user {state.user}"
        hint = f"set {key}, give the user the directory, or the hostfile another user="
        return Check(name, False, found, hint)
    if state.unfit:
        hint = f"set {key} to a directory that can be written"
        return Check(name, False, f"{state.existing} is {state.unfit}", hint)
    if state.free is None:
        return Check(name, True, f"{path}: free space unknown", warning=True)
    found = f"{path}: {state.free / _MIB:,.0f} MiB free"
    if state.free < _DISK_FAILS_BELOW:
        return Check(name, False, found, f"make room there, or set {key}")
    return Check(name, True, found, warning=state.free < _DISK_WARNS_BELOW)
