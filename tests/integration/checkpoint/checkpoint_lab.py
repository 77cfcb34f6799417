"""Layouts and cases of checkpoint tests.

A case is a function of ``checkpoint_worker.py`` with the arguments of a training run. Cases with
the same number of ranks form a stage and share one set of ranks, because starting ranks takes
seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("checkpoint_worker.py")
ROOT = WORKER.parents[3]

LLAMA = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 128
--seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr 2e-3
--vocab-size 500 --make-vocab-size-divisible-by 64 --mock-data --normalization RMSNorm --swiglu
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --num-workers 0 --clip-grad 0.5
--lr-decay-style cosine --device cpu --init-method-std 0.1
"""
MOE = LLAMA + " --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none"
DIST_OPT = "--use-distributed-optimizer"
HYBRID = "--num-distributed-optimizer-instances 2"
SHARDED = "--data-parallel-sharding-strategy optim_grads_params"
PRECISION_AWARE = f"{DIST_OPT} --use-precision-aware-optimizer"
LEAN_MOMENTS = f"{PRECISION_AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"
MUON = "--optimizer muon --muon-fp32-matmul-prec highest --muon-extra-scale-factor 0.2 --lr 1e-2"
LION = "--optimizer lion --lr 1e-4"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
OVERLAP = DIST_OPT + " --overlap-grad-reduce --overlap-param-gather --bucket-size 20000"
MESHES = "--enable-hetero --hetero-process-meshes"
STEPS = 2


@dataclass(frozen=True)
class Layout:
    """A parallel layout in which cases save and load checkpoints.

    Attributes:
        world: number of ranks.
        flags: command-line flags of the layout.
        model: a key of ``MODELS``.
    """

    world: int
    flags: str = ""
    model: str = "llama"


