"""Plan as text for ``dryrun``: hosts whose scripts are equal are shown once. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from flagscale.config.interpolation import restore_references
from flagscale.hosts.names import compress_names
from flagscale.launcher.layout import host_label
from flagscale.launcher.planning.environment import EnvironmentVariable
from flagscale.launcher.planning.model import BatchJob, HostPlan, LaunchPlan
from flagscale.launcher.planning.script import render
from flagscale.launcher.planning.supervision import NOTIFY_ORIGIN

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
    port = plan.master_port or "a port that is free there"
    spares = sum(host.is_spare for host in plan.hosts)
    lines = [
        f"# {plan.name}: {plan.world_size} rank(s) on {len(plan.hosts) - spares} host(s)"
        + (f", and {spares} spare host(s)" if spares else ""),
        f"# rendezvous of the ranks at {restore_references(plan.master_addr)}:{port}",
        *(f"# note: {note}" for note in plan.notes),
    ]
    if plan.job is not None:
        lines += _batch_job_lines(plan.job)
    groups: dict[tuple[object, ...], list[HostPlan]] = {}
    for host in plan.hosts if hosts is None else hosts:
        groups.setdefault(_script_shape(host), []).append(host)
    for equal_hosts in groups.values():
        first = equal_hosts[0]
        lines += [
            "",
            *_heading_lines(equal_hosts),
            *_setting_lines(first.environment, first.origins),
            f"# --- {first.script}",
            render(plan, first),
        ]
    return "\n".join(lines)


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

    def shared_part(value: EnvironmentVariable) -> str:
        per_host_fields = value.origin in ("run", "default")
        return (
            value.value.replace(run_dir, "").removeprefix(prefix)
            if per_host_fields
            else value.value
        )

    variables = (value for value in host.environment if value.origin != NOTIFY_ORIGIN)
    environment = tuple((value.name, value.origin, shared_part(value)) for value in variables)
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
    common_fields = {key: value for key, value in vars(host).items() if key not in host_specific}
    return tuple({**common_fields, **derived}.values())


def _heading_lines(hosts: Sequence[HostPlan]) -> Iterator[str]:
    first = hosts[0]
    type_text = f" ({first.device_type})" if first.device_type else ""
    if len(hosts) == 1:
        ranks = _format_ranks(first.first_rank, first.nproc)
        yield f"# host {first.node_rank} {first.name}{type_text}: ranks {ranks}"
        return
    names = _format_names([host.name for host in hosts])
    ranks = "spares" if first.is_spare else f"{first.nproc} rank(s) each"
    yield f"# {len(hosts)} hosts {names}{type_text}: {ranks}, one script except for"
    varying_fields = list(_varying_fields(hosts))
    width = max(len(field) for field, _ in varying_fields)
    for field, values in varying_fields:
        yield f"#   {field:{width}}  {values}"
    yield f"# host=NAME shows the script of another host; this is the script of {first.name}:"


def _format_ranks(first_rank: int, nproc: int) -> str:
    return f"{first_rank}-{first_rank + nproc - 1}" if nproc else "none"


def _varying_fields(hosts: Sequence[HostPlan]) -> Iterator[tuple[str, str]]:
    """Yield what differs between hosts of the same shape, and how."""
    yield "name", _format_names([host.name for host in hosts])
    yield "node_rank", _first_and_last([str(host.node_rank) for host in hosts])
    yield "ranks", _first_and_last([_format_ranks(host.first_rank, host.nproc) for host in hosts])
    if any(host.address != host.name for host in hosts):
        yield "address", _format_names([host.address for host in hosts])
    for field in ("run_dir", "pid_file"):
        labels = ((str(getattr(h, field)), host_label(h.node_rank, h.name)) for h in hosts)
        patterns = (path.replace(label, "host_<node_rank>_<name>") for path, label in labels)
        yield field, _first_and_last(list(dict.fromkeys(patterns)))
    for field in _ROLE_OPTIONS:
        yield from _values_by_host(field, hosts, [getattr(host.agent, field) for host in hosts])
    notified = [[v.name for v in host.environment if v.origin == NOTIFY_ORIGIN] for host in hosts]
    yield from _values_by_host(NOTIFY_ORIGIN, hosts, notified)


def _values_by_host(
    field: str, hosts: Sequence[HostPlan], values: Sequence[str | Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """Yield the values of a field by host, if they are not all equal."""
    groups: dict[str, list[str]] = {}
    for host, value in zip(hosts, values, strict=True):
        text = value if isinstance(value, str) else _format_names(value)
        groups.setdefault(text or "none", []).append(host.name)
    if len(groups) > 1:
        yield (
            field,
            "; ".join(f"{text} on {_format_names(names)}" for text, names in groups.items()),
        )


def _format_names(names: Sequence[str]) -> str:
    text = compress_names(names)
    return text if len(text) <= _MAX_CHARACTERS else _first_and_last(names)


def _first_and_last(values: Sequence[str]) -> str:
    if len(values) <= _MAX_VALUES:
        return ", ".join(values)
    return f"{values[0]}, {values[1]} ... {values[-1]}"


def _setting_lines(
    environment: Sequence[EnvironmentVariable], settings: Sequence[tuple[str, str]]
) -> Iterator[str]:
    """Yield the variables of a host and the settings that only this host has, with their origins.

    Args:
        environment: Variables of the ranks.
        settings: Dotted key and value of each setting. An empty value removes an argument.
    """
    keys = [*(variable.origin for variable in environment), *(key for key, _ in settings)]
    width = max(map(len, keys), default=0)
    for key, value in settings:
        yield f"#   {key:{width}}  {_escape_line_ends(value) if value else '(removed)'}"
    for variable in environment:
        text = "<secret, not written>" if variable.secret else shlex.quote(variable.readable_value)
        yield f"#   {variable.origin:{width}}  {variable.name}={_escape_line_ends(text)}"


def _escape_line_ends(text: str) -> str:
    """Escape line ends, which would end the comment."""
    return text.replace("\n", "\\n").replace("\r", "\\r")
