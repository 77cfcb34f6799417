"""Checks of the hardware of a run's hosts (``experiment.runner.health``).

They are made last, because they need the project and torch on the hosts, and hosts without a live
run: measuring would disturb it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from flagscale.config.interpolation import split_references
from flagscale.config.schema import PROJECT, Experiment
from flagscale.config.secrets import is_secret
from flagscale.health.messages import VariableParts
from flagscale.health.names import HARDWARE
from flagscale.health.rows import list_rows
from flagscale.health.session import HealthResult, HealthTarget, check_health
from flagscale.hosts.facts import HostFacts
from flagscale.hosts.fan_out import Hosts
from flagscale.hosts.hostfile import Host
from flagscale.hosts.names import compress_names
from flagscale.hosts.workers.remote import HostPython
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.launcher.planning.per_host import HostSettings
from flagscale.launcher.preflight.checks import Check, merge_equal_rows
from flagscale.launcher.preflight.host_probe import HostReplies, copies_code, rank_python

_UNCLEAR_HINT = "experiment.runner.health: off starts without this check"


def check_hardware(experiment: Experiment, replies: HostReplies, hosts: Hosts) -> list[Check]:
    """Measure the hosts that have replied, and return the checks."""
    obstacles = {
        index: obstacle
        for index, facts in sorted(replies.facts.items())
        if (obstacle := _find_obstacle(experiment, replies, facts))
    }
    rows = [
        (replies.names[index], Check(HARDWARE, True, f"not measured: {obstacle}", warning=True))
        for index, obstacle in obstacles.items()
    ]
    checks = list(merge_equal_rows(rows))
    indices = [index for index in sorted(replies.facts) if index not in obstacles]
    if indices:
        log_line(f"measuring the hardware of {compress_names(replies.names[i] for i in indices)}")
        targets = [
            _make_target(experiment, host, settings)
            for host, settings in zip(replies.hosts, replies.settings, strict=True)
        ]
        is_full = experiment.runner.health == "full"
        checks += make_checks(check_health(hosts, targets, full=is_full, indices=indices))
    checks = [
        check if check.ok or check.hint else replace(check, hint=_UNCLEAR_HINT) for check in checks
    ]
    return [replace(check, hosts="") for check in checks] if replies.is_local else checks


def make_checks(result: HealthResult) -> list[Check]:
    """Return the results of hardware checks, with equal results of hosts in one row."""
    rows: dict[str, list[tuple[str, Check]]] = {}
    for row in list_rows(result):
        check = Check(row.check, row.ok, row.text, row.hint, row.warning)
        rows.setdefault(row.check, []).append((row.host, check))
    return [check for members in rows.values() for check in merge_equal_rows(members)]


def _find_obstacle(experiment: Experiment, replies: HostReplies, facts: HostFacts) -> str:
    """Return the reason why a host is not measured; empty if there is none."""
    if facts.live_run_id:
        return f"run {facts.live_run_id} is alive there"
    if facts.python is None:
        return "its Python did not answer"
    if "torch" not in facts.python.packages:
        return "its Python has no torch"
    needs_code = copies_code(experiment, is_local=replies.is_local)
    if needs_code and not replies.is_code_copied and facts.python.code != replies.code_digest:
        return "the code is copied when the run starts, and the hardware is checked after that"
    return ""


def _make_target(experiment: Experiment, host: Host, settings: HostSettings) -> HealthTarget:
    project = settings.build_dir or PROJECT
    return HealthTarget(
        host.name,
        str(experiment.train["device"]),
        host.addr or "",
        dict(_list_variables(experiment, host)),
        HostPython(rank_python(settings), settings.setup, project),
    )


def _list_variables(experiment: Experiment, host: Host) -> Iterator[tuple[str, VariableParts]]:
    """Yield the variables of the ranks without secrets, which no measurement needs."""
    variables: Mapping[str, str] = experiment.envs.for_host(host.name, host.device_type)
    for name, value in variables.items():
        if not is_secret(name, value):
            yield name, tuple(split_references(name, value))
