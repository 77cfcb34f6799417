"""LoRA adapters of a checkpoint: merging into the base model, and export for peft.

A checkpoint of a run with adapters holds the adapters alone. They equal peft's ``lora_A`` and
``lora_B``, except that one layer here (such as linear_qkv) corresponds to several modules in
Hugging Face. Each of those gets the whole A and the module's rows of B.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from flagscale.config.arguments.rules.adapters import (
    HUGGINGFACE_LAYERS,
    UNSUPPORTED_BY_PEFT,
    UNSUPPORTED_MIXTURE,
    first_differing_weight,
)
from flagscale.errors import CheckpointError
from flagscale.files import write_atomic
from flagscale.train.checkpoint.chat_template import MANIFEST_KEY
from flagscale.train.checkpoint.formats.base import (
    ByteProgress,
    StoredModel,
    detect_format,
    raise_if_any,
)
from flagscale.train.checkpoint.formats.chunked_tensors import open_tensors
from flagscale.train.checkpoint.formats.lazy_tensors import (
    LazyTensor,
    Region,
    Shape,
    StackedTensor,
    TensorItem,
    read_tensor,
)
from flagscale.train.checkpoint.formats.safetensors_file import write_safetensors
from flagscale.train.checkpoint.formats.sidecar_files import PUBLIC_MODE, atomic_directory
from flagscale.train.checkpoint.formats.torch_dist import find_checkpoint
from flagscale.train.checkpoint.formats.weight_sample import sample_weights

_WEIGHTS_FILE, _CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the names of optimizer tensors."""
_MLP, _EXPERTS = ".mlp.", ".mlp.experts."
_MATRIX_DIMENSIONS = 2
_PEFT_A, _PEFT_B = "lora_A.weight", "lora_B.weight"
_MERGE_HINT = "merge them: flagscale convert CHECKPOINTS OUT"


@dataclass(frozen=True)
class Adapters:
    """Adapters of a checkpoint.

    Attributes:
        path: the checkpoint.
        settings: entry ``adapters`` of the manifest: base, rank, alpha, dropout and targets.
        pairs: A ``[rank, in]`` and B ``[out, rank]`` by the layer's name, such as
            ``decoder.layers.0.mlp.linear_fc1``. Those of a layer's experts are stacked.
        chat_template: text of the chat template that they were trained with, if it is known.
    """

    path: Path
    settings: Mapping[str, Any]
    pairs: Mapping[str, tuple[LazyTensor, LazyTensor]]
    chat_template: str | None = None

    @property
    def scale(self) -> float:
        """Factor of ``B A`` when it is added to the weight: alpha / rank."""
        return float(self.settings["alpha"] / self.settings["rank"])


