"""Hugging Face's model format: ``config.json``, safetensors files, and tokenizer files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from flagscale.config.arguments.compat.huggingface.config_reader import (
    CONFIG,
    read_config,
    read_json,
)
from flagscale.config.arguments.compat.huggingface.models import (
    MTP_LAYERS,
    arguments_of,
    config_of,
    effective,
    huggingface_family_of,
)
from flagscale.config.arguments.spec.values import format_value
from flagscale.errors import CheckpointError
from flagscale.files import write_atomic
from flagscale.train.checkpoint.formats.base import (
    ByteProgress,
    InspectModel,
    StoredModel,
    describe_mismatches,
    raise_if_any,
)
from flagscale.train.checkpoint.formats.lazy_tensors import LazyTensor, count_bytes, read_tensor
from flagscale.train.checkpoint.formats.resumable_directory import ResumableDirectory
from flagscale.train.checkpoint.formats.safetensors_file import (
    SafetensorsFile,
    split_into_files,
    write_safetensors,
)
from flagscale.train.checkpoint.formats.sidecar_files import (
    PUBLIC_MODE,
    atomic_directory,
    list_sidecar_files,
    write_chat_template,
    write_sidecar_files,
)
from flagscale.train.checkpoint.formats.weight_mappings import (
    FAMILY_MAPPINGS,
    FamilyMapping,
    iter_weights,
)

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_MAX_INDEX_BYTES = 256 << 20
_MAX_SHARD_BYTES = 4 << 30


class HuggingFace:
    """Format ``huggingface``: model directories of transformers."""

    name = "huggingface"

    def recognises(self, path: Path) -> bool:
        return (path / CONFIG).is_file()

    def read(self, path: Path) -> StoredModel:
        config = read_config(path)
        model_type = huggingface_family_of(config).model_type
        stored_tensors, notes = _open_tensors(path)
        # With every argument that the tensors' shapes depend on, also those that config.json omits.
        arguments = effective(arguments_of(config))
        values, omitted_names, mtp_notes = _detect_mtp_layers(model_type, arguments, stored_tensors)
        included_tensors = {
            name: tensor for name, tensor in stored_tensors.items() if name not in omitted_names
        }
        tensors, more_notes = _convert_tensors(path, model_type, values, included_tensors)
        sidecar_files = tuple(list_sidecar_files(path))
        notes = (*notes, *mtp_notes, *more_notes)
        return StoredModel(path, model_type, values, tensors, config, sidecar_files, notes=notes)

    def write(
        self, model: StoredModel, path: Path, report: ByteProgress, inspect: InspectModel
    ) -> Path:
        config = model.config
        if config is None:
            config = config_of(model.values, model.model_type)
        config = {**config, **_build_mtp_config(model, config)}
        tensors = dict(_iter_huggingface_tensors(model))
        with atomic_directory(path, model.resume) as output:
            _write_weights(output, tensors, report)
            write_sidecar_files(output.directory, config, tensors, model.files)
            if model.chat_template is not None:
                write_chat_template(output.directory, model.chat_template)
            # Raises if the written model is not the expected one: the directory then keeps its
            # temporary name.
            inspect(self.read(output.directory))
        return path


def _open_tensors(path: Path) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """Open all tensors in the files of a directory.

    A single file is the model, whatever an index next to it says, as in transformers.

    Returns:
        The tensors by name, and notes for the user.
    """
    file_names: dict[str, str] = {}  # by tensor, from the index
    notes: tuple[str, ...] = ()
    if not (path / WEIGHTS_FILE).is_file():
        file_names = _read_index(path)
    elif (path / INDEX_FILE).exists():
        notes = (f"{INDEX_FILE} is ignored, because {WEIGHTS_FILE} exists, as in transformers",)
    tensors: dict[str, LazyTensor] = {}
    duplicates: list[str] = []
    for name in sorted(set(file_names.values())) or [WEIGHTS_FILE]:
        if not (path / name).is_file():
            hint = None
            if any(path.glob("*.bin")):
                hint = "it has pickles (*.bin): let transformers save it again as safetensors"
            raise CheckpointError(f"{path / name} is missing", hint=hint)
        for tensor_name, tensor in SafetensorsFile(path / name).tensors.items():
            if tensor_name in tensors:
                duplicates.append(tensor_name)
            tensors[tensor_name] = tensor
    raise_if_any(path, "has tensors in several files", duplicates)
    missing = [f"{name} (in {file})" for name, file in file_names.items() if name not in tensors]
    raise_if_any(path, f"lacks tensors that {INDEX_FILE} names", missing)
    return tensors, notes


def _detect_mtp_layers(
    model_type: str, values: Mapping[str, Any], stored_tensors: Mapping[str, LazyTensor]
) -> tuple[Mapping[str, Any], set[str], tuple[str, ...]]:
    """Detect the multi-token prediction layers that follow the last layer, if the family has any.

    Args:
        model_type: Hugging Face's name of the family.
        values: fully resolved arguments of the model.
        stored_tensors: tensors of the files, by name.

    Returns:
        The arguments, with the number of complete layers; the names of tensors to leave out because
        the layers are incomplete; and notes about that.
    """
    mapping = FAMILY_MAPPINGS[model_type]
    positions = {
        name: _position_after_last_layer(name, mapping, values)
        for name in stored_tensors
        if mapping.mtp_layer
    }
    positions = {name: position for name, position in positions.items() if position > 0}
    if not positions:
        return values, set(), ()
    values_with_mtp = {**values, MTP_LAYERS: max(positions.values())}
    names = [
        name
        for spec in iter_weights(model_type, values_with_mtp)
        for name, _ in spec.huggingface_tensors
    ]
    missing_names = [
        name
        for name in names
        if name not in stored_tensors and _position_after_last_layer(name, mapping, values) > 0
    ]
    if not missing_names:
        return values_with_mtp, set(), ()
    note = (
        f"{len(positions)} tensors of multi-token prediction layers are left out, because others "
        f"of them are missing, such as {missing_names[0]}"
    )
    return values, set(positions), (note,)


def _position_after_last_layer(name: str, mapping: FamilyMapping, values: Mapping[str, Any]) -> int:
    """Return the position of a tensor's layer after the model's last layer.

    The position is 1 for the first layer after it, and at most 0 for the model's own layers.
    """
    match = re.match(rf"{re.escape(mapping.layer_prefix)}(\d+)\.", name)
    return int(match[1]) + 1 - int(values["num_layers"]) if match else 0


def _build_mtp_config(model: StoredModel, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of multi-token prediction layers, by its keys in ``config.json``."""
    keys, layers = FAMILY_MAPPINGS[model.model_type].mtp_count_keys, model.values[MTP_LAYERS] or 0
    return {key: layers for key in keys if key in config or (layers and key == keys[0])}


