"""What a run was started with: its model, how its ranks are laid out, its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config.arguments.layout import data_parallel_size, global_batch_size, places_of
from flagscale.config.arguments.meshes import Mesh, meshes_of
from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.shares import is_on
from flagscale.config.secrets import redact, redact_overrides
from flagscale.errors import ConfigError
from flagscale.files import read_json
from flagscale.launcher.layout import Layout
from flagscale.launcher.state import HostState, RunState

_PRECISIONS = ("fp16", "bf16")


@dataclass(frozen=True)
class Setting:
    """``absent``: why there is nothing to tell, where there is not. ``places``: what the ranks of
    each host hold, by node rank, as far as it says more than their numbers. ``options``: of the
    configuration, every value by its dotted key."""

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


def read(state: RunState) -> Setting:
    """The setting of a run, from what was kept beside its scripts. Those belong to the run that was
    last started in a directory."""
    files = Layout(state.exp_dir)
    plan = read_json(files.plan)
    if plan is None:
        return Setting(absent=f"{files.plan} is not there any more, nor what was kept beside it")
    if plan.get("run_id") != state.run_id:
        later = f"run {plan.get('run_id')} was started in the same directory since"
        return Setting(absent=f"{later}, and what is kept there is of that one")
    data = _yaml(files.config)
    data = redact(data) if isinstance(data, dict) else {}
    typed = _yaml(files.overrides)
    overrides = redact_overrides(map(str, typed)) if isinstance(typed, list) else []
    first = (plan.get("hosts") or [{}])[0]
    words = [str(word) for word in first.get("program", ())]
    return Setting(
        program=words[0] if words else "",
        notes=[str(note) for note in plan.get("notes", ())],
        text=_dumped(data),
        overrides=overrides,
        options=dict(_leaves(data)),
        **_arguments(words[1:], state),
    )


def _yaml(path: Path) -> Any:
    """What a file of ours holds; None where there is none, or it is damaged."""
    import yaml

    with suppress(OSError, ValueError, yaml.YAMLError):
        text = path.read_text(encoding="utf-8")
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return None


def _dumped(data: Mapping[Any, Any]) -> str:
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True) if data else ""


def _leaves(data: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(data, dict) and data:
        for name, value in data.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, "null" if data is None else str(data)


def _arguments(words: Sequence[str], state: RunState) -> dict[str, Any]:
    """What the training program's arguments say; nothing of a program that is another's."""
    try:
        values = vars(parse_arguments([word for word in words if word not in ("-h", "--help")]))
        model = _model(values)
        if not model:
            return {}
        return {
            "model": model,
            "layout": _layout(values, state.world_size),
            "batch": _batch(values, state.world_size),
            "places": _places(values, state),
        }
    except (ConfigError, ValueError, TypeError, KeyError, ArithmeticError):
        return {}


def _model(values: Mapping[str, Any]) -> str:
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


def _layout(values: Mapping[str, Any], world_size: int) -> str:
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
    return sizes.text() + (" over unlike replicas" if is_on(values) else "")


def _batch(values: Mapping[str, Any], world_size: int) -> str:
    whole = global_batch_size(values, world_size)
    length = values.get("seq_length") or 0
    tokens = f", {whole * length:,} tokens" if length else ""
    return f"{whole:,} sequences a step{tokens}; micro-batches of {values['micro_batch_size']}"


def _places(values: Mapping[str, Any], state: RunState) -> dict[int, str]:
    hosts = [host for host in state.hosts if len(host.ranks)]
    unlike = places_of(values, [host.ranks for host in hosts], state.world_size)
    if unlike:
        return {host.node_rank: place for host, place in zip(hosts, unlike, strict=True)}
    pp = values["pipeline_model_parallel_size"]
    inner = values["tensor_model_parallel_size"] * values["context_parallel_size"]
    dp = data_parallel_size(values, state.world_size)
    if pp * dp == 1:
        return {}
    return {host.node_rank: _place(host, inner, dp, pp) for host in hosts}


def _place(host: HostState, inner: int, dp: int, pp: int) -> str:
    """Ranks are numbered tensor-parallel ones fastest, then context, data and pipeline."""
    first, last = host.ranks[0], host.ranks[-1]
    stages = (first // (inner * dp), last // (inner * dp))
    parts = [f"{_numbered('stage', *stages)} of {pp}"] if pp > 1 else []
    if stages[0] == stages[1] and dp > 1:
        replicas = (first // inner % dp, last // inner % dp)
        parts.append(f"{_numbered('replica', *replicas)} of {dp}")
    return ", ".join(parts)


def _numbered(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"
