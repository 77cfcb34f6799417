"""Preference training: losses and rewards equal those of TRL, of transformers and of one rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arguments import flatten
from support.chat_files import write_lines
from support.preference_files import (
    PAIR_COUNT,
    STEPS,
    compute_logps,
    make_dialog_pairs,
    make_text_pairs,
    write_pair_model,
)

from flagscale.config.arguments.compat.huggingface.config_reader import read_config
from flagscale.config.arguments.compat.huggingface.models import missing_arguments
from flagscale.config.arguments.spec.registry import arguments

pytestmark = [pytest.mark.torch, pytest.mark.integration]

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("preference_worker.py")
RECORDED = json.loads(Path(__file__).with_name("trl_losses.json").read_text())["cases"]
"""Values that ``support/trl_losses.py`` has recorded."""
RUN = (
    "--dpo --seq-length 128 --sft-too-long refuse --lr 2e-3 --lr-decay-style constant "
    f"--train-iters {STEPS} --weight-decay 0 --clip-grad 1 --adam-beta2 0.999 --device cpu "
    "--eval-iters 1 --eval-interval 1000 --num-workers 0 --hidden-dropout 0 --attention-dropout 0 "
    "--log-interval 1 --tokenizer-type HuggingFaceTokenizer"
)
WHOLE_BATCH = f"--no-sft-packing --micro-batch-size 2 --global-batch-size {PAIR_COUNT}"
PACKED = "--micro-batch-size 1 --global-batch-size 4 --dpo-beta 0.5 --train-iters 3"
FP8 = f"{PACKED} --bf16 --fp8 hybrid --transformer-impl compiled"
LORA = "--peft-type lora --lora-dim 4 --lora-alpha 16 --lr 2e-2"
# The loss that balances experts is part of the gradient.
EXPERTS = f"{PACKED} --no-sft-packing --moe-aux-loss-coeff 0.1"
TRL_OPTIONS = {
    "texts-sigmoid": "--dpo-beta 0.1",
    "dialogs-sigmoid": "--dpo-beta 0.5",
    "texts-ipo": "--dpo-loss ipo --dpo-beta 0.2",
    "dialogs-smoothed": "--dpo-beta 0.5 --dpo-label-smoothing 0.2",
}
SHARDED = "--data-parallel-sharding-strategy optim_grads_params"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
CP2 = "--context-parallel-size 2"
LAYOUTS = {
    "packed-dp2-sharded-mbs2": ("packed", PACKED, f"{SHARDED} --micro-batch-size 2"),
    "packed-tp2-sp": ("packed", PACKED, TP2),
    "packed-pp2-vpp2-overlap": ("packed", PACKED, f"{PP2} {OVERLAP}"),
    "packed-cp2": ("packed", PACKED, CP2),
    "unpacked-cp2": ("unpacked", f"{PACKED} --no-sft-packing", CP2),
    "lora-tp2-sp": ("lora", f"{PACKED} {LORA}", TP2),
    "experts-ep2": ("experts", EXPERTS, "--expert-model-parallel-size 2"),
}
"""Layouts of two ranks: the run of one rank with equal results, its options, and the layout."""
RARELY_TRAINED = ("unpacked-cp2", "lora-tp2-sp")


class PreferenceLab:
    """A model, files of pairs, and cases of ``preference_worker.py``."""

    def __init__(self, root: Path) -> None:
        self.root, self.model = root, write_pair_model(root / "model")
        self.experts = write_pair_model(
            root / "experts", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        )
        for name, make_pairs in (("texts", make_text_pairs), ("dialogs", make_dialog_pairs)):
            write_lines(root / f"{name}.jsonl", make_pairs())
            write_lines(root / f"{name}_valid.jsonl", make_pairs(seed=1))
        write_lines(root / "many.jsonl", make_dialog_pairs(24, seed=2))
        write_lines(root / "many_valid.jsonl", make_dialog_pairs(6, seed=3))
        self.cases: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        data: str,
        flags: str,
        *,
        ranks: int = 1,
        cache: str = "cache",
        model: Path | None = None,
    ) -> None:
        """Add a case that trains on the pairs of ``data``."""
        model = model or (self.experts if name.startswith("experts") else self.model)
        options = {"seq_length": 128}
        values = {a.name: a.default for a in arguments().values()} | options
        paths = {
            "pretrained_checkpoint": model,
            "tokenizer_path": self.model,
            "train_data_path": self.root / f"{data}.jsonl",
            "valid_data_path": self.root / f"{data}_valid.jsonl",
            "data_cache_path": self.root / cache,
        }
        words = [w for k, v in paths.items() for w in (f"--{k.replace('_', '-')}", str(v))]
        size = flatten({"model": missing_arguments(values, options, read_config(model))})
        flags = flags.replace("{root}", str(self.root))
        argv = [*f"{RUN} {flags}".split(), *words, *size]
        self.cases.append({"id": name, "world": ranks, "argv": argv})

    def run(self) -> dict[str, Any]:
        """Run the cases."""
        cases_file, results_file = self.root / "cases.json", self.root / "results.json"
        cases_file.write_text(json.dumps(self.cases))
        self.cases.clear()
        process = subprocess.run(
            [sys.executable, str(WORKER), str(cases_file), str(results_file)],
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}",
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert process.returncode == 0, process.stderr[-4000:]
        results: dict[str, Any] = json.loads(results_file.read_text())
        return results


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> PreferenceLab:
    return PreferenceLab(tmp_path_factory.mktemp("preferences"))


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, lab: PreferenceLab) -> dict[str, Any]:
    """Run the cases of all selected tests once."""
    items = [item for item in request.session.items if item.path == request.path]
    selected = {name for item in items for name in LAYOUTS if f"[{name}]" in item.name}
    layouts = {name: layout for name, layout in LAYOUTS.items() if name in selected}
    for name, options in TRL_OPTIONS.items():
        save = "--save {root}/trained" if name == "texts-sigmoid" else ""
        lab.add(name, name.partition("-")[0], f"{WHOLE_BATCH} {options} {save}")
    references = {"packed": PACKED, **{name: options for name, options, _ in layouts.values()}}
    for name, options in references.items():
        lab.add(name, "many", options, cache=f"cache_{name}")
    stop = "--save {root}/stopped --load {root}/stopped"
    lab.add("fp8", "many", FP8, cache="cache_fp8")
    lab.add("stopped", "many", f"{FP8} {stop} --exit-interval 1", cache="cache_resumed")
    lab.add("resumed", "many", f"{FP8} {stop} --exit-interval 2", cache="cache_resumed")
    # Without the scores, which are computed again although the weights have changed.
    lab.add("resumed-anew", "many", f"{FP8} {stop}", cache="cache_anew")
    lab.add("other-model", "many", PACKED, cache="cache_resumed", model=change_model(lab))
    for name, (_, options, layout) in layouts.items():
        lab.add(name, "many", f"{options} {layout}", ranks=2, cache=f"cache_{name}")
    return lab.run()


def change_model(lab: PreferenceLab) -> Path:
    """Write a copy of the model of which one weight differs."""
    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(lab.model, lab.root / "other model"))
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][3, 4] += 1e-3
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def list_events(result: dict[str, Any], kind: str) -> list[dict[str, float]]:
    assert result["error"] == ""
    return [event for event in result["events"] if event["event"] == kind]


def read_scores(lab: PreferenceLab, cache: str) -> list[Any]:
    """Return the scores of the reference model in a cache, ordered by their number."""
    files = (lab.root / cache).glob("conversations/*/reference-*.npy")
    return sorted((np.load(path) for path in files), key=len)


@pytest.mark.parametrize("name", TRL_OPTIONS)
def test_losses_and_rewards_equal_those_of_trl(name: str, results: dict[str, Any]) -> None:
    steps = list_events(results[name], "progress")
    (evaluation,) = list_events(results[name], "evaluation")
    recorded = [*RECORDED[name]["steps"], RECORDED[name]["evaluation"]]
    assert len(steps) == STEPS
    for event, expected in zip([*steps, evaluation], recorded, strict=True):
        values = {key: event[key] for key in expected}
        assert values == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_rewards_equal_those_of_transformers(lab: PreferenceLab, results: dict[str, Any]) -> None:
    """The last evaluation is compared with log-probabilities of transformers."""
    import transformers

    from flagscale.train.checkpoint.formats import convert

    (evaluation,) = list_events(results["texts-sigmoid"], "evaluation")
    trained = lab.root / "exported"
    assert convert.main([str(lab.root / "trained"), str(trained)]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(lab.model)
    pairs = make_text_pairs(seed=1)
    ratios = {}
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32")
        for path in (trained, lab.model)
    ]
    for key in ("chosen", "rejected"):
        texts = [(pair["prompt"], pair[key] + tokenizer.eos_token) for pair in pairs]
        policy, reference = (np.array(compute_logps(model, texts, tokenizer)) for model in models)
        ratios[key] = policy - reference
    margins = 0.1 * (ratios["chosen"] - ratios["rejected"])
    expected = {
        "loss": np.log1p(np.exp(-margins)).mean(),
        "chosen_reward": 0.1 * ratios["chosen"].mean(),
        "rejected_reward": 0.1 * ratios["rejected"].mean(),
        "reward_margin": margins.mean(),
        "reward_accuracy": (margins > 0).mean(),
    }
    assert {key: evaluation[key] for key in expected} == pytest.approx(expected, abs=1e-4)
    assert "perplexity" not in results["texts-sigmoid"]["log"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in RARELY_TRAINED else [])
        for name in LAYOUTS
    ],
)
def test_layout_equals_one_rank(name: str, lab: PreferenceLab, results: dict[str, Any]) -> None:
    reference = LAYOUTS[name][0]
    for kind in ("progress", "evaluation"):
        for event, expected in zip(
            list_events(results[name], kind), list_events(results[reference], kind), strict=True
        ):
            keys = [key for key in ("loss", "grad_norm", "reward_margin") if key in expected]
            values = {key: event[key] for key in keys}
            assert values == pytest.approx({key: expected[key] for key in keys}, rel=1e-4, abs=1e-5)
    for scores, expected_scores in zip(
        read_scores(lab, f"cache_{name}"), read_scores(lab, f"cache_{reference}"), strict=True
    ):
        np.testing.assert_allclose(scores, expected_scores, atol=1e-4)


def test_packed_pairs_share_sequences(results: dict[str, Any]) -> None:
    assert "8 pairs in 8 pairs of sequences of 128" in results["texts-sigmoid"]["log"]
    assert "24 pairs in 24 pairs" not in results["packed"]["log"]
    assert "3 steps of 4 pairs of 128 tokens" in results["packed"]["log"]


def test_resumed_run_keeps_the_reference(lab: PreferenceLab, results: dict[str, Any]) -> None:
    # With FP8, layers must not keep the 8-bit values of the reference's weights.
    losses = [event["loss"] for event in list_events(results["fp8"], "progress")]
    names = ("stopped", "resumed", "resumed-anew")
    parts = [list_events(results[name], "progress") for name in names]
    assert [event["loss"] for events in parts for event in events] == losses
    logs = [results[name]["log"] for name in names]
    assert ["the reference model scored 24 pairs" in log for log in logs] == [True, False, True]
    assert "scores of the reference model for many.jsonl" in logs[1]
    for scores, expected in zip(
        read_scores(lab, "cache_anew"), read_scores(lab, "cache_fp8"), strict=True
    ):
        np.testing.assert_array_equal(scores, expected)


def test_changed_model_is_scored_anew(lab: PreferenceLab, results: dict[str, Any]) -> None:
    assert "the reference model scored 24 pairs" in results["other-model"]["log"]
    assert len(read_scores(lab, "cache_resumed")) == 4
