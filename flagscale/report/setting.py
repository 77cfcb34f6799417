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
)
from flagscale.config.arguments.spec.parser import parse_arguments
from flagscale.config.secrets import redact, redact_overrides
from flagscale.errors import ConfigError
from flagscale.files import read_json
from flagscale.launcher.layout import Layout
from flagscale.launcher.state import HostState, RunState

_PRECISIONS = ("fp16", "bf16")


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run.

    ``absent`` is the reason if nothing is known. ``places`` describes the part of the model on each
    host by node rank, if it says more than rank numbers. ``options`` has every value of the
    configuration by dotted key.
    """

    absent: str = ""
    program: str = ""
    model: str = ""
    layout: str = ""
    batch: str = ""
    places: Mapping[int, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    text: str = ""
    overrides: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)


def read_settings(state: RunState) -> RunSettings:
    """Read the settings from the files next to a run's scripts.

    These files belong to the run that was started last in the directory.
    """
    files = Layout(state.exp_dir)
    plan = read_json(files.plan)
    if plan is None:
        return RunSettings(
            absent=f"{files.plan} is not there any more, nor what was kept beside it"
        )
    if plan.get("run_id") != state.run_id:
        later = f"run {plan.get('run_id')} was started in the same directory since"
        return RunSettings(absent=f"{later}, and what is kept there is of that one")
    data = _read_yaml(files.config)
    data = redact(data) if isinstance(data, dict) else {}
    typed = _read_yaml(files.overrides)
    overrides = redact_overrides(map(str, typed)) if isinstance(typed, list) else []
    first = (plan.get("hosts") or [{}])[0]
    words = [str(word) for word in first.get("program", ())]
    return RunSettings(
        program=words[0] if words else "",
        notes=[str(note) for note in plan.get("notes", ())],
        text=_dump_yaml(data),
        overrides=overrides,
        options=dict(_flatten(data)),
        **_describe_arguments(words[1:], state),
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


def _describe_arguments(words: Sequence[str], state: RunState) -> dict[str, Any]:
    """What the training program's arguments say; nothing of a program that is another's."""
    try:
        values = vars(parse_arguments([word for word in words if word not in ("-h", "--help")]))
        model = _describe_model(values)
        if not model:
            return {}
        return {
            "model": model,
            "layout": _describe_layout(values, state.world_size),
            "batch": _describe_batch(values, state.world_size),
            "places": _describe_places(values, state),
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
    return sizes.text() + (" over unlike replicas" if uses_microbatch_split(values) else "")


def _describe_batch(values: Mapping[str, Any], world_size: int) -> str:
    whole = global_batch_size(values, world_size)
    length = values.get("seq_length") or 0
    tokens = f", {whole * length:,} tokens" if length else ""
    return f"{whole:,} sequences a step{tokens}; micro-batches of {values['micro_batch_size']}"


def _describe_places(values: Mapping[str, Any], state: RunState) -> dict[int, str]:
    hosts = [host for host in state.hosts if len(host.ranks)]
    unlike = describe_rank_ranges(values, [host.ranks for host in hosts], state.world_size)
    if unlike:
        return {host.node_rank: place for host, place in zip(hosts, unlike, strict=True)}
    pp = values["pipeline_model_parallel_size"]
    inner = values["tensor_model_parallel_size"] * values["context_parallel_size"]
    dp = data_parallel_size(values, state.world_size)
    if pp * dp == 1:
        return {}
    return {host.node_rank: _describe_place(host, inner, dp, pp) for host in hosts}


def _describe_place(host: HostState, inner: int, dp: int, pp: int) -> str:
    """Describe the part of a host. Tensor-parallel ranks vary fastest, then context, data,
    pipeline.
    """
    first, last = host.ranks[0], host.ranks[-1]
    stages = (first // (inner * dp), last // (inner * dp))
    parts = [f"{_format_range('stage', *stages)} of {pp}"] if pp > 1 else []
    if stages[0] == stages[1] and dp > 1:
        replicas = (first // inner % dp, last // inner % dp)
        parts.append(f"{_format_range('replica', *replicas)} of {dp}")
    return ", ".join(parts)


def _format_range(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"
