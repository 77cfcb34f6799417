"""Megatron-LM's ``torch_dist`` checkpoints.

They have the files of ours, and say two things otherwise: arguments lie in ``common.pt``, and the
tensors of equal layers are one, ``[layer, …]``. Where layers are unlike, as of some with experts,
they lie one by one. Norms are named as its layers have them. Any layout there loads them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from flagscale.checkpoint_metadata import METADATA
from flagscale.checkpoints import MANIFEST, TRACKER, Checkpoints
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.describing import BACKEND, METADATA_KEY, sharding_metadata
from flagscale.train.checkpoint.formats.base import (
    Inspect,
    Model,
    Report,
    UnfitError,
    collect,
    fitting,
)
from flagscale.train.checkpoint.formats.distributed_writing import Writer
from flagscale.train.checkpoint.formats.megatron_arguments import (
    layout_in,
    shape_of,
    values_in,
    vocabulary_rows,
)
from flagscale.train.checkpoint.formats.megatron_layout import (
    EMBEDDING,
    HEAD,
    RELEASE,
    Layout,
    Padded,
    arguments_for,
    is_weight,
    precision_of,
    require_shared,
    spelled,
    spelled_for,
)
from flagscale.train.checkpoint.formats.megatron_unpickler import load
from flagscale.train.checkpoint.formats.metadata import tensors_of
from flagscale.train.checkpoint.formats.parts import Parts
from flagscale.train.checkpoint.formats.sidecar_files import appearing
from flagscale.train.checkpoint.formats.tables import Entry
from flagscale.train.checkpoint.formats.tensors import Item, Shape, Stack, Stored

_COMMON, _BACKEND = "common.pt", "metadata.json"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_VERSION = 3.0


@dataclass(frozen=True)
class MegatronDistributed:
    """Checkpoints of Megatron-LM (``ckpt_format: torch_dist``), for any layout."""

    name: ClassVar[str] = "megatron_dist"
    layout: Layout = field(default_factory=Layout)

    def recognises(self, path: Path) -> bool:
        found = _newest(path)
        return found is not None and _arguments(found) is not None

    def laid_out(self, layout: Layout) -> MegatronDistributed:
        """The same, with the names of other layers, or other padding.

        Raises:
            CheckpointError: something else is asked for.
        """
        if replace(layout, engine=True, rows=1) != Layout():
            raise CheckpointError(
                f"{self.name} is of no layout: any one loads it",
                hint="of these options it has --transformer-impl and "
                "--make-vocab-size-divisible-by",
            )
        return replace(self, layout=layout)

    def read(self, path: Path) -> Model:
        found = _newest(path)
        given = None if found is None else _arguments(found)
        if found is None or given is None:
            raise CheckpointError(f"{path} holds no checkpoint that says Megatron-LM's arguments")
        args = vars(given)
        values = values_in(args, found)
        layout_in(args, found)
        rows = vocabulary_rows(args, values["vocab_size"])
        return collect(found, values, _Source(found, args, values, rows, tensors_of(found)))

    def write(self, model: Model, path: Path, report: Report, inspect: Inspect) -> Path:
        require_shared(model.values, model.path)
        with appearing(path, model.origin) as parts:
            self._write(model, parts, report)
            inspect(self.read(parts.directory))
        return path

    def _write(self, model: Model, parts: Parts, report: Report) -> None:
        root = parts.directory / RELEASE
        root.mkdir(exist_ok=True)
        tensors = _stacked(model, self.layout)
        Writer(parts, report, RELEASE).write(tensors, list(_no_states(tensors)))
        metadata = {**sharding_metadata(), "non_homogeneous_layers": not _alike(model.values)}
        given = arguments_for(model.values, self.layout)
        if _alike(model.values):
            given["moe_layer_freq"] = 1  # a list would say that layers lie one by one
        given |= {**precision_of(model.dtype), "ckpt_format": "torch_dist"}
        common = {
            "args": argparse.Namespace(**given),
            "checkpoint_version": _VERSION,
            "iteration": 0,
            METADATA_KEY: metadata,
        }
        torch.save(common, root / _COMMON)
        (root / _BACKEND).write_text(json.dumps(BACKEND), encoding="utf-8")
        (parts.directory / TRACKER).write_text(f"{RELEASE}\n", encoding="utf-8")


def _newest(path: Path) -> Path | None:
    """The checkpoint that a directory is, or that its tracker file names, or the newest in it;
    None where there is none, or it is one of ours."""
    try:
        tracked = (path / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        tracked = ""
    directories = Checkpoints(path)
    tries = [path]
    if tracked:
        tries.append(directories.path(int(tracked)) if tracked.isdecimal() else path / RELEASE)
    tries += [*map(directories.path, directories.iterations()), path / RELEASE]
    found = next((one for one in tries if (one / METADATA).is_file()), None)
    return None if found is None or (found / MANIFEST).exists() else found


def _arguments(path: Path) -> argparse.Namespace | None:
    """What a checkpoint says of its arguments, if it does as Megatron-LM."""
    if not (path / _COMMON).is_file():
        return None
    given = load(path / _COMMON).get("args")
    return given if isinstance(given, argparse.Namespace) else None


@dataclass(frozen=True)
class _Source:
    """The tensors of a checkpoint, and which of them were found."""

    path: Path
    args: Mapping[str, Any]
    values: Mapping[str, Any]
    rows: Sequence[int]
    """How many the vocabulary may have."""
    stored: Mapping[str, Stored]
    used: set[str] = field(default_factory=set)

    def find(self, entry: Entry) -> Stored | None:
        """A tensor by its name, or of all layers' one.

        Raises:
            UnfitError: it has another shape than the arguments say, or holds no weights.
        """
        for name in spelled(entry.name):
            layer = _LAYER.fullmatch(name)
            if name in self.stored:
                return self._fitting(name, shape_of(entry, self.rows, self._rows(name)))
            stacked = "" if layer is None else f"decoder.layers.{layer[2]}"
            if layer is not None and stacked in self.stored:
                shape = (self.values["num_layers"], *entry.shape)
                return Item(self._fitting(stacked, shape), int(layer[1]))
        return None

    def _fitting(self, name: str, shape: Shape) -> Stored:
        found = self.stored[name]
        self.used.add(name)
        if problems := list(fitting(self.path, name, {name: found}, {name: shape})):
            raise UnfitError(problems)
        return found

    def _rows(self, name: str) -> int:
        return next(iter(self.stored[name].shape), 0)

    def left(self) -> list[str]:
        """The weights that were not found."""
        names = self.stored.keys() - self.used
        return sorted(name for name in names if is_weight(name, self.args))


def _alike(values: Mapping[str, Any]) -> bool:
    """Whether all layers have the same tensors."""
    return not values["num_moe_experts"] or all(values["moe_layer_freq"])


def _stacked(model: Model, layout: Layout) -> dict[str, Stored]:
    """A model's tensors by the names there."""
    alike = _alike(model.values)
    found: dict[str, Stored] = {}
    layers: dict[str, list[Stored]] = {}
    for name, tensor in model.tensors.items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            vocabulary = name in (EMBEDDING, HEAD)
            rows = layout.padded(tensor.shape[0]) if vocabulary else tensor.shape[0]
            found[name] = Padded(tensor, rows) if vocabulary else tensor
            continue
        spelling = name  # ours are those of its local layers, which are renamed for these files
        if layout.engine:
            spelling = spelled_for(name, model.values, int(layer[1]), engine=True)
        if alike:
            layers.setdefault(spelling.replace(f".{layer[1]}.", ".", 1), []).append(tensor)
        else:
            found[spelling] = tensor
    return found | {name: Stack(tuple(each)) for name, each in layers.items()}


def _no_states(tensors: Mapping[str, Stored]) -> Iterator[str]:
    """The names under which a linear layer wants to find that it has no state beside its weights:
    for each layer, and each expert, of those that lie in one tensor."""
    for name, tensor in tensors.items():
        module, _, what = name.rpartition(".")
        if what != "weight" or ".linear_" not in module:
            continue
        ahead = tensor.shape[:-2] or (1,)
        sizes = ".".join(map(str, ahead))
        for place in torch.cartesian_prod(*map(torch.arange, ahead)).reshape(-1, len(ahead)):
            yield f"{module}._extra_state/shard_{'.'.join(map(str, place.tolist()))}_{sizes}"
