"""A third-party checkpoint format: one pickle-free file of tensors, and one of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flagscale.train.checkpoint.formats.base import StoredModel
from flagscale.train.checkpoint.formats.lazy_tensors import MappedTensor, read_tensor

if TYPE_CHECKING:
    from flagscale.train.checkpoint.formats.base import ByteProgress, InspectModel


class Plain:
    name = "plain"

    def recognises(self, path: Path) -> bool:
        return (path / "plain.json").is_file()

    def read(self, path: Path) -> StoredModel:
        record = json.loads((path / "plain.json").read_text())
        tensors: dict[str, torch.Tensor] = torch.load(path / "plain.pt", weights_only=True)
        stored = {name: _stored(tensor) for name, tensor in tensors.items()}
        return StoredModel(path, record["kind"], record["values"], stored, record["config"])

    def write(
        self, model: StoredModel, path: Path, report: ByteProgress, inspect: InspectModel
    ) -> Path:
        path.mkdir(exist_ok=True)
        tensors = {name: read_tensor(tensor).clone() for name, tensor in model.tensors.items()}
        torch.save(tensors, path / "plain.pt")
        report(model.total_bytes)
        record: dict[str, Any] = {"kind": model.model_type, "values": dict(model.values)}
        (path / "plain.json").write_text(json.dumps({**record, "config": model.config}))
        inspect(self.read(path))
        return path


def _stored(tensor: torch.Tensor) -> MappedTensor:
    return MappedTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)
