"""Checks of the hosts of a run, from their replies. Pure functions.

Each check is evaluated per host; hosts with equal results become one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from flagscale.config.command_hints import action_command, make_command, unpatch_command
from flagscale.config.schema import BACKEND_DIRECTORY, Experiment
from flagscale.errors import FlagscaleError, UnreachableError
from flagscale.hosts.facts import HostFacts, list_installed_packages
from flagscale.hosts.fan_out import format_host_errors
from flagscale.hosts.names import compress_names
from flagscale.hosts.python_environment import PythonEnvironment
from flagscale.launcher.planning.model import HostPlan, LaunchPlan
from flagscale.launcher.preflight import backend, checkpoint, directories, user_code
from flagscale.launcher.preflight.checks import (
    EARLIER_RUN,
    REACHABLE,
    Check,
    check_adapters,
    check_devices,
    describe_port_origin,
    merge_equal_rows,
)
from flagscale.launcher.preflight.host_probe import (
    TRAINING_BACKEND,
    HostReplies,
    copies_code,
    find_port_conflict,
)
from flagscale.launcher.state import RunState, alive_message

MASTER_PORT = "master port"
"""Name of the check of the ranks' port."""
_MAX_SKEW_SECONDS = 30.0
_SKEW_WARNING_SECONDS = 2.0


def check_hosts(
    experiment: Experiment, plan: LaunchPlan, replies: HostReplies, previous: RunState | None = None
) -> list[Check]:
    """Return the results of all checks, those of unreachable hosts first.

    ``previous`` is the run that was started before in this directory. Checks between hosts are
    skipped if this machine is the only one.
    """
    usual_versions = _most_common_versions(replies)
    exp_dir, key = str(plan.exp_dir), "experiment.exp_dir"
    host_checks: list[Callable[[HostPlan, HostFacts], Check]] = [
        lambda host, facts: _check_python(facts, usual_versions),
        lambda host, facts: _check_packages(experiment, replies, facts, usual_versions),
        lambda host, facts: _check_code(experiment, replies, facts),
        lambda host, facts: _check_paths(replies.required_paths[host.node_rank], facts),
        lambda host, facts: check_devices(experiment, host, facts),
        lambda host, facts: backend.check_backend(
            experiment,
            replies.hosts[host.node_rank],
            facts.module_reply(backend.CHECK),
            facts.devices,
        ),
        lambda host, facts: _without_exact_space(
            directories.check_directory("exp_dir", exp_dir, facts.exp_dir, key=key), exp_dir
        ),
        lambda host, facts: _check_earlier_run(facts, previous),
    ]
    user_code_checks = [part for part in user_code.HOST_QUERIES if part.query_arguments(experiment)]
    host_checks += [partial(part.check_host, experiment) for part in user_code_checks]
    network_checks = (
        lambda host, facts: _check_interface(plan, host, facts, replies.facts.get(0)),
        lambda host, facts: _check_clock(facts),
    )
    checks = [] if replies.is_local and not replies.errors else list(_check_reachable(replies))
    for check_host in host_checks if replies.is_local else (*host_checks, *network_checks):
        rows = [
            (plan.hosts[index].name, check_host(plan.hosts[index], facts))
            for index, facts in sorted(replies.facts.items())
        ]
        checks += merge_equal_rows(rows)
    checks += _check_directories(experiment, plan, replies)
    if (adapter_check := check_adapters()) is not None:
        checks.append(adapter_check)
    if 0 in replies.facts:
        checks += _check_ports(experiment, plan, replies)
    return [replace(check, hosts="") for check in checks] if replies.is_local else checks


def require_usable(experiment: Experiment, replies: HostReplies) -> None:
    """Check the hosts of a start without a preflight: that all replied, and that the port is free.

    Raises:
        UnreachableError: names every host that did not reply.
        ConfigError: the port is occupied.
    """
    if replies.errors:
        count = f"{len(replies.errors)} of {len(replies.hosts)} host(s) cannot be used"
        raise UnreachableError(f"{count}\n{format_host_errors(replies.errors, replies.names)}")
    conflict = find_port_conflict(experiment, replies)
    if conflict is not None:
        raise conflict


