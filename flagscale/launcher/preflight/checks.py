"""Result of one preflight check, and the error or exit code that all results together lead to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flagscale.accelerators.registry import (
    AUTO,
    CPU,
    choose_kind,
    get_accelerator,
    list_broken_kinds,
    list_device_accelerators,
)
from flagscale.config.schema import Experiment, Runner
from flagscale.errors import ConfigError, Problem, RunStateError, UnreachableError
from flagscale.hosts.names import compress_names
from flagscale.launcher.planning.assignment import requested_device
from flagscale.launcher.planning.model import HostPlan
from flagscale.launcher.planning.plan import requested_port

if TYPE_CHECKING:
    from flagscale.hosts.facts import HostFacts

REACHABLE = "reachable"
"""Name of the check that a host can be used at all."""
_NCCL_KIND = "cuda"
"""Kind of device that nccl supports."""
EARLIER_RUN = "earlier run"
"""Name of the check that no run is alive where one is to start."""


@dataclass(frozen=True)
class Check:
    """Result of one check.

    ``found`` describes the result in words. With ``warning`` the run may start, but the user should
    read it.
    """

    name: str
    ok: bool
    found: str
    hint: str = ""
    warning: bool = False
    hosts: str = ""
    """Names of the hosts with this result, in short form (``node[1-3]``); empty for this machine.
    """


def require_passed(checks: list[Check]) -> None:
    """Raise one error for all checks that failed.

    Raises:
        UnreachableError: hosts do not answer; names only those.
        RunStateError: the only failure is a live run on this machine, which is no mistake in the
            configuration.
        ConfigError: any other failure.
    """
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


def compute_exit_code(checks: Sequence[Check]) -> int:
    """Return 0 if every check passed, 3 if a host could not be reached, otherwise 2."""
    failed = [check for check in checks if not check.ok]
    if any(check.name == REACHABLE for check in failed):
        return UnreachableError.exit_code
    return ConfigError.exit_code if failed else 0


def check_devices(experiment: Experiment, host: HostPlan, facts: HostFacts) -> Check:
    """Compare a host's devices with its ranks and with the ``type=`` of the hostfile."""
    requested_kind, ranks = requested_device(experiment), host.agent.nproc
    kind = get_accelerator(
        choose_kind(AUTO if requested_kind == CPU else requested_kind, facts.devices)
    )
    device_count, nccl_devices = facts.devices.get(kind.name, 0), facts.devices.get(_NCCL_KIND, 0)
    unit = get_accelerator(_NCCL_KIND).unit if kind.name == CPU else kind.unit
    product = facts.products.get(kind.name)
    finding = f"{device_count} {unit}(s){f', {product},' if product else ''} for {ranks} rank(s)"
    backend = experiment.train["distributed_backend"]
    if backend == "nccl" and nccl_devices == 0:
        hint = "set train.system.distributed_backend: auto (or gloo)"
        return Check("devices", False, "nccl is requested, but there is no GPU", hint)
    if backend == "nccl" and ranks > nccl_devices:
        hint = "lower experiment.runner.nproc_per_node: nccl needs a GPU for every rank"
        return Check("devices", False, finding, hint)
    declared_kind = next(
        (a for a in list_device_accelerators() if host.device_type in (a.name, *a.host_types)), None
    )
    if declared_kind is not None and not facts.devices.get(declared_kind.name):
        finding += (
            f", but no {declared_kind.unit}, though the hostfile says type={host.device_type}"
        )
        return Check("devices", True, finding, warning=True)
    return Check("devices", True, finding, warning=0 < device_count < ranks)


def check_adapters() -> Check | None:
    """Report device kinds of installed packages that cannot be loaded here, or return None."""
    reasons = "; ".join(f"{kind}: {reason}" for kind, reason in list_broken_kinds().items())
    return Check("kinds of devices", True, reasons, warning=True) if reasons else None


def merge_equal_rows(rows: Sequence[tuple[str, Check]]) -> Iterator[Check]:
    """Merge hosts with equal results into one row, in order of first appearance. ``rows`` are pairs
    of a host's name and its check.
    """
    groups: dict[Check, list[str]] = {}
    for name, check in rows:
        groups.setdefault(check, []).append(name)
    for check, names in groups.items():
        yield replace(check, hosts=compress_names(names))


def describe_port_origin(runner: Runner) -> str:
    """Describe where the port of the ranks comes from."""
    if requested_port(runner) is None:
        return "picked there"
    key = "master_port" if runner.master_port else "rdzv_endpoint"
    return f"as experiment.runner.{key} says"


def warning_lines(checks: list[Check]) -> Iterator[str]:
    """Yield the findings of passed checks that the user should know."""
    for check in checks:
        if check.ok and check.warning:
            hosts_suffix = f" on {check.hosts}" if check.hosts else ""
            yield f"{check.name}{hosts_suffix}: {check.found}"
