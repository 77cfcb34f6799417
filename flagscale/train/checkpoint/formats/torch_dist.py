"""This project's checkpoints, read and written by one process for any parallel layout.

Training writes checkpoints through megatron.core, on all ranks. A converted one has the same files
and is loaded like any other: its tensors are stored in chunks of rows, and each rank of any layout
reads its shards of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flagscale.checkpoint_metadata import METADATA
from flagscale.checkpoints import NAME, CheckpointDirectory, check_complete
from flagscale.config.arguments.compat.huggingface.models import MTP_LAYERS, config_of, effective
from flagscale.config.arguments.compat.huggingface.reading import CONFIG, read_config
from flagscale.config.arguments.rules.resuming import architecture
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.content_metadata import BACKEND, METADATA_KEY, sharding_metadata
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
        return (path / METADATA).is_file() or bool(CheckpointDirectory(path).iterations())

    def read(self, path: Path) -> StoredModel:
        path, manifest = find_checkpoint(path)
        if manifest.get("adapters"):
            raise CheckpointError(
                f"{path} holds adapters alone",
                hint="flagscale convert merges them into their model",
            )
        arguments = manifest.get("model")
        stored: dict[str, LazyTensor] = dict(open_tensors(path))
        if arguments is None:
            raise CheckpointError(
                f"{path} does not say which model it is of: it was saved by an older version, or "
                "by another program",
                hint="load it once in training (finetune: true) and save it again",
            )
        arguments = {**arguments, "vocab_size": _count_tokens(arguments, stored)}
        values = effective(arguments)
        sidecar = path / SIDECAR_DIRECTORY
        config = read_config(sidecar) if (sidecar / CONFIG).is_file() else None
        expected_config = config_of(values, None if config is None else config["model_type"])
        model = StoredModel(
            path, expected_config["model_type"], values, {}, config, tuple(_list_files(sidecar))
        )
        names = [entry.name for entry in model.iter_weight_specs()]
        raise_if_any(path, "lacks tensors", [name for name in names if name not in stored])
        tensors = {name: trim_vocabulary(name, stored[name], values) for name in names}
        notes = _note_missing_mtp(values, names)
        return StoredModel(
            path, model.model_type, values, tensors, config, model.files, notes=notes
        )

    def write(
        self, model: StoredModel, path: Path, report: ByteProgress, inspect: InspectModel
    ) -> Path:
        store = CheckpointStore(path)
        if store.iterations():
            raise CheckpointError(f"{path} holds checkpoints already")
        partial = store.begin(_ITERATION, resume=model.resume is not None)
        with open_resumable(partial, model.resume) as output:
            empty_objects = [
                name for item in model.tensors.items() for name in _iter_empty_states(*item)
            ]
            DistributedCheckpointWriter(output, report).write(model.tensors, empty_objects)
            inspect(replace(model, path=partial, tensors=dict(open_tensors(partial, trusted=True))))
            _write_common(partial)
            if model.config is not None:
                (partial / SIDECAR_DIRECTORY).mkdir()
                write_sidecar_files(
                    partial / SIDECAR_DIRECTORY, model.config, model.tensors, model.files
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
    """Build the manifest's entries of a converted checkpoint."""
    dtype = str(model.dtype).removeprefix("torch.")
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32")
    size = model.values["vocab_size"]
    return {
        "architecture": architecture(_mask_equivalent_arguments(model.values)),
        "model": dict(model.values),
        "precision": precision,
        "has_optimizer": False,
        "has_rng": False,
        "vocabulary": [size, size],
        "converted_from": str(model.path),
    }


def _mask_equivalent_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Reset arguments that may differ between a checkpoint and a run with the same function."""
    ignored = {"gated_linear_unit": None}  # implied by swiglu
    if values["num_moe_experts"] and all(values["moe_layer_freq"]):
        ignored["ffn_hidden_size"] = None
    if values["multi_latent_attention"]:
        ignored |= {"kv_channels": None, "num_query_groups": None}
    return {**values, **ignored}


def find_checkpoint(path: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the checkpoint that a directory is or contains, and its manifest.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    if (path / METADATA).is_file():
        return path, check_complete(path, verify_without_manifest=False)
    latest = CheckpointDirectory(path).find_latest(verify_without_manifest=False)
    if latest is None:
        raise CheckpointError(f"{path} holds no checkpoint, expected one called {NAME}")
    return latest.path, latest.content


def _count_tokens(arguments: Mapping[str, Any], stored: Mapping[str, LazyTensor]) -> int:
    """Return the number of tokens: the recorded one, or all rows of the embedding."""
    embedding = stored.get("embedding.word_embeddings.weight")
    rows = 0 if embedding is None else embedding.shape[0]
    recorded = arguments.get("vocab_size")
    return min(recorded, rows) if recorded else rows


def _list_files(sidecar: Path) -> Iterator[Path]:
    if sidecar.is_dir():
        yield from list_sidecar_files(sidecar)


def _write_common(partial: Path) -> None:
    """Write the files in addition to tensors: progress before the first step, and metadata."""
    common = {"progress": Progress().state_dict(), METADATA_KEY: sharding_metadata()}
    torch.save(common, partial / "common.pt")
    (partial / "metadata.json").write_text(json.dumps(BACKEND), encoding="utf-8")


def _iter_empty_states(name: str, tensor: LazyTensor) -> Iterator[str]:
    """Yield the names of empty ``_extra_state`` objects of megatron.core's linear layers."""
    module, _, parameter = name.rpartition(".")
    if parameter == "weight" and (".linear_" in module or module.endswith(".eh_proj")):
        count = tensor.shape[0] if len(tensor.shape) == 3 else 1
        for index in range(count):
            yield f"{module}._extra_state/shard_{index}_{count}"