def read_adapters(path: Path) -> Adapters | None:
    """Open the adapters of a checkpoint, or of the newest one in a directory.

    Returns:
        None if the checkpoint holds a whole model.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    path, manifest = find_checkpoint(path)
    settings = manifest.get("adapters")
    if settings is None:
        return None
    tensors = dict(open_tensors(path))
    layers = [
        name.removesuffix(".lora_a")
        for name in tensors
        if name.endswith(".lora_a") and not name.startswith(_OPTIMIZER_PREFIX)
    ]
    raise_if_any(
        path, "lacks tensors", [f"{n}.lora_b" for n in layers if f"{n}.lora_b" not in tensors]
    )
    pairs = {
        name: (tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]) for name in sorted(layers)
    }
    return Adapters(path, settings, pairs, manifest.get(MANIFEST_KEY))


def open_base_model(adapters: Adapters, directory: Path | None = None) -> StoredModel:
    """Open the base model of adapters.

    Args:
        adapters: the adapters.
        directory: directory of the base model; by default, the one that the adapters were trained
            on.

    Raises:
        CheckpointError: the directory does not exist, or holds another model.
    """
    path = directory or Path(str(adapters.settings["base"] or ""))
    if not path.is_dir():
        raise CheckpointError(
            f"{adapters.path} holds adapters of {path}, which does not exist on this host",
            hint="--base DIR names the model that they are of",
        )
    base = detect_format(path).read(path)
    mismatches = [
        f"{name}: expected a weight of {list(expected)}, found {_get_weight_shape(base, name)}"
        for name, (a, b) in adapters.pairs.items()
        if (expected := (*b.shape[:-1], a.shape[-1])) != _get_weight_shape(base, name)
    ]
    if not mismatches and (name := first_differing_weight(adapters.settings, sample_weights(base))):
        mismatches.append(f"{name}: its values differ")
    raise_if_any(path, f"is not the model that {adapters.path} is of", mismatches)
    return base


def _get_weight_shape(base: StoredModel, layer: str) -> Shape | None:
    weight = base.tensors.get(f"{layer}.weight")
    return None if weight is None else weight.shape


@dataclass(frozen=True)
class _MergedWeight:
    """Merged weight ``W + scale * B A``, computed in fp32.

    The weight is computed whole and cached until another weight is read. Every number is therefore
    the same however often it is read.
    """

    weight: LazyTensor
    lora_a: LazyTensor
    lora_b: LazyTensor
    scale: float
    cache: list[tuple[LazyTensor, torch.Tensor]] = field(compare=False, repr=False)
    """The last computed weight of all merged weights of a model; at most one entry."""

    @property
    def shape(self) -> Shape:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def read(self, region: Region) -> torch.Tensor:
        if not self.cache or self.cache[0][0] is not self.weight:
            update = read_tensor(self.lora_b).float() @ read_tensor(self.lora_a).float()
            result = read_tensor(self.weight).float() + self.scale * update
            self.cache[:] = [(self.weight, result.to(self.dtype))]
        return self.cache[0][1][tuple(slice(begin, end) for begin, end in region)]


def merge_adapters(adapters: Adapters, base: StoredModel) -> StoredModel:
    """Return the base model with the adapters added to its weights."""
    tensors, cache = dict(base.tensors), list[tuple[LazyTensor, torch.Tensor]]()
    for name, (a, b) in adapters.pairs.items():
        weight = tensors[f"{name}.weight"]
        merged = [
            _MergedWeight(matrix, lora_a, lora_b, adapters.scale, cache)
            for matrix, lora_a, lora_b in zip(*map(_split_experts, (weight, a, b)), strict=True)
        ]
        is_stacked = len(weight.shape) > _MATRIX_DIMENSIONS
        tensors[f"{name}.weight"] = StackedTensor(tuple(merged)) if is_stacked else merged[0]
    chat_template = adapters.chat_template or base.chat_template
    return replace(base, path=adapters.path, tensors=tensors, chat_template=chat_template)


def _split_experts(tensor: LazyTensor) -> list[LazyTensor]:
    """Return the matrix of each expert of a stacked tensor, or the only matrix."""
    if len(tensor.shape) == _MATRIX_DIMENSIONS:
        return [tensor]
    return [TensorItem(tensor, expert) for expert in range(tensor.shape[0])]


def write_peft(adapters: Adapters, base: StoredModel, path: Path, report: ByteProgress) -> Path:
    """Write adapters in peft's format to a directory that does not exist yet or is empty.

    Returns:
        The directory.

    Raises:
        CheckpointError: peft does not support adapters of this kind of model.
    """
    if reason := UNSUPPORTED_BY_PEFT.get(base.model_type):
        raise CheckpointError(
            f"adapters of {base.model_type} are not written for peft: {reason}",
            hint=_MERGE_HINT,
        )
    if len({_EXPERTS in name for name in adapters.pairs if _MLP in name}) > 1:
        raise CheckpointError(f"{adapters.path}: {UNSUPPORTED_MIXTURE}", hint=_MERGE_HINT)
    tensors = dict(_iter_peft_tensors(adapters, base))
    with atomic_directory(path) as output:
        write_safetensors(output.directory / _WEIGHTS_FILE, tensors, report)
        text = json.dumps(_build_peft_config(adapters, base, tensors), indent=2)
        write_atomic(output.directory / _CONFIG_FILE, text + "\n", PUBLIC_MODE)
    return path


def _iter_peft_tensors(adapters: Adapters, base: StoredModel) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the adapters by peft's names, for those modules that have adapters."""
    specs = {spec.name: spec for spec in base.iter_weight_specs()}
    order = list(HUGGINGFACE_LAYERS)
    for name, (a, b) in sorted(
        adapters.pairs.items(), key=lambda pair: order.index(pair[0].rpartition(".")[2])
    ):
        entry = specs[f"{name}.weight"]
        module_tensors = entry.transform.to_huggingface(b, entry.sizes)
        matrices = _split_experts(a)
        modules_per_matrix = len(entry.huggingface_tensors) // len(matrices)
        has_adapter = _find_modules_with_adapters(adapters, name, modules_per_matrix)
        for index, ((huggingface_name, _), module_b) in enumerate(
            zip(entry.huggingface_tensors, module_tensors, strict=True)
        ):
            matrix, position = divmod(index, modules_per_matrix)
            if has_adapter[position]:
                module = huggingface_name.removesuffix(".weight")
                yield f"base_model.model.{module}.{_PEFT_A}", matrices[matrix]
                yield f"base_model.model.{module}.{_PEFT_B}", module_b


def _find_modules_with_adapters(adapters: Adapters, name: str, count: int) -> list[bool]:
    """Return for each of the Hugging Face modules of a layer, or of an expert's layer, whether it
    has an adapter.

    Of an expert, peft requires adapters of gate and up projection together. The rows of B of the
    one without an adapter are zero.
    """
    layer, targets = name.rpartition(".")[2], adapters.settings["targets"]
    if layer in targets or _EXPERTS in name:
        return [True] * count
    return [part in targets for part in HUGGINGFACE_LAYERS[layer][-count:]]


def _build_peft_config(
    adapters: Adapters, base: StoredModel, names: Iterable[str]
) -> dict[str, Any]:
    """Build the content of ``adapter_config.json`` for adapters with peft's ``names``."""
    settings = adapters.settings
    modules = (name.removesuffix(f".{_PEFT_A}") for name in names if name.endswith(_PEFT_A))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.path),
        "r": settings["rank"],
        "lora_alpha": settings["alpha"],
        "lora_dropout": settings["dropout"],
        "target_modules": list(dict.fromkeys(name.rpartition(".")[2] for name in modules)),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
