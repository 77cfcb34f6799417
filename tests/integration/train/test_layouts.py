"""The parallel layout changes how a model is trained, not what it learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from needs import why_no_compiler

pytestmark = [pytest.mark.integration, pytest.mark.torch]

WORKER = Path(__file__).with_name("layout_worker.py")
ROOT = WORKER.parents[3]

LLAMA = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 128
--seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 2e-3
--vocab-size 500 --make-vocab-size-divisible-by 64 --mock-data --normalization RMSNorm --swiglu
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --eval-iters 1 --num-workers 0 --clip-grad 0.5
--lr-decay-style constant --init-method-std 0.1
"""
TIED = LLAMA.replace("--untie-embeddings-and-output-weights", "")
GPT2 = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
--global-batch-size 4 --train-iters 3 --lr 2e-3 --vocab-size 500 --mock-data --qk-layernorm
--make-vocab-size-divisible-by 64 --hidden-dropout 0 --attention-dropout 0 --eval-iters 1
--num-workers 0 --lr-decay-style constant --init-method-std 0.1
"""
MOE = (
    LLAMA
    + """
--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type none
"""
)
BALANCED = MOE.replace("none", "aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3")
BF16 = LLAMA + "--bf16"
FP16 = LLAMA + "--fp16 --initial-loss-scale 4096"

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
SP = TP2 + " --sequence-parallel"
VPP2 = PP2 + " --num-virtual-stages-per-pipeline-rank 2"
DO = "--use-distributed-optimizer"
GROUPED = "--moe-grouped-gemm"
COMPILED = "--transformer-impl compiled"
OVERLAP = DO + " --overlap-grad-reduce --overlap-param-gather --bucket-size 20000"


@dataclass(frozen=True)
class Case:
    """A layout, and the run that it must equal: of one rank, or of the same layout on gloo."""

    name: str
    world: int
    model: str
    layout: str
    reference: str
    tolerance: float = 1e-5
    backend: str = "auto"
    clusters: str = ""

    def record(self, cache: Path) -> dict[str, Any]:
        """What the worker reads. Cases find the shuffled mock data of others in ``cache``."""
        return {
            "id": self.name,
            "world": self.world,
            "argv": [*f"{self.model} {self.layout}".split(), "--data-cache-path", str(cache)],
            "backend": self.backend,
            "clusters": self.clusters,
        }


REFERENCES = (
    Case("llama", 1, LLAMA, "", ""),
    Case("tied", 1, TIED, "", ""),
    Case("gpt2", 1, GPT2, "", ""),
    Case("moe", 1, MOE, "", ""),
    Case("moe-balanced", 1, BALANCED, "", ""),
    Case("bf16", 1, BF16, "", ""),
    Case("llama-6", 1, LLAMA, "--global-batch-size 6", ""),
    Case("tied-6", 1, TIED, "--global-batch-size 6", ""),
)
# A tensor-parallel step has hundreds of operations, on which gloo spends most of a case's time:
# where the case is not about them, fsccl does them if it can be compiled.
FASTER = "auto" if why_no_compiler() else "fsccl"
CASES = (
    Case("local-attention", 1, LLAMA, "--attention-backend local", "llama"),
    Case("recompute-full", 1, LLAMA, "--recompute-granularity full --recompute-method uniform "
         "--recompute-num-layers 1", "llama"),
    Case("recompute-selective", 1, LLAMA, "--recompute-granularity selective", "llama"),
    Case("per-token-loss", 1, LLAMA, "--calculate-per-token-loss", "llama"),
    Case("do-one-rank", 1, LLAMA, DO, "llama"),
    Case("dp2", 2, LLAMA, "", "llama"),
    Case("dp2-overlap-grad", 2, LLAMA, "--overlap-grad-reduce --bucket-size 20000", "llama"),
    Case("dp2-do", 2, LLAMA, DO, "llama"),
    Case("dp2-do-overlap", 2, LLAMA, OVERLAP, "llama"),
    Case("tp2", 2, LLAMA, TP2, "llama"),
    Case("tp2-sp", 2, LLAMA, SP, "llama"),
    Case("tp2-sp-recompute", 2, LLAMA, SP + " --recompute-granularity full "
         "--recompute-method uniform --recompute-num-layers 2", "llama", backend=FASTER),
    Case("pp2", 2, LLAMA, PP2, "llama"),
    Case("pp2-vpp2", 2, LLAMA, VPP2, "llama"),
    Case("pp2-uneven", 2, LLAMA, PP2 + " --num-layers-in-first-pipeline-stage 1", "llama"),
    Case("pp2-by-hand", 2, LLAMA, PP2 + " --pipeline-model-parallel-layout Et|tttL", "llama"),
    Case("tied-tp2", 2, TIED, TP2, "tied", backend=FASTER),
    Case("tied-pp2", 2, TIED, PP2, "tied"),
    Case("tied-pp2-do", 2, TIED, PP2 + " " + DO, "tied"),
    Case("gpt2-tp2-sp", 2, GPT2, SP, "gpt2", backend=FASTER),
    Case("gpt2-pp2", 2, GPT2, PP2, "gpt2"),
    Case("moe-ep2", 2, MOE, "--expert-model-parallel-size 2", "moe"),
    Case("moe-tp2-etp1", 2, MOE, SP + " --expert-tensor-parallel-size 1", "moe", backend=FASTER),
    Case("moe-balanced-pp2", 2, BALANCED, PP2, "moe-balanced"),
    Case("moe-balanced-tp2", 2, BALANCED, SP, "moe-balanced", backend=FASTER),
    Case("bf16-fused-loss", 1, BF16, "--cross-entropy-loss-fusion", "bf16", 1e-2),
    Case("bf16-dp2-do", 2, BF16, DO, "bf16", 1e-3),
    Case("bf16-tp2-sp", 2, BF16, SP, "bf16", 2e-2, FASTER),
    Case("fp16", 1, FP16, "", "llama", 2e-2),
    Case("fp16-dp2-do", 2, FP16, DO, "fp16", 1e-3),
    Case("fp16-tp2-sp", 2, FP16, SP, "fp16", 2e-2, FASTER),
    Case("bf16-pp2", 2, BF16, PP2, "bf16", 1e-3),
    Case("tp2-pp2", 4, LLAMA, f"{TP2} {PP2}", "llama"),
    Case("tp2-dp2-sp-do-overlap", 4, LLAMA, f"{SP} {OVERLAP}", "llama"),
    Case("pp2-dp2-vpp2-do-overlap", 4, LLAMA, f"{VPP2} {OVERLAP}", "llama"),
    Case("tied-tp2-pp2-vpp2-sp", 4, TIED, f"{SP} {VPP2}", "tied"),
    Case("cp2", 2, LLAMA, CP2, "llama"),
    Case("cp2-per-token", 2, LLAMA, CP2 + " --calculate-per-token-loss", "llama"),
    Case("gpt2-cp2", 2, GPT2, CP2, "gpt2"),
    Case("moe-cp2", 2, MOE, CP2, "moe"),
    Case("bf16-cp2", 2, BF16, CP2, "bf16", 1e-2),
    Case("cp2-tp2-sp", 4, LLAMA, f"{CP2} {SP}", "llama", backend=FASTER),
    Case("cp2-pp2-recompute", 4, LLAMA, f"{CP2} {PP2} --recompute-granularity full "
         "--recompute-method uniform --recompute-num-layers 1", "llama"),
    Case("cp2-dp2-do-overlap", 4, LLAMA, f"{CP2} {OVERLAP}", "llama"),
    Case("cp4", 4, LLAMA, "--context-parallel-size 4", "llama"),
    Case("compiled-cp2", 2, LLAMA, f"{COMPILED} {CP2}", "llama"),
    # The faster build computes what the plain one does.
    Case("compiled", 1, LLAMA, COMPILED, "llama"),
    Case("compiled-tied", 1, TIED, COMPILED, "tied"),
    Case("compiled-gpt2", 1, GPT2, COMPILED, "gpt2"),
    Case("compiled-bf16", 1, BF16, COMPILED, "bf16", 1e-2),
    Case("compiled-fp16", 1, FP16, COMPILED, "llama", 2e-2),
    Case("compiled-dp2-do-overlap", 2, LLAMA, f"{COMPILED} {OVERLAP}", "llama"),
    Case("compiled-tp2", 2, LLAMA, f"{COMPILED} {TP2}", "llama", backend=FASTER),
    Case("compiled-tp2-sp-recompute", 2, LLAMA, f"{COMPILED} {SP} --recompute-granularity full "
         "--recompute-method uniform --recompute-num-layers 2", "llama", backend=FASTER),
    Case("compiled-pp2", 2, LLAMA, f"{COMPILED} {PP2}", "llama"),
    Case("compiled-tied-pp2-do", 2, TIED, f"{COMPILED} {PP2} {DO}", "tied"),
    Case("compiled-gpt2-tp2-sp", 2, GPT2, f"{COMPILED} {SP}", "gpt2", backend=FASTER),
    Case("moe-grouped", 1, MOE, GROUPED, "moe"),
    Case("moe-grouped-bf16", 1, MOE + "--bf16", GROUPED, "moe", 2e-2),
    Case("moe-grouped-ep2", 2, MOE, f"{GROUPED} --expert-model-parallel-size 2", "moe"),
    Case("moe-grouped-tp2", 2, BALANCED, f"{GROUPED} {SP}", "moe-balanced", backend=FASTER),
    Case("moe-grouped-allgather-dp2-do", 2, MOE.replace("alltoall", "allgather"),
         f"{GROUPED} {OVERLAP}", "moe"),
    Case("compiled-moe-grouped-ep2", 2, MOE,
         f"{COMPILED} {GROUPED} --expert-model-parallel-size 2 {OVERLAP}", "moe"),
    Case("compiled-moe-ep2", 2, MOE, f"{COMPILED} --expert-model-parallel-size 2", "moe"),
    Case("compiled-moe-tp2", 2, BALANCED, f"{COMPILED} {SP}", "moe-balanced", backend=FASTER),
    Case("compiled-tp2-dp2-sp-do-overlap", 4, LLAMA, f"{COMPILED} {SP} {OVERLAP}", "llama"),
    Case("compiled-pp2-dp2-vpp2-do-overlap", 4, LLAMA, f"{COMPILED} {VPP2} {OVERLAP}", "llama"),
    Case("fp8", 1, BF16, f"{COMPILED} --fp8 hybrid", "bf16", 3e-2),
    Case("fp8-e4m3-rowwise", 1, BF16, f"{COMPILED} --fp8 e4m3 --fp8-recipe rowwise", "bf16", 3e-2),
    Case("fp8-tp2-sp", 2, BF16, f"{COMPILED} {SP} --fp8 hybrid", "bf16", 3e-2, FASTER),
    Case("fp8-pp2-dp2-do-overlap", 4, BF16, f"{COMPILED} {PP2} {OVERLAP} --fp8 hybrid "
         "--first-last-layers-bf16", "bf16", 3e-2),
)  # fmt: skip


def meshes(sizes: str, split: str = "", more: str = "") -> str:
    """Options of heterogeneous training: five sizes a mesh, a split of the layers."""
    options = f"--enable-hetero --hetero-process-meshes {sizes}"
    return f"{options}{f' --hetero-pipeline-layer-split {split}' if split else ''} {more}"


def shares(sizes: str, counts: str = "", more: str = "") -> str:
    """Options of unlike replicas: how many have which micro-batch size, and how many of them."""
    options = f"--enable-hetero --hetero-mode dp --hetero-micro-batch-sizes {sizes}"
    return f"{options}{f' --hetero-num-microbatches {counts}' if counts else ''} {more}"


# Pipeline stages on meshes that are laid out unlike each other: tp cp ep dp pp of each.
TP2_DP2 = "2 1 1 1 1  1 1 1 2 1"
DP2_TP2 = "1 1 1 2 1  2 1 1 1 1"
MBS2 = "--micro-batch-size 2"
MESHES = (
    Case("mesh-tp2+dp2", 4, LLAMA, meshes(TP2_DP2, "3 1", MBS2), "llama"),
    Case("mesh-tp2+dp2-sp-do", 4, LLAMA, meshes(TP2_DP2, "3 1", f"{MBS2} {DO} "
         "--sequence-parallel"), "llama"),
    Case("mesh-dp2+tp2-tied", 4, TIED, meshes(DP2_TP2, "1 3"), "tied"),
    Case("mesh-dp2+tp2-tied-sp-do-overlap", 4, TIED, meshes(DP2_TP2, "1 3", f"{OVERLAP} "
         "--sequence-parallel"), "tied"),
    Case("mesh-1+1+1", 3, LLAMA, meshes("1 1 1 1 1  1 1 1 1 1  1 1 1 1 1", "1 2 1"), "llama"),
    Case("mesh-1x2+dp2-no-layers-first", 4, LLAMA, meshes("1 1 1 1 2  1 1 1 2 1", "0 3 1", MBS2
         + " --standalone-embedding-stage"), "llama"),
    Case("mesh-dp3+dp2-per-token", 5, LLAMA, meshes("1 1 1 3 1  1 1 1 2 1", "2 2",
         "--calculate-per-token-loss --global-batch-size 6"), "llama-6"),
    Case("mesh-dp2+dp3-per-token", 5, LLAMA, meshes("1 1 1 2 1  1 1 1 3 1", "2 2",
         "--calculate-per-token-loss --micro-batch-size 3 --global-batch-size 6"), "llama-6"),
    Case("mesh-dp3+tp2-uneven-do", 5, TIED, meshes("1 1 1 3 1  2 1 1 1 1", "2 2",
         f"{DO} --global-batch-size 6"), "tied-6"),
    Case("mesh-cp2+dp2", 4, LLAMA, meshes("1 2 1 1 1  1 1 1 2 1", "2 2", MBS2), "llama"),
    Case("mesh-dp2+cp2-do", 4, LLAMA, meshes("1 1 1 2 1  1 2 1 1 1", "2 2", DO), "llama"),
    Case("mesh-1+tp2-cp2-sp", 5, LLAMA, meshes("1 1 1 1 1  2 2 1 1 1", "2 2",
         "--sequence-parallel"), "llama", backend=FASTER),
    Case("mesh-vpp2", 4, LLAMA, meshes(TP2_DP2, "2 2", f"{MBS2} "
         "--num-virtual-stages-per-pipeline-rank 2"), "llama"),
    Case("mesh-vpp2-tied-do-overlap", 4, TIED, meshes(DP2_TP2, "2 2", f"{OVERLAP} "
         "--num-virtual-stages-per-pipeline-rank 2"), "tied"),
    Case("mesh-bf16", 4, BF16, meshes(TP2_DP2, "3 1", MBS2), "bf16", 2e-2),
    Case("mesh-fp16-do", 4, FP16, meshes(TP2_DP2, "3 1", f"{MBS2} {DO}"), "fp16", 2e-2),
    Case("mesh-compiled", 4, LLAMA, meshes(TP2_DP2, "3 1", f"{COMPILED} {MBS2}"), "llama"),
    Case("mesh-gpt2", 4, GPT2, meshes(TP2_DP2, "1 1", MBS2), "gpt2"),
    Case("mesh-recompute", 4, LLAMA, meshes(TP2_DP2, "3 1", f"{MBS2} --recompute-granularity full "
         "--recompute-method uniform --recompute-num-layers 1"), "llama"),
    Case("mesh-moe-ep2+dp2", 4, MOE, meshes("1 1 2 2 1  1 1 1 2 1", "2 2"), "moe"),
    Case("mesh-moe-dp2+tp2-ep2-do", 4, MOE, meshes("1 1 1 2 1  2 1 2 1 1", "2 2",
         f"{DO} --sequence-parallel --expert-tensor-parallel-size-per-process-mesh 1 1"), "moe"),
    # Data parallelism over unlike replicas: how many take which micro-batches, and how many.
    Case("shares-1x1+1x3", 2, LLAMA, shares("1 1 1 3"), "llama"),
    Case("shares-2x1+1x2-do-overlap", 2, LLAMA, shares("1 1 1 2", "1 2 1 1", OVERLAP), "llama"),
    Case("shares-tp2-1x3+1x1", 4, TIED, shares("1 3 1 1", "", f"{SP} {DO}"), "tied"),
    Case("shares-three", 3, LLAMA, shares("2 1 1 2", "1 1 1 3 1 1", "--global-batch-size 6"),
         "llama-6"),
)  # fmt: skip

# Layouts that between them call every collective of megatron.core, once more on our own library.
# A sum of two ranks' numbers has one value, whoever adds; four ranks may add in another order.
ON_FSCCL = {
    **dict.fromkeys(("dp2-do-overlap", "tp2-sp", "pp2-vpp2", "tied-pp2-do", "moe-ep2"), 0.0),
    "tp2-dp2-sp-do-overlap": 1e-6,
}
FSCCL_CASES = tuple(
    replace(
        case,
        name=f"{case.name}-fsccl",
        reference=case.name,
        tolerance=ON_FSCCL[case.name],
        backend="fsccl",
        clusters="2,2" if case.world == 4 else "",
    )
    for case in CASES
    if case.name in ON_FSCCL
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Loss, gradient norm and validation loss of every case, trained once for all tests."""
    directory = tmp_path_factory.mktemp("layouts")
    cases, answers = directory / "cases.json", directory / "results.json"
    every = (*REFERENCES, *CASES, *MESHES, *(() if why_no_compiler() else FSCCL_CASES))
    cases.write_text(json.dumps([case.record(directory / "cache") for case in every]))
    path = f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(WORKER), str(cases), str(answers)],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(answers.read_text())
    found["stderr"] = done.stderr
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layout_learns_what_one_rank_learns(case: Case, results: dict[str, Any]) -> None:
    expect_equal(case, results)


