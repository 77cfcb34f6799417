"""This project's checkpoints, read and written by one process for any parallel layout.

Training writes checkpoints through megatron.core, on all ranks. A converted checkpoint has the same
files and is loaded like any other: its tensors are stored in chunks of rows, and each rank of any
layout reads its shards of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flagscale.checkpoint_metadata import METADATA_FILE
from flagscale.checkpoints import DIRECTORY_PATTERN, CheckpointDirectory, check_complete
from flagscale.config.arguments.compat.huggingface.config_reader import CONFIG, read_config
from flagscale.config.arguments.compat.huggingface.models import (
    MTP_LAYERS,
    config_of,
    effective,
    huggingface_family_of,
)
from flagscale.config.arguments.rules.resuming import architecture
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.chat_template import MANIFEST_KEY
from flagscale.train.checkpoint.content_metadata import (
    METADATA_KEY,
    STORAGE_METADATA,
    sharding_metadata,
)
from flagscale.train.checkpoint.formats.base import (
    ByteProgress,
    InspectModel,
    StoredModel,
    raise_if_any,
    trim_vocabulary,
)
from flagscale.train.checkpoint.formats.chunked_tensors import open_tensors
from flagscale.train.checkpoint.formats.lazy_tensors import LazyTensor
from flagscale.train.checkpoint.formats.resumable_directory import open_resumable
from flagscale.train.checkpoint.formats.sidecar_files import list_sidecar_files, write_sidecar_files
from flagscale.train.checkpoint.formats.torch_dist_writer import DistributedCheckpointWriter
from flagscale.train.checkpoint.store import CheckpointStore
from flagscale.train.state import Progress

SIDECAR_DIRECTORY = "huggingface"
"""Subdirectory of a checkpoint with the ``config.json`` and tokenizer that it was converted with.
"""
_ITERATION = 0


class TorchDist:
    """Format ``torch_dist``: checkpoints of this project."""

    name = "torch_dist"

    def recognises(self, path: Path) -> bool:
        return (path / METADATA_FILE).is_file() or bool(CheckpointDirectory(path).iterations())

    def read(self, path: Path) -> StoredModel:
        path, manifest = find_checkpoint(path)
        if manifest.get("adapters"):
            raise CheckpointError(
                f"{path} holds adapters alone",
                hint="flagscale convert merges them into their model",
            )
        arguments = manifest.get("model")
        stored_tensors: dict[str, LazyTensor] = dict(open_tensors(path))
        if arguments is None:
            raise CheckpointError(
                f"{path} does not record its model: it was saved by an older version, or "
                "by another program",
                hint="load it once in training (finetune: true) and save it again",
            )
        arguments = {**arguments, "vocab_size": _count_tokens(arguments, stored_tensors)}
        values = effective(arguments)
        sidecar_directory = path / SIDECAR_DIRECTORY
        config = read_config(sidecar_directory) if (sidecar_directory / CONFIG).is_file() else None
        model_type = None if config is None else huggingface_family_of(config).model_type
        expected_config = config_of(values, model_type)
        model = StoredModel(
            path,
            expected_config["model_type"],
            values,
            {},
            config,
            tuple(_list_existing_sidecar_files(sidecar_directory)),
        )
        names = [spec.name for spec in model.iter_weight_specs()]
        raise_if_any(path, "lacks tensors", [name for name in names if name not in stored_tensors])
        tensors = {name: trim_vocabulary(name, stored_tensors[name], values) for name in names}
        notes = _note_missing_mtp(values, names)
        return replace(
            model, tensors=tensors, notes=notes, chat_template=manifest.get(MANIFEST_KEY)
        )

    def write(
        self, model: StoredModel, path: Path, report: ByteProgress, inspect: InspectModel
    ) -> Path:
        store = CheckpointStore(path)
        if store.iterations():
            raise CheckpointError(f"{path} holds checkpoints already")
        temporary_directory = store.begin(_ITERATION, resume=model.resume is not None)
        with open_resumable(temporary_directory, model.resume) as output:
            extra_state_names = [
                name for item in model.tensors.items() for name in _iter_extra_states(*item)
            ]
            DistributedCheckpointWriter(output, report).write(model.tensors, extra_state_names)
            inspect(
                replace(
                    model,
                    path=temporary_directory,
                    tensors=dict(open_tensors(temporary_directory, trusted=True)),
                )
            )
            _write_common_state(temporary_directory)
            if model.config is not None:
                (temporary_directory / SIDECAR_DIRECTORY).mkdir()
                write_sidecar_files(
                    temporary_directory / SIDECAR_DIRECTORY,
                    model.config,
                    model.tensors,
                    model.files,
                )
        try:
            return store.publish(_ITERATION, build_manifest(model))
        except BaseException:
            store.abandon(_ITERATION)
            raise


def _note_missing_mtp(values: Mapping[str, Any], names: list[str]) -> tuple[str, ...]:
    """Return a note if multi-token prediction layers are left out."""
    if not values[MTP_LAYERS] or any(name.startswith("mtp.") for name in names):
        return ()
    return (
        f"its multi-token prediction layers ({MTP_LAYERS} {values[MTP_LAYERS]}) are left out: "
        "among Hugging Face models, only DeepSeek-V3 has them",
    )


def build_manifest(model: StoredModel) -> dict[str, Any]:
    """Build the manifest's entries of a converted checkpoint, which is of iteration 0."""
    dtype = str(model.dtype).removeprefix("torch.")
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32")
    vocab_size = model.values["vocab_size"]
    template = {} if model.chat_template is None else {MANIFEST_KEY: model.chat_template}
    return {
        **template,
        "architecture": architecture(_mask_equivalent_arguments(model.values)),
        "model": dict(model.values),
        "precision": precision,
        "has_optimizer": False,
        "has_rng": False,
        "vocabulary": [vocab_size, vocab_size],
        "converted_from": str(model.path),
    }


