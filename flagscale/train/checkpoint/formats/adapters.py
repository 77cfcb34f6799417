"""Low-rank adapters of a checkpoint: merged into the model that they are of, or written for peft.

A checkpoint of a run with adapters holds these alone. What peft calls ``lora_A`` and ``lora_B`` are
ours, but that a layer here stands for several there: each of them gets all of A, and its rows of B.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from flagscale.config.arguments.adapters import NOT_FOR_PEFT, THEIRS, other_weight
from flagscale.errors import CheckpointError
from flagscale.files import write_atomic
from flagscale.train.checkpoint.formats.base import Model, Report, format_of, refuse
from flagscale.train.checkpoint.formats.distributed import newest
from flagscale.train.checkpoint.formats.metadata import tensors_of
from flagscale.train.checkpoint.formats.safetensors_file import write_file
from flagscale.train.checkpoint.formats.sample import sample_of
from flagscale.train.checkpoint.formats.sidecar_files import PUBLIC, appearing
from flagscale.train.checkpoint.formats.tensors import Region, Shape, Stored, read

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_OPTIMIZER = "optimizer."
"""How names of the optimizer's tensors begin."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a checkpoint. ``about``: what its manifest says of them; ``pairs``: A and B
    by the layer's name (``decoder.layers.0.mlp.linear_fc1``)."""

    path: Path
    about: Mapping[str, Any]
    pairs: Mapping[str, tuple[Stored, Stored]]

    @property
    def scale(self) -> float:
        return float(self.about["alpha"] / self.about["rank"])


def read_adapters(path: Path) -> Adapters | None:
    """The adapters of a checkpoint of ours, or of the newest in a directory; None where it holds a
    whole model.

    Raises:
        CheckpointError: it cannot be read.
    """
    path, said = newest(path)
    about = said.get("adapters")
    if about is None:
        return None
    stored = dict(tensors_of(path))
    layers = [
        name.removesuffix(".lora_a")
        for name in stored
        if name.endswith(".lora_a") and not name.startswith(_OPTIMIZER)
    ]
    refuse(path, "lacks tensors", [f"{n}.lora_b" for n in layers if f"{n}.lora_b" not in stored])
    pairs = {name: (stored[f"{name}.lora_a"], stored[f"{name}.lora_b"]) for name in sorted(layers)}
    return Adapters(path, about, pairs)


def base_of(adapters: Adapters, given: Path | None = None) -> Model:
    """The model that adapters are of: ``given``, or the one that they were trained on.

    Raises:
        CheckpointError: it is not there, or is another one.
    """
    path = given or Path(str(adapters.about["base"] or ""))
    if not path.is_dir():
        raise CheckpointError(
            f"{adapters.path} holds adapters of {path}, which is not here",
            hint="--base DIR names the model that they are of",
        )
    base = format_of(path).read(path)
    wrong = [
        f"{name}: expected a weight of {list(expected)}, found {_shape(base, name)}"
        for name, (a, b) in adapters.pairs.items()
        if (expected := (b.shape[0], a.shape[1])) != _shape(base, name)
    ]
    if not wrong and (name := other_weight(adapters.about, sample_of(base))):
        wrong.append(f"{name}: it holds other numbers")
    refuse(path, f"is not the model that {adapters.path} is of", wrong)
    return base


def _shape(base: Model, layer: str) -> Shape | None:
    found = base.tensors.get(f"{layer}.weight")
    return None if found is None else found.shape


@dataclass(frozen=True)
class _Merged:
    """``W + scale * B A``, computed in fp32. It is computed whole, and kept until another part of
    it is asked for no more, so that each number is the same however often it is read."""

    weight: Stored
    inward: Stored
    outward: Stored
    scale: float
    kept: list[tuple[Stored, torch.Tensor]] = field(compare=False, repr=False)
    """The last one computed, of all tensors of a model."""

    @property
    def shape(self) -> Shape:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def read(self, region: Region) -> torch.Tensor:
        if not self.kept or self.kept[0][0] is not self.weight:
            added = read(self.outward).float() @ read(self.inward).float()
            whole = read(self.weight).float() + self.scale * added
            self.kept[:] = [(self.weight, whole.to(self.dtype))]
        return self.kept[0][1][tuple(slice(begin, end) for begin, end in region)]


def merged(adapters: Adapters, base: Model) -> Model:
    """The model with its adapters added to its weights."""
    tensors, kept = dict(base.tensors), list[tuple[Stored, torch.Tensor]]()
    for name, pair in adapters.pairs.items():
        weight = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = _Merged(weight, *pair, adapters.scale, kept)
    return replace(base, path=adapters.path, tensors=tensors)


def write_peft(adapters: Adapters, base: Model, path: Path, report: Report) -> Path:
    """Write adapters as peft reads them, in a directory that is not there yet, or is empty; where
    it is.

    Raises:
        CheckpointError: peft has no adapters of this kind of model.
    """
    if reason := NOT_FOR_PEFT.get(base.kind):
        raise CheckpointError(
            f"adapters of {base.kind} are not written for peft: {reason}",
            hint="merge them: flagscale convert CHECKPOINTS OUT",
        )
    theirs = dict(_theirs(adapters, base))
    with appearing(path) as parts:
        write_file(parts.directory / _WEIGHTS, theirs, report)
        text = json.dumps(_config(adapters, base), indent=2)
        write_atomic(parts.directory / _CONFIG, text + "\n", PUBLIC)
    return path


def _theirs(adapters: Adapters, base: Model) -> Iterator[tuple[str, Stored]]:
    """Adapters by peft's names, of those parts of layers that have some."""
    trained = _modules(adapters)
    rules = {entry.name: entry for entry in base.entries()}
    for name, (a, b) in adapters.pairs.items():
        entry = rules[f"{name}.weight"]
        outward = entry.rule.split(b, entry.sizes)
        for (there, _), part in zip(entry.theirs, outward, strict=True):
            module = there.removesuffix(".weight")
            if module.rpartition(".")[2] not in trained:
                continue
            layer = f"base_model.model.{module}"
            yield f"{layer}.lora_A.weight", a
            yield f"{layer}.lora_B.weight", part


def _modules(adapters: Adapters) -> list[str]:
    """Hugging Face's names of what has adapters: a layer's here, or of some of its parts."""
    return [part for name in adapters.about["targets"] for part in THEIRS.get(name, (name,))]


def _config(adapters: Adapters, base: Model) -> dict[str, Any]:
    about = adapters.about
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.path),
        "r": about["rank"],
        "lora_alpha": about["alpha"],
        "lora_dropout": about["dropout"],
        "target_modules": _modules(adapters),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
