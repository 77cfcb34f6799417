"""What would keep a run from starting, found before anything starts.

Cheap on purpose, since it precedes every run: packages are looked up, not imported.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale.config.arguments.flatten import leaves
from flagscale.config.load import missing_paths
from flagscale.config.schema import Experiment, Runner
from flagscale.errors import (
    ConfigError,
    FlagscaleError,
    Problem,
    RunStateError,
    UnreachableError,
)
from flagscale.launch.planning import ports
from flagscale.launch.planning.model import LaunchPlan, Machine
from flagscale.launch.planning.plan import BACKEND_DIRECTORY, wanted_port
from flagscale.launch.state import load_state, refuse_if_alive

REACHABLE = "reachable"
"""The check whether a host can be used at all."""
EARLIER_RUN = "earlier run"
"""The check whether a run is alive where one is to start."""
_MIB = 1 << 20
_DISK_FAILS_BELOW = 64 * _MIB
_DISK_WARNS_BELOW = 2048 * _MIB


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. ``warning``: it may go well, but should be known."""

    name: str
    ok: bool
    found: str
    hint: str = ""
    warning: bool = False
    hosts: str = ""
    """The hosts it was found on, folded; empty for this machine."""


def preflight(experiment: Experiment, plan: LaunchPlan, machine: Machine) -> list[Check]:
    """Look at what a run needs on this machine, beside its directories."""
    looks: tuple[Callable[[], Check], ...] = (
        lambda: _entrypoint(experiment.task.entrypoint),
        lambda: _package("torch", "install the project with its `train` extra: make setup"),
        lambda: _backend(experiment, machine),
        lambda: _data(experiment),
        lambda: _devices(experiment, plan, machine),
        lambda: _port(experiment, plan),
        lambda: _previous_run(plan),
        _bash,
    )
    return [*(look() for look in looks), *_wandb(experiment)]


def require(checks: list[Check]) -> None:
    """Raise :class:`ConfigError` with every check that failed, or, where hosts do not answer,
    :class:`UnreachableError` with those. That a run is alive on this machine is no mistake in the
    configuration: where nothing else failed, it is a :class:`RunStateError`."""
    failed = [check for check in checks if not check.ok]
    unreachable = [check for check in failed if check.name == REACHABLE]
    if unreachable:
        lines = [f"{check.hosts}: {check.found}" for check in unreachable]
        advice = dict.fromkeys(check.hint for check in unreachable if check.hint)
        raise UnreachableError("\n".join(lines), hint="; ".join(advice) or None)
    if [(check.name, check.hosts) for check in failed] == [(EARLIER_RUN, "")]:
        raise RunStateError(failed[0].found, hint=failed[0].hint)
    if failed:
        problems = [
            Problem(f"{check.name} ({check.hosts})" if check.hosts else check.name, check.found)
            for check in failed
        ]
        hints = list(dict.fromkeys(check.hint for check in failed if check.hint))
        raise ConfigError(problems, hint="; ".join(hints) or None)


def exit_code(checks: Sequence[Check]) -> int:
    """0 if every check is well, 3 if a host could not be asked, else 2."""
    failed = [check for check in checks if not check.ok]
    if any(check.name == REACHABLE for check in failed):
        return UnreachableError.exit_code
    return ConfigError.exit_code if failed else 0


def _entrypoint(path: Path) -> Check:
    if path.is_file():
        return Check("entrypoint", True, str(path))
    found = "is a directory" if path.is_dir() else "no such file"
    return Check("entrypoint", False, f"{found}: {path}", "set experiment.task.entrypoint")


def _package(name: str, hint: str) -> Check:
    spec = importlib.util.find_spec(name)
    if spec is None:
        return Check(name, False, "this Python has no such package", hint)
    return Check(name, True, str(Path(spec.origin).parent) if spec.origin else "found")


