"""LoRA adapters of a checkpoint: merging into the base model, and export for peft.

A checkpoint of a run with adapters holds the adapters alone. They equal peft's ``lora_A`` and
``lora_B``, except that one layer here (such as linear_qkv) corresponds to several modules in
Hugging Face. Each of those gets the whole A and the module's rows of B.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from flagscale.config.arguments.rules.adapters import (
    HUGGINGFACE_LAYERS,
    UNSUPPORTED_BY_PEFT,
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
from flagscale.train.checkpoint.formats.lazy_tensors import LazyTensor, Region, Shape, read_tensor
from flagscale.train.checkpoint.formats.safetensors_file import write_safetensors
from flagscale.train.checkpoint.formats.sidecar_files import PUBLIC_MODE, atomic_directory
from flagscale.train.checkpoint.formats.torch_dist import find_checkpoint
from flagscale.train.checkpoint.formats.weight_sample import sample_weights

_WEIGHTS_FILE, _CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the names of optimizer tensors."""


@dataclass(frozen=True)
class Adapters:
    """Adapters of a checkpoint.

    Attributes:
        path: the checkpoint.
        settings: entry ``adapters`` of the manifest: base, rank, alpha, dropout and targets.
        pairs: A ``[rank, in]`` and B ``[out, rank]`` by the layer's name, such as
            ``decoder.layers.0.mlp.linear_fc1``.
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
        if (expected := (b.shape[0], a.shape[1])) != _get_weight_shape(base, name)
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
    for name, pair in adapters.pairs.items():
        weight = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = _MergedWeight(weight, *pair, adapters.scale, cache)
    chat_template = adapters.chat_template or base.chat_template
    return replace(base, path=adapters.path, tensors=tensors, chat_template=chat_template)


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
            hint="merge them: flagscale convert CHECKPOINTS OUT",
        )
    tensors = dict(_iter_peft_tensors(adapters, base))
    with atomic_directory(path) as output:
        write_safetensors(output.directory / _WEIGHTS_FILE, tensors, report)
        text = json.dumps(_build_peft_config(adapters, base), indent=2)
        write_atomic(output.directory / _CONFIG_FILE, text + "\n", PUBLIC_MODE)
    return path


def _iter_peft_tensors(adapters: Adapters, base: StoredModel) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the adapters by peft's names, for those modules that have adapters."""
    modules_with_adapters = _list_target_modules(adapters)
    specs = {spec.name: spec for spec in base.iter_weight_specs()}
    for name, (a, b) in adapters.pairs.items():
        entry = specs[f"{name}.weight"]
        module_tensors = entry.transform.to_huggingface(b, entry.sizes)
        for (huggingface_name, _), module_b in zip(
            entry.huggingface_tensors, module_tensors, strict=True
        ):
            module = huggingface_name.removesuffix(".weight")
            if module.rpartition(".")[2] not in modules_with_adapters:
                continue
            layer = f"base_model.model.{module}"
            yield f"{layer}.lora_A.weight", a
            yield f"{layer}.lora_B.weight", module_b


def _list_target_modules(adapters: Adapters) -> list[str]:
    """List the Hugging Face modules with adapters, such as ``q_proj``."""
    return [
        module
        for name in adapters.settings["targets"]
        for module in HUGGINGFACE_LAYERS.get(name, (name,))
    ]


def _build_peft_config(adapters: Adapters, base: StoredModel) -> dict[str, Any]:
    """Build the content of ``adapter_config.json``."""
    settings = adapters.settings
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.path),
        "r": settings["rank"],
        "lora_alpha": settings["alpha"],
        "lora_dropout": settings["dropout"],
        "target_modules": _list_target_modules(adapters),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
