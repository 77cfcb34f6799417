"""Plan as text: hosts whose scripts are equal are shown once. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from flagscale.config.interpolation import restore_references
from flagscale.hosts.names import compress_names
from flagscale.launcher.layout import host_label
from flagscale.launcher.planning.environment import EnvironmentVariable
from flagscale.launcher.planning.model import BatchJob, HostPlan, LaunchPlan
from flagscale.launcher.planning.script import render
from flagscale.launcher.planning.supervision import NOTIFY

# Values that follow from a host's name and position; they do not distinguish hosts.
_NAME_DEPENDENT = {"name", "node_rank", "first_rank", "run_dir"}
# Agent options that only the first hosts have, or have with other values.
_ROLE_OPTIONS = ("hosts", "master_name", "notify_on")
_MESH_OPTIONS = ("places", "master_place")
"""Values that follow from the meshes, which the notes draw."""
# Longer lists are shown as their first and last items.
_MAX_VALUES = 4
_MAX_CHARACTERS = 200


def format_plan(plan: LaunchPlan, hosts: Sequence[HostPlan] | None = None) -> str:
    """Return a plan and the scripts of its hosts (or of ``hosts``) as plain text."""
    return "\n".join(_plan_lines(plan, plan.hosts if hosts is None else hosts))


def _plan_lines(plan: LaunchPlan, hosts: Sequence[HostPlan]) -> Iterator[str]:
    yield f"# {plan.name}: {plan.world_size} rank(s) on {len(plan.hosts)} host(s)"
    port = plan.master_port or "a port that is free there"
    yield f"# ranks meet at {restore_references(plan.master_addr)}:{port}"
    for note in plan.notes:
        yield f"# note: {note}"
    if plan.job is not None:
        yield from _batch_job_lines(plan.job)
    groups: dict[tuple[object, ...], list[HostPlan]] = {}
    for host in hosts:
        groups.setdefault(_script_shape(host), []).append(host)
    for equal in groups.values():
        yield ""
        yield from _heading_lines(equal)
        yield from _setting_lines(equal[0])
        yield f"# --- {equal[0].script}"
        yield render(plan, equal[0])


def _batch_job_lines(job: BatchJob) -> Iterator[str]:
    """Yield the scheduler's command, one word per line, and its script."""
    yield ""
    yield "# " + " \\\n#     ".join(map(shlex.quote, job.command))
    yield f"# --- {job.file}"
    yield job.script


def _script_shape(host: HostPlan) -> tuple[object, ...]:
    """Return everything that is equal for hosts whose scripts differ only in name, position and
    values that follow from these.
    """
    run_dir, prefix = str(host.run_dir), f"{host.name}:"

    def shared(value: EnvironmentVariable) -> str:
        per_host_fields = value.origin in ("run", "default")
        return (
            value.value.replace(run_dir, "").removeprefix(prefix)
            if per_host_fields
            else value.value
        )

    variables = (value for value in host.environment if value.origin != NOTIFY)
    environment = tuple((value.name, value.origin, shared(value)) for value in variables)
    starter = tuple(
        word.replace(run_dir, "")
        for before, word in zip(("", *host.starter), host.starter, strict=False)
        if before not in ("--node_rank", "--first_rank")
    )
    agent_options = {
        k: v
        for k, v in vars(host.agent).items()
        if k not in {*_NAME_DEPENDENT, *_ROLE_OPTIONS, *_MESH_OPTIONS}
    }
    host_specific = {
        "name",
        "node_rank",
        "address",
        "first_rank",
        "run_dir",
        "script",
        "output",
        "pid_file",
    }
    derived = {
        "environment": environment,
        "starter": starter,
        "agent": tuple(agent_options.values()),
    }
    same = {key: value for key, value in vars(host).items() if key not in host_specific}
    return tuple({**same, **derived}.values())


def _heading_lines(hosts: Sequence[HostPlan]) -> Iterator[str]:
    first = hosts[0]
    kind = f" ({first.device_type})" if first.device_type else ""
    if len(hosts) == 1:
        yield f"# host {first.node_rank} {first.name}{kind}: ranks {_format_ranks(first)}"
        return
    names = _format_names([host.name for host in hosts])
    yield f"# {len(hosts)} hosts {names}{kind}: {first.nproc} rank(s) each, one script but for"
    varying = list(_varying_fields(hosts))
    width = max(len(what) for what, _ in varying)
    for what, how in varying:
        yield f"#   {what:{width}}  {how}"
    yield f"# host=NAME shows another one's; this is {first.name}'s:"


def _format_ranks(host: HostPlan) -> str:
    return f"{host.ranks.start}-{host.ranks.stop - 1}"


def _varying_fields(hosts: Sequence[HostPlan]) -> Iterator[tuple[str, str]]:
    """Yield what differs between hosts of the same shape, and how."""
    yield "name", _format_names([host.name for host in hosts])
    yield "node_rank", _first_and_last([str(host.node_rank) for host in hosts])
    yield "ranks", _first_and_last([_format_ranks(host) for host in hosts])
    if any(host.address != host.name for host in hosts):
        yield "address", _format_names([host.address for host in hosts])
    for what in ("run_dir", "pid_file"):
        labels = ((str(getattr(h, what)), host_label(h.node_rank, h.name)) for h in hosts)
        patterns = (path.replace(label, "host_<node_rank>_<name>") for path, label in labels)
        yield what, _first_and_last(list(dict.fromkeys(patterns)))
    for what in _ROLE_OPTIONS:
        yield from _values_by_host(what, hosts, [getattr(host.agent, what) for host in hosts])
    notified = [[v.name for v in host.environment if v.origin == NOTIFY] for host in hosts]
    yield from _values_by_host(NOTIFY, hosts, notified)


def _values_by_host(
    what: str, hosts: Sequence[HostPlan], values: Sequence[str | Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """Yield the values of a field by host, if they are not all equal."""
    groups: dict[str, list[str]] = {}
    for host, value in zip(hosts, values, strict=True):
        text = value if isinstance(value, str) else _format_names(value)
        groups.setdefault(text or "none", []).append(host.name)
    if len(groups) > 1:
        yield what, "; ".join(f"{text} on {_format_names(names)}" for text, names in groups.items())


def _format_names(names: Sequence[str]) -> str:
    text = compress_names(names)
    return text if len(text) <= _MAX_CHARACTERS else _first_and_last(names)


def _first_and_last(values: Sequence[str]) -> str:
    if len(values) <= _MAX_VALUES:
        return ", ".join(values)
    return f"{values[0]}, {values[1]} ... {values[-1]}"


def _setting_lines(host: HostPlan) -> Iterator[str]:
    """Yield the host's variables and own settings, each with its origin."""
    origins = [*(value.origin for value in host.environment), *(o for o, _ in host.origins)]
    width = max(map(len, origins), default=0)
    for origin, text in host.origins:
        yield f"#   {origin:{width}}  {_escape_line_ends(text) if text else '(taken away)'}"
    for value in host.environment:
        text_of_value = (
            "<secret, not written>" if value.secret else shlex.quote(value.readable_value)
        )
        yield f"#   {value.origin:{width}}  {value.name}={_escape_line_ends(text_of_value)}"


def _escape_line_ends(text: str) -> str:
    """Escape line ends, which would end the comment."""
    return text.replace("\n", "\\n").replace("\r", "\\r")
