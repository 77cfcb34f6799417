"""Hugging Face models in every layout: cases for the worker to load, compare and save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from integration.checkpoint.checkpoint_lab import Lab
from support import megatron_files
from support.arguments import flatten
from support.foreign_models import FURTHER, MODELS, TOKENS, save

from flagscale.config.arguments.compat.huggingface.models import missing_arguments
from flagscale.config.arguments.compat.huggingface.reading import read_config
from flagscale.config.arguments.spec.registry import arguments
from flagscale.train.checkpoint.formats import convert
from flagscale.train.checkpoint.formats.base import detect_format
from flagscale.train.checkpoint.formats.lazy_tensors import read_tensor

RUN = (
    "--seq-length 32 --lr 1e-3 --train-iters 1 --mock-data --device cpu --eval-iters 0 "
    "--num-workers 0 --hidden-dropout 0 --attention-dropout 0 --no-save-optim --no-save-rng"
)
EP2, TP2 = "--expert-model-parallel-size 2", "--tensor-model-parallel-size 2"
LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, TP2),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "ep2": (2, EP2),
}
EXPERTS = [n for n in MODELS if "moe" in n or n == "mixtral" or n.startswith("deepseek")]
UNLIKE = {
    "qwen2-vpp": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--global-batch-size 2",
    ),
    # The embedding lies at both ends, cut in unlike parts.
    "llama-tied-meshes": (
        3,
        "--enable-hetero --hetero-process-meshes 2 1 1 1 1  1 1 1 1 1 "
        "--hetero-pipeline-layer-split 1 1",
    ),
}
"""Layouts, by model and layout, of which only what they load and save is looked at."""
VARIANTS = {
    "llama-tied": ["one", "pp2"],
    "llama-biases": ["one", "tp2"],
    "llama-linear": ["one"],
    "qwen3-moe-mixed": ["one", "pp2"],
    "gemma": ["one"],
    "deepseek-v3-plain": ["one"],
}
"""Of a family that is tried in every layout: those in which a variant could differ."""
CASES = [
    (name, layout)
    for name in MODELS
    for layout in VARIANTS.get(name, LAYOUTS)
    if layout != "ep2" or name in EXPERTS
]
LOADED = [("llama", "tp2"), ("mixtral", "ep2"), *((name, "one") for name in MODELS)]
"""Cases that also load what was converted: its files are the same for every layout."""


def argv(name: str, path: Path, layout: str) -> list[str]:
    """Build a run's command line, with the arguments that the launcher takes from config.json."""
    options = {"seq_length": 32}
    values = {a.name: a.default for a in arguments().values()} | options
    config_values = missing_arguments(values, options, read_config(path))
    more = "--sequence-parallel" if layout == "tp2" and name in EXPERTS else ""
    more += " --mtp-num-layers 1" if name == FURTHER else ""
    return [*f"{RUN} {LAYOUTS[layout][1]} {more}".split(), *flatten({"model": config_values})]


class Made:
    """Models, the results of ranks that loaded them, and the checkpoints that they saved."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reference: dict[str, Any] = {}
        for name in MODELS:
            self.reference[name] = save(name, root / name)
            torch.save(self.reference[name], root / f"{name}.pt")
            assert convert.main([str(root / name), str(self.ours(name))]) == 0
        self.as_megatron("qwen3", root / "qwen3-megatron", (2, 1, 1), engine=True)
        self.results = self._run()

    def ours(self, name: str) -> Path:
        """Return the directory of the model's converted checkpoint."""
        return self.root / f"{name}-ours"

    def saved(self, name: str, layout: str) -> Path:
        """Return the directory of the model's checkpoint, saved by ranks of a layout."""
        return self.root / "saved" / f"{name}-{layout}"

    def as_megatron(
        self,
        name: str,
        path: Path,
        sizes: tuple[int, int, int],
        *,
        engine: bool,
        chunks: int = 1,
    ) -> Path:
        """Write a model as Megatron-LM does; return the file that unpickling must not create."""
        model = detect_format(self.ours(name)).read(self.ours(name))
        whole = {key: read_tensor(tensor) for key, tensor in model.tensors.items()}
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            if key in whole:  # rows of padding
                whole[key] = torch.cat([whole[key], torch.zeros(2, whole[key].shape[1])])
        mark = path.with_name(f"{path.name}-mark")
        megatron_files.write_checkpoint(
            path, whole, model.values, sizes=sizes, engine=engine, mark=mark, chunks=chunks
        )
        return mark

    def _run(self) -> dict[str, Any]:
        lab = Lab(self.root)
        for world in (1, 2, 3):
            cases = [
                {
                    "id": layout_name,
                    "do": "start_and_compare",
                    "argv": self._unlike(layout_name, flags),
                }
                for layout_name, (ranks, flags) in UNLIKE.items()
                if ranks == world
            ]
            for name, layout in CASES:
                if LAYOUTS[layout][0] != world:
                    continue
                words = argv(name, self.root / name, layout)
                start = ["--pretrained-checkpoint", str(self.root / name)]
                start += ["--save", str(self.saved(name, layout))]
                load = ["--load", str(self.ours(name)), "--finetune"]
                if (name, layout) == ("llama", "tp2"):
                    load = ["--pretrained-checkpoint", str(self.ours(name))]
                # Made-up tokens are one more than the model has; a checkpoint's may not be fewer.
                load += ["--make-vocab-size-divisible-by", "4"]
                cases.append(self._case(f"{name}-{layout}", name, [*words, *start]))
                if (name, layout) == ("qwen3", "pp2"):
                    start = ["--pretrained-checkpoint", str(self.root / "qwen3-megatron")]
                    cases.append(self._case("qwen3-pp2-megatron", name, [*words, *start]))
                if (name, layout) in LOADED:
                    cases.append(self._case(f"{name}-{layout}-loaded", name, [*words, *load]))
            lab.stage(world, *cases)
        return lab.run()

    def _unlike(self, layout_name: str, flags: str) -> list[str]:
        name, _, layout = layout_name.rpartition("-")
        words = argv(name, self.root / name, "one") + flags.split()
        words += ["--pretrained-checkpoint", str(self.root / name)]
        return [*words, "--save", str(self.saved(name, layout))]

    def _case(self, name: str, model: str, words: list[str]) -> dict[str, Any]:
        reference = str(self.root / f"{model}.pt")
        made = {"id": name, "do": "start_and_compare", "argv": words}
        return {**made, "reference": reference, "tokens": TOKENS}
