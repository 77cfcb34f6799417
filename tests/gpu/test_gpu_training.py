"""Training on CUDA with NCCL: losses compared between layouts, and a whole run of the program.

Run on a machine with GPUs: ``pytest -m gpu tests/gpu``. The tests work with the published
megatron.core and with the patched source tree. Tests that need more GPUs than the machine has are
skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_programs import MODEL, PROGRAM, make_environment
from support.layout_lab import write_short_documents
from support.layout_models import SHORT_DOCUMENTS

from flagscale.status import STATUS_DIR_VARIABLE, Event, read_events

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "integration" / "train" / "layout_worker.py"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SP = TP2 + " --sequence-parallel"
TP_OVERLAP = "--tp-comm-overlap"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
OFFLOAD_LAYERS = "--min-offloaded-tensor-size 256 --cpu-offloading-num-layers"
OFFLOAD_MODULES = """--min-offloaded-tensor-size 256 --fine-grained-activation-offloading
--offload-modules"""
UNIFORM_RECOMPUTE, BLOCK_RECOMPUTE = (
    f"--recompute-granularity full --recompute-method {method} --recompute-num-layers 1"
    for method in ("uniform", "block")
)
VPP2 = PP2 + " --num-virtual-stages-per-pipeline-rank 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SHARDED = "--use-distributed-optimizer --data-parallel-sharding-strategy"

MOE = """
--bf16 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
"""

MASKED_DOCUMENTS = f"""
--data-path {SHORT_DOCUMENTS} --tokenizer-type NullTokenizer --split 4,1,0 --vocab-size 500
--reset-attention-mask --reset-position-ids --eod-mask-loss
"""

# Steps of Adam are as large as the learning rate even for small gradients. With a higher rate,
# gradient norms of two layouts soon differ.
LORA = "--peft-type lora --lora-dim 8 --lr 1e-3"

CUDA_GRAPH = "--cuda-graph-impl local --cuda-graph-scope full_iteration --cuda-graph-warmup-steps 1"

# Features of Gemma's layers and of DeepSeek's layers (multi-latent attention).
GEMMA_LAYERS = """
--window-size 63 0 --window-attn-skip-freq 2 --window-rotary-base 100 --sandwich-norm
--layernorm-zero-centered-gamma --scale-embeddings --final-logit-softcapping 30
"""
MLA = """
--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 48 --qk-head-dim 48
--qk-pos-emb-head-dim 16 --v-head-dim 48 --qk-layernorm --rotary-scaling-factor 4
--mscale-all-dim 1 --original-max-position-embeddings 64
"""

MTP = "--mtp-num-layers 1"
MESHES = "--enable-hetero --hetero-process-meshes 1 1 1 1 1  1 1 1 1 1"

CASES: dict[str, tuple[int, str, str, float]] = {
    # Name: number of GPUs, arguments, name of the reference case, tolerance.
    "mtp": (1, MTP, "mtp", 0.0),
    "mtp-meshes": (2, f"{MTP} {MESHES}", "mtp", 1e-4),
    "lora-mtp": (1, f"{MTP} {LORA}", "lora-mtp", 0.0),
    "lora-mtp-pp2": (2, f"{MTP} {LORA} {PP2}", "lora-mtp", 1e-4),
    "lora": (1, f"{LORA} --transformer-impl local --attention-backend local", "lora", 0.0),
    "lora-fp32": (1, LORA, "lora", 1e-4),
    "lora-fp32-tp2-sp": (2, f"{LORA} {SP}", "lora", 1e-4),
    "lora-fp32-pp2-vpp2-dp2-overlap": (4, f"{LORA} {VPP2} {OVERLAP}", "lora", 1e-4),
    "lora-bf16": (1, f"{LORA} --bf16", "lora", 2e-2),
    "lora-bf16-overlap": (1, f"{LORA} --bf16 {OVERLAP}", "lora", 2e-2),
    "lora-bf16-recompute": (1, f"{LORA} --bf16 {UNIFORM_RECOMPUTE}", "lora-bf16", 1e-3),
    "lora-masked-bf16": (1, f"{MASKED_DOCUMENTS} {LORA} --bf16", "lora-masked", 2e-2),
    "lora-masked": (
        1,
        f"{MASKED_DOCUMENTS} {LORA} --transformer-impl local --attention-backend local",
        "lora-masked",
        0.0,
    ),
    # Document masking. The reference is megatron.core's own attention with a mask, in fp32.
    "masked": (
        1,
        f"{MASKED_DOCUMENTS} --transformer-impl local --attention-backend local",
        "masked",
        0.0,
    ),
    "masked-fp32": (1, MASKED_DOCUMENTS, "masked", 1e-4),
    "masked-fp32-cp2": (2, f"{MASKED_DOCUMENTS} --context-parallel-size 2", "masked", 1e-4),
    "masked-bf16": (1, f"{MASKED_DOCUMENTS} --bf16", "masked", 2e-2),
    "masked-bf16-local-layers": (
        1,
        f"{MASKED_DOCUMENTS} --bf16 --transformer-impl local",
        "masked",
        2e-2,
    ),
    "masked-per-token": (
        1,
        f"{MASKED_DOCUMENTS} --calculate-per-token-loss",
        "masked-per-token",
        0.0,
    ),
    "masked-bf16-mbs2": (
        1,
        f"{MASKED_DOCUMENTS} --bf16 --micro-batch-size 2 --calculate-per-token-loss",
        "masked-per-token",
        2e-2,
    ),
    "masked-bf16-cp2": (2, f"{MASKED_DOCUMENTS} --bf16 --context-parallel-size 2", "masked", 2e-2),
    "masked-bf16-tp2-sp": (2, f"{MASKED_DOCUMENTS} --bf16 {SP}", "masked", 2e-2),
    "fp32": (1, "", "fp32", 0.0),
    "fp32-local-layers": (1, "--transformer-impl local", "fp32", 1e-4),
    "fp32-cp2": (2, "--context-parallel-size 2", "fp32", 1e-4),
    "fp32-local-attention": (1, "--attention-backend local", "fp32", 1e-4),
    "fp32-dp2-overlap": (2, OVERLAP, "fp32", 1e-4),
    "fp32-tp2-sp": (2, SP, "fp32", 1e-4),
    "fp32-pp2": (2, PP2, "fp32", 1e-4),
    "fp32-pp2-vpp2": (2, VPP2, "fp32", 1e-4),
    "fp32-tp2-sp-dp2-overlap": (4, f"{SP} {OVERLAP}", "fp32", 1e-4),
    "fp32-pp2-vpp2-dp2-overlap": (4, f"{VPP2} {OVERLAP}", "fp32", 1e-4),
    "fp32-tp2-pp2-vpp2": (4, f"{SP} {VPP2}", "fp32", 1e-4),
    "fp32-tp2-pp2-overlap-dp2": (8, f"{SP} {VPP2} {OVERLAP}", "fp32", 1e-4),
    "bf16": (1, "--bf16", "bf16", 0.0),
    "bf16-local-layers": (1, "--bf16 --transformer-impl local", "bf16", 2e-2),
    "bf16-cp2": (2, "--bf16 --context-parallel-size 2", "bf16", 2e-2),
    "fp32-cp2-ring": (2, "--context-parallel-size 2 --cp-comm-type p2p", "fp32", 1e-4),
    "bf16-cp2-ring": (2, "--bf16 --context-parallel-size 2 --cp-comm-type p2p", "bf16", 2e-2),
    "moe": (1, MOE, "moe", 0.0),
    "moe-grouped": (1, f"{MOE} --moe-grouped-gemm", "moe", 2e-2),
    "moe-grouped-ep2": (2, f"{MOE} --moe-grouped-gemm --expert-model-parallel-size 2", "moe", 2e-2),
    "bf16-fp8": (1, "--bf16 --fp8 hybrid", "bf16", 5e-2),
    "bf16-fp8-blockwise": (1, "--bf16 --fp8 e4m3 --fp8-recipe blockwise", "bf16", 5e-2),
    "bf16-flash": (1, "--bf16 --attention-backend flash", "bf16", 1e-2),
    "bf16-local-attention": (1, "--bf16 --attention-backend local", "bf16", 2e-2),
    "bf16-fused-loss": (1, "--bf16 --cross-entropy-loss-fusion", "bf16", 2e-2),
    "bf16-recompute": (1, f"--bf16 {UNIFORM_RECOMPUTE}", "bf16", 1e-3),
    "bf16-selective": (1, f"--bf16 {SELECTIVE} layernorm mlp core_attn", "bf16", 1e-3),
    "bf16-fp8-selective": (
        1,
        f"--bf16 --fp8 hybrid {SELECTIVE} layernorm mlp core_attn",
        "bf16-fp8",
        1e-2,
    ),
    "fp32-tp2-sp-selective": (2, f"{SP} {SELECTIVE} layernorm mlp", "fp32", 1e-4),
    "moe-grouped-selective": (
        1,
        f"{MOE} --moe-grouped-gemm {SELECTIVE} layernorm moe_act",
        "moe",
        2e-2,
    ),
    "bf16-offload-layers": (1, f"--bf16 {OFFLOAD_LAYERS} 1", "bf16", 1e-3),
    "bf16-offload-layers-selective": (
        1,
        f"--bf16 {OFFLOAD_LAYERS} 1 {SELECTIVE} layernorm mlp",
        "bf16",
        1e-3,
    ),
    "fp32-offload-modules": (1, f"{OFFLOAD_MODULES} core_attn attn_proj mlp_norm", "fp32", 1e-4),
    "fp32-pp2-offload-layers": (2, f"{PP2} {OFFLOAD_LAYERS} 1", "fp32", 1e-4),
    "cuda-graph-bf16": (1, f"--bf16 {CUDA_GRAPH}", "bf16", 1e-3),
    "cuda-graph-fp32": (1, f"{CUDA_GRAPH} --micro-batch-size 2", "fp32", 1e-4),
    "cuda-graph-local-layers": (1, f"--bf16 {CUDA_GRAPH} --transformer-impl local", "bf16", 2e-2),
    "cuda-graph-fp8": (1, f"--bf16 --fp8 hybrid {CUDA_GRAPH}", "bf16-fp8", 1e-2),
    "cuda-graph-fp8-blockwise": (
        1,
        f"--bf16 --fp8 e4m3 --fp8-recipe blockwise {CUDA_GRAPH}",
        "bf16-fp8-blockwise",
        1e-2,
    ),
    "cuda-graph-lora-masked": (
        1,
        f"{MASKED_DOCUMENTS} {LORA} --bf16 {CUDA_GRAPH}",
        "lora-masked-bf16",
        1e-2,
    ),
    "cuda-graph-bert": (1, f"--family bert {CUDA_GRAPH}", "bert-fp32", 1e-4),
    "cuda-graph-bf16-dp2": (2, f"--bf16 --use-distributed-optimizer {CUDA_GRAPH}", "bf16", 1e-2),
    "gemma-fp32": (1, GEMMA_LAYERS, "gemma-fp32", 0.0),
    "gemma-fp32-local-layers": (1, f"{GEMMA_LAYERS} --transformer-impl local", "gemma-fp32", 1e-4),
    "gemma-bf16": (1, f"{GEMMA_LAYERS} --bf16", "gemma-fp32", 2e-2),
    "softcap-fp32": (1, f"{GEMMA_LAYERS} --attn-logit-softcapping 2", "softcap-fp32", 0.0),
    "softcap-bf16": (
        1,
        f"{GEMMA_LAYERS} --attn-logit-softcapping 2 --bf16",
        "softcap-fp32",
        2e-2,
    ),
    "mla-fp32": (1, MLA, "mla-fp32", 0.0),
    "mla-fp32-local-layers": (1, f"{MLA} --transformer-impl local", "mla-fp32", 1e-4),
    "mla-bf16": (1, f"{MLA} --bf16", "mla-fp32", 2e-2),
    "mla-fp8-blockwise": (
        1,
        f"{MLA} --bf16 --fp8 e4m3 --fp8-recipe blockwise",
        "mla-bf16",
        5e-2,
    ),
    "mla-fp32-tp2-sp": (2, f"{MLA} {SP}", "mla-fp32", 1e-4),
    "bert-fp32": (1, "--family bert", "bert-fp32", 0.0),
    "bert-fp32-local-layers": (1, "--family bert --transformer-impl local", "bert-fp32", 1e-4),
    "bert-bf16": (1, "--family bert --bf16", "bert-fp32", 2e-2),
    "bert-fp32-tp2-sp": (2, f"--family bert {SP}", "bert-fp32", 1e-4),
    "bf16-dp2-overlap": (2, f"--bf16 {OVERLAP}", "bf16", 1e-2),
    "fp32-dp2-sharded": (2, f"{SHARDED} optim_grads_params", "fp32", 1e-4),
    "fp32-dp2-sharded-gradients": (2, f"{SHARDED} optim_grads", "fp32", 1e-4),
    "fp32-dp2-sharded-recompute": (
        2,
        f"{SHARDED} optim_grads_params {UNIFORM_RECOMPUTE}",
        "fp32",
        1e-4,
    ),
    "bf16-dp2-sharded": (2, f"--bf16 {SHARDED} optim_grads_params", "bf16", 1e-2),
    "bf16-fp8-dp2-sharded": (
        2,
        f"--bf16 --fp8 hybrid {SHARDED} optim_grads_params",
        "bf16-fp8",
        1e-2,
    ),
    "bf16-fp8-blockwise-dp2-sharded": (
        2,
        f"--bf16 --fp8 e4m3 --fp8-recipe blockwise {SHARDED} optim_grads_params",
        "bf16-fp8-blockwise",
        1e-2,
    ),
    "bf16-offloaded-states": (
        1,
        "--bf16 --use-distributed-optimizer --optimizer-cpu-offload",
        "bf16",
        1e-3,
    ),
    "muon-fp32": (1, "--optimizer muon", "muon-fp32", 0.0),
    "muon-fp32-dp2": (
        2,
        "--optimizer dist_muon --use-distributed-optimizer",
        "muon-fp32",
        1e-3,
    ),
    "muon-bf16": (1, "--optimizer muon --bf16", "muon-fp32", 2e-2),
    "muon-fp32-dp2-sharded": (
        2,
        f"--optimizer dist_muon {SHARDED} optim_grads_params",
        "muon-fp32",
        1e-3,
    ),
    "bf16-tp2-sp": (2, f"--bf16 {SP}", "bf16", 2e-2),
    "tp-overlap-fp32-tp2-sp": (2, f"{SP} {TP_OVERLAP}", "fp32", 1e-4),
    "tp-overlap-bf16-tp2-sp": (2, f"--bf16 {SP} {TP_OVERLAP}", "bf16", 2e-2),
    "tp-overlap-fp32-tp2-sp-recompute": (2, f"{SP} {TP_OVERLAP} {UNIFORM_RECOMPUTE}", "fp32", 1e-4),
    "tp-overlap-fp32-tp2-sp-recompute-block": (
        2,
        f"{SP} {TP_OVERLAP} {BLOCK_RECOMPUTE}",
        "fp32",
        1e-4,
    ),
    "tp-overlap-lora-fp32-tp2-sp": (2, f"{LORA} {SP} {TP_OVERLAP}", "lora", 1e-4),
    "tp-overlap-mla-fp32-tp2-sp": (2, f"{MLA} {SP} {TP_OVERLAP}", "mla-fp32", 1e-4),
}


def model_arguments(layout: str) -> str:
    """Return the model's arguments, with mock data unless the layout names data."""
    return MODEL.replace("--mock-data", "") if "--data-path" in layout else MODEL


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Train the layouts of the selected tests and their references; return the results by name."""
    callspecs = [getattr(item, "callspec", None) for item in request.session.items]
    names = {
        callspec.params["name"]
        for callspec in callspecs
        if callspec and callspec.params.get("name") in CASES
    }
    names |= {CASES[name][2] for name in names} | {"fp32"}
    directory = tmp_path_factory.mktemp("gpu-layouts")
    cases_file, results_file = directory / "cases.json", directory / "results.json"
    write_short_documents(directory / SHORT_DOCUMENTS, max_tokens=150)
    runnable_cases = [
        {
            "id": name,
            "world": world,
            "argv": f"{model_arguments(layout)} {layout} --train-iters 3".split(),
        }
        for name, (world, layout, _, _) in CASES.items()
        if name in names and world <= torch.cuda.device_count()
    ]
    cases_file.write_text(json.dumps(runnable_cases))
    process = subprocess.run(
        [sys.executable, str(WORKER), str(cases_file), str(results_file), "cuda"],
        env=make_environment(),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    results_by_name: dict[str, Any] = json.loads(results_file.read_text())
    results_by_name["stderr"] = process.stderr
    return results_by_name


@pytest.mark.parametrize("name", CASES)
def test_layout_matches_its_reference(name: str, results: dict[str, Any]) -> None:
    world, _, reference, tolerance = CASES[name]
    if world > torch.cuda.device_count():
        pytest.skip(f"needs {world} GPUs")
    assert {name, reference} <= results.keys(), results["stderr"][-4000:]
    for quantity in ("loss", "norm", "validation"):
        expected = pytest.approx(results[reference][quantity], rel=tolerance, abs=tolerance)
        assert results[name][quantity] == expected, quantity


@pytest.mark.parametrize("name", ["fp32", "lora-fp32"])
def test_first_step_matches_a_reference_implementation(name: str, results: dict[str, Any]) -> None:
    loss, norm = results[name]["torch_reference"]
    assert results[name]["loss"][0] == pytest.approx(loss, rel=1e-4)
    assert results[name]["norm"][0] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("name", [n for n in CASES if {"masked", "lora", "fp8"} & {*n.split("-")}])
def test_layers_stay_compiled_with_these_features(name: str, results: dict[str, Any]) -> None:
    if CASES[name][0] > torch.cuda.device_count():
        pytest.skip(f"needs {CASES[name][0]} GPUs")
    assert results[name]["uncompiled"] == []


def train_program(directory: Path, arguments: str, gpus: int) -> list[Event]:
    """Run the training program on ``gpus`` GPUs and return the events of rank 0."""
    status = directory / "status"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]
    process = subprocess.run(
        [sys.executable, *command, str(PROGRAM), *f"{MODEL} {arguments}".split()],
        env=make_environment(**{STATUS_DIR_VARIABLE: str(status)}),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return read_events(status / "rank_0.jsonl")[0]


def test_program_trains_on_all_gpus_and_reports_throughput(tmp_path: Path) -> None:
    events = train_program(tmp_path, "--bf16 --log-interval 5", min(torch.cuda.device_count(), 8))
    assert next(e for e in events if e.event == "joined").get("backend") == "nccl"
    last = [e for e in events if e.event == "progress"][-1]
    assert last.get("step") == 20
    assert last.get("memory_gib") > 0
    assert last.get("tokens_per_second") > 0
    assert events[-1].get("reason") == "completed"


def test_resumed_run_matches_uninterrupted_run(tmp_path: Path) -> None:
    checkpoint_options = "--bf16 --use-distributed-optimizer --save checkpoints --load checkpoints"
    uninterrupted = train_program(
        tmp_path, "--bf16 --use-distributed-optimizer --log-interval 1", 1
    )
    train_program(tmp_path, f"{checkpoint_options} --exit-interval 10 --log-interval 1", 1)
    resumed_directory = tmp_path / "resumed"
    resumed_directory.mkdir()
    (resumed_directory / "checkpoints").symlink_to(tmp_path / "checkpoints")
    resumed = train_program(resumed_directory, f"{checkpoint_options} --log-interval 1", 1)
    expected_losses, resumed_losses = (
        {event.get("step"): event.get("loss") for event in events if event.event == "progress"}
        for events in (uninterrupted, resumed)
    )
    assert resumed_losses
    for step, loss in resumed_losses.items():
        assert loss == pytest.approx(expected_losses[step], abs=1e-3)


@pytest.mark.parametrize(
    ("model_parallel", "layout"), [(1, OVERLAP), (2, f"{SP} {OVERLAP}"), (4, f"{SP} {VPP2}")],
    ids=["data", "tensor", "tensor-pipeline"],
)  # fmt: skip
def test_fsccl_matches_nccl(tmp_path: Path, model_parallel: int, layout: str) -> None:
    gpus = min(torch.cuda.device_count(), 8) // model_parallel * model_parallel
    if gpus == 0:
        pytest.skip(f"needs {model_parallel} GPUs")
    layout = f"--bf16 --log-interval 1 {layout if gpus > 1 else ''}"
    losses = {}
    for backend in ("nccl", "fsccl"):
        directory = tmp_path / backend
        directory.mkdir()
        events = train_program(directory, f"{layout} --distributed-backend {backend}", gpus)
        assert next(e for e in events if e.event == "joined").get("backend") == backend
        losses[backend] = [e.get("loss") for e in events if e.event == "progress"]
    assert len(losses["nccl"]) == 20
    assert losses["fsccl"] == pytest.approx(losses["nccl"], rel=1e-2)