def _read_index(path: Path) -> dict[str, str]:
    """Read the index that maps tensors to files; empty for a model in a single file."""
    if not (path / INDEX_FILE).exists():
        return {}
    weight_map = read_json(path / INDEX_FILE, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX_FILE}: weight_map: expected files by tensor")
    for tensor_name, name in weight_map.items():
        is_valid = isinstance(name, str) and re.fullmatch(r"[\w][\w.-]*\.safetensors", name)
        if not is_valid:
            raise CheckpointError(
                f"{path / INDEX_FILE}: {format_value(tensor_name)}: expected the name of a "
                f".safetensors file next to it, found {format_value(name)}"
            )
    return weight_map


def _convert_tensors(
    path: Path, model_type: str, values: Mapping[str, Any], stored_tensors: dict[str, LazyTensor]
) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """Convert the tensors to megatron.core's names and check that all are present and expected.

    Returns:
        The tensors by name, and notes for the user about names and tensors that are not kept.
    """
    mapping = FAMILY_MAPPINGS[model_type]
    notes: list[str] = []
    if not any(name.startswith(mapping.prefix) for name in stored_tensors):
        notes.append(f"its tensors are named without the prefix {mapping.prefix!r}")
        stored_tensors = {
            _add_prefix(name, mapping.prefix): tensor for name, tensor in stored_tensors.items()
        }
    unexpected_names, missing_names, mismatches = set(stored_tensors), list[str](), list[str]()
    tensors: dict[str, LazyTensor] = {}
    for spec in iter_weights(model_type, values):
        shapes = dict(spec.huggingface_tensors)
        missing_names += [name for name in shapes if name not in stored_tensors]
        unexpected_names -= shapes.keys()
        if shapes.keys() <= stored_tensors.keys():
            parts = {name: stored_tensors[name] for name in shapes}
            problems = list(describe_mismatches(path, spec.name, parts, shapes))
            mismatches += problems
            if not problems:
                tensors[spec.name] = spec.transform.to_megatron(list(parts.values()), spec.sizes)
    raise_if_any(path, "lacks tensors", missing_names)
    raise_if_any(path, "has tensors that do not fit its config.json", mismatches)
    # Buffers, such as causal masks and rotary frequencies, follow from the configuration.
    buffers = sorted(n for n in unexpected_names if re.fullmatch(mapping.ignored_pattern, n))
    unexpected_names -= set(buffers)
    if buffers:
        text = f"{len(buffers)} buffers are left out, because they are not weights"
        if len(buffers) == 1:
            text = "a buffer is left out, because it is not a weight"
        notes.append(f"{text}, such as {buffers[0]}")
    if _HEAD in unexpected_names:
        if not _equals_embedding(stored_tensors[_HEAD], tensors):
            raise CheckpointError(
                f"{path}: {_HEAD} is not the embedding, but tie_word_embeddings is true in "
                f"{CONFIG}; transformers would not tie them",
                hint=f"set tie_word_embeddings to false in {CONFIG}",
            )
        unexpected_names.remove(_HEAD)
        notes.append(f"{_HEAD} is left out: it is the embedding, to which it is tied")
    raise_if_any(path, f"has tensors that no {model_type} model has", sorted(unexpected_names))
    return tensors, tuple(notes)


