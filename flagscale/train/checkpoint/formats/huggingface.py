"""Directories of Hugging Face: config.json, safetensors, a tokenizer's files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from flagscale.config.arguments.huggingface.models import (
    FURTHER,
    arguments_of,
    config_of,
    effective,
    family_of,
)
from flagscale.config.arguments.huggingface.reading import CONFIG, read_config, read_json
from flagscale.config.arguments.values import shown
from flagscale.errors import CheckpointError
from flagscale.files import write_atomic
from flagscale.train.checkpoint.formats.base import Inspect, Model, Report, fitting, refuse
from flagscale.train.checkpoint.formats.parts import Parts
from flagscale.train.checkpoint.formats.safetensors_file import SafetensorsFile, shards, write_file
from flagscale.train.checkpoint.formats.sidecar_files import (
    PUBLIC,
    appearing,
    beside,
    write_companions,
)
from flagscale.train.checkpoint.formats.tables import TABLES, Table, entries
from flagscale.train.checkpoint.formats.tensors import Stored, read, size_of

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_INDEX = 256 << 20
_SHARD = 4 << 30


class HuggingFace:
    """Models that transformers reads and writes."""

    name = "huggingface"

    def recognises(self, path: Path) -> bool:
        return (path / CONFIG).is_file()

    def read(self, path: Path) -> Model:
        config = read_config(path)
        kind = family_of(config).model_type
        theirs = _tensors(path)
        told = effective(arguments_of(config))
        values, left_out, notes = _with_further(kind, told, theirs)
        kept = {name: tensor for name, tensor in theirs.items() if name not in left_out}
        tensors = _ours(path, kind, values, kept)
        return Model(path, kind, values, tensors, config, tuple(beside(path)), notes=notes)

    def write(self, model: Model, path: Path, report: Report, inspect: Inspect) -> Path:
        config = model.config
        if config is None:
            config = config_of(model.values, model.kind)
        config = {**config, **_counts(model, config)}
        theirs = dict(_theirs(model))
        with appearing(path, model.origin) as parts:
            _write_weights(parts, theirs, report)
            write_companions(parts.directory, config, theirs, model.files)
            inspect(self.read(parts.directory))
        return path


def _tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of the directory's files, by name."""
    places = _index(path)
    found: dict[str, Stored] = {}
    twice: list[str] = []
    for name in sorted(set(places.values())) or [WEIGHTS]:
        if not (path / name).is_file():
            hint = None
            if any(path.glob("*.bin")):
                hint = "it has pickles (*.bin): let transformers save it again as safetensors"
            raise CheckpointError(f"{path / name} is missing", hint=hint)
        for tensor, stored in SafetensorsFile(path / name).tensors.items():
            if tensor in found:
                twice.append(tensor)
            found[tensor] = stored
    refuse(path, "has tensors in several files", twice)
    lost = [f"{name} (in {places[name]})" for name in places if name not in found]
    refuse(path, f"lacks tensors that {INDEX} names", lost)
    return found


def _with_further(
    kind: str, values: Mapping[str, Any], theirs: Mapping[str, Stored]
) -> tuple[Mapping[str, Any], set[str], tuple[str, ...]]:
    """A model's arguments with the layers behind its last one, which predict further tokens, where
    its family has such and they are whole; the tensors that are left out, and a note of it."""
    table = TABLES[kind]
    places = {name: _behind(name, table, values) for name in theirs if table.further}
    places = {name: place for name, place in places.items() if place > 0}
    if not places:
        return values, set(), ()
    wanted = {**values, FURTHER: max(places.values())}
    every = [name for entry in entries(kind, wanted) for name, _ in entry.theirs]
    lost = [name for name in every if name not in theirs and _behind(name, table, values) > 0]
    if not lost:
        return wanted, set(), ()
    note = (
        f"{len(places)} tensors of layers that predict further tokens are left out, since others "
        f"of them are missing, such as {lost[0]}"
    )
    return values, set(places), (note,)


def _behind(name: str, table: Table, values: Mapping[str, Any]) -> int:
    """How many places behind the model's last layer a tensor's layer is."""
    found = re.match(rf"{re.escape(table.layers)}(\d+)\.", name)
    return int(found[1]) + 1 - int(values["num_layers"]) if found else 0


