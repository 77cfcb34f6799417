"""Measured costs, kept for the next time: a file for each model, layout and kind of device.

They lie under ``${XDG_CACHE_HOME:-~/.cache}/flagscale/times`` of the host that rank 0 is on. What
they depend on and a YAML says is in a file's name; the rest (vocabulary, device, versions) is in
the file, so that a plan, which does not know it, can find them all the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flagscale import files
from flagscale.config.arguments.architecture import Architecture
from flagscale.config.arguments.latent import Latent
from flagscale.config.arguments.meshes import Mesh, Meshes, view
from flagscale.config.arguments.precision import Values
from flagscale.config.arguments.registry import arguments
from flagscale.config.arguments.spec import declared
from flagscale.config.arguments.training import Model
from flagscale.estimate.costs import Costs

_MORE = ("transformer_impl", "seq_length", "device", "recompute_granularity")
_OF_NO_MATTER = {
    *("num_layers", "moe_layer_freq", "pipeline_model_parallel_size"),
    *("pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size"),
    *("overlap_grad_reduce", "overlap_param_gather", "max_position_embeddings"),
    *("lr", "min_lr", "weight_decay", "clip_grad", "init_method_std", "sgd_momentum"),
    *("adam_beta1", "adam_beta2", "adam_eps"),
}


@dataclass(frozen=True)
class Kept:
    """Costs of a rank of a mesh. ``origin``: vocabulary, device and versions they were measured
    with; ``date``: when."""

    costs: Costs
    origin: Mapping[str, str]
    date: str


def path_of(values: Values, meshes: Meshes, index: int) -> Path:
    """Where the costs of a mesh are kept."""
    return path_with(values, meshes, index, sequences(meshes, meshes.meshes[index]))


def path_with(values: Values, meshes: Meshes, index: int, most: int) -> Path:
    """The same for ranks that have at most so many sequences of a micro-batch."""
    mesh = meshes.meshes[index]
    known = view(values, meshes, index)
    relevant: dict[str, Any] = {name: known[name] for name in _relevant()}
    # Meshes without a type may be of unlike devices all the same.
    whose = index if mesh.device_type is None else mesh.device_type
    relevant["mesh"] = [mesh.tp, mesh.cp, mesh.ep, mesh.etp, mesh.dp, whose]
    relevant["sequences"] = most
    relevant["sequence_parallel"] = meshes.sequence_parallel and mesh.tp > 1
    text = json.dumps(relevant, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    return files.cache_directory() / "times" / f"{digest}.json"


def sequences(meshes: Meshes, mesh: Mesh) -> int:
    """Most sequences that a rank of a mesh has of a micro-batch."""
    return max(len(meshes.sequences_of(mesh, d)) for d in range(mesh.dp))


@cache
def _relevant() -> tuple[str, ...]:
    """Arguments that what a layer takes may depend on."""
    core = (name for name, a in arguments().items() if a.origin.startswith("megatron.core"))
    groups = (Model, Architecture, Latent)
    own = (argument.name for group in groups for argument in declared(group, "model"))
    return tuple(sorted({*core, *own, *_MORE} - _OF_NO_MATTER))


def read(path: Path) -> Kept | None:
    """What is kept there; None where nothing is, or nothing that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        origin = {str(name): str(value) for name, value in found["origin"].items()}
        return Kept(Costs.from_json(found["costs"]), origin, str(found["date"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write(path: Path, kept: Kept) -> None:
    """Keep costs; where the disk does not take them they are measured again next time."""
    record = {"origin": dict(kept.origin), "date": kept.date, "costs": kept.costs.as_json()}
    with suppress(OSError):
        files.make_private_directory(path.parent)
        files.write_atomic(path, json.dumps(record, indent=1) + "\n", durable=False)
