"""LoRA adapters of a Hugging Face model: trained, saved, resumed, merged, exported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.arguments import flatten
from support.chat_files import (
    CHATML_TEMPLATE,
    make_conversation,
    write_conversations,
    write_lines,
    write_model,
)
from support.foreign_models import TOKENS, compute_logits, save_model
from support.warm_programs import run_warm_program

from flagscale.checkpoints import CheckpointDirectory
from flagscale.config.arguments.compat.huggingface.config_reader import read_config
from flagscale.config.arguments.compat.huggingface.models import missing_arguments
from flagscale.config.arguments.rules.adapters import adapter_targets
from flagscale.config.arguments.spec.registry import arguments
from flagscale.errors import CheckpointError
from flagscale.status import STATUS_DIR_VARIABLE, read_events
from flagscale.train.checkpoint.formats import convert
from flagscale.train.checkpoint.formats.adapters import Adapters, merge_adapters, write_peft
from flagscale.train.checkpoint.formats.base import StoredModel, detect_format
from flagscale.train.checkpoint.formats.chunked_tensors import open_tensors
from flagscale.train.checkpoint.formats.lazy_tensors import MappedTensor

pytestmark = [pytest.mark.torch, pytest.mark.integration]

PROJECT = Path(__file__).parents[3]
PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"
PEFT_WEIGHTS = "adapter_model.safetensors"
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
"""Some but not all Hugging Face modules of each fused layer of megatron.core."""
RUN_ARGUMENTS = (
    "--seq-length 96 --global-batch-size 4 --lr 2e-2 --lr-decay-style constant --train-iters 6 "
    "--device cpu --eval-iters 1 --eval-interval 3 --eval-prompt-tokens 5 --num-workers 0 "
    "--hidden-dropout 0 --attention-dropout 0 --sft --split 4,1 --log-interval 1 "
    "--use-distributed-optimizer --peft-type lora --lora-dim 4 --lora-alpha 16 --weight-decay 0.1 "
    f"--lora-target-modules {' '.join(TARGETS)}"
)
TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"


class AdapterRuns:
    """A model, conversations, and runs of the training program with them."""

    def __init__(self, root: Path, **experts: int) -> None:
        self.root, self.base = root, write_model(root / "base model", **experts)
        self.talks = write_conversations(root / "talks.jsonl", 60)
        template = [{"messages": make_conversation(1, 9, seed)[:1]} for seed in range(3)]
        self.template = root / "template.jinja"
        self.template.write_text("Question and answer:\n" + CHATML_TEMPLATE)
        self.prompts = write_lines(root / "prompts.jsonl", [*template, {"prompt": "gather"}])
        self.answers: list[list[str]] = []
        """Answers to the prompts after three steps, of each run."""

    def argv(self, flags: str, save: str) -> list[str]:
        options = {"seq_length": 96}
        values = {a.name: a.default for a in arguments().values()} | options
        paths = {
            "save": self.root / save,
            "load": self.root / save,
            "pretrained_checkpoint": self.base,
            "tokenizer_path": self.base,
            "data_path": self.talks,
            "eval_prompts": self.prompts,
            "chat_template": self.template,
        }
        words = [w for k, v in paths.items() for w in (f"--{k.replace('_', '-')}", str(v))]
        model = flatten({"model": missing_arguments(values, options, read_config(self.base))})
        kind = "--tokenizer-type HuggingFaceTokenizer"
        return [*f"{RUN_ARGUMENTS} {kind} {flags}".split(), *words, *model]

    def train(self, flags: str, save: str, ranks: int = 1) -> list[float]:
        """Train; return the losses of the run's steps."""
        process = self.run(flags, save, ranks)
        assert process.returncode == 0, process.stderr[:3000]
        self.answers.append(re.findall(r"step 3 \| .* → .*", process.stdout))
        events = read_events(self.root / "status" / "rank_0.jsonl")[0]
        losses = [event.get("loss") for event in events if event.event == "progress"]
        (self.root / "status" / "rank_0.jsonl").unlink()
        return losses

    def run(self, flags: str, save: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        return run_warm_program(
            PROGRAM,
            self.argv(flags, save),
            ranks=ranks,
            environment={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                STATUS_DIR_VARIABLE: str(self.root / "status"),
            },
            cwd=PROJECT,
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> AdapterRuns:
    return AdapterRuns(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def uninterrupted_losses(runs: AdapterRuns) -> list[float]:
    """Run without interruption; return its losses. Its exports are in ``merged`` and ``peft``."""
    root = runs.root
    return runs.train(f"--export-huggingface {root}/merged --export-peft {root}/peft", "whole")


def test_adapters_alone_are_saved(runs: AdapterRuns, uninterrupted_losses: list[float]) -> None:
    names = CheckpointDirectory(runs.root / "whole").find_latest()
    assert names is not None
    tensors = dict(open_tensors(names.path))
    weights = [name for name in tensors if name.startswith("decoder.")]
    assert len(weights) == 2 * 2 * 4
    assert all(name.endswith((".lora_a", ".lora_b")) for name in weights)
    assert tensors["decoder.layers.1.mlp.linear_fc1.lora_b"].shape == (96, 4)
    moments = [name for name in tensors if "exp_avg" in name and "decoder" in name]
    assert all("lora_" in name for name in moments)
    assert uninterrupted_losses[-1] < uninterrupted_losses[0]


def test_a_run_goes_on_in_another_layout(
    runs: AdapterRuns, uninterrupted_losses: list[float]
) -> None:
    first = runs.train(f"{TP2_SP} --exit-interval 3", "parts", 2)
    losses = runs.train("", "parts")
    assert [*first, *losses] == pytest.approx(uninterrupted_losses, rel=1e-5)
    assert len(runs.answers[0]) == 4
    assert runs.answers[0] == runs.answers[1]


def read_weight_updates(path: Path) -> dict[str, torch.Tensor]:
    """Return the weight updates of adapters, by peft's documented layout."""
    tensors = load_file(path / PEFT_WEIGHTS)
    config = json.loads((path / "adapter_config.json").read_text())
    updates = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace("lora_A", "lora_B")]
            updates[f"{layer}.weight"] = config["lora_alpha"] / config["r"] * b @ a
    return updates


def compute_unmerged_logits(base: Path, adapters: Path) -> torch.Tensor:
    """Compute logits of transformers' model with unmerged adapters."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in read_weight_updates(adapters).items():
            weights[name] += value
        return model.eval()(torch.tensor(TOKENS)).logits


def test_merged_logits_equal_unmerged_ones(
    runs: AdapterRuns, uninterrupted_losses: list[float]
) -> None:
    assert uninterrupted_losses
    (merged,), (adapters,) = ((runs.root / name).iterdir() for name in ("merged", "peft"))
    expected = compute_logits(merged)
    assert float((expected - compute_unmerged_logits(runs.base, adapters)).abs().max()) <= 1e-5
    assert float((expected - compute_logits(runs.base)).abs().max()) > 0.1
    assert (merged / "tokenizer.json").is_file()


def test_a_merged_model_has_the_template_that_it_was_trained_with(
    runs: AdapterRuns, uninterrupted_losses: list[float], tmp_path: Path
) -> None:
    import transformers

    assert uninterrupted_losses
    text = runs.template.read_text()
    (merged,) = (runs.root / "merged").iterdir()
    assert transformers.AutoTokenizer.from_pretrained(merged).chat_template == text
    assert transformers.AutoTokenizer.from_pretrained(runs.base).chat_template != text
    runs.template.unlink()  # the checkpoint has the text
    try:
        assert convert.main([str(runs.root / "whole"), str(tmp_path / "merged")]) == 0
    finally:
        runs.template.write_text(text)
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == text


def test_only_the_named_layers_have_adapters(
    runs: AdapterRuns, uninterrupted_losses: list[float]
) -> None:
    assert uninterrupted_losses
    (merged,), (adapters,) = ((runs.root / name).iterdir() for name in ("merged", "peft"))
    assert {name.split(".")[-2] for name in read_weight_updates(adapters)} == set(TARGETS)
    assert json.loads((adapters / "adapter_config.json").read_text())["target_modules"] == TARGETS
    merged_weights, base_weights = (
        load_file(path / "model.safetensors") for path in (merged, runs.base)
    )
    changed = {
        n.split(".")[-2]
        for n, weight in merged_weights.items()
        if not torch.equal(weight, base_weights[n])
    }
    assert changed == set(TARGETS)


def test_peft_loads_adapters(runs: AdapterRuns, uninterrupted_losses: list[float]) -> None:
    import peft
    import transformers

    assert uninterrupted_losses
    (merged,), (adapters,) = ((runs.root / name).iterdir() for name in ("merged", "peft"))
    base = transformers.AutoModelForCausalLM.from_pretrained(runs.base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapters).eval()
    with torch.no_grad():
        actual = model(torch.tensor(TOKENS)).logits
    assert float((actual - compute_logits(merged)).abs().max()) <= 1e-5


def test_convert_merges_adapters_and_writes_peft_format(
    runs: AdapterRuns,
    uninterrupted_losses: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert uninterrupted_losses
    source = str(runs.root / "whole")
    assert convert.main([source, str(tmp_path / "merged")]) == 0
    (merged,) = (runs.root / "merged").iterdir()
    assert torch.equal(compute_logits(merged), compute_logits(tmp_path / "merged"))
    assert convert.main([source, str(tmp_path / "peft"), "--to", "peft"]) == 0
    (exported,) = (runs.root / "peft").iterdir()
    assert read_weight_updates(exported).keys() == read_weight_updates(tmp_path / "peft").keys()
    other_model = ["--base", str(tmp_path / "nowhere")]
    assert convert.main([source, str(tmp_path / "again"), *other_model]) == 1
    assert "holds adapters of" in capsys.readouterr().err
    assert convert.main([str(runs.base), str(tmp_path / "again"), "--to", "peft"]) == 1
    assert "a whole model and no adapters" in capsys.readouterr().err
    assert convert.main([source, str(tmp_path / "again"), "--to", "peft", "--dtype", "bf16"]) == 1
    assert "--dtype: --to peft writes the adapters as they are" in capsys.readouterr().err
    # Another model of the same kind and sizes.
    weights = load_file(runs.base / "model.safetensors")
    shutil.copytree(runs.base, tmp_path / "other")
    turned = {name: weight.flip(0) for name, weight in weights.items()}
    save_file(turned, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    base = ["--base", str(tmp_path / "other")]
    assert convert.main([source, str(tmp_path / "again"), *base]) == 1
    assert "its values differ" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.fixture(scope="module")
def expert_runs(tmp_path_factory: pytest.TempPathFactory) -> AdapterRuns:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return AdapterRuns(tmp_path_factory.mktemp("experts"), **sizes)


def test_adapters_of_experts_are_trained_and_exported(expert_runs: AdapterRuns) -> None:
    import peft
    import transformers

    root, base = expert_runs.root, expert_runs.base
    exports = f"--export-huggingface {root}/merged --export-peft {root}/peft"
    losses = expert_runs.train(
        f"--moe-grouped-gemm --expert-model-parallel-size 2 {exports}", "saved", 2
    )
    assert losses[-1] < losses[0]
    (merged,), (adapters,) = ((root / name).iterdir() for name in ("merged", "peft"))
    names = {name.split(".layers.0.")[-1] for name in load_file(adapters / PEFT_WEIGHTS)}
    assert "mlp.experts.3.up_proj.lora_B.weight" in names
    weights, base_weights = (load_file(p / "model.safetensors") for p in (merged, base))
    changed = {n.split(".")[-2] for n in weights if not torch.equal(weights[n], base_weights[n])}
    assert changed == set(TARGETS)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapters).eval()
    with torch.no_grad():
        actual = model(torch.tensor(TOKENS)).logits
    assert float((actual - compute_logits(merged)).abs().max()) <= 1e-5
    assert float((actual - compute_logits(base)).abs().max()) > 0.1


def make_random_adapters(base: StoredModel, names: list[str] | None = None) -> Adapters:
    """Create random adapters for the named layers, by default every layer that has them."""
    generator = torch.Generator().manual_seed(3)

    def make_random(*shape: int) -> MappedTensor:
        tensor = torch.randn(shape, generator=generator) * 0.3
        return MappedTensor(shape, tensor.dtype, lambda: tensor)

    values = {**base.values, "peft_type": "lora", "lora_target_modules": names}
    targets = adapter_targets(values)
    shapes = {
        n.removesuffix(".weight"): t.shape for n, t in base.tensors.items() if len(t.shape) > 1
    }
    pairs = {
        name: (make_random(*experts, 4, columns), make_random(*experts, rows, 4))
        for name, (*experts, rows, columns) in shapes.items()
        if name.rpartition(".")[2] in targets and "mtp." not in name
    }
    settings = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": list(targets), "base": None}
    return Adapters(base.path, settings, pairs)


@pytest.mark.parametrize(
    ("name", "adapters_per_layer"),
    [("deepseek-v3", 5), ("deepseek-v3-plain", 4), ("qwen3-moe", 2), ("llama", 4)],
)
def test_adapters_of_every_kind_of_model(
    name: str, adapters_per_layer: int, tmp_path: Path
) -> None:
    save_model(name, tmp_path / "base")
    base = detect_format(tmp_path / "base").read(tmp_path / "base")
    adapters = make_random_adapters(base)
    assert len(adapters.pairs) == adapters_per_layer * base.values["num_layers"]
    write_peft(adapters, base, tmp_path / "peft", lambda _size: None)
    detect_format(base.path).write(
        merge_adapters(adapters, base), tmp_path / "merged", lambda _: None, lambda _: None
    )
    difference = compute_logits(tmp_path / "merged") - compute_unmerged_logits(
        tmp_path / "base", tmp_path / "peft"
    )
    assert float(difference.abs().max()) <= 1e-5


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_each_expert_is_merged_with_its_own_adapters(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "base")
    base = detect_format(tmp_path / "base").read(tmp_path / "base")
    adapters = make_random_adapters(base, ["linear_fc1", "linear_fc2"])
    write_peft(adapters, base, tmp_path / "peft", lambda _size: None)
    detect_format(base.path).write(
        merge_adapters(adapters, base), tmp_path / "merged", lambda _: None, lambda _: None
    )
    weights, merged = (load_file(tmp_path / n / "model.safetensors") for n in ("base", "merged"))
    updates = read_weight_updates(tmp_path / "peft")
    experts = base.values["num_layers"] * base.values["num_moe_experts"]
    assert len(updates) == 3 * experts
    for weight, update in updates.items():
        torch.testing.assert_close(merged.pop(weight), weights.pop(weight) + update)
    assert all(torch.equal(merged[weight], weights[weight]) for weight in weights)


def test_peft_cannot_have_experts_and_shared_experts(tmp_path: Path) -> None:
    save_model("deepseek-v3-plain", tmp_path / "base")
    base = detect_format(tmp_path / "base").read(tmp_path / "base")
    adapters = make_random_adapters(base, ["linear_fc2"])
    with pytest.raises(CheckpointError, match="together with those of shared experts"):
        write_peft(adapters, base, tmp_path / "peft", lambda _size: None)
