"""How a plan looks: hosts whose scripts say the same are shown as one. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from flagscale.config.interpolation import readable
from flagscale.hosts.names import compress
from flagscale.launcher.layout import host_label
from flagscale.launcher.planning.environment import EnvValue
from flagscale.launcher.planning.model import BatchJob, HostPlan, LaunchPlan
from flagscale.launcher.planning.script import render
from flagscale.launcher.planning.supervision import NOTIFY

# What a host's name and its place in the plan make of these: they keep no two hosts apart.
_OWN = {"name", "node_rank", "first_rank", "run_dir"}
# What the first hosts are told beside, or in place of, what the others are.
_ROLES = ("hosts", "master_name", "notify_on")
_OF_OTHERS = ("places", "master_place")
"""What follows from the meshes, which the notes draw, and from these."""
# Of more values, or longer lists of names, the first and the last are shown.
_MOST_VALUES = 4
_MOST_CHARACTERS = 200


def plan_text(plan: LaunchPlan, hosts: Sequence[HostPlan] | None = None) -> str:
    """A plan and the scripts of its hosts, or of ``hosts``, as plain text."""
    return "\n".join(_lines(plan, plan.hosts if hosts is None else hosts))


def _lines(plan: LaunchPlan, hosts: Sequence[HostPlan]) -> Iterator[str]:
    yield f"# {plan.name}: {plan.world_size} rank(s) on {len(plan.hosts)} host(s)"
    port = plan.master_port or "a port that is free there"
    yield f"# ranks meet at {readable(plan.master_addr)}:{port}"
    for note in plan.notes:
        yield f"# note: {note}"
    if plan.job is not None:
        yield from _batch(plan.job)
    groups: dict[tuple[object, ...], list[HostPlan]] = {}
    for host in hosts:
        groups.setdefault(_shape(host), []).append(host)
    for equal in groups.values():
        yield ""
        yield from _heading(equal)
        yield from _settings(equal[0])
        yield f"# --- {equal[0].script}"
        yield render(plan, equal[0])


def _batch(job: BatchJob) -> Iterator[str]:
    """What a scheduler is given: its command, a word a line, and the script."""
    yield ""
    yield "# " + " \\\n#     ".join(map(shlex.quote, job.command))
    yield f"# --- {job.file}"
    yield job.script


def _shape(host: HostPlan) -> tuple[object, ...]:
    """What is the same for hosts whose scripts differ only in the host's name, its place in the
    plan, and what follows from these."""
    run_dir, prefix = str(host.run_dir), f"{host.name}:"

    def shared(value: EnvValue) -> str:
        own = value.origin in ("run", "default")
        return value.value.replace(run_dir, "").removeprefix(prefix) if own else value.value

    given = (value for value in host.environment if value.origin != NOTIFY)
    environment = tuple((value.name, value.origin, shared(value)) for value in given)
    starter = tuple(
        word.replace(run_dir, "")
        for before, word in zip(("", *host.starter), host.starter, strict=False)
        if before not in ("--node_rank", "--first_rank")
    )
    told = {k: v for k, v in vars(host.agent).items() if k not in {*_OWN, *_ROLES, *_OF_OTHERS}}
    own = {"name", "node_rank", "address", "first_rank", "run_dir", "script", "output", "pid_file"}
    worked_out = {"environment": environment, "starter": starter, "agent": tuple(told.values())}
    same = {key: value for key, value in vars(host).items() if key not in own}
    return tuple({**same, **worked_out}.values())


def _heading(hosts: Sequence[HostPlan]) -> Iterator[str]:
    first = hosts[0]
    kind = f" ({first.device_type})" if first.device_type else ""
    if len(hosts) == 1:
        yield f"# host {first.node_rank} {first.name}{kind}: ranks {_ranks(first)}"
        return
    names = _names([host.name for host in hosts])
    yield f"# {len(hosts)} hosts {names}{kind}: {first.nproc} rank(s) each, one script but for"
    varying = list(_varying(hosts))
    width = max(len(what) for what, _ in varying)
    for what, how in varying:
        yield f"#   {what:{width}}  {how}"
    yield f"# host=NAME shows another one's; this is {first.name}'s:"


def _ranks(host: HostPlan) -> str:
    return f"{host.ranks.start}-{host.ranks.stop - 1}"


def _varying(hosts: Sequence[HostPlan]) -> Iterator[tuple[str, str]]:
    """What differs between hosts of the same shape, and how."""
    yield "name", _names([host.name for host in hosts])
    yield "node_rank", _first_and_last([str(host.node_rank) for host in hosts])
    yield "ranks", _first_and_last([_ranks(host) for host in hosts])
    if any(host.address != host.name for host in hosts):
        yield "address", _names([host.address for host in hosts])
    for what in ("run_dir", "pid_file"):
        labels = ((str(getattr(h, what)), host_label(h.node_rank, h.name)) for h in hosts)
        patterns = (path.replace(label, "host_<node_rank>_<name>") for path, label in labels)
        yield what, _first_and_last(list(dict.fromkeys(patterns)))
    for what in _ROLES:
        yield from _by_host(what, hosts, [getattr(host.agent, what) for host in hosts])
    told = [[v.name for v in host.environment if v.origin == NOTIFY] for host in hosts]
    yield from _by_host(NOTIFY, hosts, told)


def _by_host(
    what: str, hosts: Sequence[HostPlan], values: Sequence[str | Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """What some of the hosts have and others have not, where they are not all the same."""
    groups: dict[str, list[str]] = {}
    for host, value in zip(hosts, values, strict=True):
        text = value if isinstance(value, str) else _names(value)
        groups.setdefault(text or "none", []).append(host.name)
    if len(groups) > 1:
        yield what, "; ".join(f"{text} on {_names(names)}" for text, names in groups.items())


def _names(names: Sequence[str]) -> str:
    text = compress(names)
    return text if len(text) <= _MOST_CHARACTERS else _first_and_last(names)


def _first_and_last(values: Sequence[str]) -> str:
    if len(values) <= _MOST_VALUES:
        return ", ".join(values)
    return f"{values[0]}, {values[1]} ... {values[-1]}"


def _settings(host: HostPlan) -> Iterator[str]:
    """The host's variables and what is its own, each with where it comes from."""
    origins = [*(value.origin for value in host.environment), *(o for o, _ in host.origins)]
    width = max(map(len, origins), default=0)
    for origin, given in host.origins:
        yield f"#   {origin:{width}}  {_one_line(given) if given else '(taken away)'}"
    for value in host.environment:
        shown = "<secret, not written>" if value.secret else shlex.quote(value.shown)
        yield f"#   {value.origin:{width}}  {value.name}={_one_line(shown)}"


def _one_line(text: str) -> str:
    """A value may have line ends, which would end the comment."""
    return text.replace("\n", "\\n").replace("\r", "\\r")
