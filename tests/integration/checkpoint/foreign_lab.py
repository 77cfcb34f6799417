"""Hugging Face models in every layout: cases for the worker to load, compare and save them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from integration.checkpoint.checkpoint_lab import CheckpointLab
from safetensors.torch import load_file, save_file
from support import megatron_files
from support.arguments import flatten
from support.foreign_models import MODELS, MTP_MODEL, TOKENS, save_model

from flagscale.config.arguments.compat.huggingface.config_reader import read_config
from flagscale.config.arguments.compat.huggingface.models import missing_arguments
from flagscale.config.arguments.spec.registry import arguments
from flagscale.train.checkpoint.formats import convert
from flagscale.train.checkpoint.formats.base import detect_format
from flagscale.train.checkpoint.formats.lazy_tensors import read_tensor

RUN_ARGUMENTS = (
    "--seq-length 32 --lr 1e-3 --train-iters 1 --mock-data --device cpu --eval-iters 0 "
    "--num-workers 0 --hidden-dropout 0 --attention-dropout 0 --no-save-optim --no-save-rng"
)
EP2, TP2 = "--expert-model-parallel-size 2", "--tensor-model-parallel-size 2"
LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, TP2),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "ep2": (2, EP2),
    "sharded": (2, "--data-parallel-sharding-strategy optim_grads_params"),
}
SHARDED_MODELS = ("llama", "mixtral")
"""Models that also run with weights in shards."""
EXPERTS = [n for n in MODELS if "moe" in n or n == "mixtral" or n.startswith("deepseek")]
SAVE_ONLY_LAYOUTS = {
    "qwen2-vpp": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--global-batch-size 2",
    ),
    # Both ends of the pipeline hold the embedding, in shards of different sizes.
    "llama-tied-meshes": (
        3,
        "--enable-hetero --hetero-process-meshes 2 1 1 1 1  1 1 1 1 1 "
        "--hetero-pipeline-layer-split 1 1",
    ),
}
"""Ranks and flags of layouts by ``<model>-<layout>``, whose runs only load and save a model."""
VARIANT_LAYOUTS = {
    "llama-tied": ["one", "pp2"],
    "llama-biases": ["one", "tp2"],
    "llama-linear": ["one"],
    "qwen3-moe-mixed": ["one", "pp2"],
    "qwen3-moe-windows": ["one"],
    "ministral": ["one"],
    "gemma": ["one"],
    "deepseek-v3-plain": ["one"],
}
"""Layouts of variants of a family; the main model of the family runs in every layout."""
CASES = [
    (name, layout)
    for name in MODELS
    for layout in VARIANT_LAYOUTS.get(name, LAYOUTS)
    if (layout != "ep2" or name in EXPERTS) and (layout != "sharded" or name in SHARDED_MODELS)
]
RELOADED_CASES = [
    ("llama", "tp2"),
    ("llama", "sharded"),
    ("mixtral", "ep2"),
    *((name, "one") for name in MODELS),
]
"""Cases that also load the converted checkpoint, whose files are the same for every layout."""


def build_argv(name: str, path: Path, layout: str) -> list[str]:
    """Build a run's command line, with the arguments that the launcher takes from config.json."""
    options = {"seq_length": 32}
    values = {a.name: a.default for a in arguments().values()} | options
    config_values = missing_arguments(values, options, read_config(path))
    more = "--sequence-parallel" if layout == "tp2" and name in EXPERTS else ""
    more += " --mtp-num-layers 1" if name == MTP_MODEL else ""
    return [
        *f"{RUN_ARGUMENTS} {LAYOUTS[layout][1]} {more}".split(),
        *flatten({"model": config_values}),
    ]


