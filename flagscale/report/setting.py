"""Settings with which a run was started: model, layout, configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config.arguments.hetero.meshes import Mesh, meshes_of
from flagscale.config.arguments.hetero.microbatch_split import uses_microbatch_split
from flagscale.config.arguments.layout import (
    data_parallel_size,
    describe_rank_ranges,
    global_batch_size,
    sequences_per_sample,
    tokens_per_sample,
)
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.config.secrets import redact, redact_overrides
from flagscale.errors import ConfigError
from flagscale.files import read_json
from flagscale.launcher.layout import Layout
from flagscale.launcher.state import HostState, RunState

_PRECISIONS = ("fp16", "bf16")


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run.

    ``missing_reason`` is the reason if nothing is known. ``host_roles`` describes the part of the
    model on each host, such as its pipeline stages, by node rank, if rank numbers alone do not show
    it. ``options`` has every value of the configuration by dotted key.
    """

    missing_reason: str = ""
    program: str = ""
    model: str = ""
    layout: str = ""
    batch: str = ""
    host_roles: Mapping[int, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    text: str = ""
    overrides: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)


def read_settings(state: RunState) -> RunSettings:
    """Read the settings from a run's own files.

    A run of an older version has none: the files next to the scripts belong to the run that was
    started last in the directory.
    """
    layout = Layout(state.exp_dir)
    run_files = layout.run_files(state.run_id)
    files = run_files if run_files.plan.exists() else layout
    plan = read_json(files.plan)
    if plan is None:
        return RunSettings(
            missing_reason=f"{files.plan} and the files next to it do not exist any more"
        )
    if plan.get("run_id") != state.run_id:
        later_run = f"run {plan.get('run_id')} was started in the same directory since"
        return RunSettings(missing_reason=f"{later_run}, and the files there belong to that run")
    data = _read_yaml(files.config)
    data = redact(data) if isinstance(data, dict) else {}
    stored_overrides = _read_yaml(files.overrides)
    overrides = (
        redact_overrides(map(str, stored_overrides)) if isinstance(stored_overrides, list) else []
    )
    first_host = (plan.get("hosts") or [{}])[0]
    program_argv = [str(word) for word in first_host.get("program", ())]
    return RunSettings(
        program=program_argv[0] if program_argv else "",
        notes=[str(note) for note in plan.get("notes", ())],
        text=_dump_yaml(data),
        overrides=overrides,
        options=dict(_flatten(data)),
        **_describe_arguments(program_argv[1:], state),
    )


def _read_yaml(path: Path) -> Any:
    """Return the contents of one of our YAML files; None if it is missing or damaged."""
    import yaml

    with suppress(OSError, ValueError, yaml.YAMLError):
        text = path.read_text(encoding="utf-8")
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return None


def _dump_yaml(data: Mapping[Any, Any]) -> str:
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True) if data else ""


def _flatten(data: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(data, dict) and data:
        for name, value in data.items():
            yield from _flatten(value, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, "null" if data is None else str(data)


def _describe_arguments(arguments: Sequence[str], state: RunState) -> dict[str, Any]:
    """Describe the training program's arguments; empty for a program of another project."""
    try:
        values = vars(parse_arguments([word for word in arguments if word not in ("-h", "--help")]))
        model = _describe_model(values)
        if not model:
            return {}
        return {
            "model": model,
            "layout": _describe_layout(values, state.world_size),
            "batch": _describe_batch(values, state.world_size),
            "host_roles": _describe_host_roles(values, state),
        }
    except (ConfigError, ValueError, TypeError, KeyError, ArithmeticError):
        return {}


def _describe_model(values: Mapping[str, Any]) -> str:
    if not values.get("num_layers") or not values.get("hidden_size"):
        return ""
    precision = next((name for name in _PRECISIONS if values.get(name)), "fp32")
    experts = values.get("num_experts")
    parts = [
        f"{values['family']}",
        f"{values['num_layers']} layers",
        f"hidden size {values['hidden_size']:,}",
        f"{values['num_attention_heads']} heads",
        f"{experts} experts" if experts else "",
        f"sequences of {values['seq_length']:,}" if values.get("seq_length") else "",
        precision,
    ]
    return ", ".join(filter(None, parts))


def _describe_layout(values: Mapping[str, Any], world_size: int) -> str:
    meshes = meshes_of(values)
    if meshes is not None:
        return f"meshes {meshes.describe()}"
    sizes = Mesh(
        tp=values["tensor_model_parallel_size"],
        cp=values["context_parallel_size"],
        ep=values["expert_model_parallel_size"],
        dp=data_parallel_size(values, world_size),
        pp=values["pipeline_model_parallel_size"],
    )
    suffix = " with heterogeneous replicas" if uses_microbatch_split(values) else ""
    return sizes.format_sizes() + suffix


def _describe_batch(values: Mapping[str, Any], world_size: int) -> str:
    batch_size = global_batch_size(values, world_size)
    length = values.get("seq_length") or 0
    tokens = f", {batch_size * tokens_per_sample(values):,} tokens" if length else ""
    noun = "sequences" if sequences_per_sample(values) == 1 else "pairs of sequences"
    return f"{batch_size:,} {noun} a step{tokens}; micro-batches of {values['micro_batch_size']}"


def _describe_host_roles(values: Mapping[str, Any], state: RunState) -> dict[int, str]:
    hosts = [host for host in state.hosts if len(host.ranks)]
    mesh_roles = describe_rank_ranges(values, [host.ranks for host in hosts], state.world_size)
    if mesh_roles:
        return {host.node_rank: role for host, role in zip(hosts, mesh_roles, strict=True)}
    pp = values["pipeline_model_parallel_size"]
    model_ranks = values["tensor_model_parallel_size"] * values["context_parallel_size"]
    dp = data_parallel_size(values, state.world_size)
    if pp * dp == 1:
        return {}
    return {host.node_rank: _describe_host_role(host, model_ranks, dp, pp) for host in hosts}


def _describe_host_role(host: HostState, model_ranks: int, dp: int, pp: int) -> str:
    """Describe the part of the model on a host. Tensor-parallel ranks vary fastest, then context,
    data, pipeline. ``model_ranks`` is the number of tensor- and context-parallel ranks of a stage.
    """
    first, last = host.ranks[0], host.ranks[-1]
    stages = (first // (model_ranks * dp), last // (model_ranks * dp))
    parts = [f"{_format_range('stage', *stages)} of {pp}"] if pp > 1 else []
    if stages[0] == stages[1] and dp > 1:
        replicas = (first // model_ranks % dp, last // model_ranks % dp)
        parts.append(f"{_format_range('replica', *replicas)} of {dp}")
    return ", ".join(parts)


def _format_range(noun: str, first: int, last: int) -> str:
    return f"{noun} {first}" if first == last else f"{noun}s {first}-{last}"