def _mask_equivalent_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Reset arguments that may differ between a checkpoint and a run with the same function."""
    ignored_values = {"gated_linear_unit": None}  # implied by swiglu
    if values["num_moe_experts"] and all(values["moe_layer_freq"]):
        ignored_values["ffn_hidden_size"] = None
    if values["multi_latent_attention"]:
        ignored_values |= {"kv_channels": None, "num_query_groups": None}
    return {**values, **ignored_values}


def find_checkpoint(path: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the checkpoint that a directory is or contains, and its manifest.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    if (path / METADATA_FILE).is_file():
        return path, check_complete(path, verify_without_manifest=False)
    latest = CheckpointDirectory(path).find_latest(verify_without_manifest=False)
    if latest is None:
        raise CheckpointError(
            f"{path} holds no checkpoint, expected one called {DIRECTORY_PATTERN}"
        )
    return latest.path, latest.content


def _count_tokens(arguments: Mapping[str, Any], stored_tensors: Mapping[str, LazyTensor]) -> int:
    """Return the number of tokens: the recorded one, or all rows of the embedding."""
    embedding = stored_tensors.get("embedding.word_embeddings.weight")
    rows = 0 if embedding is None else embedding.shape[0]
    recorded_size = arguments.get("vocab_size")
    return min(recorded_size, rows) if recorded_size else rows


def _list_existing_sidecar_files(sidecar: Path) -> Iterator[Path]:
    """Yield the sidecar files in a directory, which may not exist."""
    if sidecar.is_dir():
        yield from list_sidecar_files(sidecar)


def _write_common_state(directory: Path) -> None:
    """Write the files other than tensors: progress before the first step, and metadata."""
    common_state = {"progress": Progress().state_dict(), METADATA_KEY: sharding_metadata()}
    torch.save(common_state, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(STORAGE_METADATA), encoding="utf-8")


def _iter_extra_states(name: str, tensor: LazyTensor) -> Iterator[str]:
    """Yield the names of empty ``_extra_state`` objects of megatron.core's linear layers."""
    module, _, parameter = name.rpartition(".")
    if parameter == "weight" and (".linear_" in module or module.endswith(".eh_proj")):
        count = tensor.shape[0] if len(tensor.shape) == 3 else 1
        for index in range(count):
            yield f"{module}._extra_state/shard_{index}_{count}"
