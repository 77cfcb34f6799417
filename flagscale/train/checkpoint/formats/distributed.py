"""Our own checkpoints, read and written by one process, whatever layout they are of or for.

Training writes them through megatron.core, on all ranks. A converted one has the same files, and
is loaded as any other: its tensors lie in chunks of rows, and any layout takes its parts of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flagscale.checkpoint_metadata import METADATA
from flagscale.checkpoints import NAME, Checkpoints, check_whole
from flagscale.config.arguments.huggingface.models import FURTHER, config_of, effective
from flagscale.config.arguments.huggingface.reading import CONFIG, read_config
from flagscale.config.arguments.resuming import architecture
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.describing import BACKEND, METADATA_KEY, sharding_metadata
from flagscale.train.checkpoint.formats.base import (
    Inspect,
    Model,
    Report,
    refuse,
    without_padding,
)
from flagscale.train.checkpoint.formats.distributed_writing import Writer
from flagscale.train.checkpoint.formats.metadata import tensors_of
from flagscale.train.checkpoint.formats.parts import resumable
from flagscale.train.checkpoint.formats.sidecar_files import beside, write_companions
from flagscale.train.checkpoint.formats.tensors import Stored
from flagscale.train.checkpoint.store import CheckpointStore
from flagscale.train.state import Progress

BESIDE = "huggingface"
"""Directory, in a checkpoint, of the config.json and the tokenizer that it was converted with."""
_ITERATION = 0


class Distributed:
    """Checkpoints of this project; Megatron-LM's are read, too."""

    name = "torch_dist"

    def recognises(self, path: Path) -> bool:
        return (path / METADATA).is_file() or bool(Checkpoints(path).iterations())

    def read(self, path: Path) -> Model:
        path, said = newest(path)
        if said.get("adapters"):
            raise CheckpointError(
                f"{path} holds adapters alone",
                hint="flagscale convert merges them into their model",
            )
        given = said.get("model")
        stored: dict[str, Stored] = dict(tensors_of(path))
        if given is None:
            raise CheckpointError(
                f"{path} does not say which model it is of: it was saved by an older version, or "
                "by another program",
                hint="load it once in training (finetune: true) and save it again",
            )
        given = {**given, "vocab_size": _vocabulary(given, stored)}
        values = effective(given)
        kept = path / BESIDE
        config = read_config(kept) if (kept / CONFIG).is_file() else None
        made = config_of(values, None if config is None else config["model_type"])
        model = Model(path, made["model_type"], values, {}, config, tuple(_files(kept)))
        names = [entry.name for entry in model.entries()]
        refuse(path, "lacks tensors", [name for name in names if name not in stored])
        tensors = {name: without_padding(name, stored[name], values) for name in names}
        notes = _further(values, names)
        return Model(path, model.kind, values, tensors, config, model.files, notes=notes)

    def write(self, model: Model, path: Path, report: Report, inspect: Inspect) -> Path:
        store = CheckpointStore(path)
        if store.iterations():
            raise CheckpointError(f"{path} holds checkpoints already")
        partial = store.begin(_ITERATION, again=model.origin is not None)
        with resumable(partial, model.origin) as parts:
            empty = [place for item in model.tensors.items() for place in _empty_states(*item)]
            Writer(parts, report).write(model.tensors, empty)
            inspect(replace(model, path=partial, tensors=dict(tensors_of(partial, trusted=True))))
            _write_common(partial)
            if model.config is not None:
                (partial / BESIDE).mkdir()
                write_companions(partial / BESIDE, model.config, model.tensors, model.files)
        try:
            return store.publish(_ITERATION, describe(model))
        except BaseException:
            store.abandon(_ITERATION)
            raise


def _further(values: Mapping[str, Any], names: list[str]) -> tuple[str, ...]:
    """What is to be said of layers that predict further tokens, which few families have."""
    if not values[FURTHER] or any(name.startswith("mtp.") for name in names):
        return ()
    return (
        f"its layers that predict further tokens ({FURTHER} {values[FURTHER]}) are left out: "
        "models of Hugging Face have them in DeepSeek-V3 alone",
    )


def describe(model: Model) -> dict[str, Any]:
    """The manifest's words on a converted checkpoint."""
    kind = str(model.dtype).removeprefix("torch.")
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(kind, "fp32")
    size = model.values["vocab_size"]
    return {
        "architecture": architecture(_told(model.values)),
        "model": dict(model.values),
        "precision": precision,
        "has_optimizer": False,
        "has_rng": False,
        "vocabulary": [size, size],
        "converted_from": str(model.path),
    }


def _told(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without those that a run may well give otherwise."""
    unread = {"gated_linear_unit": None}  # swiglu says it
    if values["num_moe_experts"] and all(values["moe_layer_freq"]):
        unread["ffn_hidden_size"] = None
    if values["multi_latent_attention"]:
        unread |= {"kv_channels": None, "num_query_groups": None}
    return {**values, **unread}


def newest(path: Path) -> tuple[Path, Mapping[str, Any]]:
    """The checkpoint in a directory of checkpoints, or that the directory is, and its manifest."""
    if (path / METADATA).is_file():
        return path, check_whole(path, foreign=False)
    found = Checkpoints(path).find(foreign=False)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint, expected one called {NAME}")
    return found.path, found.content


def _vocabulary(given: Mapping[str, Any], stored: Mapping[str, Stored]) -> int:
    """Tokens of the model: as it was told, or else all the rows there are."""
    embedding = stored.get("embedding.word_embeddings.weight")
    rows = 0 if embedding is None else embedding.shape[0]
    told = given.get("vocab_size")
    return min(told, rows) if told else rows


def _files(kept: Path) -> Iterator[Path]:
    if kept.is_dir():
        yield from beside(kept)


def _write_common(partial: Path) -> None:
    """What a checkpoint has beside tensors: where training would go on, which is at its start."""
    common = {"progress": Progress().state_dict(), METADATA_KEY: sharding_metadata()}
    torch.save(common, partial / "common.pt")
    (partial / "metadata.json").write_text(json.dumps(BACKEND), encoding="utf-8")


def _empty_states(name: str, tensor: Stored) -> Iterator[str]:
    """The names under which a linear layer of megatron.core wants to find that it has no state
    beside its weights."""
    module, _, what = name.rpartition(".")
    if what == "weight" and (".linear_" in module or module.endswith(".eh_proj")):
        count = tensor.shape[0] if len(tensor.shape) == 3 else 1
        for index in range(count):
            yield f"{module}._extra_state/shard_{index}_{count}"