def _check_reachable(replies: HostReplies) -> Iterator[Check]:
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, error in replies.errors.items():
        summary = str(getattr(error, "summary", error.message))
        groups.setdefault((summary, error.hint or ""), []).append(rank)
    for (_, hint), ranks in groups.items():
        errors: Mapping[int, FlagscaleError] = {rank: replies.errors[rank] for rank in ranks}
        names = compress_names(replies.names[rank] for rank in ranks)
        # The names have a column of their own.
        text = format_host_errors(errors, replies.names).splitlines()[0].removeprefix(f"{names}: ")
        yield Check(REACHABLE, False, text, hint, hosts=names)
    if replies.facts:
        names = compress_names(replies.names[rank] for rank in sorted(replies.facts))
        yield Check(REACHABLE, True, f"{len(replies.facts)} host(s)", hosts=names)


def _most_common_versions(replies: HostReplies) -> dict[str, str]:
    """Return the version of each package that most hosts have."""
    pythons = [facts.python for facts in replies.facts.values() if facts.python]
    version_by_package = {}
    for name in ("version", *list_installed_packages(list(replies.facts.values()))):
        versions = Counter(_version_of(python, name) for python in pythons)
        version_by_package[name] = versions.most_common(1)[0][0] if versions else ""
    return version_by_package


def _version_of(python: PythonEnvironment, name: str) -> str:
    return python.version if name == "version" else python.packages.get(name, "none")


def _check_python(facts: HostFacts, common_versions: Mapping[str, str]) -> Check:
    hint = "set experiment.runner.python (or conda), or device_type_specific.<type>.python"
    if facts.python is None:
        return Check("python", False, facts.python_error or "its Python did not answer", hint)
    version = facts.python.version
    finding = f"{version}, {facts.python.executable}"
    if version.rpartition(".")[0] != common_versions["version"].rpartition(".")[0]:
        return Check(
            "python", False, f"{finding}; the other hosts have {common_versions['version']}", hint
        )
    return Check("python", True, finding, warning=version != common_versions["version"])


def _check_packages(
    experiment: Experiment,
    replies: HostReplies,
    facts: HostFacts,
    common_versions: Mapping[str, str],
) -> Check:
    if facts.python is None:
        return Check("packages", False, "its Python did not answer")
    if experiment.task.is_command:
        return Check("packages", True, f"what {experiment.task.program} needs is for it to say")
    hint_by_package = {"torch": "install the `train` extra there (here: make setup)"}
    names = list_installed_packages(list(replies.facts.values()))
    versions = {name: _version_of(facts.python, name) for name in (*names, *hint_by_package)}
    for name, hint in hint_by_package.items():
        if versions[name] == "none":
            return Check("packages", False, f"its Python has no {name}", hint)
    differing = [name for name in names if versions[name] != common_versions[name]]
    if differing:
        text = ", ".join(
            f"{name} {versions[name]} (others: {common_versions[name]})" for name in differing
        )
        return Check("packages", False, text, "install the same versions on every host")
    return Check("packages", True, ", ".join(f"{name} {versions[name]}" for name in names[:3]))


def _check_code(experiment: Experiment, replies: HostReplies, facts: HostFacts) -> Check:
    if facts.python is None:
        return Check("code", False, "its Python did not answer")
    is_same = facts.python.code == replies.code_digest
    if copies_code(experiment, is_local=replies.is_local):
        return Check("code", True, "the same as here" if is_same else "copied when the run starts")
    hint = "install it there, or let `experiment.runner.sync: code` copy it"
    if not facts.has_project:
        return Check("code", False, "there is no flagscale where it should be", hint)
    if replies.code_digest and not is_same:
        text = f"flagscale or {BACKEND_DIRECTORY} is not what it is here"
        return Check("code", False, text, hint)
    return Check("code", True, "the same as here" if replies.code_digest else "shared")


def _check_paths(key_by_path: Mapping[str, str], facts: HostFacts) -> Check:
    missing_entries = [f"{key_by_path[path]}: {path}" for path in facts.missing_paths]
    if not missing_entries:
        text = "the program and its data are there" if key_by_path else "none are known of"
        return Check("files", True, text)
    missing_text = "; ".join(missing_entries[:3]) + (
        f" and {len(missing_entries) - 3} more" if missing_entries[3:] else ""
    )
    hints = []
    if any(key_by_path[path] == TRAINING_BACKEND for path in facts.missing_paths):
        hints.append(f"run: {unpatch_command()}")
    if any("data/quickstart/" in path for path in facts.missing_paths):
        hints.append(f"run: {make_command('data')}")
    hint = "; ".join(hints) or "copy them, or name others"
    return Check("files", False, f"not there: {missing_text}", hint)


