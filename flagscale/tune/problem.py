"""The search problem of an experiment: its devices, its batch, and the values to consider."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flagscale.accelerators.registry import list_device_accelerators
from flagscale.config.arguments.hetero.meshes import uses_meshes
from flagscale.config.arguments.hetero.microbatch_split import uses_microbatch_split
from flagscale.config.arguments.layout import check_world_size, global_batch_size
from flagscale.config.arguments.layout_choices import CHOICES, CHOSEN_ARGUMENTS, TP, hashable
from flagscale.config.runners import DEFAULT_RUNNER
from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError, Problem
from flagscale.estimate.arithmetic import get_transformer
from flagscale.estimate.plan import GIB, DeviceSpec, find_padded_vocabulary, get_device_spec
from flagscale.launcher.planning.model import HostPlan
from flagscale.launcher.runners.base import runner_for_experiment
from flagscale.tune.machine import Machine, make_cpu_machine, make_gpu_machine
from flagscale.tune.space import SearchProblem

_BATCH = ("global_batch_size", "rampup_batch_size")
_BYTES_PER_MB = 1e6


@dataclass(frozen=True)
class HostFactsSummary:
    """Facts of the first host: its cores, the product names of its devices, and its memory."""

    cores: int | None = None
    products: Sequence[str] = ()
    memory_bytes: int | None = None


def make_problem(experiment: Experiment, *, probing: bool) -> SearchProblem:
    """Return the search problem of an experiment.

    Args:
        experiment: The experiment.
        probing: Contact the first host for the type of its devices and the number of its cores.
            This machine is always probed if it is the only host.

    Raises:
        ConfigError: The experiment has nothing that can be searched, or its hosts differ.
    """
    _require_searchable(experiment)
    hosts = _plan_hosts(experiment)
    ranks = sum(len(host.ranks) for host in hosts)
    args = experiment.train
    values = {**args.values, "global_batch_size": _find_batch(experiment, ranks)}
    machine = _find_machine(experiment, hosts, ranks, probing=probing)
    tuner = experiment.tuner
    requested = {name: tuple(found) for name, found in tuner.space.items()}
    for choice in CHOICES:
        if any(name in tuner.keep for name in choice.arguments):
            requested |= {name: (hashable(values[name]),) for name in choice.arguments}
    fractions = tuner.memory_model.gpu_utilization
    return SearchProblem(
        values,
        machine,
        _find_vocabulary(experiment),
        requested,
        (fractions[0], fractions[1]) if fractions else None,
    )


def _require_searchable(experiment: Experiment) -> None:
    """Raise an error for an experiment without homogeneous layouts."""
    if experiment.task.external:
        raise ConfigError(
            f"{experiment.task.program} is not this project's training program, so its layouts "
            "are not known",
            hint="-m train.system.NAME=1,2,4 runs each value",
        )
    values = experiment.train.values
    if uses_meshes(values) or uses_microbatch_split(values):
        key = experiment.train.key_of("enable_hetero")
        raise ConfigError(
            Problem(key, "auto_tune searches layouts of identical devices"),
            hint="hetero_process_meshes: auto and hetero_pipeline_layer_split: auto choose the "
            "sizes and layers of unlike devices by measuring when training starts",
        )
    get_transformer(Namespace(**values))


def _plan_hosts(experiment: Experiment) -> Sequence[HostPlan]:
    """Return the hosts with their ranks, whatever the layout of the YAML.

    Raises:
        ConfigError: They differ.
    """
    train = experiment.train.without(*CHOSEN_ARGUMENTS, *_BATCH)
    neutral = replace(experiment, train=train)
    plan = runner_for_experiment(neutral).plan(neutral)
    hosts = [host for host in plan.hosts if not host.is_spare]
    types = {host.device_type for host in hosts}
    counts = {len(host.ranks) for host in hosts}
    if len(types) > 1 or len(counts) > 1:
        found = (
            f"hosts of type {' and '.join(sorted(str(name) for name in types))}"
            if len(types) > 1
            else f"hosts with {' and '.join(map(str, sorted(counts)))} ranks"
        )
        raise ConfigError(
            Problem("experiment.runner.hostfile", f"auto_tune needs hosts that are alike: {found}"),
            hint="for unlike devices, enable_hetero: true with hetero_process_meshes: auto "
            "chooses the meshes, see docs/guides/heterogeneous.md; or tune the hosts of one type",
        )
    return hosts


def _find_batch(experiment: Experiment, ranks: int) -> int:
    """Return the number of sequences per step, which the search does not change.

    Raises:
        ConfigError: The YAML does not state it, and its own layout does not fit the ranks.
    """
    values = experiment.train.values
    if values["global_batch_size"] is not None:
        return int(values["global_batch_size"])
    if violations := check_world_size(values, ranks):
        name, message = violations[0]
        raise ConfigError(
            Problem(
                experiment.train.key_of("global_batch_size"),
                f"is required: the layout of the YAML, from which it would follow, is not possible "
                f"({name}: {message})",
            )
        )
    return global_batch_size(values, ranks)


def _find_vocabulary(experiment: Experiment) -> int:
    """Return the vocabulary size before it is padded for tensor parallelism; 0 if unknown."""
    return find_padded_vocabulary(Namespace(**{**experiment.train.values, TP: 1, "meshes": None}))


def _find_machine(
    experiment: Experiment, hosts: Sequence[HostPlan], ranks: int, *, probing: bool
) -> Machine:
    facts = _read_facts(experiment, probing=probing)
    per_host = len(hosts[0].ranks)
    device_type, device = hosts[0].device_type, experiment.train.values["device"]
    is_cpu = device == "cpu" or (
        device == "auto" and device_type is None and facts.cores is not None and not facts.products
    )
    if is_cpu:
        machine = make_cpu_machine(ranks, per_host, facts.cores or per_host, facts.memory_bytes)
    else:
        product = next(iter(facts.products), None)
        machine = make_gpu_machine(
            ranks,
            per_host,
            _find_device(device_type) or _find_device(product),
            experiment.train.values["peak_tflops"],
        )
    memory = experiment.tuner.memory_model.gpu_memory
    return machine if memory is None else replace(machine, memory_gib=memory * _BYTES_PER_MB / GIB)


def _find_device(name: str | None) -> DeviceSpec | None:
    """Return a device of which anything is known."""
    spec = get_device_spec(name)
    return spec if spec is not None and (spec.peak or spec.memory) else None


def _read_facts(experiment: Experiment, *, probing: bool) -> HostFactsSummary:
    """Return the facts of the first host; without any if it is not contacted."""
    from flagscale.launcher.plan_builder import select_hosts
    from flagscale.launcher.preflight.host_probe import query_hosts
    from flagscale.launcher.runners import endpoints

    if (experiment.runner.type or DEFAULT_RUNNER) not in ("local", "ssh"):
        return HostFactsSummary()
    hosts = select_hosts(experiment)
    handle = endpoints.make_handle(experiment.runner, hosts)
    is_local = endpoints.is_local(handle)
    if not is_local and not probing:
        return HostFactsSummary()
    with endpoints.open_hosts(handle, [host.name for host in hosts]) as connected:
        replies = query_hosts(experiment, hosts, connected, is_local=is_local, for_preflight=False)
    facts = replies.facts.get(0)
    if facts is None:
        return HostFactsSummary()
    kinds = {adapter.name for adapter in list_device_accelerators()}
    products: list[Any] = [name for kind, name in facts.products.items() if kind in kinds and name]
    return HostFactsSummary(
        facts.cpus,
        products or [kind for kind in facts.devices if kind in kinds],
        facts.memory_bytes,
    )
