"""Megatron-LM's ``torch`` format: one file per rank, with tensors sharded as the ranks hold them.

``iter_0000100`` (or ``release``) ``/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, where TT, PPP and
EEE are tensor, pipeline and expert-parallel rank. The latter two appear only if their size exceeds
1. Layers are numbered within a rank's model chunk, experts within a rank.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from flagscale.checkpoints import TRACKER_FILE
from flagscale.config.arguments.compat.huggingface.models import MTP_LAYERS
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.base import (
    ByteProgress,
    InspectModel,
    StoredModel,
    TensorMismatchError,
    collect_model,
    describe_mismatches,
)
from flagscale.train.checkpoint.formats.lazy_tensors import (
    LazyTensor,
    MappedTensor,
    MetaTensor,
    Shape,
    StackedTensor,
)
from flagscale.train.checkpoint.formats.megatron_arguments import (
    expected_shape,
    possible_vocabulary_rows,
    read_layout,
    require_same_model,
    resolve_arguments,
)
from flagscale.train.checkpoint.formats.megatron_layout import (
    EMBEDDING,
    EXPERT_TENSOR,
    OUTPUT_LAYER,
    RANK_FILE,
    MegatronLayout,
    RankCoordinates,
    find_rank_file,
    is_weight,
    iter_spellings,
    merge_replicas,
    require_megatron_support,
    shard_tensor,
    spell_expert,
    unshard_tensor,
)
from flagscale.train.checkpoint.formats.megatron_torch_writer import write_ranks
from flagscale.train.checkpoint.formats.megatron_unpickler import load_pickle
from flagscale.train.checkpoint.formats.sidecar_files import atomic_directory
from flagscale.train.checkpoint.formats.weight_mappings import WeightSpec


@dataclass(frozen=True)
class MegatronTorch:
    """Format ``torch``: checkpoints of Megatron-LM with ``ckpt_format: torch``."""

    name: ClassVar[str] = "torch"
    layout: MegatronLayout = field(default_factory=MegatronLayout)

    def recognises(self, path: Path) -> bool:
        return any(path.glob(f"mp_rank_*/{RANK_FILE}")) or any(
            path.glob(f"*/mp_rank_*/{RANK_FILE}")
        )

    def for_layout(self, layout: MegatronLayout) -> MegatronTorch:
        """Return the format for another parallel layout."""
        return replace(self, layout=layout)

    def read(self, path: Path) -> StoredModel:
        path = _find_checkpoint(path)
        args = _load_arguments(path)
        values = resolve_arguments(args, path)
        return collect_model(path, values, _RankShards.read(path, args, values))

    def write(
        self, model: StoredModel, path: Path, report: ByteProgress, inspect: InspectModel
    ) -> Path:
        require_megatron_support(model.values, model.path)
        with atomic_directory(path, model.resume) as output:
            write_ranks(model, self.layout, output, report)
            inspect(self.read(output.directory))
        return path


def _find_checkpoint(path: Path) -> Path:
    """Return the directory of rank directories that the tracker file names, or the newest one."""
    if any(path.glob("mp_rank_*")):
        return path
    try:
        text = (path / TRACKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        text = ""
    name = f"iter_{int(text):07d}" if text.isdecimal() else "release" if text else ""
    if name and any((path / name).glob("mp_rank_*")):
        return path / name
    return max(directory.parent for directory in path.glob("*/mp_rank_*"))


def _load_arguments(path: Path) -> Mapping[str, Any]:
    """Return the arguments in the first rank's file."""
    args = _get_arguments(load_pickle(min(path.glob(f"mp_rank_*/{RANK_FILE}"))))
    if not args:
        raise CheckpointError(f"{path} does not record its arguments: an old version wrote it")
    return args


