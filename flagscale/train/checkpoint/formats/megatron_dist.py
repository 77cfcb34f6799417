"""Megatron-LM's ``torch_dist`` format. Any parallel layout loads such a checkpoint.

It has the same files as this project's checkpoints, with these differences:

- Arguments are in ``common.pt``.
- If all layers have the same tensors (homogeneous layers), those of one kind are stacked in one
  tensor ``[layer, …]``. Heterogeneous layers, such as dense ones among mixtures of experts, are
  stored one by one.
- Norms have the names that the implementation of the layers gives them.
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

from flagscale.checkpoint_metadata import METADATA_FILE
from flagscale.checkpoints import MANIFEST_FILE, TRACKER_FILE, CheckpointDirectory
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.content_metadata import (
    METADATA_KEY,
    STORAGE_METADATA,
    sharding_metadata,
)
from flagscale.train.checkpoint.formats.base import (
    ByteProgress,
    InspectModel,
    StoredModel,
    TensorMismatchError,
    collect_model,
    describe_mismatches,
)
from flagscale.train.checkpoint.formats.chunked_tensors import open_tensors
from flagscale.train.checkpoint.formats.lazy_tensors import (
    LazyTensor,
    Shape,
    StackedTensor,
    TensorItem,
)
from flagscale.train.checkpoint.formats.megatron_arguments import (
    expected_shape,
    possible_vocabulary_rows,
    read_layout,
    resolve_arguments,
)
from flagscale.train.checkpoint.formats.megatron_layout import (
    EMBEDDING,
    OUTPUT_LAYER,
    RELEASE_DIRECTORY,
    MegatronLayout,
    PaddedTensor,
    build_megatron_arguments,
    build_precision_arguments,
    is_weight,
    iter_spellings,
    require_megatron_support,
    spell_for_layer,
)
from flagscale.train.checkpoint.formats.megatron_unpickler import load_pickle
from flagscale.train.checkpoint.formats.resumable_directory import ResumableDirectory
from flagscale.train.checkpoint.formats.sidecar_files import atomic_directory
from flagscale.train.checkpoint.formats.torch_dist_writer import DistributedCheckpointWriter
from flagscale.train.checkpoint.formats.weight_mappings import WeightSpec

_COMMON_FILE, _BACKEND_FILE = "common.pt", "metadata.json"
_LAYER_TENSOR = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_CHECKPOINT_VERSION = 3.0


@dataclass(frozen=True)
class MegatronDist:
    """Format ``megatron_dist``: checkpoints of Megatron-LM with ``ckpt_format: torch_dist``."""

    name: ClassVar[str] = "megatron_dist"
    layout: MegatronLayout = field(default_factory=MegatronLayout)

    def recognises(self, path: Path) -> bool:
        checkpoint = _find_checkpoint(path)
        return checkpoint is not None and _load_arguments(checkpoint) is not None

    def for_layout(self, layout: MegatronLayout) -> MegatronDist:
        """Return the format for another layer implementation or vocabulary padding.

        Raises:
            CheckpointError: ``layout`` has other options.
        """
        if replace(layout, transformer_engine=True, vocabulary_multiple=1) != MegatronLayout():
            raise CheckpointError(
                f"{self.name} does not depend on the layout: any layout can load it",
                hint="of these options it has --transformer-impl and "
                "--make-vocab-size-divisible-by",
            )
        return replace(self, layout=layout)

    def read(self, path: Path) -> StoredModel:
        checkpoint = _find_checkpoint(path)
        namespace = None if checkpoint is None else _load_arguments(checkpoint)
        if checkpoint is None or namespace is None:
            raise CheckpointError(
                f"{path} holds no checkpoint that records Megatron-LM's arguments"
            )
        args = vars(namespace)
        values = resolve_arguments(args, checkpoint)
        read_layout(args, checkpoint)
        rows = possible_vocabulary_rows(args, values["vocab_size"])
        return collect_model(
            checkpoint,
            values,
            _DistributedSource(checkpoint, args, values, rows, open_tensors(checkpoint)),
        )

    def write(
        self, model: StoredModel, path: Path, report: ByteProgress, inspect: InspectModel
    ) -> Path:
        require_megatron_support(model.values, model.path)
        with atomic_directory(path, model.resume) as output:
            self._write_files(model, output, report)
            inspect(self.read(output.directory))
        return path

    def _write_files(
        self, model: StoredModel, output: ResumableDirectory, report: ByteProgress
    ) -> None:
        root = output.directory / RELEASE_DIRECTORY
        root.mkdir(exist_ok=True)
        tensors = _stack_layers(model, self.layout)
        DistributedCheckpointWriter(output, report, RELEASE_DIRECTORY).write(
            tensors, list(_iter_extra_states(tensors))
        )
        metadata = {
            **sharding_metadata(),
            "non_homogeneous_layers": not _is_homogeneous(model.values),
        }
        arguments = build_megatron_arguments(model.values, self.layout)
        if _is_homogeneous(model.values):
            arguments["moe_layer_freq"] = 1  # a list would mean that layers are not stacked
        arguments |= {**build_precision_arguments(model.dtype), "ckpt_format": "torch_dist"}
        common_state = {
            "args": argparse.Namespace(**arguments),
            "checkpoint_version": _CHECKPOINT_VERSION,
            "iteration": 0,
            METADATA_KEY: metadata,
        }
        torch.save(common_state, root / _COMMON_FILE)
        (root / _BACKEND_FILE).write_text(json.dumps(STORAGE_METADATA), encoding="utf-8")
        (output.directory / TRACKER_FILE).write_text(f"{RELEASE_DIRECTORY}\n", encoding="utf-8")


def _find_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint in a directory: the directory itself, the tracked or the newest one.

    Returns:
        None if there is none, or if it is one of this project.
    """
    try:
        tracked = (path / TRACKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        tracked = ""
    directories = CheckpointDirectory(path)
    candidates = [path]
    if tracked:
        candidates.append(
            directories.path(int(tracked)) if tracked.isdecimal() else path / RELEASE_DIRECTORY
        )
    candidates += [*map(directories.path, directories.iterations()), path / RELEASE_DIRECTORY]
    checkpoint = next(
        (candidate for candidate in candidates if (candidate / METADATA_FILE).is_file()), None
    )
    return None if checkpoint is None or (checkpoint / MANIFEST_FILE).exists() else checkpoint


def _load_arguments(path: Path) -> argparse.Namespace | None:
    """Return the arguments in a checkpoint's ``common.pt``, or None if it has none."""
    if not (path / _COMMON_FILE).is_file():
        return None
    args = load_pickle(path / _COMMON_FILE).get("args")
    return args if isinstance(args, argparse.Namespace) else None


@dataclass(frozen=True)
class _DistributedSource:
    """Tensors of a checkpoint, with a record of those that were looked up.

    Attributes:
        path: the checkpoint.
        args: arguments of the checkpoint.
        values: fully resolved arguments of the model.
        vocabulary_rows: possible numbers of rows of embedding and output layer.
        stored_tensors: the stored tensors, by name.
        used_names: names of the tensors that were looked up.
    """

    path: Path
    args: Mapping[str, Any]
    values: Mapping[str, Any]
    vocabulary_rows: Sequence[int]
    stored_tensors: Mapping[str, LazyTensor]
    used_names: set[str] = field(default_factory=set)

    def find_tensor(self, spec: WeightSpec) -> LazyTensor | None:
        """Look up a tensor by its name, or as an item of the stack of all layers.

        Raises:
            TensorMismatchError: its shape or dtype is not the expected one.
        """
        for name in iter_spellings(spec.name):
            layer_match = _LAYER_TENSOR.fullmatch(name)
            if name in self.stored_tensors:
                return self._get_checked(
                    name, expected_shape(spec, self.vocabulary_rows, self._count_rows(name))
                )
            stacked_name = "" if layer_match is None else f"decoder.layers.{layer_match[2]}"
            if layer_match is not None and stacked_name in self.stored_tensors:
                shape = (self.values["num_layers"], *spec.shape)
                return TensorItem(self._get_checked(stacked_name, shape), int(layer_match[1]))
        return None

    def _get_checked(self, name: str, shape: Shape) -> LazyTensor:
        """Return a stored tensor after a check of its shape and dtype."""
        tensor = self.stored_tensors[name]
        self.used_names.add(name)
        if problems := list(describe_mismatches(self.path, name, {name: tensor}, {name: shape})):
            raise TensorMismatchError(problems)
        return tensor

    def _count_rows(self, name: str) -> int:
        return next(iter(self.stored_tensors[name].shape), 0)

    def list_unused(self) -> list[str]:
        """List the weights that were not looked up."""
        names = self.stored_tensors.keys() - self.used_names
        return sorted(name for name in names if is_weight(name, self.args))


def _is_homogeneous(values: Mapping[str, Any]) -> bool:
    """Return whether all layers have the same tensors."""
    return not values["num_moe_experts"] or all(values["moe_layer_freq"])


def _stack_layers(model: StoredModel, layout: MegatronLayout) -> dict[str, LazyTensor]:
    """Return a model's tensors under Megatron-LM's names, with homogeneous layers stacked."""
    is_homogeneous = _is_homogeneous(model.values)
    tensors: dict[str, LazyTensor] = {}
    layer_tensors: dict[str, list[LazyTensor]] = {}
    for name, tensor in model.tensors.items():
        layer_match = _LAYER_TENSOR.fullmatch(name)
        if layer_match is None:
            is_padded = name in (EMBEDDING, OUTPUT_LAYER)
            rows = layout.pad_vocabulary(tensor.shape[0]) if is_padded else tensor.shape[0]
            tensors[name] = PaddedTensor(tensor, rows) if is_padded else tensor
            continue
        # This project's names are those of Megatron-LM's local layers.
        spelling = name
        if layout.transformer_engine:
            spelling = spell_for_layer(
                name, model.values, int(layer_match[1]), transformer_engine=True
            )
        if is_homogeneous:
            layer_tensors.setdefault(spelling.replace(f".{layer_match[1]}.", ".", 1), []).append(
                tensor
            )
        else:
            tensors[spelling] = tensor
    return tensors | {name: StackedTensor(tuple(items)) for name, items in layer_tensors.items()}


def _iter_extra_states(tensors: Mapping[str, LazyTensor]) -> Iterator[str]:
    """Yield the names of empty ``_extra_state`` objects that linear layers expect.

    There is one per layer, and per expert, of those stacked in one tensor.
    """
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        if parameter != "weight" or ".linear_" not in module:
            continue
        stack_shape = tensor.shape[:-2] or (1,)
        sizes = ".".join(map(str, stack_shape))
        for position in torch.cartesian_prod(*map(torch.arange, stack_shape)).reshape(
            -1, len(stack_shape)
        ):
            yield f"{module}._extra_state/shard_{'.'.join(map(str, position.tolist()))}_{sizes}"