class ForeignModelRuns:
    """Models of transformers, and the results of ranks that loaded, compared and saved them.

    Attributes:
        root: directory of models and checkpoints.
        reference: logits of transformers by model.
        results: results of ``checkpoint_worker.py`` by case.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reference: dict[str, Any] = {}
        for name in MODELS:
            self.reference[name] = save_model(name, root / name)
            torch.save(self.reference[name], root / f"{name}.pt")
            assert convert.main([str(root / name), str(self.converted_path(name))]) == 0
        self.write_as_megatron("qwen3", root / "qwen3-megatron", (2, 1, 1), transformer_engine=True)
        self.results = self._run()

    def converted_path(self, name: str) -> Path:
        """Return the directory of the model's converted checkpoint."""
        return self.root / f"{name}-ours"

    def saved_path(self, name: str, layout: str) -> Path:
        """Return the directory of the model's checkpoint, saved by ranks of a layout."""
        return self.root / "saved" / f"{name}-{layout}"

    def write_as_megatron(
        self,
        name: str,
        path: Path,
        sizes: tuple[int, int, int],
        *,
        transformer_engine: bool,
        chunks: int = 1,
    ) -> Path:
        """Write a model as Megatron-LM does; return the file that unpickling must not create."""
        model = detect_format(self.converted_path(name)).read(self.converted_path(name))
        weights = {key: read_tensor(tensor) for key, tensor in model.tensors.items()}
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            if key in weights:  # rows of padding
                weights[key] = torch.cat([weights[key], torch.zeros(2, weights[key].shape[1])])
        mark_path = path.with_name(f"{path.name}-mark")
        megatron_files.write_checkpoint(
            path,
            weights,
            model.values,
            sizes=sizes,
            transformer_engine=transformer_engine,
            mark_path=mark_path,
            chunks=chunks,
        )
        return mark_path

    def _run(self) -> dict[str, Any]:
        lab = CheckpointLab(self.root)
        for world in (1, 2, 3):
            cases = [
                {
                    "id": layout_name,
                    "function": "start_and_compare",
                    "argv": self._build_save_only_argv(layout_name, flags),
                }
                for layout_name, (ranks, flags) in SAVE_ONLY_LAYOUTS.items()
                if ranks == world
            ]
            for name, layout in CASES:
                if LAYOUTS[layout][0] != world:
                    continue
                run_arguments = build_argv(name, self.root / name, layout)
                start = ["--pretrained-checkpoint", str(self.root / name)]
                start += ["--save", str(self.saved_path(name, layout))]
                load = ["--load", str(self.converted_path(name)), "--finetune"]
                if name == "llama" and layout in ("tp2", "sharded"):
                    load = ["--pretrained-checkpoint", str(self.converted_path(name))]
                # Mock data has one token more than the model, and a run may not have fewer tokens
                # than its checkpoint.
                load += ["--make-vocab-size-divisible-by", "4"]
                cases.append(self._make_case(f"{name}-{layout}", name, [*run_arguments, *start]))
                if (name, layout) == ("llama", "sharded"):
                    case = self._make_case("llama-sharded-damaged", name, [*run_arguments, *start])
                    cases.append({**case, "path_of_rank_1": str(self._write_damaged(name))})
                if (name, layout) == ("qwen3", "pp2"):
                    start = ["--pretrained-checkpoint", str(self.root / "qwen3-megatron")]
                    cases.append(
                        self._make_case("qwen3-pp2-megatron", name, [*run_arguments, *start])
                    )
                if (name, layout) in RELOADED_CASES:
                    cases.append(
                        self._make_case(f"{name}-{layout}-loaded", name, [*run_arguments, *load])
                    )
            lab.add_stage(world, *cases)
        return lab.run()

    def _write_damaged(self, name: str) -> Path:
        """Copy a model, with an infinite weight in its first layer; return the copy's directory."""
        path = self.root / f"{name}-damaged"
        shutil.copytree(self.root / name, path)
        weights = load_file(path / "model.safetensors")
        weights["model.layers.0.self_attn.o_proj.weight"][3, 5] = float("inf")
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return path

    def _build_save_only_argv(self, layout_name: str, flags: str) -> list[str]:
        name, _, layout = layout_name.rpartition("-")
        run_arguments = build_argv(name, self.root / name, "one") + flags.split()
        run_arguments += ["--pretrained-checkpoint", str(self.root / name)]
        return [*run_arguments, "--save", str(self.saved_path(name, layout))]

    def _make_case(self, name: str, model: str, run_arguments: list[str]) -> dict[str, Any]:
        reference = str(self.root / f"{model}.pt")
        case = {"id": name, "function": "start_and_compare", "argv": run_arguments}
        return {**case, "reference": reference, "tokens": TOKENS}