@pytest.mark.parametrize("case", MESHES, ids=lambda case: case.name)
def test_unlike_meshes_learn_what_one_rank_learns(case: Case, results: dict[str, Any]) -> None:
    expect_equal(case, results)


@pytest.mark.compiler
@pytest.mark.parametrize("case", FSCCL_CASES, ids=lambda case: case.name)
def test_fsccl_trains_what_gloo_trains(case: Case, results: dict[str, Any]) -> None:
    expect_equal(case, results)


def expect_equal(case: Case, results: dict[str, Any]) -> None:
    assert case.name in results, results["stderr"][-4000:]
    ours, reference = results[case.name], results[case.reference]
    for quantity in ("loss", "norm", "validation"):
        expected = pytest.approx(reference[quantity], rel=case.tolerance, abs=case.tolerance)
        assert ours[quantity] == expected, quantity
    assert ours["routers"] == pytest.approx(reference["routers"], rel=1e-4)


def test_the_losses_of_routers_are_counted_once(results: dict[str, Any]) -> None:
    """A load-balancing loss is 1 where all experts get the same share, and just above it with
    weights that are drawn at random."""
    found = results["moe-balanced"]["routers"]
    assert set(found) == {"load_balancing_loss", "z_loss"}
    assert found["load_balancing_loss"] == pytest.approx(1.0, abs=0.25)
    assert results["moe"]["routers"] == results["llama"]["routers"] == {}