def _check_interface(
    plan: LaunchPlan, host: HostPlan, facts: HostFacts, master_facts: HostFacts | None
) -> Check:
    if len(plan.hosts) == 1:
        return Check("interface", True, "not needed by one host")
    hint = "set experiment.runner.master_addr, or addr= in a hostfile"
    # Host names of one machine, recognized by its boot id, may reach each other over loopback.
    if (
        facts.is_master_loopback
        and master_facts is not None
        and facts.boot_id != master_facts.boot_id
    ):
        text = f"{plan.master_addr} is a loopback address there, not that of {plan.hosts[0].name}"
        return Check("interface", False, text, hint)
    variable = next((v for v in host.environment if v.name.endswith("_SOCKET_IFNAME")), None)
    if variable is not None and variable.origin != "detected":
        return Check("interface", True, f"{variable.value}, as {variable.origin} says")
    if facts.interface:
        return Check("interface", True, f"{facts.interface} reaches {plan.master_addr}")
    text = f"no interface reaches {plan.master_addr}"
    if not facts.address:
        text = f"{plan.master_addr} means nothing there"
    return Check("interface", False, text, hint)


def _check_directories(
    experiment: Experiment, plan: LaunchPlan, replies: HostReplies
) -> Iterator[Check]:
    """Yield the checks of checkpoints and output paths, which may differ between hosts."""
    rows: dict[str, list[tuple[str, Check]]] = {}
    for rank, facts in sorted(replies.facts.items()):
        settings = replies.settings[rank]
        host_paths = directories.collect_host_paths(
            experiment, plan.layout, settings, is_first=rank == 0
        )
        checkpoint_check = checkpoint.check_checkpoint(
            host_paths, facts, replies.facts.get(0), plan.world_size
        )
        for check in filter(
            None,
            (*directories.check_output_paths(host_paths, facts.output_paths), checkpoint_check),
        ):
            row = _without_exact_space(check, host_paths.output_paths.get(check.name, ""))
            rows.setdefault(check.name, []).append((plan.hosts[rank].name, row))
    for results in rows.values():
        yield from merge_equal_rows(results)


def _without_exact_space(check: Check, path: str) -> Check:
    """Replace the exact free space of hosts with enough room, so that their rows can be merged."""
    if path and check.ok and not check.warning:
        return replace(check, found=f"{path}: more than 2 GiB free")
    return check


def _check_clock(facts: HostFacts) -> Check:
    skew = abs(facts.clock_offset)
    if skew < _SKEW_WARNING_SECONDS:
        return Check("clock", True, f"within {_SKEW_WARNING_SECONDS:g} s of ours")
    finding = f"{round(skew)} s {'ahead of' if facts.clock_offset > 0 else 'behind'} ours"
    hint = "set the clocks right (chrony, ntpd): times of logs and failures would mislead"
    return Check("clock", skew < _MAX_SKEW_SECONDS, finding, hint, warning=True)


def _check_earlier_run(facts: HostFacts, previous: RunState | None) -> Check:
    if not facts.live_run_id:
        return Check(EARLIER_RUN, True, "none alive")
    if previous is not None and previous.run_id == facts.live_run_id:
        finding, hint = alive_message(previous)
        return Check(EARLIER_RUN, False, finding, hint)
    hint = f"stop it with {action_command('stop')}, or give this one another experiment.exp_dir"
    return Check(EARLIER_RUN, False, f"{facts.live_run_id} is alive there", hint)


def _check_ports(experiment: Experiment, plan: LaunchPlan, replies: HostReplies) -> Iterator[Check]:
    """Yield the checks of the master host's ports, with the origin of their numbers."""
    runner, host = experiment.runner, plan.hosts[0].name
    conflict = find_port_conflict(experiment, replies)
    if conflict is not None:
        yield Check(MASTER_PORT, False, conflict.message, conflict.hint or "", hosts=host)
        return
    origin = describe_port_origin(runner)
    yield Check(MASTER_PORT, True, f"{plan.master_port}, free, {origin}", hosts=host)
    if plan.liveness_port is None:
        return
    origin = "next to the master port"
    if runner.liveness_port:
        origin = "as experiment.runner.liveness_port says"
    yield Check("liveness port", True, f"{plan.liveness_port}, free, {origin}", hosts=host)