def _add_prefix(name: str, prefix: str) -> str:
    """Add the prefix that the names in some published files lack."""
    return name if name.startswith("lm_head.") else prefix + name


def _equals_embedding(output_layer: LazyTensor, tensors: Mapping[str, LazyTensor]) -> bool:
    """Return whether an output layer has the same numbers as the embedding."""
    embedding = tensors["embedding.word_embeddings.weight"]
    return output_layer.shape == embedding.shape and torch.equal(
        read_tensor(output_layer), read_tensor(embedding)
    )


def _iter_huggingface_tensors(model: StoredModel) -> Iterator[tuple[str, LazyTensor]]:
    """Yield a model's tensors by Hugging Face's names."""
    for spec in model.iter_weight_specs():
        parts = spec.transform.to_huggingface(model.tensors[spec.name], spec.sizes)
        for (name, shape), part in zip(spec.huggingface_tensors, parts, strict=True):
            if part.shape != shape:
                raise CheckpointError(
                    f"{model.path}: {spec.name}: converts to {name} of shape {list(part.shape)}, "
                    f"expected {list(shape)}"
                )
            yield name, part


def _write_weights(
    output: ResumableDirectory, all_tensors: Mapping[str, LazyTensor], report: ByteProgress
) -> None:
    """Write the files with weights, and their index if there are several."""
    tensor_groups = split_into_files(all_tensors, _MAX_SHARD_BYTES)
    names = [WEIGHTS_FILE]
    if len(tensor_groups) > 1:
        last = len(tensor_groups)
        names = [f"model-{i:05d}-of-{last:05d}.safetensors" for i in range(1, last + 1)]
    for name, tensors in zip(names, tensor_groups, strict=True):
        if output.reuse_file(name):
            report(sum(map(count_bytes, tensors.values())))
            continue
        spans = write_safetensors(output.directory / name, tensors, report)
        output.record_file(name, spans=spans)
    if len(tensor_groups) > 1:
        weight_map = {
            tensor_name: name
            for name, tensors in zip(names, tensor_groups, strict=True)
            for tensor_name in tensors
        }
        index = {"metadata": {"total_size": sum(map(count_bytes, all_tensors.values()))}}
        text = json.dumps({**index, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
        write_atomic(output.directory / INDEX_FILE, text + "\n", PUBLIC_MODE)