@pytest.mark.parametrize(
    ("name", "spread", "mean"),
    [
        ("embedding.word_embeddings.weight", 0.1, 0.0),
        ("decoder.layers.3.self_attention.linear_qkv.weight", 0.1, 0.0),
        ("decoder.layers.3.mlp.linear_fc1.weight", 0.1, 0.0),
        ("decoder.layers.0.self_attention.linear_proj.weight", 0.1 / 8**0.5, 0.0),
        ("decoder.layers.0.mlp.linear_fc2.weight", 0.1 / 8**0.5, 0.0),
        ("decoder.final_layernorm.weight", 0.0, 1.0),
        ("output_layer.weight", 0.1, 0.0),
    ],
)
def test_initial_weights_are_distributed_as_in_megatron(
    name: str, spread: float, mean: float, results: dict[str, Any]
) -> None:
    found = results["llama"]["initial"][name]
    assert found == pytest.approx([spread, mean], rel=0.05, abs=0.01)


def test_the_reference_computes_what_plain_torch_does(results: dict[str, Any]) -> None:
    found = results["llama"]
    assert found["by_hand"] == pytest.approx([found["loss"][0], found["norm"][0]], rel=1e-5)


def test_the_reference_really_learns(results: dict[str, Any]) -> None:
    loss = results["llama"]["loss"]
    assert loss[-1] < loss[0]
    assert all(norm > 0.1 for norm in results["llama"]["norm"])


def test_a_model_is_two_graphs(results: dict[str, Any], tmp_path: Path) -> None:
    """One for training and one for evaluation, which all layers, micro-batches and steps share;
    no part of a layer is left out, with the parameters gathered as it runs."""
    path = f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}"
    found = subprocess.run(
        [sys.executable, str(WORKER.with_name("graph_worker.py")),
         *f"{LLAMA} {COMPILED} {OVERLAP}".split()],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    counted = json.loads(found.stdout.splitlines()[-1])
    assert (counted["graphs"], counted["breaks"]) == (2, 0)
    assert counted["loss"] == pytest.approx(results["llama"]["loss"], rel=1e-5)
    assert [counted["validation"]] == pytest.approx(results["llama"]["validation"], rel=1e-5)