LAYOUTS = {
    # Names ending in "do" use the distributed optimizer.
    "one": Layout(1),
    "one-do": Layout(1, DIST_OPT),
    "dp2": Layout(2),
    "dp2-do": Layout(2, DIST_OPT),
    "dp2-do-overlap": Layout(2, OVERLAP),
    "dp2-sharded": Layout(2, f"{SHARDED} --transformer-impl compiled"),
    "bf16-pp2-dp2-sharded": Layout(
        4, f"{PP2} {SHARDED} --optimizer-cpu-offload --optimizer-offload-fraction 0.5", "bf16"
    ),
    "cp2-dp2-sharded-hybrid": Layout(4, f"--context-parallel-size 2 {SHARDED} {HYBRID}"),
    "moe-ep2-dp2-do-hybrid": Layout(
        4, f"--expert-model-parallel-size 2 {DIST_OPT} {HYBRID}", "moe"
    ),
    "moe-ep2-sharded": Layout(
        2, "--expert-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads", "moe"
    ),
    "tp2": Layout(2, TP2),
    "tp2-sp-do": Layout(2, f"{TP2} --sequence-parallel {DIST_OPT}"),
    "pp2": Layout(2, PP2),
    "pp2-do": Layout(2, f"{PP2} {DIST_OPT}"),
    "pp2-vpp2": Layout(2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
    "compiled-tp2-do": Layout(2, f"{TP2} {DIST_OPT} --transformer-impl compiled"),
    "moe-one": Layout(1, "", "moe"),
    "moe-ep2": Layout(2, "--expert-model-parallel-size 2", "moe"),
    "moe-grouped": Layout(1, "--moe-grouped-gemm", "moe"),
    "moe-ep2-do": Layout(2, f"--expert-model-parallel-size 2 {DIST_OPT}", "moe"),
    "moe-grouped-ep2-do": Layout(
        2, f"--moe-grouped-gemm --expert-model-parallel-size 2 {DIST_OPT}", "moe"
    ),
    "moe-lora-one-do": Layout(1, DIST_OPT, "moe-lora"),
    "moe-lora-ep2-do": Layout(2, f"--expert-model-parallel-size 2 {DIST_OPT}", "moe-lora"),
    "moe-lora-grouped-ep2-do": Layout(
        2, f"--moe-grouped-gemm --expert-model-parallel-size 2 {DIST_OPT}", "moe-lora"
    ),
    "cp2-do": Layout(2, f"--context-parallel-size 2 {DIST_OPT}"),
    "meshes": Layout(3, f"{MESHES} 2 1 1 1 1  1 1 1 1 1 --hetero-pipeline-layer-split 3 1"),
    "tied-meshes-do": Layout(
        4,
        f"{MESHES} 2 1 1 1 1  1 1 1 2 1 {DIST_OPT} --micro-batch-size 2 --sequence-parallel",
        "tied",
    ),
    "tied-meshes-turned-do": Layout(
        4, f"{MESHES} 1 1 1 2 1  2 1 1 1 1 {DIST_OPT} --hetero-pipeline-layer-split 1 3", "tied"
    ),
    "meshes-vpp2-do": Layout(
        4,
        f"{MESHES} 2 1 1 1 1  1 1 1 2 1 {DIST_OPT} --micro-batch-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "meshes-cp2-do": Layout(4, f"{MESHES} 1 2 1 1 1  1 1 1 2 1 {DIST_OPT} --micro-batch-size 2"),
    "moe-meshes-ep2-do": Layout(
        4, f"{MESHES} 1 1 2 2 1  1 1 2 2 1 {DIST_OPT} --hetero-pipeline-layer-split 3 1", "moe"
    ),
    # Experts in the second mesh alone.
    "moe-meshes-do": Layout(
        3, f"{MESHES} 1 1 1 1 1  1 1 2 2 1 {DIST_OPT} --micro-batch-size 2", "moe-last"
    ),
    "moe-last-one-do": Layout(1, DIST_OPT, "moe-last"),
    "mtp-meshes-do": Layout(
        3, f"{MESHES} 1 1 1 1 1  1 1 1 2 1 {DIST_OPT} --micro-batch-size 2", "mtp"
    ),
    "mtp-pp2-do": Layout(2, f"{PP2} {DIST_OPT}", "mtp"),
    "replicas-pp2-do": Layout(
        4,
        f"{PP2} {DIST_OPT} --enable-hetero --hetero-mode dp --hetero-micro-batch-sizes 1 2 1 1 "
        "--hetero-num-microbatches 1 1 1 2",
    ),
    "bert-tp2-sp-do": Layout(2, f"{TP2} --sequence-parallel {DIST_OPT}", "bert"),
    "bert-pp2-do": Layout(2, f"{PP2} {DIST_OPT}", "bert"),
    "bert-bf16-dp2-do": Layout(2, f"{DIST_OPT} --bf16", "bert"),
    "bf16-dp2-do": Layout(2, DIST_OPT, "bf16"),
    "bf16-offload": Layout(
        1, f"{DIST_OPT} --optimizer-cpu-offload --optimizer-offload-fraction 0.7", "bf16"
    ),
    "bf16-remainders": Layout(1, PRECISION_AWARE, "bf16"),
    "bf16-dp2-lean": Layout(
        2, f"{LEAN_MOMENTS} --main-params-dtype bf16 --main-grads-dtype bf16", "bf16"
    ),
    "bf16-dp2-sharded-lean": Layout(
        2, f"{SHARDED} {LEAN_MOMENTS} --main-params-dtype bf16 --main-grads-dtype bf16", "bf16"
    ),
    # With the default seed, two logits of a token are too close, see moe-last.
    "moe-lora-lean-offload": Layout(
        1,
        f"{LEAN_MOMENTS} --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --seed 9",
        "moe-lora",
    ),
    "sgd-one": Layout(1, "--optimizer sgd --lr 0.1"),
    "sgd-tp2": Layout(2, f"{TP2} --optimizer sgd --lr 0.1"),
    "lion-tp2-do": Layout(2, f"{TP2} {LION} {DIST_OPT}"),
    "lion-dp2-sharded": Layout(2, f"{LION} {SHARDED}"),
    "lion-bf16-one": Layout(1, LION, "bf16"),
    "lion-bf16-pp2": Layout(2, f"{PP2} {LION}", "bf16"),
    # Without clipping, because a factor that rounding changes would change some bf16 weights.
    "muon-bf16-one": Layout(1, f"{MUON} --clip-grad 0", "bf16"),
    "muon-bf16-pp2": Layout(2, f"{PP2} {MUON} --clip-grad 0", "bf16"),
    "muon-tp2-do": Layout(2, f"{TP2} {MUON} {DIST_OPT}"),
    "muon-dp2-sharded": Layout(2, f"{MUON} {SHARDED}"),
    "muon-moe-ep2-do": Layout(2, f"--expert-model-parallel-size 2 {MUON} {DIST_OPT}", "moe"),
    "muon-moe-grouped-do": Layout(1, f"--moe-grouped-gemm {MUON} {DIST_OPT}", "moe"),
    "tied-pp2": Layout(2, PP2, "tied"),
    "tied-one": Layout(1, "", "tied"),
    "tied-pp2-do": Layout(2, f"{PP2} {DIST_OPT}", "tied"),
}
BERT = """
--family bert --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr 2e-3 --vocab-size 500 --mock-data
--make-vocab-size-divisible-by 64 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0
--num-workers 0 --lr-decay-style cosine --device cpu --init-method-std 0.1
"""
MODELS = {
    "llama": LLAMA,
    "bert": BERT,
    "moe": MOE,
    # With the default seed, two logits of a token differ by 2e-7, so that rounding chooses.
    "moe-last": f"{MOE} --moe-layer-freq 0 0 1 1 --seed 5",
    # The base model is initialized, not read.
    "moe-lora": f"{MOE} --peft-type lora --lora-target-modules linear_fc1 linear_fc2 --lr 5e-3 "
    "--pretrained-checkpoint /none",
    "bf16": LLAMA + " --bf16",
    "mtp": f"{LLAMA} --mtp-num-layers 1",
    "tied": LLAMA.replace("--untie-embeddings-and-output-weights", ""),
}


def make_case(
    name: str, function: str, layout: Layout, flags: object = "", **parameters: Any
) -> dict[str, Any]:
    """Build a case.

    Args:
        name: key of the result.
        function: name of a function of ``checkpoint_worker.py``.
        layout: the layout that runs the case.
        flags: further command-line flags.
        parameters: values that the function reads from ``run.case``.
    """
    argv = f"{MODELS[layout.model]} {layout.flags} {flags}".split()
    return {"id": name, "function": function, "argv": argv, **parameters}


class CheckpointLab:
    """Collects stages of cases and runs them in one worker process, below one directory."""

    def __init__(self, root: Path, *, backend: str = "gloo") -> None:
        self.root, self.backend = root, backend
        self.stages: list[dict[str, Any]] = []

    def add_stage(self, world: int, *cases: dict[str, Any]) -> None:
        """Add cases that run one after the other on ``world`` ranks."""
        cache = ["--data-cache-path", str(self.root / "cache")]
        for case in cases:
            case["argv"] += cache
        self.stages.append({"world": world, "backend": self.backend, "cases": list(cases)})

    def run(self) -> dict[str, Any]:
        """Run all stages; return the results by case, and ``stderr``."""
        plan_path, results_path = self.root / "plan.json", self.root / "results.json"
        plan_path.write_text(json.dumps(self.stages))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.run(
            [sys.executable, str(WORKER), str(plan_path), str(results_path)],
            env=environment,
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert process.returncode == 0, process.stderr[-4000:]
        results: dict[str, Any] = json.loads(results_path.read_text())
        results["stderr"] = process.stderr
        return results


def checkpoint_names(*iterations: int) -> list[str]:
    """Return the content of a directory with these complete checkpoints."""
    return [f"iter_{i:07d}" for i in iterations] + ["latest_checkpointed_iteration.txt"]
