"""What would keep a run from starting on its hosts, from what they answered. Pure.

Each check is worked out host by host; hosts with the same finding become one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from flagscale.config.arguments.flatten import leaves
from flagscale.config.schema import BACKEND_DIRECTORY, Experiment
from flagscale.errors import FlagscaleError, UnreachableError
from flagscale.hosts.facts import Facts, packages_of
from flagscale.hosts.fan_out import describe
from flagscale.hosts.names import compress
from flagscale.hosts.python_world import World
from flagscale.launcher.planning.model import HostPlan, LaunchPlan
from flagscale.launcher.preflight import backend, checkpoint, directories, user_code
from flagscale.launcher.preflight.checks import (
    EARLIER_RUN,
    REACHABLE,
    Check,
    check_adapters,
    check_devices,
    port_origin,
)
from flagscale.launcher.preflight.host_probe import BACKEND, Survey, port_in_use, syncs
from flagscale.launcher.state import RunState, alive_message

_SKEW_FAILS = 30.0
_SKEW_WARNS = 2.0


def check_hosts(
    experiment: Experiment, plan: LaunchPlan, found: Survey, previous: RunState | None = None
) -> list[Check]:
    """Everything that the hosts' answers tell, the troubles of unreachable ones first. Of what is
    between hosts, this machine alone has nothing to tell. ``previous``: the run before."""
    usual = _usual(found)
    exp_dir, key = str(plan.exp_dir), "experiment.exp_dir"
    per_host: list[Callable[[HostPlan, Facts], Check]] = [
        lambda host, facts: _python(facts, usual),
        lambda host, facts: _packages(experiment, found, facts, usual),
        lambda host, facts: _code(experiment, found, facts),
        lambda host, facts: _paths(found.needed[host.node_rank], facts),
        lambda host, facts: check_devices(experiment, host, facts),
        lambda host, facts: backend.judge(
            experiment, found.hosts[host.node_rank], facts.answer(backend.CHECK), facts.devices
        ),
        lambda host, facts: _rounded(
            directories.check_directory("exp_dir", exp_dir, facts.exp_dir, key=key), exp_dir
        ),
        lambda host, facts: _earlier_run(facts, previous),
    ]
    asked = [part for part in user_code.ALL if part.words(experiment)]
    per_host += [partial(part.look, experiment) for part in asked]
    between = (
        lambda host, facts: _interface(plan, host, facts, found.facts.get(0)),
        lambda host, facts: _clock(facts),
    )
    checks = [] if found.here and not found.errors else list(_reachable(found))
    for look in per_host if found.here else (*per_host, *between):
        rows = [
            (plan.hosts[number].name, look(plan.hosts[number], facts))
            for number, facts in sorted(found.facts.items())
        ]
        checks += _compressed(rows)
    checks += _directories(experiment, plan, found)
    if (adapters := check_adapters()) is not None:
        checks.append(adapters)
    if 0 in found.facts:
        checks += _ports(experiment, plan, found)
    return [replace(check, hosts="") for check in checks] if found.here else checks


def require_usable(experiment: Experiment, found: Survey) -> None:
    """Raise :class:`UnreachableError` that names every host that did not answer, or
    :class:`ConfigError` for a port that is taken: what is known without a preflight."""
    if found.errors:
        count = f"{len(found.errors)} of {len(found.hosts)} host(s) cannot be used"
        raise UnreachableError(f"{count}\n{describe(found.errors, found.names)}")
    taken = port_in_use(experiment, found)
    if taken is not None:
        raise taken


def _compressed(rows: list[tuple[str, Check]]) -> Iterator[Check]:
    """One row for all hosts with the same finding, in the order in which they come."""
    groups: dict[Check, list[str]] = {}
    for name, check in rows:
        groups.setdefault(check, []).append(name)
    for check, names in groups.items():
        yield replace(check, hosts=compress(names))


def _reachable(found: Survey) -> Iterator[Check]:
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, error in found.errors.items():
        summary = str(getattr(error, "summary", error.message))
        groups.setdefault((summary, error.hint or ""), []).append(rank)
    for (_, hint), ranks in groups.items():
        errors: Mapping[int, FlagscaleError] = {rank: found.errors[rank] for rank in ranks}
        names = compress(found.names[rank] for rank in ranks)
        # Names are a column of their own.
        text = describe(errors, found.names).splitlines()[0].removeprefix(f"{names}: ")
        yield Check(REACHABLE, False, text, hint, hosts=names)
    if found.facts:
        names = compress(found.names[rank] for rank in sorted(found.facts))
        yield Check(REACHABLE, True, f"{len(found.facts)} host(s)", hosts=names)


def _usual(found: Survey) -> dict[str, str]:
    """The versions that most hosts have: those of the others differ."""
    asked = [facts.python for facts in found.facts.values() if facts.python]
    usual = {}
    for name in ("version", *packages_of(list(found.facts.values()))):
        versions = Counter(_version(python, name) for python in asked)
        usual[name] = versions.most_common(1)[0][0] if versions else ""
    return usual


def _version(python: World, name: str) -> str:
    return python.version if name == "version" else python.packages.get(name, "none")


def _python(facts: Facts, usual: Mapping[str, str]) -> Check:
    hint = "set experiment.runner.python (or conda), or device_type_specific.<type>.python"
    if facts.python is None:
        return Check("python", False, facts.python_error or "its Python did not answer", hint)
    version = facts.python.version
    found = f"{version}, {facts.python.executable}"
    if version.rpartition(".")[0] != usual["version"].rpartition(".")[0]:
        return Check("python", False, f"{found}; the other hosts have {usual['version']}", hint)
    return Check("python", True, found, warning=version != usual["version"])


def _packages(
    experiment: Experiment, found: Survey, facts: Facts, usual: Mapping[str, str]
) -> Check:
    if facts.python is None:
        return Check("packages", False, "its Python did not answer")
    if experiment.task.is_command:
        return Check("packages", True, f"what {experiment.task.program} needs is for it to say")
    needed = {"torch": "install the `train` extra there (here: make setup)"}
    given = leaves(experiment.train.sections())
    reports = any(name == "wandb_project" and value for _, name, value in given)
    if reports and not experiment.task.external:
        needed["wandb"] = "pip install wandb, or remove wandb_project"
    there = packages_of(list(found.facts.values()))
    names = [name for name in there if name != "wandb" or name in needed]
    own = {name: _version(facts.python, name) for name in (*names, *needed)}
    for name, hint in needed.items():
        if own[name] == "none":
            return Check("packages", False, f"its Python has no {name}", hint)
    differing = [name for name in names if own[name] != usual[name]]
    if differing:
        text = ", ".join(f"{name} {own[name]} (others: {usual[name]})" for name in differing)
        return Check("packages", False, text, "install the same versions on every host")
    return Check("packages", True, ", ".join(f"{name} {own[name]}" for name in names[:3]))


def _code(experiment: Experiment, found: Survey, facts: Facts) -> Check:
    if facts.python is None:
        return Check("code", False, "its Python did not answer")
    same = facts.python.code == found.code
    if syncs(experiment, here=found.here):
        return Check("code", True, "the same as here" if same else "copied when the run starts")
    hint = "install it there, or let `experiment.runner.sync: code` copy it"
    if not facts.project:
        return Check("code", False, "there is no flagscale where it should be", hint)
    if found.code and not same:
        what = f"flagscale or {BACKEND_DIRECTORY} is not what it is here"
        return Check("code", False, what, hint)
    return Check("code", True, "the same as here" if found.code else "shared")


def _paths(needed: Mapping[str, str], facts: Facts) -> Check:
    missing = [f"{needed[path]}: {path}" for path in facts.missing]
    if not missing:
        known = "the program and its data are there" if needed else "none are known of"
        return Check("files", True, known)
    shown = "; ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
    hints = []
    if any(needed[path] == BACKEND for path in facts.missing):
        hints.append("run: python tools/patch/unpatch.py --backend Megatron-LM")
    if any("data/quickstart/" in path for path in facts.missing):
        hints.append("run: make data")
    hint = "; ".join(hints) or "copy them, or name others"
    return Check("files", False, f"not there: {shown}", hint)


def _interface(plan: LaunchPlan, host: HostPlan, facts: Facts, master: Facts | None) -> Check:
    if len(plan.hosts) == 1:
        return Check("interface", True, "not needed by one host")
    hint = "give the hostfile's addr=, or experiment.runner.master_addr"
    # Names of one machine, which has one boot, may well meet at its loopback address.
    if facts.loopback and master is not None and facts.boot_id != master.boot_id:
        text = f"{plan.master_addr} is a loopback address there, not that of {plan.hosts[0].name}"
        return Check("interface", False, text, hint)
    given = next((v for v in host.environment if v.name.endswith("_SOCKET_IFNAME")), None)
    if given is not None and given.origin != "detected":
        return Check("interface", True, f"{given.value}, as {given.origin} says")
    if facts.interface:
        return Check("interface", True, f"{facts.interface} reaches {plan.master_addr}")
    text = f"no interface reaches {plan.master_addr}"
    if not facts.address:
        text = f"{plan.master_addr} means nothing there"
    return Check("interface", False, text, hint)


def _directories(experiment: Experiment, plan: LaunchPlan, found: Survey) -> Iterator[Check]:
    """What training starts from and writes to. Hosts may differ in what they use."""
    rows: dict[str, list[tuple[str, Check]]] = {}
    for rank, facts in sorted(found.facts.items()):
        own = found.settings[rank]
        want = directories.wanted(experiment, plan.layout, own, first=rank == 0)
        loaded = checkpoint.judge(want, facts, found.facts.get(0), plan.world_size)
        for check in filter(None, (*directories.judge(want, facts.written), loaded)):
            row = _rounded(check, want.written.get(check.name, ""))
            rows.setdefault(check.name, []).append((plan.hosts[rank].name, row))
    for named in rows.values():
        yield from _compressed(named)


def _rounded(check: Check, path: str) -> Check:
    """Hosts with room differ in its amount, which nobody needs to the megabyte."""
    if path and check.ok and not check.warning:
        return replace(check, found=f"{path}: more than 2 GiB free")
    return check


def _clock(facts: Facts) -> Check:
    skew = abs(facts.skew)
    if skew < _SKEW_WARNS:
        return Check("clock", True, f"within {_SKEW_WARNS:g} s of ours")
    found = f"{round(skew)} s {'ahead of' if facts.skew > 0 else 'behind'} ours"
    hint = "set the clocks right (chrony, ntpd): times of logs and failures would mislead"
    return Check("clock", skew < _SKEW_FAILS, found, hint, warning=True)


def _earlier_run(facts: Facts, previous: RunState | None) -> Check:
    if not facts.alive:
        return Check(EARLIER_RUN, True, "none alive")
    if previous is not None and previous.run_id == facts.alive:
        found, hint = alive_message(previous)
        return Check(EARLIER_RUN, False, found, hint)
    hint = "stop it with action=stop, or give this one another experiment.exp_dir"
    return Check(EARLIER_RUN, False, f"{facts.alive} is alive there", hint)


def _ports(experiment: Experiment, plan: LaunchPlan, found: Survey) -> Iterator[Check]:
    """The ports of the master's host, and why it is these where its answer has found them free."""
    runner, host = experiment.runner, plan.hosts[0].name
    taken = port_in_use(experiment, found)
    if taken is not None:
        yield Check("master port", False, taken.message, taken.hint or "", hosts=host)
        return
    origin = port_origin(runner)
    yield Check("master port", True, f"{plan.master_port}, free, {origin}", hosts=host)
    if plan.liveness_port is None:
        return
    origin = "beside the master port"
    if runner.liveness_port:
        origin = "as experiment.runner.liveness_port says"
    yield Check("liveness port", True, f"{plan.liveness_port}, free, {origin}", hosts=host)
