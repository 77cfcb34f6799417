"""A checkpoint format of an outside package: one pickle-free file of tensors, one of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flagscale.train.checkpoint.formats.base import Model
from flagscale.train.checkpoint.formats.tensors import Mapped, read

if TYPE_CHECKING:
    from flagscale.train.checkpoint.formats.base import Inspect, Report


class Plain:
    name = "plain"

    def recognises(self, path: Path) -> bool:
        return (path / "plain.json").is_file()

    def read(self, path: Path) -> Model:
        said = json.loads((path / "plain.json").read_text())
        tensors: dict[str, torch.Tensor] = torch.load(path / "plain.pt", weights_only=True)
        stored = {name: _stored(tensor) for name, tensor in tensors.items()}
        return Model(path, said["kind"], said["values"], stored, said["config"])

    def write(self, model: Model, path: Path, report: Report, inspect: Inspect) -> Path:
        path.mkdir(exist_ok=True)
        tensors = {name: read(tensor).clone() for name, tensor in model.tensors.items()}
        torch.save(tensors, path / "plain.pt")
        report(model.size)
        said: dict[str, Any] = {"kind": model.kind, "values": dict(model.values)}
        (path / "plain.json").write_text(json.dumps({**said, "config": model.config}))
        inspect(self.read(path))
        return path


def _stored(tensor: torch.Tensor) -> Mapped:
    return Mapped(tuple(tensor.shape), tensor.dtype, lambda: tensor)