def _get_arguments(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments in the content of a rank's file, or none."""
    args = saved.get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def _load_rank(file: Path, args: Mapping[str, Any]) -> dict[str, Any]:
    """Load a rank's file and check that it belongs to the checkpoint with arguments ``args``."""
    saved = load_pickle(file)
    require_same_model(args, _get_arguments(saved), file)
    return saved


@dataclass(frozen=True)
class _RankShards:
    """The shards that all ranks saved.

    Attributes:
        path: directory of the rank directories.
        args: arguments of the checkpoint.
        values: fully resolved arguments of the model.
        layout: parallel layout of the files.
        chunks: by tensor and expert-parallel rank: all model chunks, in the order of layers.
        layer_locations: for each layer of the model: the index of its chunk, and its number in
            that chunk.
        used_tensors: tensors that were looked up: tensor and expert-parallel rank, chunk, name.
    """

    path: Path
    args: Mapping[str, Any]
    values: Mapping[str, Any]
    layout: MegatronLayout
    chunks: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]
    layer_locations: Sequence[tuple[int, int]]
    used_tensors: set[tuple[int, int, int, str]] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path, args: Mapping[str, Any], values: Mapping[str, Any]) -> _RankShards:
        """Load the files of all ranks.

        Raises:
            CheckpointError: a rank's file is missing or damaged, or the layout is not supported.
        """
        layout = read_layout(args, path)
        tensor_parallel = layout.tensor_parallel
        expert_tensor_parallel = args.get("expert_tensor_parallel_size") or tensor_parallel
        if expert_tensor_parallel != tensor_parallel and args.get("num_experts"):
            raise CheckpointError(
                f"{path}: experts have another tensor-parallel size (expert_tensor_parallel_size), "
                "which is not supported",
                hint="let Megatron-LM save it as torch_dist",
            )
        experts = values["num_moe_experts"] or 0
        if experts % layout.expert_parallel:
            raise CheckpointError(
                f"{path}: expert_model_parallel_size: {layout.expert_parallel} ranks cannot share "
                f"{experts} experts"
            )
        chunks = {}
        for tensor_rank in range(tensor_parallel):
            for expert_rank in range(layout.expert_parallel):
                files = [
                    find_rank_file(path, layout, RankCoordinates(tensor_rank, p, expert_rank))
                    for p in range(layout.pipeline_parallel)
                ]
                chunks[tensor_rank, expert_rank] = _order_chunks(
                    [_load_rank(file, args) for file in files]
                )
        return cls(path, args, values, layout, chunks, _list_layers(chunks[0, 0]))

    def find_tensor(self, spec: WeightSpec) -> LazyTensor | None:
        """Assemble a tensor of the model from the ranks' shards; None if they have none.

        Raises:
            TensorMismatchError: shards have unexpected shapes or dtypes.
        """
        if not EXPERT_TENSOR.fullmatch(spec.name):
            return self._assemble(
                spec, spec.shape, [*iter_spellings(spec.name)], range(self.layout.expert_parallel)
            )
        expert_count = spec.sizes.experts
        experts_per_rank = expert_count // self.layout.expert_parallel
        tensors = []
        for expert in range(expert_count):
            rank, local_expert = divmod(expert, experts_per_rank)
            names = spell_expert(spec.name, local_expert) or ()
            tensors.append(self._assemble(spec, spec.shape[1:], names, [rank]))
        experts = [tensor for tensor in tensors if tensor is not None]
        return StackedTensor(tuple(experts)) if len(experts) == expert_count else None

    def _assemble(
        self, spec: WeightSpec, shape: Shape, names: Sequence[str], expert_ranks: Sequence[int]
    ) -> LazyTensor | None:
        """Assemble a tensor from the shards of all tensor-parallel ranks.

        Args:
            spec: the tensor, or the stack of experts that it is in.
            shape: expected shape of the whole tensor.
            names: names that it may have.
            expert_ranks: expert-parallel ranks that hold it.
        """
        chunk, prefixes = self._locate(spec.name)
        shards: list[list[LazyTensor]] = []
        for tensor_rank in range(self.layout.tensor_parallel):
            shards.append([])
            for expert_rank in expert_ranks:
                tensors = self.chunks[tensor_rank, expert_rank][chunk]
                name = next(
                    (n for n in _localize_names(names, prefixes) if _is_tensor(tensors.get(n))),
                    None,
                )
                if name is None:
                    return None
                chunk_index = chunk % len(self.chunks[tensor_rank, expert_rank])
                self.used_tensors.add((tensor_rank, expert_rank, chunk_index, name))
                shards[-1].append(_wrap_tensor(tensors[name]))
        self._check_shards(spec, shape, shards, (chunk, expert_ranks))
        merged = [merge_replicas(spec.name, parts) for parts in shards]
        return unshard_tensor(spec.name, merged, shape[0], gated=self.values["gated_linear_unit"])

    def _check_shards(
        self,
        spec: WeightSpec,
        shape: Shape,
        shards: Sequence[Sequence[LazyTensor]],
        location: tuple[int, Sequence[int]],
    ) -> None:
        """Check the shapes and dtypes of a tensor's shards.

        Args:
            spec: the tensor, or the stack of experts that it is in.
            shape: expected shape of the whole tensor.
            shards: its shards, by tensor-parallel rank and then by expert-parallel rank.
            location: chunk and expert-parallel ranks that hold it.

        Raises:
            TensorMismatchError: they are not the shards of a tensor of this shape.
        """
        chunk, expert_ranks = location
        parts, shapes = {}, {}
        whole_shape = self._get_whole_shape(spec, shape, shards[0][0])
        for tensor_rank, replicas in enumerate(shards):
            shard_shape = self._get_shard_shape(spec.name, whole_shape, tensor_rank, shards[0][0])
            for expert_rank, shard in zip(expert_ranks, replicas, strict=True):
                label = f"{spec.name} ({self._directory_name(tensor_rank, chunk, expert_rank)})"
                parts[label], shapes[label] = shard, shard_shape
        if problems := list(describe_mismatches(self.path, spec.name, parts, shapes)):
            raise TensorMismatchError(problems)

    def _get_whole_shape(self, spec: WeightSpec, shape: Shape, shard: LazyTensor) -> Shape:
        """Return the shape of the whole tensor, with the vocabulary padding that the file has."""
        if spec.name not in (EMBEDDING, OUTPUT_LAYER):
            return shape
        rows = possible_vocabulary_rows(self.args, self.values["vocab_size"])
        return expected_shape(spec, rows, next(iter(shard.shape), 0) * self.layout.tensor_parallel)

    def _get_shard_shape(
        self, name: str, whole_shape: Shape, rank: int, shard: LazyTensor
    ) -> Shape:
        """Return the expected shape of a shard.

        Tensors that only some implementations shard may be whole or sharded; the stored shape
        decides.
        """
        gated, rank_count = self.values["gated_linear_unit"], self.layout.tensor_parallel
        whole_tensor = MetaTensor(whole_shape)
        for transformer_engine in (True, False):
            shape = shard_tensor(
                name,
                whole_tensor,
                rank,
                rank_count,
                gated=gated,
                transformer_engine=transformer_engine,
            ).shape
            if shape == shard.shape:
                break
        return shape

    def _directory_name(self, tensor: int, chunk: int, expert: int) -> str:
        stage = chunk % self.layout.pipeline_parallel  # -1 is the last chunk
        return self.layout.directory_name(RankCoordinates(tensor, stage, expert))

    def _locate(self, name: str) -> tuple[int, tuple[str, str]]:
        """Return a tensor's chunk, and its layer's prefix in the model and in the chunk."""
        if match := re.match(r"decoder\.layers\.(\d+)\.", name):
            layer = int(match[1])
            if layer >= len(self.layer_locations):
                return 0, (name, name)
            chunk, local_layer = self.layer_locations[layer]
            return chunk, (match[0], f"decoder.layers.{local_layer}.")
        return (0 if name.startswith("embedding.") else -1), ("", "")

    def list_unused(self) -> list[str]:
        """List the weights that were not looked up, each with a rank's directory that holds it."""
        unused: dict[str, str] = {}
        for (tensor_rank, expert_rank), chunks in self.chunks.items():
            for index, chunk in enumerate(chunks):
                for name, tensor in chunk.items():
                    key = (tensor_rank, expert_rank, index, name)
                    is_used = key in self.used_tensors or self._is_copy(index, name)
                    if _is_tensor(tensor) and not is_used and is_weight(name, self.args):
                        directory = self._directory_name(tensor_rank, index, expert_rank)
                        unused.setdefault(f"{index} {name}", f"{name} (in {directory})")
        return sorted(unused.values())

    def _is_copy(self, chunk: int, name: str) -> bool:
        """Return whether a tensor is the embedding's copy for multi-token prediction layers."""
        return bool(chunk and self.args.get(MTP_LAYERS) and name.startswith("embedding."))