def _counts(model: Model, config: Mapping[str, Any]) -> dict[str, int]:
    """How many layers predict further tokens, by the keys of config.json that tell it."""
    keys, layers = TABLES[model.kind].counts, model.values[FURTHER] or 0
    return {key: layers for key in keys if key in config or (layers and key == keys[0])}


def _index(path: Path) -> dict[str, str]:
    """Which file has which tensor, of a model in several; empty for one file."""
    if not (path / INDEX).exists():
        return {}
    places = read_json(path / INDEX, _MOST_INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path / INDEX}: weight_map: expected files by tensor")
    for tensor, name in places.items():
        plain = isinstance(name, str) and re.fullmatch(r"[\w][\w.-]*\.safetensors", name)
        if not plain:
            raise CheckpointError(
                f"{path / INDEX}: {shown(tensor)}: expected the name of a .safetensors file beside "
                f"it, found {shown(name)}"
            )
    return places


def _ours(
    path: Path, kind: str, values: Mapping[str, Any], theirs: dict[str, Stored]
) -> dict[str, Stored]:
    """The tensors by our names, all checked."""
    table = TABLES[kind]
    if table.prefix and not any(name.startswith(table.prefix) for name in theirs):
        theirs = {_prefixed(name, table.prefix): tensor for name, tensor in theirs.items()}
    left, lost, wrong = set(theirs), list[str](), list[str]()
    found: dict[str, Stored] = {}
    for entry in entries(kind, values):
        shapes = dict(entry.theirs)
        lost += [name for name in shapes if name not in theirs]
        left -= shapes.keys()
        if shapes.keys() <= theirs.keys():
            parts = {name: theirs[name] for name in shapes}
            problems = list(fitting(path, entry.name, parts, shapes))
            wrong += problems
            if not problems:
                found[entry.name] = entry.rule.join(list(parts.values()), entry.sizes)
    refuse(path, "lacks tensors", lost)
    refuse(path, "has tensors that do not fit its config.json", wrong)
    left = {name for name in left if not re.fullmatch(table.ignored, name)}
    if "lm_head.weight" in left and _same(theirs["lm_head.weight"], found):
        left.remove("lm_head.weight")  # tied, and written all the same
    refuse(path, f"has tensors that no {kind} model has", sorted(left))
    return found


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith("lm_head.") else prefix + name


def _same(head: Stored, found: Mapping[str, Stored]) -> bool:
    embedding = found["embedding.word_embeddings.weight"]
    return head.shape == embedding.shape and torch.equal(read(head), read(embedding))


def _theirs(model: Model) -> Iterator[tuple[str, Stored]]:
    """A model's tensors by Hugging Face's names."""
    for entry in model.entries():
        parts = entry.rule.split(model.tensors[entry.name], entry.sizes)
        for (name, shape), part in zip(entry.theirs, parts, strict=True):
            if part.shape != shape:
                raise CheckpointError(
                    f"{model.path}: {entry.name}: it makes {name} of shape {list(part.shape)}, "
                    f"expected {list(shape)}"
                )
            yield name, part


def _write_weights(parts: Parts, theirs: Mapping[str, Stored], report: Report) -> None:
    """The weights' files, and which has which tensor where they are several."""
    files = shards(theirs, _SHARD)
    names = [WEIGHTS]
    if len(files) > 1:
        last = len(files)
        names = [f"model-{i:05d}-of-{last:05d}.safetensors" for i in range(1, last + 1)]
    for name, tensors in zip(names, files, strict=True):
        if parts.kept(name):
            report(sum(map(size_of, tensors.values())))
            continue
        spans = write_file(parts.directory / name, tensors, report)
        parts.finish(name, spans=spans)
    if len(files) > 1:
        places = {
            tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors
        }
        index = {"metadata": {"total_size": sum(map(size_of, theirs.values()))}}
        text = json.dumps({**index, "weight_map": dict(sorted(places.items()))}, indent=2)
        write_atomic(parts.directory / INDEX, text + "\n", PUBLIC)