def _wandb(experiment: Experiment) -> Iterator[Check]:
    wanted = any(
        name == "wandb_project" and value for _, name, value in leaves(experiment.train.sections())
    )
    if wanted and not experiment.task.external:
        yield _package("wandb", "pip install wandb, or remove wandb_project")


def _backend(experiment: Experiment, machine: Machine) -> Check:
    """The adapted source of the training backend; a program of the user's own may have another."""
    name, directory = "training backend", machine.project / BACKEND_DIRECTORY
    if (directory / "megatron" / "core").is_dir():
        return Check(name, True, str(directory))
    if experiment.task.external:
        return Check(name, True, "not adapted; the entrypoint is not this project's own")
    hint = "run: python tools/patch/unpatch.py --backend Megatron-LM"
    return Check(name, False, f"there is no adapted Megatron-LM in {directory}", hint)


def _data(experiment: Experiment) -> Check:
    missing = missing_paths(experiment)
    if missing:
        found = "; ".join(f"{problem.key}: {problem.message}" for problem in missing)
        quickstart = "data/quickstart/" in found
        return Check("data", False, found, "run: make data" if quickstart else "")
    return Check("data", True, "every path the YAML names is there")


def _devices(experiment: Experiment, plan: LaunchPlan, machine: Machine) -> Check:
    ranks = max(host.nproc for host in plan.hosts)
    return check_devices(experiment, machine.gpus or 0, ranks)


def check_devices(experiment: Experiment, gpus: int, ranks: int) -> Check:
    """A machine's GPUs against the ranks it takes."""
    wanted = {
        str(value)
        for _, name, value in leaves(experiment.train.sections())
        if name == "distributed_backend"
    }
    found = f"{gpus} GPU(s) for {ranks} rank(s)"
    if "nccl" in wanted and gpus == 0:
        hint = "set train.system.distributed_backend: auto (or gloo)"
        return Check("devices", False, "nccl is asked for, but there is no GPU", hint)
    if "nccl" in wanted and ranks > gpus:
        hint = "lower experiment.runner.nproc_per_node: nccl wants a GPU for every rank"
        return Check("devices", False, found, hint)
    return Check("devices", True, found, warning=0 < gpus < ranks)


def _port(experiment: Experiment, plan: LaunchPlan) -> Check:
    free = Check("master port", True, f"{plan.master_port}, free, {port_origin(experiment.runner)}")
    if wanted_port(experiment.runner) is None:
        return free
    try:
        ports.require_free(plan.master_port)
    except FlagscaleError as error:
        return Check("master port", False, _message(error), error.hint or "")
    return free


def port_origin(runner: Runner) -> str:
    """Where the port of the ranks comes from."""
    if wanted_port(runner) is None:
        return "picked there"
    key = "master_port" if runner.master_port else "rdzv_endpoint"
    return f"as experiment.runner.{key} says"


def _message(error: FlagscaleError) -> str:
    problems = getattr(error, "problems", ())
    return "; ".join(problem.message for problem in problems) or error.message


def check_space(name: str, path: str, free: int, key: str) -> Check:
    """What is free, in bytes, where the directory that ``key`` names is."""
    found = f"{path}: {free / _MIB:,.0f} MiB free"
    if free < _DISK_FAILS_BELOW:
        return Check(name, False, found, f"make room there, or set {key}")
    return Check(name, True, found, warning=free < _DISK_WARNS_BELOW)


def _previous_run(plan: LaunchPlan) -> Check:
    state = load_state(plan.layout.state)
    try:
        refuse_if_alive(state)
    except FlagscaleError as error:
        return Check(EARLIER_RUN, False, error.message, error.hint or "")
    return Check(EARLIER_RUN, True, f"{state.run_id} has ended" if state else "none")


def _bash() -> Check:
    path = shutil.which("bash")
    return Check("bash", path is not None, path or "not on PATH", "install bash")


def warnings(checks: list[Check]) -> Iterator[str]:
    for check in checks:
        if check.ok and check.warning:
            where = f" on {check.hosts}" if check.hosts else ""
            yield f"{check.name}{where}: {check.found}"
