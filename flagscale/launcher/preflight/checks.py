"""One thing that a preflight has looked at, and what all of them together come to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flagscale.accelerators.registry import AUTO, CPU, accelerator, accelerators, broken, preferred
from flagscale.config.arguments.flatten import leaves
from flagscale.config.schema import Experiment, Runner
from flagscale.errors import ConfigError, Problem, RunStateError, UnreachableError
from flagscale.launcher.planning.assignment import wanted_kind
from flagscale.launcher.planning.model import HostPlan
from flagscale.launcher.planning.plan import wanted_port

if TYPE_CHECKING:
    from flagscale.hosts.facts import Facts

REACHABLE = "reachable"
"""The check whether a host can be used at all."""
_NCCLS = "cuda"
"""The kind that nccl is for: NVIDIA's own."""
EARLIER_RUN = "earlier run"
"""The check whether a run is alive where one is to start."""


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


def check_devices(experiment: Experiment, host: HostPlan, facts: Facts) -> Check:
    """A host's devices against the ranks it takes, and against what the hostfile calls it."""
    wanted, ranks = wanted_kind(experiment), host.nproc
    kind = accelerator(preferred(AUTO if wanted == CPU else wanted, facts.devices))
    count, gpus = facts.devices.get(kind.name, 0), facts.devices.get(_NCCLS, 0)
    unit = accelerator(_NCCLS).unit if kind.name == CPU else kind.unit
    product = facts.products.get(kind.name)
    found = f"{count} {unit}(s){f', {product},' if product else ''} for {ranks} rank(s)"
    backends = {
        str(value)
        for _, name, value in leaves(experiment.train.sections())
        if name == "distributed_backend"
    }
    if "nccl" in backends and gpus == 0:
        hint = "set train.system.distributed_backend: auto (or gloo)"
        return Check("devices", False, "nccl is asked for, but there is no GPU", hint)
    if "nccl" in backends and ranks > gpus:
        hint = "lower experiment.runner.nproc_per_node: nccl wants a GPU for every rank"
        return Check("devices", False, found, hint)
    called = next((a for a in accelerators() if host.device_type in (a.name, *a.host_types)), None)
    if called is not None and not facts.devices.get(called.name):
        found += f", but no {called.unit}, though the hostfile says type={host.device_type}"
        return Check("devices", True, found, warning=True)
    return Check("devices", True, found, warning=0 < count < ranks)


def check_adapters() -> Check | None:
    """The kinds of devices of installed packages that do not load here; None where all do."""
    found = "; ".join(f"{kind}: {reason}" for kind, reason in broken().items())
    return Check("kinds of devices", True, found, warning=True) if found else None


def port_origin(runner: Runner) -> str:
    """Where the port of the ranks comes from."""
    if wanted_port(runner) is None:
        return "picked there"
    key = "master_port" if runner.master_port else "rdzv_endpoint"
    return f"as experiment.runner.{key} says"


def warnings(checks: list[Check]) -> Iterator[str]:
    for check in checks:
        if check.ok and check.warning:
            where = f" on {check.hosts}" if check.hosts else ""
            yield f"{check.name}{where}: {check.found}"