def _localize_names(names: Sequence[str], prefixes: tuple[str, str]) -> list[str]:
    """Replace the layer prefix of names by that within a chunk."""
    model_prefix, chunk_prefix = prefixes
    return [chunk_prefix + name.removeprefix(model_prefix) for name in names]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _wrap_tensor(tensor: torch.Tensor) -> LazyTensor:
    detached = tensor.detach()
    return MappedTensor(tuple(detached.shape), detached.dtype, lambda: detached)


def _order_chunks(files: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the model chunks of all stages: first chunks of all stages, then second ones, …"""
    keys = {str(name) for file in files for name in file}
    numbers = sorted(int(m[1]) for name in keys if (m := re.fullmatch(r"model(\d+)", name)))
    names = [f"model{number}" for number in numbers] or ["model"]
    chunks = [file.get(name) for name in names for file in files]
    return [chunk if isinstance(chunk, dict) else {} for chunk in chunks]


def _list_layers(chunks: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return, for each layer of the model, the index of its chunk and its number in that chunk."""
    layers = []
    for index, chunk in enumerate(chunks):
        numbers = {int(m[1]) for key in chunk if (m := re.match(r"decoder\.layers\.(\d+)\.", key))}
        layers += [(index, number) for number in sorted(numbers)]
    return layers
