"""Cache of measured costs, with one file per model, layout and kind of device.

The costs are those of :mod:`.costs`, which training measures for heterogeneous meshes
(:mod:`flagscale.train.meshes.cost_profiler`). The files are in
``${XDG_CACHE_HOME:-~/.cache}/flagscale/times`` on the host of rank 0. The file name is a digest of
the relevant configuration. Other dependencies (vocabulary, device, versions) are stored in the
file, so that a plan, which cannot determine them, finds the file all the same.
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
from flagscale.config.arguments.hetero.meshes import Mesh, Meshes, mesh_view
from flagscale.config.arguments.spec.argument import Values, declared
from flagscale.config.arguments.spec.model_arguments import Architecture, Latent, Model, Muon
from flagscale.config.arguments.spec.registry import arguments
from flagscale.estimate.costs import RankCosts

_ADDITIONAL_ARGUMENTS = (
    "transformer_impl",
    "seq_length",
    "device",
    "recompute_granularity",
    "recompute_modules",
    "cpu_offloading_num_layers",
    "offload_modules",
)
_IRRELEVANT_ARGUMENTS = {
    "num_layers",
    "moe_layer_freq",
    "pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "virtual_pipeline_model_parallel_size",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "max_position_embeddings",
    "lr",
    "min_lr",
    "weight_decay",
    "clip_grad",
    "init_method_std",
    "sgd_momentum",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
}
"""Arguments that do not affect the cost of one layer."""


@dataclass(frozen=True)
class CachedCosts:
    """Cached costs of a rank of a mesh.

    ``conditions`` contains the vocabulary, device and versions of the measurement, ``date`` its
    date.
    """

    costs: RankCosts
    conditions: Mapping[str, str]
    date: str


def mesh_cost_path(values: Values, meshes: Meshes, index: int) -> Path:
    """Return the path of the cached costs of a mesh."""
    return cost_path(values, meshes, index, count_max_sequences(meshes, meshes.meshes[index]))


def cost_path(values: Values, meshes: Meshes, index: int, max_sequences: int) -> Path:
    """Return the path of a mesh's costs with at most ``max_sequences`` sequences per rank and
    micro-batch."""
    mesh = meshes.meshes[index]
    mesh_values = mesh_view(values, meshes, index)
    relevant: dict[str, Any] = {name: mesh_values[name] for name in _relevant_arguments()}
    # Meshes without a type may nevertheless have different devices.
    device = index if mesh.device_type is None else mesh.device_type
    relevant["mesh"] = [mesh.tp, mesh.cp, mesh.ep, mesh.etp, mesh.dp, device]
    relevant["sequences"] = max_sequences
    relevant["sequence_parallel"] = meshes.sequence_parallel and mesh.tp > 1
    text = json.dumps(relevant, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    return files.cache_directory() / "times" / f"{digest}.json"


def count_max_sequences(meshes: Meshes, mesh: Mesh) -> int:
    """Return the maximum number of sequences that a rank of a mesh has in a micro-batch."""
    return max(len(meshes.sequences_of(mesh, d)) for d in range(mesh.dp))


@cache
def _relevant_arguments() -> tuple[str, ...]:
    """Return the names of the arguments that may affect the cost of a layer."""
    megatron_names = (
        name for name, a in arguments().items() if a.origin.startswith("megatron.core")
    )
    groups = (Model, Architecture, Latent, Muon)
    project_names = (argument.name for group in groups for argument in declared(group, "model"))
    return tuple(
        sorted({*megatron_names, *project_names, *_ADDITIONAL_ARGUMENTS} - _IRRELEVANT_ARGUMENTS)
    )


def read_costs(path: Path) -> CachedCosts | None:
    """Return the cached costs; None if the file is missing or invalid."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        conditions = {str(name): str(value) for name, value in record["origin"].items()}
        return CachedCosts(RankCosts.from_json(record["costs"]), conditions, str(record["date"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_costs(path: Path, cached: CachedCosts) -> None:
    """Write costs to the cache. Errors are ignored: the costs are measured again next time."""
    record = {
        "origin": dict(cached.conditions),
        "date": cached.date,
        "costs": cached.costs.to_json(),
    }
    with suppress(OSError):
        files.make_private_directory(path.parent)
        files.write_atomic(path, json.dumps(record, indent=1) + "\n", durable=False)
